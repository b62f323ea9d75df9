"""One trainer session's hold on an engine's rank: its links, the staged copy, and how staged bytes become the parameters.

Each link has a thread of its own, which writes staged memory only; the scheduler's thread alone writes parameters. The size of
the parameters decides how much is allocated, never what a trainer says.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from r3channel.errors import R3Error, WeightsCorrupt, WeightsError
from r3channel.transport.connection import Connection
from r3channel.transport.listener import connect
from r3channel.transport.process_group import in_background
from r3channel.weights import rank_link
from r3channel.weights.checksums import hashed_bytes, host_bytes, tensor_digest
from r3channel.weights.geometry import Box
from r3channel.weights.groups import JointReceiver
from r3channel.weights.loader_map import Learned, derive
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.staged_copy import Room, StagedCopy, make_copy

_CONNECT_S = 10.0
WORD_BYTES = 1024
"""Most bytes of a reason that is sent to the trainer."""


_Places = dict[tuple[int, int], list[torch.Tensor]]
"""Where each record of a trainer's table lies, by first entry and number of entries. It is the same at every update."""

Ready = tuple[StagedCopy, list[torch.Tensor]]
"""The staged copy, and the parameters that were found unchanged."""


@dataclass(slots=True)
class _Stage:
    """One update on its way, over all links."""

    update: int = -1
    digests: dict[str, str] | None = None
    """By parameter, once everything has been placed."""
    came: int = 0
    """The number of items placed."""
    committed: bool = False


class Hold:
    """One trainer's hold on this rank: its links, and the staged copy."""

    def __init__(
        self, model: torch.nn.Module, order: Mapping[str, Any], learned: Learned, *, rank: int, run_token: str, room: Room
    ) -> None:  # fmt: skip
        """Allocate the staged copy and open the links to the trainers.

        The links' threads hold the copy: it is freed once the trainers are gone. Where there is no room for the copy, the links
        tell so. Links of an order that stages nothing tell what was `learned`, and keep other sessions out.

        Args:
            model: The engine's model.
            order: The trainer's order, with `op` "open" to stage, or "hold".
            learned: The result of the dry run.
            rank: This rank's number in its engine.
            run_token: The run's secret; may be empty.
            room: This rank's share of the free memory.
        """
        self.name: str = order["session"]
        told, stages = {"needs": learned.needs.to_dict(), "whole": learned.refused}, order["op"] == "open"
        self._learned = learned if stages else Learned()
        self._needs, self._whole = self._learned.needs, bool(self._learned.refused)
        self._lock = threading.Lock()
        self._stage = _Stage()
        self._until_s = float("inf")
        """When the time of the update that began last is over, on the clock of `time.monotonic`."""
        self._joint = JointReceiver()
        self._mapped = set[int]()
        self._serving: tuple[int, Mapping[str, str], Sequence[torch.Tensor]] | None = None
        """The version, digests and flat parameters that a trainer may read back; None before a commit over these links."""
        self._items = sum(part.box.numel for part in self._needs.parts)
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        where: dict[str, Any] = {"device": device, "wire": order["wire"] if stages else "tcp", "room": room}
        copy, why = make_copy(self._needs.params, **where, insist=order["staged"] != "auto")
        self._copy = weakref.ref(copy)
        reply = {"error": why} if why else told | (self._fill(copy, model) if stages else {})
        token = rank_link.session_token(run_token, order["nonce"])
        hello = json.dumps({key: order[key] for key in ("engine", "attempt")} | {"rank": rank}).encode()
        self._links, self._threads = list[Connection](), list[Future[None]]()
        try:
            for host, port in order["trainers"]:
                self._links.append(connect(host, port, token, timeout_s=_CONNECT_S, hello=hello))
        except BaseException:
            self.close()
            raise
        for number, link in enumerate(self._links):
            serving = partial(self._serve, number, link, reply, copy)
            self._threads.append(in_background(serving, name=f"stage-{number}"))

    @property
    def ended(self) -> bool:
        """Return whether the trainers are gone: nobody holds the engine.

        Links that something in between keeps alive count as gone, too, if an update was begun, not committed, and is past its
        limit.
        """
        given_up = time.monotonic() > self._until_s and not self._stage.committed
        return given_up or not any(link.alive for link in self._links)

    @property
    def staging(self) -> bool | None:
        """Return whether an update is on its way.

        An update is on its way from the linking, or from its first byte, to its commit. None where nothing is staged.
        """
        return not (self._stage.committed or self.ended) if self._items else None

    def close(self) -> None:
        """End the links and their threads, which free the staged copy.

        A link's own thread must not call it.
        """
        self._joint.close("the session has ended")
        self._joint = JointReceiver()  # the other one's memory goes with its last thread
        for link in self._links:
            link.close()
        wait(self._threads, timeout=_CONNECT_S)

    def regroup(self, joint: dict[str, Any], rank: int) -> None:
        """Leave the joint group, then join another if one is given.

        Calls under way in the old group end, on any thread.

        Args:
            joint: What `JointReceiver` takes; its `rank` is the number of the engine's first rank in the group. Empty to join
                none.
            rank: This rank's number in its engine.
        """
        self._joint.close("a trainer has given it up")
        if joint:
            self._joint = JointReceiver(**joint | {"rank": joint["rank"] + rank})
            self._joint.join()

    def _fill(self, copy: StagedCopy, model: torch.nn.Module) -> dict[str, Any]:
        # present values stay where no tensor comes; nothing that comes may meet a copy that is late
        for view, param in zip(copy.views, () if self._whole else model.parameters(), strict=not self._whole):
            view.copy_(param.detach().flatten())
        for place, constant in self._needs.padding:
            place.view(copy.views[place.param]).fill_(constant)
        if any(view.is_cuda for view in copy.views):
            torch.cuda.synchronize()
        compared = {part.param for part in self._learned.copied} if self._whole else self._needs.params
        return {"compared": len(compared), "summed": copy.summed}

    # -- a link's thread -----------------------------------------------------------------------------------------------

    def _serve(self, number: int, link: Connection, reply: dict[str, Any], copy: StagedCopy) -> None:
        """Serve the link until the trainer leaves or dies.

        Nothing that was staged is committed after that.
        """
        try:
            # after any of these errors the stream is out of step: the link must end
            with suppress(R3Error, ValueError, IndexError, struct.error):
                self._listen(number, link, reply, copy)
        finally:
            self._joint.close(f"trainer rank {number} is gone")
            link.abort("the rank has ended it")  # also where we are at fault: no dead thread holds an engine

    def _listen(self, number: int, link: Connection, reply: dict[str, Any], copy: StagedCopy) -> None:
        table, places, failure = list[rank_link.Entry](), _Places(), ""
        rank_link.send_blob(link, rank_link.NEEDS, reply | {"shared": copy.shared()}, timeout_s=None)
        while "error" not in reply:  # a rank that cannot stage holds no engine
            kind, body = link.recv_record(timeout_s=None)
            try:
                if kind == rank_link.TABLE:
                    self._mapped.add(number)
                    if len(self._mapped) == len(self._links):
                        copy.hide()
                    table = rank_link.read_table(rank_link.receive_blob(link, body), self._needs.parts)
                    places, failure = _Places(), ""
                elif kind == rank_link.BEGIN:
                    update, records, left_s = rank_link.LIMIT.unpack(body)
                    self._until_s, failure = time.monotonic() + left_s + _CONNECT_S, ""
                    with self._lock:  # not at the first record: a rank that takes nothing gets none
                        self._stage = _Stage(update) if update > self._stage.update else self._stage
                    self._joint.begin(update, number, records)
                elif kind in (rank_link.DATA, rank_link.PLACED, rank_link.LANDS):
                    self._place(number, link, kind, table, places, body, copy)
                elif kind == rank_link.LEAVES and body.decode() == self._joint.name:
                    self._joint.close(f"trainer rank {number} has left it")
                elif kind == rank_link.END:
                    word, failure = failure, ""
                    link.send_record(rank_link.END, word.encode()[:WORD_BYTES], timeout_s=_CONNECT_S)
                elif kind == rank_link.VERIFY:
                    answer = self._verify(copy, *rank_link.ASK.unpack(body))
                    rank_link.send_blob(link, rank_link.VERIFY, answer, timeout_s=_CONNECT_S)
                    if self._learned.moved_experts():
                        return
                elif kind == rank_link.GIVE:
                    answer, data = self._digests_of(*rank_link.PARAM.unpack(body))
                    rank_link.send_blob(link, rank_link.GIVE, answer, timeout_s=_CONNECT_S)
                    link.send(data, timeout_s=None)
            except WeightsCorrupt as error:
                failure = failure or f"{type(error).__name__}: {error}"

    def _place(
        self, number: int, link: Connection, kind: int, table: Sequence[rank_link.Entry], places: _Places, body: bytes,
        copy: StagedCopy,
    ) -> None:  # fmt: skip
        update, first, count, digest = rank_link.HEAD.unpack(body)
        with self._lock:
            stage = self._stage
            late = update < stage.update  # others have gone on to the next update
            if not late and stage.digests is not None:
                self._stage = stage = _Stage(update)  # whatever was staged before is void
        entries, seen = table[first : first + count], xxhash.xxh3_64()
        if len(entries) != count:
            raise ValueError(f"entries {first} to {first + count} of {len(table)}")
        if (first, count) not in places:
            places[first, count] = [run.view for run in rank_link.runs_of(entries, self._needs, copy.views)]
        views = places[first, count]
        if kind == rank_link.LANDS:
            self._land(number, update, views, seen)
        for view in views if kind != rank_link.LANDS else ():
            # a link receives in the host's memory alone: an engine that is updated alone may stage on its GPU
            in_place = kind == rank_link.PLACED or (view.is_cpu and view.is_contiguous() and not late)
            came = view.contiguous() if in_place else torch.empty(view.shape, dtype=view.dtype)
            if kind == rank_link.DATA:  # else the trainer has put it there
                link.recv_into(host_bytes(came), timeout_s=None)
            seen.update(hashed_bytes(came))
            if not (in_place or late):
                view.copy_(came)
        if late:
            return
        if seen.intdigest() != digest:
            name = self._learned.tensors[self._needs.parts[entries[0].part].tensor].name
            raise WeightsCorrupt(f"{count} pieces from {name} on came damaged")
        with self._lock:  # another link may have begun the next update meanwhile: there it does not count
            stage.came += sum(entry.box.numel for entry in entries)

    def _land(self, number: int, update: int, views: Sequence[torch.Tensor], seen: xxhash.xxh3_64) -> None:
        sizes, left_s = [view.nbytes for view in views], self._until_s - time.monotonic()
        with self._joint.receive(update, number, sum(sizes), timeout_s=max(left_s, 0.0)) as flat_N:
            seen.update(hashed_bytes(flat_N))
            for view, part_N in zip(views, flat_N.split(sizes), strict=True):
                view.copy_(part_N.view(view.dtype).view(view.shape))

    def _verify(self, copy: StagedCopy, update: int, checksums: bool) -> dict[str, Any]:
        if moved := self._learned.moved_experts():
            return {"error": moved}
        with self._lock:
            stage = self._stage
            if stage.update != update or stage.came != self._items:
                staged = f"{stage.came} of {self._items} items of update {stage.update} are staged"
                return {"error": f"{staged}, asked for {update}"}
        stage.digests, sums = copy.seal(checksums=checksums and not self._whole)
        # another engine has moved experts elsewhere
        alike = [name for name in stage.digests if not (self._learned.placed() and ".experts." in name)]
        both = {"digests": stage.digests, "checksums": sums}
        return {kind: {name: sums[name] for name in alike if name in sums} for kind, sums in both.items()}

    def _digests_of(self, version: int, param: int) -> tuple[dict[str, str], list[memoryview]]:
        """Return a parameter's digest at the commit, and its bytes now."""
        held, digests, params = self._serving or (None, {}, ())
        if held != version:
            last = "nothing" if held is None else f"version {held}"
            return {"error": f"version {version} is asked for, {last} was committed last"}, []
        return {"digest": digests[self._needs.params[param].name]}, [host_bytes(params[param])]

    # -- the scheduler's thread ----------------------------------------------------------------------------------------

    def check(self, model: torch.nn.Module, update: int) -> Ready:
        """Check that the update is ready to be committed.

        The update is staged and verified, and the parameters are those of the dry run. Nothing is touched yet.

        Args:
            model: The engine's model.
            update: The update's number.

        Returns:
            What `change_over` takes. While it is kept, so is the staged copy's memory.

        Raises:
            WeightsError: The update is not staged and verified here, a parameter is not what it was, or experts have moved.
        """
        stage, copy = self._stage, self._copy()
        if stage.update != update or stage.digests is None or copy is None:
            raise WeightsError(f"update {update} is not staged and verified here; {stage.update} is staged")
        if moved := self._learned.moved_experts():
            self.close()  # so that the next update learns anew
            raise WeightsError(moved)
        return copy, [] if self._whole else self._targets(model)

    def change_over(self, model: torch.nn.Module, version: int, ready: Ready) -> None:
        """Make the staged bytes the parameters.

        The staged copy stays as it is: the order may come again.

        Args:
            model: The engine's model.
            version: The version that the parameters have then.
            ready: What `check` returned.

        Raises:
            WeightsError: A parameter holds other values than were staged.
        """
        (copy, targets), self._serving = ready, None
        self._stage.committed = True
        if self._whole:
            named = zip(self._needs.params, copy.views, strict=True)
            model.load_weights((m.name, v.view(m.shape)) for m, v in named)  # pyright: ignore[reportCallIssue]
            self._compare(model, copy.views)
            return
        copy.change_over(targets)
        derive(model, self._learned)
        self._serving = version, self._stage.digests or {}, targets

    def _compare(self, model: torch.nn.Module, views: Sequence[torch.Tensor]) -> None:
        params, at = list(model.named_parameters()), {part.tensor: part.param for part in self._needs.parts}
        for part in self._learned.copied:
            name, param = params[part.param]
            whole = Box.whole(self._learned.tensors[part.tensor].shape)
            staged = views[at[part.tensor]].view(whole.shape)[part.box.slices_in(whole)]
            loaded = part.view(param.detach().view(-1))
            if tensor_digest(loaded) != tensor_digest(staged.to(loaded.dtype)):  # of bytes: NaN equals itself
                raise WeightsError(f"{name} holds other values than were given for it")

    def _targets(self, model: torch.nn.Module) -> list[torch.Tensor]:
        params = dict(model.named_parameters())
        for meta in self._needs.params:
            if meta.name not in params or TensorMeta.of(meta.name, params[meta.name]) != meta:
                raise WeightsError(f"parameter {meta} is not what it was when the session opened")
        return [params[meta.name].detach().view(-1) for meta in self._needs.params]
