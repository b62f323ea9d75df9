from examples.embedded.sglang_models.qwen3_moe import EntryClass

__all__ = ["EntryClass"]
