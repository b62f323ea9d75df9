"""A loop of your own: two real SGLang servers, a relay, a real Megatron-core trainer; two turns, and a sample that is discarded.

python examples/05_own_loop.py                      starts the two servers itself, on this machine's CPU: about a minute
python examples/05_own_loop.py MODEL URL URL        asks servers that run
"""

import json
import sys
import tempfile
from urllib.request import Request

from examples.embedded import megatron
from examples.embedded.model import write_model
from examples.embedded.sglang import EngineOptions, engines
from r3channel import Assignment, RoutingSpec, Ticket, TrainerLayout
from r3channel.relay import Relay
from r3channel.trainer import TrainerChannel
from r3channel.transport.network import urlopen

LAYOUT = TrainerLayout()


def turn(relay: Relay, url: str, name: str, prompt: list[int], *, later: bool = False) -> list[int]:
    """One request. The relay takes the reply's bytes, and asks of a later turn only the rows that it has not."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    data = json.dumps(body | relay.asks(name)).encode()
    request = Request(url + "/generate", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout_s=120) as answer:
        raw = answer.read()
    reply = relay.add_body(name, raw, lambda reply: prompt + reply["output_ids"], engine=url, append=later)
    return prompt + reply["output_ids"]


def train(model: megatron.TrainerModel, channel: TrainerChannel, ticket: Ticket, samples: dict) -> None:
    batches = [[samples[name] for name in batch] for batch in ticket.assignment.ranks[0]]
    model.zero_grad()
    with channel.step(ticket, tokens=batches) as step:  # other tokens than the ticket's are refused here
        shard = channel.shard  # this step's rows
        assert shard is not None
        for number, batch in enumerate(batches):
            ids, positions = shard.model_input(number, batch)
            with step.microbatch(number):
                loss = model.chunks[0](ids, positions, None, labels=ids.roll(-1, 1))
            (loss * shard.loss_mask(number)).sum().backward()  # multiplying by the mask is the loop's part
    model.optimizer.step()


def main(checkpoint: str, *urls: str) -> None:
    spec = RoutingSpec.from_hf_config(checkpoint)
    megatron.init_distributed(layout=LAYOUT)
    model = megatron.build(checkpoint, LAYOUT, dtype="float32")
    with Relay(spec, LAYOUT) as relay, TrainerChannel.attach(model.chunks, relay, layout=LAYOUT) as channel:
        for number in range(2):
            samples = {}
            for i in range(5):
                name, url = f"step{number}-sample{i}", urls[i % len(urls)]
                first = turn(relay, url, name, [7, 11 + i, 13, 17 + number])
                said = [*first, 23, 29]  # 23, 29: what a tool said
                samples[name] = turn(relay, url, name, said, later=True)
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
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        with (
            tempfile.TemporaryDirectory() as work,
            engines(EngineOptions(model=write_model(work)), 2) as urls,
        ):
            main(work, *urls)
