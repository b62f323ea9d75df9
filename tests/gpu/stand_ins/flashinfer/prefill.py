from flashinfer import absent as cudnn_batch_prefill_with_kv_cache

__all__ = ["cudnn_batch_prefill_with_kv_cache"]
