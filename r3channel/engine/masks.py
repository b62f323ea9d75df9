"""A request's sampling masks, kept until it is finished: then the frame behind its rows. Knows no engine."""

from __future__ import annotations

from typing import Any

from r3channel.wire.frame import sample_key
from r3channel.wire.masks import encode_masks


class KeptMasks:
    """In place of SGLang's `SamplingMaskRows`. Nothing of it goes into JSON: SGLang streams what it has every so many tokens."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def append(self, token_ids: Any, logprobs: Any) -> None:
        self._rows.append(token_ids, logprobs)

    def view(self) -> Any:
        return self._rows.view()

    def take(self) -> Any:
        """What is streamed: nothing."""
        return type(self._rows)().view()

    def frame(self, *, prompt_tokens: int, request_id: str) -> bytes:
        """Of all rows so far; the first is of the logits at the prompt's last token."""
        rows = self.view()
        return encode_masks(
            first_row=prompt_tokens - 1,
            lengths_T=rows.lengths,
            token_ids_N=rows.token_ids,
            sample_key=sample_key(request_id),
        )
