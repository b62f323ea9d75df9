from r3channel.embedded.sglang_models.qwen3_moe import EntryClass

__all__ = ["EntryClass"]
