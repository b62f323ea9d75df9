from flashinfer import absent as min_p_sampling_from_probs
from flashinfer import absent as top_k_top_p_sampling_from_probs

__all__ = ["min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"]
