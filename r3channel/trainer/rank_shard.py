"""A received shard as one rank's routers consume it: views, no copies. Knows no transport and no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from r3channel.errors import RowsInvalid, UsageError
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.plan.token_tensors import read_slot, received_tensors, slot_bytes
from r3channel.trainer.router_digests import RouterDigestCheck, upload
from r3channel.trainer.staleness import UNKNOWN, Staleness
from r3channel.wire.routing import Ids


class RankShard:
    """The ids of one process for one step; implements `trainer.replay.StepRouting`.

    Args:
        ticket: The step's ticket.
        shard: The plan's shard of this rank.
        data_N: uint8, `shard.slot_bytes` bytes: this TP rank's part, `[micro-batch][layer][row][k]`. It may be reused once the
            step is over.
        tp: This TP rank.
        invalid_rows: The policy for rows without engine routing: `error`, `live` (the live router chooses for them) or `mask` (it
            does, and `loss_mask` takes those tokens out of the loss).
        digests_SL: [sample of the DP rank, layer]: the digests that the rows must have.
        tensors: By name this TP rank's part of what came beside the ids (`plan.token_tensors.slot_bytes`), in host memory.

    Raises:
        RowsInvalid: The ticket names rows without routing and the policy is `error`.
    """

    def __init__(
        self, ticket: Ticket, shard: Shard, data_N: torch.Tensor, *, tp: int, invalid_rows: str = "error",
        digests_SL: torch.Tensor | None = None, tensors: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if len(data_N) != shard.slot_bytes:
            raise UsageError(
                f"step {ticket.step}: {len(data_N)} bytes for a shard part of {shard.slot_bytes}"
            )
        self.ticket, self.shard, self.data_N, self.tp = ticket, shard, data_N, tp
        self._views = list(self._cut())
        self.digests = RouterDigestCheck(ticket, shard, self._views, tp=tp, digests_SL=digests_SL)
        self.check_digest, self.verify = self.digests.check, self.digests.verify
        """The calls of `trainer.router.StepRouting`. They check nothing where the shard came without digests."""
        self._check_policy(invalid_rows)
        self.staleness: Staleness | None = None
        """The rows' age in versions, seen from the trainer's version; None where the loop names no version."""
        self._loss_mask_read = False
        self._masks = dict[tuple[str, int], Any]()
        self._tensors = {
            tensor: list(read_slot(shard, tensor, np.asarray(tensors[tensor.name])))
            for tensor in received_tensors(ticket, shard) if tensors is not None
        }  # fmt: skip

    @classmethod
    def from_whole(
        cls, ticket: Ticket, shard: Shard, data_N: torch.Tensor, *, tp: int, **options: Any
    ) -> RankShard:
        """Make this rank's shard from the bytes of all TP slots.

        Such bytes are in a recording, or in a shard that was not scattered.

        Args:
            ticket: The step's ticket.
            shard: The plan's shard of this rank.
            data_N: uint8: the bytes of all TP slots.
            tp: This TP rank.
            options: As the class takes them. `tensors` are as they travel.
        """
        slot, came = tp if shard.tp_slots > 1 else 0, options.get("tensors")
        if came is not None:
            own = received_tensors(ticket, shard)
            options["tensors"] = {one.name: slot_bytes(shard, one, came[one.name])[slot] for one in own}
        own_N = torch.cat([parts[slot] for parts in slot_parts(shard, data_N)])
        return cls(ticket, shard, own_N, tp=tp, **options)

    @property
    def num_microbatches(self) -> int:
        return len(self.shard.microbatches)

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        """Return one layer's ids of a micro-batch.

        Args:
            microbatch: The index of the micro-batch.
            layer: The global decoder layer.

        Returns:
            [rows, K] in `id_dtype`: a contiguous view, in the order in which the layer's router sees tokens.
        """
        return self._views[microbatch][self.shard.layers.index(layer)]

    def live_rows(self, microbatch: int) -> torch.Tensor | None:
        """Return the rows for which the live router chooses.

        Returns:
            [rows] bool; None where there are no such rows.
        """
        return self._mask("live", microbatch) if self._may_live(microbatch) else None

    def counted_rows(self, microbatch: int) -> torch.Tensor:
        """Return the rows that an engine computed and this rank replays.

        Returns:
            [rows] bool.
        """
        return self._mask("counted", microbatch)

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        """Return the rows that are no engine's.

        Returns:
            [rows] bool: True for padding, and for the last token of each sample.
        """
        return self._mask("padding", microbatch)

    def padding_mask(self, microbatch: int) -> torch.Tensor:
        """Return where a micro-batch has no token.

        Returns:
            [b, s / cp] bool ([1, t / cp] for a pack) on the routers' device: True where no token is, as Megatron's `padding_mask`
            has it.
        """
        return upload(self._padding(microbatch), self.data_N.device)

    def _padding(self, microbatch: int) -> Ids:
        sample, position = self.shard.token_map(microbatch)
        tokens = np.asarray([*self.shard.microbatches[microbatch].tokens, 0])
        return (sample < 0) | (position >= tokens[sample])

    def model_input(
        self, microbatch: int, tokens: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids and positions of this CP rank.

        Args:
            microbatch: The index of the micro-batch.
            tokens: Token ids of the micro-batch's samples, in its order.

        Returns:
            (token ids, positions), each [b, s / cp] int64 ([1, t / cp] for a pack), padded and cut as the ticket says.
        """
        ids = self.shard.lay_out(microbatch, [np.asarray(own, np.int64) for own in tokens])
        positions = self.shard.token_map(microbatch)[1]
        return torch.from_numpy(ids), torch.from_numpy(np.ascontiguousarray(positions))

    def loss_mask(self, microbatch: int) -> torch.Tensor:
        """Return which tokens of a micro-batch stay in the loss.

        Returns:
            [b, s / cp] bool ([1, t / cp] for a pack) on the routers' device: False on padding, with policy `mask` on tokens
            without engine routing, and on stale tokens where `on_stale` masks them. A sample's last token is True: it has no row,
            and nothing is wrong with it.
        """
        self._loss_mask_read = True
        sample, position = self.shard.token_map(microbatch)
        keep = ~self._padding(microbatch)
        if self.invalid_rows == "mask":
            keep &= ~self._invalid(microbatch, sample, position)
        if self.staleness is not None and self.staleness.masks:
            keep &= ~self._laid_out(microbatch, self.staleness.stale)
        return upload(keep, self.data_N.device)

    @property
    def loss_mask_missed(self) -> bool:
        """Return whether the loss mask was needed and never read.

        The mask is needed where tokens are to leave the loss. Only the last pipeline stage has a loss.
        """
        invalid = self.invalid_rows == "mask" and any(sample.invalid for sample in self.ticket.samples)
        stale = self.staleness is not None and self.staleness.masks
        return (invalid or stale) and not self._loss_mask_read and self.shard.pp == self.ticket.layout.pp - 1

    def tensor(self, name: str, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Return what tokens bring beside expert ids.

        The tensor is in the layout of this CP rank's logits and on the routers' device (`r3channel/wire/README.md`).

        Args:
            name: Its name in `token_tensors`.
            microbatch: The index of the micro-batch.

        Returns:
            For `sampling_masks` and `sampling_support` rows of a CSR matrix: (offsets [b x s / cp + 1] int64, token ids int32[,
            log-probs float32]). Token i of the flattened model input has the entries `offsets[i]` to `offsets[i + 1]`.

            For `topk_logprobs` (token ids [b, s / cp, k] int32, log-probs [b, s / cp, k], the other tokens' mass [b, s / cp]
            float32), likeliest first. Where no token was made (prompts, last tokens, padding) the id is -1, and log-prob and
            mass are 0.

            For `combine_weights` (float16 [layers, rows, K],) of this TP rank's routers, in the order of `shard.layers` and of
            `layer_ids`; 0 where no engine row is.

        Raises:
            UsageError: The step has no such tensor, or the tensor does not come to this pipeline stage.
        """
        tensor = next((one for one in self._tensors if one.name == name), None)
        if tensor is None:
            raise UsageError(
                f"step {self.ticket.step}: no tensor {name!r} on pp {self.shard.pp} of {self.ticket.layout.pp}, only "
                f"{[one.name for one in self._tensors]}; those of the logits travel to the last stage, and the relay's "
                "token_tensors names them"
            )
        offsets, entries_N = self._tensors[tensor][microbatch]
        values = tensor.values(entries_N)
        if tensor.by_layer:
            values = tuple(np.ascontiguousarray(value.swapaxes(0, 1)) for value in values)
        elif tensor.dense:
            there, shape = np.diff(offsets) > 0, self.shard.token_map(microbatch)[0].shape
            values = tuple(_spread(value, there, shape) for value in values)
        else:
            values = offsets, *values
        return tuple(upload(value, self.data_N.device) for value in values)

    def lags(self, microbatch: int) -> torch.Tensor:
        """Return the weight updates between each token's row and the trainer.

        Returns:
            [b, s / cp] int64; `staleness.UNKNOWN` on padding, on a sample's last token and where the engine recorded nothing.

        Raises:
            UsageError: The loop named no version.
        """
        if self.staleness is None:
            raise UsageError("staleness is known only where channel.step() was given the trainer's version")
        return torch.from_numpy(self._laid_out(microbatch, self.staleness.lags, fill=UNKNOWN))

    def set_version(self, version: int, *, max_staleness: int = -1, on_stale: str = "accept") -> Staleness:
        """Compare the rows' versions with the trainer's committed version.

        Args:
            version: The trainer's version.
            max_staleness: Most weight updates between a row and the trainer; -1: no bound.
            on_stale: `accept`, `mask` or `reject`, for rows beyond the bound.

        Returns:
            The rows' staleness, which this shard keeps.

        Raises:
            RowsStale: The policy refuses the rows.
        """
        self.staleness = Staleness(
            self.ticket, version=version, max_staleness=max_staleness, on_stale=on_stale
        )
        self.staleness.check()
        return self.staleness

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Return the samples of all micro-batches."""
        return tuple(name for batch in self.shard.microbatches for name in batch.sample_ids)

    def live_counts(self) -> dict[str, int]:
        """Count the step's rows left to the live router, by cause.

        Returns:
            The rows of this TP rank by cause: `invalid`, `padding`.
        """
        counts = {"invalid": 0, "padding": 0}
        for index in filter(self._may_live, range(self.num_microbatches)):
            sample_R, position_R = self.shard.row_map(index, tp=self.tp)
            counts["invalid"] += int(self._invalid(index, sample_R, position_R).sum())
            if self.ticket.layout.pad_policy == "live":
                counts["padding"] += int((sample_R < 0).sum())
        return counts

    def _check_policy(self, policy: str) -> None:
        self.invalid_rows = policy
        named = [sample for sample in self.ticket.samples if sample.invalid]
        if named and policy == "error":
            first = named[0]
            raise RowsInvalid(
                f"step {self.ticket.step}: {len(named)} samples have rows without routing, the first is {first.sample_id} with "
                f"rows {list(first.invalid)}; expected none (policy: error). Relay and trainer need the same invalid_rows",
                samples=[sample.sample_id for sample in named], step=self.ticket.step,
            )  # fmt: skip

    def _may_live(self, microbatch: int) -> bool:
        # Without this check every step would map all its rows, to find nothing.
        samples = map(self.ticket.sample, self.shard.microbatches[microbatch].sample_ids)
        return self.ticket.layout.pad_policy == "live" or any(sample.invalid for sample in samples)

    def _mask(self, kind: str, microbatch: int) -> Any:
        """Return a mask of the rows, computed once.

        The mask is [rows] bool on the routers' device. A `live` mask is None where no row is live.
        """
        if (kind, microbatch) not in self._masks:
            sample_R, position_R = self.shard.row_map(microbatch, tp=self.tp)
            padding_R, invalid_R = sample_R < 0, self._invalid(microbatch, sample_R, position_R)
            live_R = invalid_R | padding_R if self.ticket.layout.pad_policy == "live" else invalid_R
            found_R = {"padding": padding_R, "counted": ~(padding_R | invalid_R), "live": live_R}[kind]
            none = kind == "live" and not live_R.any()
            self._masks[kind, microbatch] = None if none else upload(found_R, self.data_N.device)
        return self._masks[kind, microbatch]

    def _invalid(self, microbatch: int, sample: Ids, position: Ids) -> Ids:
        found = np.zeros(sample.shape, dtype=bool)
        for index, name in enumerate(self.shard.microbatches[microbatch].sample_ids):
            for start, end in self.ticket.sample(name).invalid:
                found |= (sample == index) & (position >= start) & (position < end)
        return found

    def _laid_out(self, microbatch: int, of_sample: Callable[[str], Ids], *, fill: int = 0) -> Ids:
        names = self.shard.microbatches[microbatch].sample_ids
        return self.shard.lay_out(microbatch, [*map(of_sample, names)], fill=fill)

    def _cut(self) -> Iterator[torch.Tensor]:
        shard, dtype = self.shard, getattr(torch, self.shard.spec.id_dtype.name)
        sizes = [shard.microbatch_bytes(number) // shard.tp_slots for number in range(self.num_microbatches)]
        for number, part_N in enumerate(self.data_N.split(sizes)):
            yield part_N.view(dtype).view(len(shard.layers), shard.slot_rows(number), shard.spec.top_k)


def _spread(values_N: Ids, there_T: Ids, shape: tuple[int, ...]) -> Ids:
    # A token without a value gets -1 where values are ids, else 0.
    none, axes = -1 if values_N.dtype.kind == "i" else 0, values_N.shape[1:]
    spread = np.full((len(there_T), *axes), none, values_N.dtype)
    spread[there_T] = values_N
    return spread.reshape(*shape, *axes)


def slot_parts(shard: Shard, data_N: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return each TP slot's part of every micro-batch.

    Returns:
        Per micro-batch a list over TP slots of uint8 tensors: contiguous views into the whole shard.
    """
    sizes = [*map(shard.microbatch_bytes, range(len(shard.microbatches)))]
    return [list(part_N.view(shard.tp_slots, -1)) for part_N in data_N.split(sizes)]
