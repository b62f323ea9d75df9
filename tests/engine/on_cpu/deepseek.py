"""DeepSeek's attention over latent keys, also for a prompt: whole keys are not in the cache that torch's backend reads."""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_v2 import EntryClass

__all__ = ["EntryClass"]

AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
