"""The whole channel in one process: two engine replies in, each trainer's exact rows out. No SGLang, no Ray.

python examples/01_one_process.py
"""

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from r3channel import Assignment, RoutingSpec, Ticket, TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import encode_frame

spec = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
layout = TrainerLayout.parse("dp=2,pp=2")
rng = np.random.default_rng(0)


def engine(tokens: list[int]) -> tuple[np.ndarray, dict]:
    """Stands in for SGLang with the plug-in: what it captured, and the reply that it sends."""
    ids_TLK = rng.random((len(tokens) - 1, 48, 128)).argsort(-1)[..., :8].astype(spec.id_dtype)
    frame = encode_frame(spec, expert_ids_TLK=ids_TLK)
    return ids_TLK, {"meta_info": {"routed_experts": base64.b64encode(frame).decode()}}


# rollout side: add replies as they come, seal the step, ship the ticket with the ordinary data
relay = Relay(spec, layout)
captured = {}
for sample_id, length in (("a", 200), ("b", 120)):
    captured[sample_id], reply = engine(tokens := list(range(length)))
    relay.add(sample_id, reply, tokens)
ticket = relay.seal(0, Assignment.round_robin(["a", "b"], dp=2, microbatch_size=1)).to_bytes()
print(f"sealed: a ticket of {len(ticket)} bytes; each receiver gets its rows when it asks for them")

# trainer side: one receiver per (dp, pp), which connects to the relay over TCP even here; a training loop would use
# TrainerChannel, which also drives the routers
receivers = [Receiver(relay, spec=spec, layout=layout, coords=layout.coords(rank)) for rank in range(4)]
with ThreadPoolExecutor(4) as ranks:
    shards = list(ranks.map(lambda receiver: receiver.receive(Ticket.from_bytes(ticket)), receivers))
relay.join_previous(timeout_s=10)

compared = different = 0
for shard in shards:
    (batch,) = shard.shard.microbatches
    sample_id, rows = batch.sample_ids[0], batch.tokens[0] - 1
    for layer in shard.shard.layers:
        used = shard.layer_ids(0, layer).numpy()[:rows]
        compared += used.size
        different += int((used != captured[sample_id][:, layer]).sum())
print(f"{len(shards)} ranks, {compared} ids compared, {different} different")
for receiver in receivers:
    receiver.close()
relay.close()
assert different == 0
