"""Score centering (arXiv 2609.20807) from the sampler's 128 likeliest tokens, as they come with the routing. No SGLang, no Ray.

python examples/07_score_centering.py

The loss of a token a is -A (log p(a) - sum over v of q(v) log p(v)): p is the trainer's distribution, q the engine's. Of q the
trainer has the head and the mass of the rest, which it spreads as p does. The whole q, which no engine sends, is the yardstick.
"""

import base64

import numpy as np
import torch

from r3channel import Assignment, ChannelConfig, RoutingSpec, TrainerLayout
from r3channel.engine.token_tensors import KeptTopk, TopkBatch, TopkRow, tensor_frame
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import encode_frame, sample_key
from r3channel.wire.token_tensors import tensors_of

PROMPT, NEW, OPTION = 20, 60, "topk_logprobs:128"
spec, layout = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=8, top_k=2), TrainerLayout()
logits_TV = torch.randn(NEW, 32_000, generator=torch.manual_seed(0)) * 5
logq_TV = torch.log_softmax(logits_TV + torch.randn_like(logits_TV) / 5, -1)  # older weights, other kernels

# what an engine with R3CHANNEL_TOKEN_TENSORS=topk_logprobs:128 answers
(tensor,) = tensors_of(OPTION)
batch = TopkBatch(logq_TV, tensor)
kept = KeptTopk(TopkRow(batch, row) for row in range(NEW))
frame = encode_frame(
    spec,
    expert_ids_TLK=np.tile(np.array([0, 1], np.uint8), (PROMPT + NEW - 1, 2, 1)),
    sample_key=sample_key("a"),
)
frame += bytes(tensor_frame(tensor, kept, prompt_tokens=PROMPT, new_tokens=NEW, request_id="a"))

# through the channel
relay = Relay(spec, layout, ChannelConfig(token_tensors=OPTION))
relay.add(
    "a", {"meta_info": {"id": "a", "routed_experts": base64.b64encode(frame).decode()}}, range(PROMPT + NEW)
)
receiver = Receiver(relay, spec=spec, layout=layout, coords=layout.coords(0))
shard = receiver.receive(relay.seal(0, Assignment.round_robin(["a"], dp=1, microbatch_size=1)))
ids_TK, logq_TK, rest_T = (value[0, PROMPT - 1 : -1] for value in shard.tensor("topk_logprobs", 0))

# the trainer's loss
logp_TV = torch.log_softmax(logits_TV.requires_grad_(), -1)
head_T = (logq_TK.float().exp() * logp_TV.gather(1, ids_TK.long())).sum(-1)
others_TV = logp_TV.detach().exp().scatter(1, ids_TK.long(), 0.0)
centre_T = head_T + rest_T * (others_TV / others_TV.sum(-1, keepdim=True) * logp_TV).sum(-1)
whole_T = (logq_TV.exp() * logp_TV).sum(-1)
ours_TV, full_TV = (
    torch.autograd.grad(one.sum(), logits_TV, retain_graph=True)[0] for one in (centre_T, whole_T)
)
error_T, size_T = (ours_TV - full_TV).abs().sum(-1), full_TV.abs().sum(-1)
print(f"{ids_TK.numel():,} ids compared, {int((ids_TK != logq_TV.topk(128).indices).sum())} different")
print(f"{tensor.entry.itemsize + 2} bytes a response token; the head has {1 - rest_T.mean():.3f} of the mass")
print(
    f"the centre's gradient, L1: {size_T.mean():.3f}, from the head {error_T.mean():.4f} off, {error_T.max():.4f} at most"
)
receiver.close()
relay.join_previous(timeout_s=10)
relay.close()
assert (error_T <= 2 * rest_T + 0.004).all()  # where the rest lies is not known; float16
