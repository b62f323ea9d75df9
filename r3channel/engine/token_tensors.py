"""Keeps what a request's tokens bring beside expert ids until it is finished, and then makes frames of it. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from r3channel.engine.capture import UnfinishedFrame
from r3channel.errors import RoutingError
from r3channel.wire.frame import sample_key
from r3channel.wire.routing import RowKind, columns_of
from r3channel.wire.tensor_frame import TensorRows, encode_tensor, seal_tensor
from r3channel.wire.token_tensors import LENGTH_BYTES, TokenTensor, Values


class KeptMasks:
    """Sampling masks in place of SGLang's `SamplingMaskRows`. They stay here, where SGLang streams what it has every so many
    tokens.
    """

    def __init__(self, rows: Any, *, support: bool) -> None:
        """Wrap SGLang's rows.

        Args:
            rows: SGLang's `SamplingMaskRows`.
            support: Whether there is a log-prob for each id that could be chosen, and not for the chosen one alone.
        """
        self._rows, self._support, self._streamed = rows, support, 0

    def append(self, token_ids: Any, logprobs: Any) -> None:
        self._rows.append(token_ids, logprobs)

    def view(self) -> Any:
        return self._rows.view()

    def take(self) -> Any:
        """Return what SGLang streams now: new log-probs, and no masks.

        These are the log-probs of the chosen ids. Log-probs of the whole support stay with the masks.
        """
        rows, before = self.view(), self._streamed
        self._streamed = len(rows.logprobs)
        first = self._streamed if self._support else before
        return type(rows)(
            lengths=rows.lengths[:0], token_ids=rows.token_ids[:0], logprobs=rows.logprobs[first:].copy()
        )

    def entries(self, tensor: TokenTensor, new_tokens: int) -> tuple[Values, Values]:
        """Return (lengths, entries) of the tokens that are answered.

        Args:
            tensor: The declared tensor.
            new_tokens: Number of answered tokens.

        Raises:
            RoutingError: If the request asked for something else.
        """
        rows = self.view()
        values = {"token_id": rows.token_ids} | ({"logprob": rows.logprobs} if self._support else {})
        if tensor.entry.names != tuple(values):
            raise RoutingError(
                f"{tensor.name} is made of requests with {tensor.asked_by}; this one asked for something else"
            )
        lengths_T = rows.lengths[:new_tokens]  # a request for no token samples one
        entries_N = np.empty(lengths_T.sum(), tensor.entry)
        for name, value_N in values.items():
            entries_N[name] = value_N[: len(entries_N)]
        return lengths_T, entries_N


class TopkBatch:
    """The likeliest tokens of each request in a pass: one tensor of packed entries, on its way to the host."""

    def __init__(self, logprobs_BV: torch.Tensor, tensor: TokenTensor) -> None:
        """Pack the entries and issue their copy to the host.

        The copy is issued in the order of the current stream.

        Args:
            logprobs_BV: Log-probs that are normalised over the whole vocabulary.
            tensor: The declared tensor.
        """
        packed_BN, on_gpu = pack_topk(logprobs_BV, tensor), logprobs_BV.is_cuda
        host_BN = torch.empty(packed_BN.shape, dtype=torch.uint8, pin_memory=on_gpu)
        self._host_BN = host_BN.copy_(packed_BN, non_blocking=True).numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def entry(self, row: int) -> bytes:
        """Return one request's entry; wait until it has reached the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host_BN[row].tobytes()


class TopkRow:
    """Stands where SGLang has one request's values, or ids, of a pass."""

    def __init__(self, batch: TopkBatch, row: int) -> None:
        self.batch, self.row = batch, row

    def tolist(self) -> TopkRow:
        return self


class KeptTopk:
    """A request's entries of `topk_logprobs`, token by token. They outlive a retraction, as the request's tokens do."""

    def __init__(self, rows: Iterable[TopkRow] = ()) -> None:
        self._entries, self.swept = bytearray(), 0
        """`swept`: number of tokens that were looked at."""
        for row in rows:
            self.add(row)

    def add(self, row: TopkRow) -> None:
        self._entries += row.batch.entry(row.row)

    def entries(self, tensor: TokenTensor, new_tokens: int) -> tuple[Values, Values]:
        """Return (lengths, entries) of the tokens that are answered.

        Args:
            tensor: The declared tensor.
            new_tokens: Number of answered tokens.
        """
        entries_N = np.frombuffer(self._entries, tensor.entry)[:new_tokens]
        return np.ones(len(entries_N), np.uint16), entries_N


class KeptWeights:
    """The weights of a request's rows, gathered with its ids. A row that no pass has made has no weights."""

    def __init__(self, unfinished: UnfinishedFrame) -> None:
        self.unfinished, self.first_row = unfinished, unfinished.first_row

    def entries(self, tensor: TokenTensor, new_tokens: int) -> tuple[Values, Values]:
        """Return (lengths, entries) of all rows, of the prompt too.

        A row that no pass has made has length 0.
        """
        del new_tokens
        there_T = columns_of(self.unfinished.runs)[1] != int(RowKind.MISSING)
        return there_T.astype(np.uint16), self.unfinished.weights_TN.view(tensor.entry)[there_T, 0]

    def frame(self, tensor: TokenTensor) -> Values | None:
        """Return the frame's bytes, made where the weights lie.

        Returns:
            The bytes, or None if a row has no weights.
        """
        whole = self.unfinished
        if whole.begin is None or whole.oldest < 0:
            return None
        memory_N, rows = whole.weights_frame_N, whole.rows
        memory_N[len(memory_N) - rows * LENGTH_BYTES :].view("<u2")[:] = 1  # entries of each row
        seal_tensor(tensor, memory_N, rows=rows, first_row=self.first_row, sample_key=whole.sample_key)
        return memory_N


def pack_topk(logprobs_BV: torch.Tensor, tensor: TokenTensor) -> torch.Tensor:
    """Pack the likeliest tokens of each request; nothing waits.

    Args:
        logprobs_BV: Log-probs that are normalised over the whole vocabulary.
        tensor: The declared tensor, whose layout `tensor.entry` is written.

    Returns:
        [B, bytes of an entry] uint8 on the same device, likeliest token first.
    """
    k, dtype = tensor.entry["low"].shape[0], torch.from_numpy(np.empty(0, tensor.entry["logprob"].base)).dtype
    values_BK, ids_BK = logprobs_BV.float().topk(k, dim=-1)
    tail_B1 = (1 - values_BK.exp().sum(-1, keepdim=True)).clamp_(min=0)
    four_BQ = (ids_BK >> 16).to(torch.uint8).view(torch.int32)  # the high bits of four ids, a byte each
    high_BQ = four_BQ | four_BQ >> 6 | four_BQ >> 12 | four_BQ >> 18
    parts = ids_BK.to(torch.int16), high_BQ.to(torch.uint8), values_BK.to(dtype), tail_B1
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def tensor_frame(
    tensor: TokenTensor, kept: KeptMasks | KeptTopk | KeptWeights | None, *,
    prompt_tokens: int, new_tokens: int, request_id: str,
) -> bytes | Values:  # fmt: skip
    """Return the tensor's frame of a finished request.

    The first row belongs to the logits at the prompt's last token; that of weights belongs to the first row of ids.

    Args:
        tensor: The declared tensor.
        kept: What the request kept of it, or None.
        prompt_tokens: Number of the prompt's tokens.
        new_tokens: Number of answered tokens.
        request_id: SGLang's id of the request.

    Raises:
        RoutingError: If the request did not ask for the tensor.
    """
    if kept is None:
        raise RoutingError(f"the request has no {tensor.name}: it set no {tensor.asked_by}")
    first_row = prompt_tokens - 1
    if isinstance(kept, KeptWeights):
        if (frame := kept.frame(tensor)) is not None:
            return frame
        first_row = kept.first_row
    lengths_T, entries_N = kept.entries(tensor, new_tokens)
    return encode_tensor(TensorRows(tensor, first_row, lengths_T, entries_N, sample_key(request_id)))
