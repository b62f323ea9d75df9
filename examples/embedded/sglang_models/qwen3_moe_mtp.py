"""SGLang's draft head for Qwen3-MoE, on a machine without a GPU: it waits for CUDA when it is given the target's embeddings."""

from __future__ import annotations

from typing import Any

from sglang.srt.models import qwen3_moe_mtp as upstream


class Qwen3MoeForCausalLMMTP(upstream.Qwen3MoeForCausalLMMTP):
    def set_embed_and_head(self, embed: Any, head: Any) -> None:
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head


EntryClass = [Qwen3MoeForCausalLMMTP]
