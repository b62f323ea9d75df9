"""A request's sampling masks, kept until it is finished: then the frame behind its rows. Knows no engine."""

from __future__ import annotations

from typing import Any

from r3channel.wire.frame import sample_key
from r3channel.wire.masks import encode_masks


class KeptMasks:
    """In place of SGLang's `SamplingMaskRows`. They stay here, where SGLang streams what it has every so many tokens."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._streamed = rows, 0

    def append(self, token_ids: Any, logprobs: Any) -> None:
        self._rows.append(token_ids, logprobs)

    def view(self) -> Any:
        return self._rows.view()

    def take(self) -> Any:
        """What is streamed: the new log-probabilities of what was chosen, and no masks."""
        rows, before = self.view(), self._streamed
        self._streamed = len(rows.logprobs)
        return type(rows)(
            lengths=rows.lengths[:0], token_ids=rows.token_ids[:0], logprobs=rows.logprobs[before:].copy()
        )

    def frame(self, *, prompt_tokens: int, new_tokens: int, request_id: str) -> bytes:
        """The masks of the tokens that are answered; the first belongs to the logits at the prompt's last token."""
        rows = self.view()
        lengths_T = rows.lengths[:new_tokens]  # a request for no token samples one
        return encode_masks(
            first_row=prompt_tokens - 1,
            lengths_T=lengths_T,
            token_ids_N=rows.token_ids[: lengths_T.sum()],
            sample_key=sample_key(request_id),
        )
