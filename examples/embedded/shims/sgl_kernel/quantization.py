"""What SGLang 0.5.23's GGUF layers import where CUDA is there (layers/quantization/gguf.py); raises when called."""

from sgl_kernel import refusing

_NAMES = ("ggml_dequantize", "ggml_moe_a8", "ggml_mul_mat_a8", "ggml_mul_mat_vec_a8")

globals().update({name: refusing(name) for name in _NAMES})
