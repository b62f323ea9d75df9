"""Our half inside an engine's rank: it stages bytes beside the parameters while the engine serves, and changes over on order.

    open (dry run, links to the trainers) -> staged by update -> commit under a pause
                                          -> dropped: nothing was touched

An order comes from the scheduler's thread and may read and write parameters. A rank answers an order after all ranks of its
engine have agreed, because SGLang passes on the answer of the first rank alone. Nothing is unpickled, and no port is opened: a
rank connects to its trainers. SGLang itself is not imported at the top of this module.

Before a broadcast, which SGLang loads itself, only the dry run is made: it tells which names the model takes, also in
0.5.15.post1.

SGLang takes an update between two calls, begin and end. A commit arrives without them, since each call lengthens the pause: both
calls are made here. An order that loads nothing gets neither, since end processes weights anew. A begin without an end marks an
engine whose weights nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch

from r3channel.errors import WeightsError
from r3channel.weights.checksums import tensor_digest
from r3channel.weights.convert import gathered_bytes
from r3channel.weights.hold import WORD_BYTES, Hold, Ready
from r3channel.weights.loader_map import Learned, learn
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.rank_link import COMMIT_FORMAT, FLUSH_REFUSED, FOUND_OPEN, OPEN_FORMAT, UNTOUCHED
from r3channel.weights.refusals import refused_model
from r3channel.weights.staged_copy import Room


class Receiver:
    """Our half in one engine rank. Orders come from one thread."""

    def __init__(self, *, rank: int, run_token: str, agree: Callable[[str], Sequence[str]]) -> None:
        """Make the half of one rank.

        Args:
            rank: This rank's number in its engine.
            run_token: The run's secret; may be empty.
            agree: Gathers every rank's word, by rank; a word is empty where all is well.
        """
        self._rank, self._run_token, self._agree = rank, run_token, agree
        self._hold: Hold | None = None
        self.learned = Learned()

    def order(self, model: torch.nn.Module, order: Mapping[str, Any]) -> None:
        """Handle an order from a session, on all ranks.

        Args:
            model: The engine's model.
            order: The order: `op` is `commit`, `regroup`, `look`, or opens a session's hold.

        Raises:
            WeightsError: Not all ranks did it; has every failed rank's reason.
        """
        if order["op"] == "commit":
            ready = list[Ready]()
            self._agree_on(lambda: ready.append(self._mine(order).check(model, order["update"])), UNTOUCHED)
            self._agree_on(lambda: self._mine(order).change_over(model, order["version"], ready[0]))
        elif order["op"] == "regroup":
            self._agree_on(lambda: self._mine(order).regroup(order["joint"], self._rank))
        elif order["op"] != "look":
            self._agree_on(lambda: self._free_for(order["session"], model))
            self._agree_on(self.leave)  # what the last session staged is freed before any rank looks for room
            room = Room.share_of_host(self._agree)
            self._agree_on(lambda: self._open(model, order, room))

    def holder(self) -> str:
        """Return the name of the session that holds this engine.

        It is empty where no session holds the engine.
        """
        return "" if self._hold is None or self._hold.ended else self._hold.name

    def leave(self) -> None:
        """End the session's links, and free what it staged."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def may_move(self) -> bool:
        """Return whether experts may change their places now.

        They may not while an update is on its way at some rank. If they may, links that were made for the places so far are
        ended, so that the next update learns the new places. All ranks ask at the same pass.
        """
        staging = None if self._hold is None else self._hold.staging
        waits = any(self._agree("staging" if staging else ""))
        if staging is False and not waits:
            self.leave()
        return not waits

    def _agree_on(self, step: Callable[[], None], failing: str = "") -> None:
        """Take a step on all ranks, or raise on all of them."""
        word = ""
        try:
            step()
        except Exception as error:
            word = f"{type(error).__name__}: {error}"
        failures = {rank: text for rank, text in enumerate(self._agree(word)) if text}
        if failures:
            raise WeightsError(failing + "; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))

    def _free_for(self, session: str, model: torch.nn.Module) -> None:
        if (held := self.holder()) not in ("", session):
            raise WeightsError(f"the engine is held by session {held}, whose trainer lives; close it first")
        if why := "; ".join(refused_model(model)):
            raise WeightsError(f"an update would leave something old: {why}")

    def _open(self, model: torch.nn.Module, order: Mapping[str, Any], room: Room) -> None:
        learned, tensors = Learned(), tuple(TensorMeta.from_row(row) for row in order["tensors"])
        if tensors or order["op"] == "open":
            self.learned = learned = learn(model, tensors, self.learned)
        self._hold = Hold(model, order, learned, rank=self._rank, run_token=self._run_token, room=room)

    def _mine(self, order: Mapping[str, Any]) -> Hold:
        if self._hold is None or self._hold.name != order["session"]:
            raise WeightsError(f"session {order['session']} does not hold this engine; it must open it first")
        return self._hold


_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_HOOKED = {
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.receive_weights_from_distributed":
    {"names", "dtypes", "shapes", "group_name", "load_format"},
    f"{_MANAGER}.update_weights_from_distributed": {"recv_req"},
    "sglang.srt.eplb.eplb_manager.EPLBManager.rebalance": set[str](),
}  # fmt: skip
"""Method of SGLang -> parameters that its hook relies on. The hooks are `receive`, `update` and `rebalance`, in this order."""
_ASKED = {f"{_MANAGER}.destroy_weights_update_group": {"recv_req"}}
"""The same for a release without begin and end, whose hook is `ask`: any other order would end an engine without our half."""

RELEASED = "weights"
"""SGLang's tag for released memory of weights (`release_memory_occupation`)."""
_run_token = ""


def hooks() -> list[tuple[str, Callable[..., Any]]]:
    """Return the methods that are hooked in this SGLang.

    Returns:
        (dotted name, hook) pairs; nothing where this SGLang has no such methods.
    """
    for hooked, wraps in ((_HOOKED, (receive, update, rebalance)), (_ASKED, (ask,))):
        with suppress(ImportError, AttributeError):
            if all(wanted <= {*signature(resolve_name(name)).parameters} for name, wanted in hooked.items()):
                return list(zip(hooked, wraps, strict=True))
    return []


def apply(run_token: str) -> None:
    """Register the hooks with SGLang.

    Args:
        run_token: The run's secret, which a trainer must know, too. Empty: the session's own secret is enough.
    """
    global _run_token
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _run_token = run_token
    for hooked, hook in hooks():
        HookRegistry.register(hooked, hook, HookType.AROUND)


def handle_order(receiver: Receiver, manager: Any, model: torch.nn.Module, names: Any) -> tuple[bool, str]:
    """Handle an order that loads nothing, without begin and end.

    Nothing is raised, since an exception here ends the engine.

    Args:
        receiver: This rank's half.
        manager: SGLang's manager of weight updates.
        model: The engine's model.
        names: The names of the request; the first is the order, as JSON.

    Returns:
        Whether the order was carried out, and the answer.
    """
    begun = FOUND_OPEN if getattr(manager, "_session", None) is not None else ""
    if RELEASED in manager.offload_tags:
        return False, f"{begun}{UNTOUCHED}the engine has released the memory of its weights; resume it first"
    try:
        receiver.order(model, json.loads(names[0]))
    except Exception as error:
        return False, f"{begun}{error}"
    return True, f"{begun}done"


def ask(original: Any, manager: Any, recv_req: Any) -> Any:
    """Wrap the leaving of a group, whose name may be an order.

    Such an order only asks. Without this hook SGLang answers that it knows no such group.
    """
    if not recv_req.group_name.startswith("{"):
        return original(manager, recv_req)
    from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqOutput

    done, message = handle_order(_own(), manager, manager.tp_worker.model_runner.model, [recv_req.group_name])
    return DestroyWeightsUpdateGroupReqOutput(success=done, message=message)


def update(original: Any, manager: Any, recv_req: Any) -> Any:
    """Wrap the scheduler's update.

    A commit gets begin and end. An order that loads nothing gets neither. Other updates pass unchanged, unless the memory of the
    weights is released.
    """
    # an update of released memory would write where nothing is: it is answered as an order is there
    if recv_req.load_format == OPEN_FORMAT or RELEASED in manager.offload_tags:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

        model = manager.tp_worker.model_runner.weight_updater.get_model()
        done, message = handle_order(_own(), manager, model, recv_req.names)
        return UpdateWeightsFromDistributedReqOutput(success=done, message=message)
    if recv_req.load_format != COMMIT_FORMAT:
        return original(manager, recv_req)
    begun = manager.begin_weight_update(recv_req).success  # of the request only `selector` is read
    done = original(manager, recv_req)
    if done.success or FLUSH_REFUSED in done.message or (begun and UNTOUCHED in done.message):
        # end is collective; all ranks come here or none does, because they agree on their words
        manager.end_weight_update(recv_req)
    return done


def receive(original: Any, updater: Any, **request: Any) -> Any:
    """Wrap a rank's update.

    A commit of ours is carried out. Other updates pass, unless a session holds this engine.

    Raises:
        WeightsError: Another session holds the engine, or not all ranks carried out the commit.
    """
    receiver = _own()
    if request.get("load_format") != COMMIT_FORMAT:
        holder = receiver.holder()
        if holder and not request["group_name"].startswith(holder):
            raise WeightsError(f"the engine is held by weight session {holder}, whose trainer lives")
        return original(updater, **request)
    receiver.order(updater.get_model(), json.loads(request["names"][0]))
    return []


def rebalance(original: Any, manager: Any) -> Iterator[None]:
    """Wrap EPLB's rebalancing; skip it while an update is on its way."""
    if _own().may_move():
        yield from original(manager)


@cache
def _own() -> Receiver:
    from sglang.srt import runtime_context as runtime
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata as locations

    parallel = runtime.get_parallel()
    # an older release has its settings in the server arguments
    settings: Any = runtime.get_exec().moe if hasattr(runtime, "get_exec") else runtime.get_server_args()

    def placement_digest() -> str:  # the logical expert of each slot
        return tensor_digest(locations().physical_to_logical_map_cpu)

    def agree(word: str) -> list[str]:
        if parallel.tp_size == 1:
            return [word]
        group, raw = parallel.tp_group.cpu_group, word.encode()[:WORD_BYTES]
        words = gathered_bytes(raw, group=group, device=torch.device("cpu"))
        return [word.decode(errors="replace") for word in words]

    receiver = Receiver(rank=parallel.tp_rank, run_token=_run_token, agree=agree)
    receiver.learned = Learned(placed=placement_digest if settings.enable_eplb else str)
    return receiver
