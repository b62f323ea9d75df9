"""SGLang's `nixl` backend of prefill/decode disaggregation on a machine without a GPU: real transfers, over UCX in host memory.

Found only through the PYTHONPATH of embedded children. The wheel `nixl-cu12` has the same API under its own name.
"""
