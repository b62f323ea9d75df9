"""Memory of the buckets in which rows arrive, on a host or a GPU, and the code that places rows from there.

Rows are placed where the routers are, whatever the transport. Over NCCL rows arrive there. Over TCP rows come to a GPU through
pinned memory, bucket by bucket. On a host `plan.placement` places rows. On a device `DevicePlacement` makes the same bytes and
digests, and the host waits for none of that work. A digest is linear in the items of its rows (`wire.digest`): a bucket's items,
each times the coefficient of its position, are added up by sample, and multiplied once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from r3channel.plan.placement import Placement, places, spread_ids
from r3channel.plan.stream import Stream, Stretches
from r3channel.trainer.router_digests import upload
from r3channel.wire.digest import coefficients, item_bytes_of
from r3channel.wire.mixing import OFFSET, multipliers
from r3channel.wire.routing import Ids

_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS_AT_ONCE = 1 << 19
"""Rows whose places are computed at once, 40 bytes each. They span several buckets, so that one bucket pays little."""
_SUMS = 1 << 14
"""Most sums of digests. The rows of few samples are added up in lanes, since atomic additions to one address would queue."""


def buckets_for(device: torch.device) -> HostBuckets:
    """Return the buckets of a receiver whose routers are on this device."""
    return HostBuckets() if device.type == "cpu" else DeviceBuckets(device)


class HostBuckets:
    """The buckets on a host: one, or two over a process group. One thread at a time."""

    held: tuple[torch.Tensor, ...] = ()
    """The buckets in which rows arrive, uint8."""

    def reserve(self, nbytes: int, *, transport: str) -> None:
        """Make new buckets where the present ones are too small.

        Args:
            nbytes: Bytes that a bucket must hold.
            transport: The transport over which rows come.
        """
        self.held = _grow(self.held, 1 if transport == "tcp" else 2, nbytes)

    def mark(self) -> None:
        """Let rows wait for the device work that this thread queued.

        That work may read the memory that the rows are to fill.
        """

    def placing(self) -> Any:
        """Return a block for the work of one receive."""
        return nullcontext()

    def placement(self, stream: Stream, rows_N: torch.Tensor) -> Any:
        """Return a `Placement` that fills a shard from these buckets."""
        return Placement(stream, rows_N.numpy())

    def free(self, number: int) -> torch.Tensor:
        """Return a bucket once rows may be received into it.

        Args:
            number: The bucket's number, counted in a receive.
        """
        return self.held[number % len(self.held)]

    def take_rows(self, number: int, nbytes: int, stream: Stream) -> Any:
        """Return the rows of a filled bucket.

        Args:
            number: The bucket's number, counted in a receive.
            nbytes: Bytes of the rows in it.
            stream: The stream that the rows belong to.

        Returns:
            [rows, columns, K], as `rows` of the placement takes them.
        """
        return _rows_in(self.free(number)[:nbytes], stream).numpy()


class DeviceBuckets(HostBuckets):
    """Two buckets on the device, two pinned ones where rows come through the host, and a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._there = device, tuple[torch.Tensor, ...]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: Any = None
        self._copies: list[Any] = [None, None]
        """The copy from each pinned bucket, as an event."""

    def reserve(self, nbytes: int, *, transport: str) -> None:
        self._there = _grow(self._there, 2, nbytes, device=self._device)
        host = transport == "tcp" or (transport == "gloo" and self._stream is not None)
        known = () if self.held is self._there else self.held
        self.held = _grow(known, 2, nbytes, pin_memory=self._stream is not None) if host else self._there

    def mark(self) -> None:
        if self._stream is not None:
            self._read = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def placing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            try:
                yield
            finally:
                self._stream.synchronize()  # copies of a failed receive may still write to memory that is freed

    def placement(self, stream: Stream, rows_N: torch.Tensor) -> Any:
        return DevicePlacement(stream, rows_N)

    def free(self, number: int) -> torch.Tensor:
        if self._copies[number % 2] is not None:
            self._copies[number % 2].synchronize()
        return self.held[number % 2]

    def take_rows(self, number: int, nbytes: int, stream: Stream) -> Any:
        here_N = self._there[number % 2][:nbytes]
        if self.held is not self._there:
            here_N.copy_(self.held[number % 2][:nbytes], non_blocking=True)
            if self._stream is not None:
                self._copies[number % 2] = self._stream.record_event()
        return _rows_in(here_N, stream)


def _rows_in(bucket_N: torch.Tensor, stream: Stream) -> torch.Tensor:
    spec = stream.shard.spec
    return bucket_N.view(_ITEMS[spec.id_dtype.itemsize]).view(-1, len(stream.columns), spec.top_k)


def _grow(held: tuple[torch.Tensor, ...], count: int, nbytes: int, **where: Any) -> tuple[torch.Tensor, ...]:
    if len(held) >= count and len(held[0]) >= nbytes:
        return held
    return tuple(torch.empty(nbytes, dtype=torch.uint8, **where) for _ in range(count))


class _Rows(NamedTuple):
    """Consecutive rows of a stream: an int64 value for each row in each field."""

    line_T: torch.Tensor
    """Line of the row's first layer; a line is the ids of one layer."""
    layer_T: torch.Tensor
    """Lines from a layer to the next."""
    position_T: torch.Tensor
    sample_T: torch.Tensor
    """Index of the sums to which the row is added: (TP slot * samples of the DP rank + sample) * lanes + lane."""


class DevicePlacement:
    """A `plan.placement.Placement` on a device: one shard as it fills.

    All calls are on one stream of the device.
    """

    def __init__(self, stream: Stream, buffer_N: torch.Tensor) -> None:
        """Prepare to fill a shard.

        Args:
            stream: The rows that travel.
            buffer_N: `shard.nbytes` bytes of any content, on the device.
        """
        shard, spec = stream.shard, stream.shard.spec
        self._stream, self._device = stream, buffer_N.device
        self._id_bytes, item_bytes = spec.top_k * spec.id_dtype.itemsize, item_bytes_of(spec)
        self._item, self._items = _ITEMS[item_bytes], self._id_bytes // item_bytes
        self._lines_NI = buffer_N.view(self._item).view(-1, self._items)
        self._layers_L = torch.arange(len(shard.layers), device=self._device)
        columns = {column: index for index, column in enumerate(stream.columns)}
        self._sources_L = self._upload(np.asarray([columns[source] for source in shard.sources], np.int64))
        self._in_order = shard.sources == stream.columns
        self._mask = torch.tensor([(1 << 8 * min(item_bytes, 4)) - 1], device=self._device)
        self._factor_I = self._upload(multipliers(self._items))
        self._lanes = max(1, min(32, _SUMS // max(1, shard.tp_slots * len(stream.samples))))
        stretches = stream.stretches
        self._table, self._total = self._tabulate(stretches), int(stretches.rows.sum())
        ends = stretches.position + stretches.rows
        self._coefficient_P = self._upload(coefficients(0, int(ends.max(initial=0))))
        self._known, self._known_from = list[torch.Tensor](), self._total
        """Values of the rows from `_known_from` on: those of `_Rows`, their coefficients, and these times the digest's offset."""
        self._target_N = self._word_N = self._layers_L[:0]

    def pads(self) -> None:
        """Write the rows that do not travel."""
        pads, spec = self._stream.pads, self._stream.shard.spec
        ids_EK = spread_ids(spec, positions_T=np.arange(spec.num_experts))
        pad_EI, table = upload(ids_EK, self._device).view(self._item), self._tabulate(pads)
        total, layers = int(pads.rows.sum()), len(self._layers_L)
        most = max(1, _ROWS_AT_ONCE // max(layers, 1))
        for begin in range(0, total if layers else 0, most):
            rows = self._rows_of(table, begin, min(begin + most, total))
            ids_TI = pad_EI.index_select(0, rows.position_T % spec.num_experts)
            self._write(rows.line_T, rows.layer_T, ids_TI[:, None].expand(-1, layers, -1))

    def new_digests(self) -> torch.Tensor:
        """Return zeros to which `rows` adds.

        Returns:
            [TP slot * samples of the DP rank * lanes, column, item] int64.
        """
        lines = self._stream.shard.tp_slots * len(self._stream.samples) * self._lanes
        shape = lines, len(self._stream.columns), self._items
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def rows(self, source_TCK: torch.Tensor, digests: torch.Tensor, *, begin: int) -> None:
        """Write consecutive rows of the stream and add to their digests.

        The rows are [begin, begin + T) of the stream.

        Args:
            source_TCK: Of the spec's id dtype, contiguous, on the device. It is overwritten, and may be reused once the stream
                has come so far.
            digests: Of `new_digests`.
            begin: The number of the first row; attempts begin with 0, and rows come in order.
        """
        end = begin + len(source_TCK)
        line_T, layer_T, _, sample_T, coefficient_T, offset_T = self._columns_at(begin, end)
        items_TCI = source_TCK.view(self._item)
        came = items_TCI if self._in_order else items_TCI.index_select(1, self._sources_L)
        self._write(line_T, layer_T, came)
        words_TCI = self._words(items_TCI)
        torch.addcmul(offset_T[:, None, None], words_TCI, coefficient_T[:, None, None], out=words_TCI)
        digests.index_add_(0, sample_T, words_TCI)

    def table(self, digests: torch.Tensor) -> torch.Tensor:
        """Return the digests of the rows that were written.

        Args:
            digests: Of `new_digests`.

        Returns:
            [TP slot, sample of the DP rank, layer] int64.
        """
        shape = self._stream.shard.tp_slots, len(self._stream.samples), self._lanes, digests.shape[1]
        return (digests * self._factor_I).sum(-1).view(shape).sum(2).index_select(2, self._sources_L)

    def _upload(self, words: Ids) -> torch.Tensor:
        return upload(np.array(words).view(np.int64), self._device)

    def _tabulate(self, stretches: Stretches) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each stretch ends, and a table of its columns.

        The table is [5, stretches]; a row's values add up from its stretch's column. The first four values are those of `_Rows`,
        of row number 0 if the stretch reached back to it. The fifth is lines from row to row.
        """
        stream, begin = self._stream, stretches.begin[:-1]
        line, layer, step = (each // self._id_bytes for each in places(stream, stretches))
        sample = stream.runs.slot[stretches.run] * len(stream.samples) + stream.sample_of[stretches.run]
        columns = (line - begin * step, layer, stretches.position - begin, sample * self._lanes, step)
        return self._upload(stretches.begin[1:]), self._upload(np.stack(columns))

    def _rows_of(self, table: tuple[torch.Tensor, torch.Tensor], begin: int, end: int) -> _Rows:
        ends_S, columns_5S = table
        number_T = torch.arange(begin, end, device=self._device)
        stretch_T = torch.searchsorted(ends_S, number_T, right=True)
        line_T, layer_T, position_T, sample_T, step_T = columns_5S.index_select(1, stretch_T)
        line_T, sample_T = torch.addcmul(line_T, number_T, step_T), sample_T + number_T % self._lanes
        return _Rows(line_T, layer_T, position_T + number_T, sample_T)

    def _columns_at(self, begin: int, end: int) -> list[torch.Tensor]:
        first = begin - self._known_from
        if first < 0 or not self._known or end - self._known_from > len(self._known[0]):
            self._known_from, first = begin, 0
            rows = self._rows_of(self._table, begin, min(max(begin + _ROWS_AT_ONCE, end), self._total))
            coefficient_T = self._coefficient_P.index_select(0, rows.position_T)
            self._known = [*rows, coefficient_T, coefficient_T * int(OFFSET.view(np.int64))]
        return [values[first : first + end - begin] for values in self._known]

    def _write(self, line_T: torch.Tensor, layer_T: torch.Tensor, items_TLI: torch.Tensor) -> None:
        rows, layers = len(line_T), len(self._layers_L)
        target_TL = self._room("_target_N", rows * layers).view(rows, layers)
        torch.addcmul(line_T[:, None], layer_T[:, None], self._layers_L, out=target_TL)
        self._lines_NI.index_copy_(0, target_TL.view(-1), items_TLI.reshape(-1, self._items))

    def _words(self, items_TCI: torch.Tensor) -> torch.Tensor:
        """Return the items as `wire.mixing.mix` has them.

        Items of 8 bytes are changed where they lie.
        """
        if self._item == torch.int64:
            halves = items_TCI.view(torch.int32).view(*items_TCI.shape, 2)
            halves[..., 0].bitwise_xor_(halves[..., 1])
            return items_TCI
        words_TCI = self._room("_word_N", items_TCI.numel()).view(items_TCI.shape)
        return torch.bitwise_and(items_TCI, self._mask, out=words_TCI)

    def _room(self, name: str, count: int) -> torch.Tensor:
        if len(getattr(self, name)) < count:
            setattr(self, name, torch.empty(count, dtype=torch.int64, device=self._device))
        return getattr(self, name)[:count]
