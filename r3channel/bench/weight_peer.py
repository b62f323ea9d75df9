"""The engine's side of the path benchmarks: one process that takes weights in every way that has a figure.

python -m r3channel.bench.weight_peer FD       serves length-prefixed messages on the inherited socket FD until it closes

A message is a command of `weight_pair` or a control message of `weights.refit`; both are JSON. It is answered when its
weights lie in the parameters (or, for a raw copy, in a buffer). An error ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.joining import join
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.weights.digests import payload_digest
from r3channel.weights.lending import borrow
from r3channel.weights.manifest import Bucket, Manifest
from r3channel.weights.pipeline import BroadcastPipeline, SharedManifest
from r3channel.weights.receiver import BucketReceiver, copy_in
from r3channel.weights.refit import RefitReceiver

TIMEOUT_S = 120.0
DONE = b"done"


class Peer:
    """One engine process. Parameters are views of one flat buffer, so that one digest covers them."""

    def __init__(self) -> None:
        self._flat_N = torch.empty(0, dtype=torch.uint8)
        self._raw_N = torch.empty(0, dtype=torch.uint8)
        self._parameters: dict[str, torch.Tensor] = {}
        self._receiver: BucketReceiver | None = None
        self._refit = RefitReceiver(self._apply)
        self._transports: dict[str, Transport] = {}
        self._pipelines: dict[int, BroadcastPipeline] = {}
        self._lent: list[tuple[str, torch.Tensor]] = []

    def take(self, message: bytes) -> bytes:
        told = json.loads(message)
        if "do" not in told:
            return self._refit.take(message)
        answer = getattr(self, f"do_{told['do']}")(told)
        return DONE if answer is None else str(answer).encode()

    def do_prepare(self, told: Mapping[str, Any]) -> None:
        """Parameters of this manifest, each page touched; one buffer of their size for raw copies."""
        metas = [meta for bucket in Manifest.from_dict(told["manifest"]).buckets for meta in bucket.tensors]
        whole = Bucket.aligned(metas)
        self._flat_N = torch.zeros(whole.payload_bytes, dtype=torch.uint8)
        self._parameters = dict(zip(whole.names, whole.views(self._flat_N), strict=True))
        self._receiver = BucketReceiver(self._parameters.items)
        self._raw_N = torch.zeros(told["raw_bytes"], dtype=torch.uint8)

    def do_join(self, told: Mapping[str, Any]) -> None:
        rendezvous = Rendezvous(**told["rendezvous"])
        self._transports[rendezvous.backend] = join(rendezvous, timeout_s=TIMEOUT_S)

    def do_pipelines(self, told: Mapping[str, Any]) -> None:
        shared = SharedManifest(Manifest.from_dict(told["manifest"]), tuple(told["owners"]))
        group = self._group()
        self._pipelines = {
            1: BroadcastPipeline(group, shared, depth=1),
            2: BroadcastPipeline(group, shared, depth=2),
        }

    def do_pipeline(self, told: Mapping[str, Any]) -> None:
        self._pipelines[told["depth"]].run(_owns_nothing, self._apply, timeout_s=TIMEOUT_S)

    def do_broadcast(self, told: Mapping[str, Any]) -> None:
        self._group().broadcast(0, self._raw_N, timeout_s=TIMEOUT_S)

    def do_receive(self, told: Mapping[str, Any]) -> None:
        self._transports[told["backend"]].recv(0, self._raw_N, timeout_s=TIMEOUT_S)

    def do_borrow(self, told: Mapping[str, Any]) -> None:
        """Map the trainer's weights, once."""
        shards = borrow(told["card"]).shards
        self._lent = [(name, tensor) for name, parts in shards.items() for _, tensor in parts]

    def do_lent(self, told: Mapping[str, Any]) -> None:
        """The trainer has written its weights where they are mapped: take them."""
        copy_in(self._parameters, self._lent)

    def do_digest(self, told: Mapping[str, Any]) -> int:
        return payload_digest(self._raw_N if told["raw"] else self._flat_N)

    def do_clear(self, told: Mapping[str, Any]) -> None:
        self._flat_N.zero_()
        self._raw_N.zero_()

    def _group(self) -> ProcessGroupTransport:
        group = self._transports["gloo"]
        assert isinstance(group, ProcessGroupTransport)
        return group

    def _apply(self, index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
        assert self._receiver is not None
        self._receiver(index, bucket, data_N)


def _owns_nothing(index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
    raise AssertionError("only the trainer owns buckets here")


def serve(line: Connection) -> None:
    peer = Peer()
    while True:
        try:
            message = line.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        line.send_bytes(peer.take(message))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # UCX's threads may hold an ordinary exit up
