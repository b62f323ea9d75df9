"""A loop of your own: two real SGLang servers, a relay, a real Megatron-core trainer; two turns, and a sample that is discarded.

python examples/05_own_loop.py                      starts the two servers itself, on this machine's CPU: about a minute
python examples/05_own_loop.py MODEL URL URL        asks servers that run
"""

import json
import sys
import tempfile
from contextlib import ExitStack, closing
from urllib.request import Request

import torch

from r3channel import Assignment, RoutingSpec, Ticket, TrainerLayout
from r3channel.embedded import megatron
from r3channel.embedded.model import write_model
from r3channel.embedded.sglang import EngineOptions, EngineServer
from r3channel.relay import Relay
from r3channel.trainer import TrainerChannel
from r3channel.unproxied import urlopen

LAYOUT = TrainerLayout()


def turn(relay: Relay, url: str, name: str, prompt: list[int]) -> list[int]:
    """One request. The relay takes the reply's bytes; of a later turn only the rows that it has not."""
    held = relay.rows_held(name)
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    body |= {"routed_experts_start_len": held} if held else {}
    request = Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout_s=120) as answer:
        raw = answer.read()
    reply = relay.add_body(name, raw, lambda reply: prompt + reply["output_ids"], engine=url, append=held > 0)
    return prompt + reply["output_ids"]


def train(model: megatron.TrainerModel, channel: TrainerChannel, ticket: Ticket, samples: dict) -> None:
    batches = [[samples[name] for name in batch] for batch in ticket.assignment.ranks[0]]
    model.zero_grad()
    with channel.step(ticket, tokens=batches) as step:  # other tokens than the ticket's are refused here
        assert channel.shard is not None  # this step's rows
        for number, batch in enumerate(batches):
            longest = ticket.plan.shard(dp=0, pp=0).microbatches[number].seq_len
            ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in batch])
            mask = channel.shard.loss_mask(number)  # False on padding: multiplying by it is the loop's part
            with step.microbatch(number):
                loss = model.chunks[0](
                    ids, torch.arange(longest).expand_as(ids), None, labels=ids.roll(-1, 1)
                )
            (loss * mask).sum().backward()
    model.optimizer.step()


def main(checkpoint: str, urls: list[str], scratch: str) -> None:
    spec = RoutingSpec.from_hf_config(checkpoint)
    megatron.init_distributed(rank=0, world_size=1, init_method=f"file://{scratch}/rendezvous", layout=LAYOUT)
    model = megatron.build(checkpoint, LAYOUT, dtype="float32")
    with (
        closing(Relay(spec, LAYOUT)) as relay,
        closing(TrainerChannel.attach(model.chunks, relay, layout=LAYOUT)) as channel,
    ):
        for number in range(2):
            samples = {}
            for i in range(5):
                name, url = f"step{number}-sample{i}", urls[i % len(urls)]
                first = turn(relay, url, name, [7, 11 + i, 13, 17 + number])
                samples[name] = turn(relay, url, name, [*first, 23, 29])  # 23, 29: what a tool said
            relay.discard([dropped := f"step{number}-sample2"])  # filtered: no assignment will name it
            del samples[dropped]
            lengths = {name: len(tokens) for name, tokens in samples.items()}
            ticket = relay.seal(number, Assignment.balanced(lengths, dp=1, microbatch_size=2))
            train(model, channel, ticket, samples)
            relay.join_previous()
            agrees = channel.report.mean_overlap if channel.report else 0.0
            print(
                f"step {number}: {len(samples)} samples, {sum(lengths.values())} tokens, live router agrees {agrees:.3f}"
            )
    megatron.close_distributed()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        if len(sys.argv) > 1:
            checkpoint, *urls = sys.argv[1:]
        else:
            checkpoint = str(write_model(f"{work}/model"))
            servers = [stack.enter_context(EngineServer(EngineOptions(model=checkpoint))) for _ in range(2)]
            for server in servers:
                server.wait_ready()
            urls = [server.url for server in servers]
        main(checkpoint, urls, work)
