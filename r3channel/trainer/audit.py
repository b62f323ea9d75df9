"""Records the ids that routers really used, and checks them against the map that each router returned.

A `RouterTap` reads at the far end, after everything that this package does: the return value of `get_replay_topk` of
each bound router's own RouterReplay, and the router module's output. A tap is off until opened; nothing is wrapped while the tap
is closed. This module imports no Megatron and does not know what the ids should have been.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from r3channel.errors import ReplayError, UsageError
from r3channel.trainer.replay import ReplayDriver
from r3channel.trainer.router import RouterCall, RouterHandle, name_of
from r3channel.wire.routing import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed(RouterCall):
    """One router call. Its pass is `natural` where replay was off and the router chose for itself."""

    layer: int
    """Global 0-based decoder layer."""
    ids_RK: Ids
    """[rows, K] of the spec's id dtype, in the router's row order; an own copy on the host."""


class RouterTap:
    """Records every call of a driver's routers while it is open. Costs a device-to-host copy per call.

    with RouterTap(driver) as tap:
        ...                                     # train a step
    rows = [consumed for consumed in tap.records if consumed.pass_name == "forward"]
    """

    def __init__(self, driver: ReplayDriver, *, on_call: Callable[[Consumed], None] | None = None) -> None:
        """Take the driver whose routers are read.

        Args:
            driver: The attached driver.
            on_call: Gets each record on the thread of the router, instead of `records`.
        """
        self.records: list[Consumed] = []
        self._driver = driver
        self._on_call = on_call or self.records.append
        self._handed: dict[int, torch.Tensor] = {}
        self._undo = ExitStack()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> RouterTap:
        """Wrap this driver's routers. One tap at a time."""
        if self._driver.tap is not None:
            raise UsageError("the routers are tapped already; close the other tap first")
        self._driver.tap = self
        for handle in self._driver.handles.values():
            self._wrap(handle)
        return self

    __enter__ = open

    def close(self) -> None:
        """Take the wrappers away; a second call does nothing."""
        if self._driver.tap is self:
            self._undo.close()
            self._handed.clear()
            self._driver.tap = None

    def _wrap(self, handle: RouterHandle) -> None:
        inner = handle.replay.get_replay_topk

        def tap(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            scores, ids = inner(*args, **kwargs)
            self._handed[handle.layer] = ids
            return scores, ids

        handle.replay.get_replay_topk = tap
        self._undo.callback(setattr, handle.replay, "get_replay_topk", inner)
        hook = handle.module.register_forward_hook(lambda *call: self._record_call(handle, call[2]))
        self._undo.callback(hook.remove)

    def _record_call(self, handle: RouterHandle, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        call, ids = self._driver.call_of(handle.layer), self._handed.pop(handle.layer, None)
        if ids is None:
            raise ReplayError(f"{name_of(handle)}, {call}: it never asked its RouterReplay for ids")
        _check_map(handle, call, ids, output[1])
        used_RK = ids.detach().cpu().numpy().astype(self._driver.spec.id_dtype)
        place = call.step, call.microbatch, call.pass_name
        self._on_call(Consumed(*place, layer=handle.layer, ids_RK=used_RK))


def _check_map(handle: RouterHandle, call: RouterCall, ids_RK: torch.Tensor, map_RE: torch.Tensor) -> None:
    if len(ids_RK) != len(map_RE):
        raise ReplayError(f"{name_of(handle)}, {call}: {len(ids_RK)} rows of ids, {len(map_RE)} in its map")
    wanted_RE = torch.zeros_like(map_RE, dtype=torch.bool).scatter(1, ids_RK, True)
    wrong_R = (wanted_RE != map_RE.bool()).any(dim=1).nonzero()
    if len(wrong_R):
        row = int(wrong_R[0])
        raise ReplayError(
            f"{name_of(handle)}, {call}: {len(wrong_R)} of {len(map_RE)} rows route to other experts than handed out; row {row}: "
            f"handed {sorted(ids_RK[row].tolist())}, routed {map_RE[row].nonzero().flatten().tolist()}"
        )
