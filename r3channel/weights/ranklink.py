"""A trainer's end of the links to engines' ranks: who connects, what each rank needs, and pieces sent to it.

A rank connects to every trainer that the order to open names. Knows no HTTP, no plan and no transaction.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from r3channel.errors import CannotStage, WeightsCorrupt, WeightsError
from r3channel.transport.link import Link
from r3channel.transport.listener import Listener
from r3channel.weights.deadline import Deadline
from r3channel.weights.dryrun import Needs
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.staging import (
    ASK,
    DATA,
    END,
    HEAD,
    NEEDS,
    TABLE,
    VERIFY,
    Entry,
    expect_json,
    send_blob,
    session_token,
    table_bytes,
)


@dataclass(slots=True, eq=False)
class RankLink:
    """One rank of an engine. One thread at a time."""

    engine: str
    rank: int
    link: Link
    needs: Needs
    whole: str
    """Why the rank stages whole tensors and lets the model's own loader place them; empty where parts are placed."""
    entries: Sequence[Entry] = field(default_factory=tuple)

    def tell(self, entries: Sequence[Entry], *, timeout_s: float) -> None:
        """What will be sent from now on, in order."""
        self.entries = entries
        send_blob(self.link, TABLE, table_bytes(entries), timeout_s=timeout_s)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.needs.params[self.needs.parts[entry.part].param].dtype

    def send(self, version: int, first: int, pieces: Sequence[torch.Tensor], *, timeout_s: float) -> int:
        """The pieces of entries `first` ..., each of its entry's shape; returns the bytes. Cast to the rank's dtypes here."""
        digest, parts = xxhash.xxh3_64(), []
        for entry, piece in zip(self.entries[first : first + len(pieces)], pieces, strict=True):
            flat = piece.detach().to("cpu", self.dtype(entry)).contiguous().flatten().view(torch.uint8)
            parts.append(flat.numpy().data)
            digest.update(parts[-1])
        head = HEAD.pack(version, first, len(pieces), digest.intdigest())
        limit = time.monotonic() + timeout_s
        self.link.send_record(DATA, head, timeout_s=timeout_s)
        self.link.send(parts, timeout_s=max(0.001, limit - time.monotonic()))
        return sum(len(part) for part in parts)

    def end(self, *, timeout_s: float) -> None:
        """Wait until the rank has placed everything; WeightsCorrupt with its reason if not."""
        self.link.send_record(END, timeout_s=timeout_s)
        kind, word = self.link.recv_record(timeout_s=timeout_s)
        if kind != END or word:
            raise WeightsCorrupt(f"engine {self.engine} rank {self.rank}: {word.decode(errors='replace')}")

    def verify(
        self, version: int, *, checksums: bool, timeout_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Digests, and checksums as SGLang's own if asked, by parameter, of what the rank would hold."""
        self.link.send_record(VERIFY, ASK.pack(version, checksums), timeout_s=timeout_s)
        told = expect_json(self.link, VERIFY, timeout_s=timeout_s)
        if "error" in told:
            raise WeightsError(f"engine {self.engine} rank {self.rank}: {told['error']}")
        return told["digests"], told["checksums"]


class Door:
    """Where engines' ranks connect to this trainer. OPEN -> CLOSED."""

    def __init__(self, *, host: str, session: str, run_token: str) -> None:
        self.session, self.nonce = session, ""
        self._host, self._run_token = host, run_token
        self._listener: Listener | None = None

    def listen(self, nonce: str = "") -> tuple[str, int]:
        """Begin to listen, where nobody did; the address. `nonce`: the session's own secret, made by its first trainer."""
        if self._listener is None:
            self.nonce = nonce or secrets.token_hex(16)
            token = session_token(self._run_token, self.nonce)
            self._listener = Listener(self._host, token=token)
        return self._host, self._listener.port

    def order(
        self,
        op: str,
        *,
        engine: str,
        tensors: Sequence[TensorMeta],
        trainers: Sequence[tuple[str, int]],
        staged: str,
    ) -> dict[str, Any]:
        """The order that makes every rank of `engine` connect to all trainers."""
        where = {"session": self.session, "nonce": self.nonce, "engine": engine, "trainers": list(trainers)}
        return {"op": op, **where, "tensors": [meta.row() for meta in tensors], "staged": staged}

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]:
        """The links of these engines (url -> ranks). WeightsError with a rank's reason where one cannot receive."""
        assert self._listener is not None
        found: dict[str, list[RankLink]] = {url: [] for url in wanted}
        refused = ""
        while any(len(found[url]) < ranks for url, ranks in wanted.items()):
            link = self._listener.accept(deadline.left_s())
            hello = json.loads(link.hello)
            told = expect_json(link, NEEDS, timeout_s=deadline.left_s())
            if hello["engine"] not in found:
                link.close()  # of an attempt that was given up
                continue
            refused = refused or told.get("error", "")
            needs = Needs((), (), ()) if "error" in told else Needs.from_dict(told["needs"])
            found[hello["engine"]].append(
                RankLink(hello["engine"], hello["rank"], link, needs, told.get("whole", ""))
            )
        if refused:
            raise CannotStage(refused)
        return {url: sorted(ranks, key=lambda rank: rank.rank) for url, ranks in found.items()}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
