"""Log-probs of a recorded step: a safetensors file of each trainer rank that computes them, whole or not there.

`KeptLogprobs` collects those of a rank while its step is open.

u64 bytes of JSON, JSON {"engine": {"dtype": "F32", "shape": [n], "data_offsets": [begin, end]}, ...}, the numbers. Two columns
say where each number belongs: `sample`, its place in the ticket, and `position`, the model input whose output it is. A number
is the log-prob of the token after that input.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from r3channel.errors import RecordingInvalid, UsageError
from r3channel.plan.layout import RankCoords
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.wire.routing import Ids

if TYPE_CHECKING:  # recordings are read without torch
    import torch

log = logging.getLogger(__name__)

PLACES = ("sample", "position")
SIDES = ("engine", "trainer", "natural")
"""The columns; `natural` is the trainer's with replay off, in few steps or in none."""
_DTYPES = {**dict.fromkeys(PLACES, ("I32", "<i4")), **dict.fromkeys(SIDES, ("F32", "<f4"))}
_MOST_JSON = 1 << 16


def logprobs_glob(step: int) -> str:
    return f"step-{step:06d}.logprobs-*.safetensors"


def write_logprobs(folder: Path, step: int, rank: int, columns: Mapping[str, Ids]) -> Path | None:
    """Write one rank's log-probs, if the folder has the step.

    A folder without a segment of the step belongs to another node, or to a recording that is over.

    Returns:
        The file, or None if nothing was written.

    Raises:
        OSError: the file cannot be written.
    """
    if not (folder / f"step-{step:06d}.r3s").exists():
        return None
    arrays = {name: np.ascontiguousarray(column, _DTYPES[name][1]) for name, column in columns.items()}
    spans = pairwise(accumulate((array.nbytes for array in arrays.values()), initial=0))
    head = {
        name: {"dtype": _DTYPES[name][0], "shape": list(array.shape), "data_offsets": span}
        for (name, array), span in zip(arrays.items(), spans, strict=True)
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path = folder / logprobs_glob(step).replace("*", str(rank))
    scratch = path.with_name(f".{path.name}")
    columns_bytes = (array.tobytes() for array in arrays.values())
    scratch.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *columns_bytes]))
    return scratch.rename(path)


def read_logprobs(folder: Path, step: int) -> dict[str, Ids]:
    """Read all ranks' columns, one rank after another.

    Returns:
        column -> numbers; empty if no rank wrote any.

    Raises:
        RecordingInvalid: a file is damaged.
    """
    return _join_columns([_read(path) for path in sorted(folder.glob(logprobs_glob(step)))])


def _join_columns(parts: list[dict[str, Ids]]) -> dict[str, Ids]:
    # The columns that all parts have, one part after another.
    shared = [name for name in _DTYPES if all(name in columns for columns in parts)]
    return {name: np.concatenate([columns[name] for columns in parts]) for name in shared if parts}


def _read(path: Path) -> dict[str, Ids]:
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if not 8 <= size + 8 <= min(len(data), _MOST_JSON):
            raise ValueError(f"{size} bytes of JSON in a file of {len(data)}")
        body, head = memoryview(data)[8 + size :], json.loads(data[8 : 8 + size])
        columns = {name: _view(body, name, head[name]) for name in _DTYPES if name in head}
        if not {*PLACES, "trainer"} <= columns.keys() or len({array.shape for array in columns.values()}) > 1:
            raise ValueError(f"columns { ({name: array.shape for name, array in columns.items()}) }")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordingInvalid(f"{path}: expected a safetensors file of log-probs: {error!r}") from error
    return columns


def _view(body: memoryview, name: str, entry: Mapping[str, object]) -> Ids:
    (begin, end), (count,) = entry["data_offsets"], entry["shape"]  # type: ignore[misc]
    if entry["dtype"] != _DTYPES[name][0] or not 0 <= begin <= end <= len(body):
        raise ValueError(f"{name} of {entry['dtype']} at {begin}..{end} of {len(body)} bytes")
    return np.frombuffer(body[begin:end], _DTYPES[name][1]).reshape(count)


class KeptLogprobs:
    """A step's log-probs until they are recorded: add* -> write.

    Nothing waits for the device before `write`. A micro-batch that comes again replaces its earlier values.
    """

    def __init__(self, ticket: Ticket, shard: Shard) -> None:
        self._ticket, self._shard = ticket, shard
        self._place = {sample.sample_id: place for place, sample in enumerate(ticket.samples)}
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, microbatch: int, mask: torch.Tensor, **sides: torch.Tensor | None) -> None:
        """Keep a micro-batch's log-probs where `mask` > 0.

        Args:
            microbatch: the index of the micro-batch.
            mask: [b, s / cp] ([1, t / cp] for a pack).
            sides: each side's log-probs by name, of the same shape.

        Raises:
            UsageError: the shape is not that of the model's output.
        """
        expected = self._shard.token_map(microbatch)[0].shape
        if mask.shape != expected:
            raise UsageError(
                f"step {self._ticket.step}, micro-batch {microbatch}: log-probs {tuple(mask.shape)}, expected {expected}: the "
                "model's output, which a recording can place"
            )
        given = {name: values.detach() for name, values in sides.items() if values is not None}
        self._kept[microbatch] = {"mask": mask, **given}

    def write(self, folder: Path) -> bool:
        """Write the file.

        Returns:
            Whether later steps are to be written too.
        """
        try:
            if self._kept:
                at, layout = self._shard, self._ticket.layout
                rank = layout.rank(RankCoords(dp=at.dp, pp=at.pp, cp=at.cp, tp=0))
                parts = [self._columns_of(index, kept) for index, kept in sorted(self._kept.items())]
                write_logprobs(folder, self._ticket.step, rank, _join_columns(parts))
        except OSError as error:
            log.warning("r3channel: log-probs are recorded no more, the channel goes on: %s", error)
            return False
        return True

    def _columns_of(self, microbatch: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Ids]:
        sample, position = self._shard.token_map(microbatch)
        batch = self._shard.microbatches[microbatch]
        last = np.asarray([tokens - 1 for tokens in batch.tokens] + [0])  # the last output predicts no token
        chosen = (kept["mask"] > 0).cpu().numpy() & (position < last[sample])
        places = np.asarray([self._place[name] for name in batch.sample_ids])
        return {
            "sample": places[sample[chosen]],
            "position": position[chosen],
            **{name: own.float().cpu().numpy()[chosen] for name, own in kept.items() if name != "mask"},
        }
