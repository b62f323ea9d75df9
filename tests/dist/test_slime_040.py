"""`r3channel slime` on a stand-in of slime 0.4.0: signatures are those that were read, what they do is the least of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.embedded.model import ModelShape, config_of
from examples.embedded.sglang import free_port
from tests.support import slime_checkout
from tests.support.children import ROOT, run

pytestmark = [pytest.mark.dist, pytest.mark.full]

_SLIME = slime_checkout.PARSED | slime_checkout.MEGATRON | {"actor_num_gpus_per_node": 4, "use_critic": False}
_SLIME["debug_train_only"] = True  # nobody is asked for a token

BODIES = {
    "slime/utils/arguments.py": "import argparse, sys",
    "parse_args": f"""
 args = add_custom_arguments(argparse.ArgumentParser()).parse_args()
 vars(args).update({_SLIME}, hf_checkpoint=sys.argv[0].removesuffix("/train.py"))
 return (args, "a plan") if return_restore_plan else args""",
    "slime/ray/placement_group.py": "import ray, types",
    "create_rollout_manager": """
 from slime.ray.rollout import RolloutManager
 from slime.ray.serving import ServingCluster
 serving = ServingCluster.remote(args, restore_plan)
 given = {"restore_plan": restore_plan, "serving": serving, "deployment": ray.get(serving.started.remote())}
 return types.SimpleNamespace(manager=RolloutManager.options(num_gpus=0).remote(args, None, **given), **given)""",
    "slime/ray/serving.py": "import ray\nfrom slime.backends.sglang_utils import engine_group",
    "ServingCluster": "@ray.remote\nclass ServingCluster:",
    "ServingCluster.__init__": """
  self.engine = ray.remote(engine_group.SGLangEngine).remote(args)
  ray.get(self.engine.init.remote())
 def started(self): return self.engine""",
    "slime/backends/sglang_utils/sglang_engine.py": "import os\nfrom tests.support import direct, waits",
    "SGLangEngine.init": """
  self.plugin = direct.Engine(*(os.environ[f"R3CHANNEL_{name}"] for name in ("RELAY_URL", "TOKEN_FILE")))
 def __init__(self, args): self.args = args
 def finish(self, request, tokens, first_row): return self.plugin.finish(request, tokens, first_row=first_row)
 def delivered(self): waits.until(lambda: self.plugin.frames("direct"), "a frame went directly")""",
    "slime/ray/rollout.py": "import ray\nfrom slime.data.batch_builder import BatchBuilder\nfrom slime.utils.types import Sample",
    "RolloutManager": "@ray.remote\nclass RolloutManager:",
    "RolloutManager.__init__": """
  self.args, self.engine, self.controller, self.rollout_id = args, deployment, "a controller", 7
 def generate(self):
  self.batch_builder.rollout_id, samples = 7, [Sample(), Sample()]
  for sample in samples:
   sample.index = samples.index(sample)
   for turn in ([1, 2, 3, 4], [5, 6]):
    sample.tokens, first = sample.tokens + turn, sample.get_rollout_routed_experts_length()
    assert first == max(0, len(sample.tokens) - len(turn) - 1), "slime goes on only with the rows of all tokens before"
    reply = ray.get(self.engine.finish.remote(f"{sample.index}.{first}", len(sample.tokens), first))["meta_info"]
    sample._apply_meta_info(self.args, reply | {"routed_experts_start_len": first, "finish_reason": {"type": "stop"}})
  self.data = self.batch_builder.convert(samples)
  return self.batch_builder.split_by_dp(self.data)
 def replay(self): return self.batch_builder.replay_converted(self.data, None)""",
    "Sample._apply_meta_info": 'assert "routed_experts" not in meta_info, "it would be decoded as int32"\n tokens = []',
    "Sample.get_rollout_routed_experts_length": "return 0",
    "slime/data/batch_builder.py": "from types import SimpleNamespace\nfrom slime.utils.dp_schedule import build_dp_schedule",
    "BatchBuilder.__init__": "self.args, self.controller = args, controller",
    "BatchBuilder.convert": "assert not self.args.use_rollout_routing_replay, 'live samples without'; return "
    "{'tokens': [sample.tokens for sample in samples], 'sample_indices': [0, 1]}",
    "BatchBuilder.replay_converted": "return self.split_by_dp(data)",
    "BatchBuilder.split_by_dp": "return [SimpleNamespace(inner=one) for one in build_dp_schedule(self.args, {}, [6, 6])[0]]",
    "build_dp_schedule": "return [[1], [0]], [[[0]], [[0]]], [1], [2]",
}  # fmt: skip

SCRIPT = """
import numpy, ray, types
from slime.ray.placement_group import create_rollout_manager
from slime.utils.arguments import parse_args
from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay
from tests.support.delivery import compare, receive, receivers_of
from tests.support.samples import random_ids

args, restore_plan = parse_args(return_restore_plan=True)
startup = create_rollout_manager(args, restore_plan=restore_plan)
boxes = ray.get(startup.manager.generate.remote())
ticket = Ticket.from_bytes(ray.get(*{box.r3_ticket for box in boxes}))
relay = types.SimpleNamespace(spec=ticket.spec, layout=ticket.layout, config=ChannelConfig(**args.r3_channel))
ids = dict.fromkeys(ticket.assignment.sample_ids, numpy.concatenate([random_ids(3), random_ids(5)[3:]]))
shards = receive(receivers_of(relay, control=RayRelay(startup.manager)), ticket)
ray.get(startup.deployment.delivered.remote())
ray.get(startup.manager.dispose.remote(5))
print(ticket.step, [compare(shard, ids) for shard in shards], flush=True)
ray.get(startup.manager.replay.remote())
"""


def test_engines_that_start_first_deliver_and_slimes_split_is_sealed(tmp_path: Path) -> None:
    slime = slime_checkout.write(tmp_path / "slime", "0.4.0", BODIES)
    (slime / "train.py").write_text(SCRIPT)
    (slime / "config.json").write_text(json.dumps(config_of(ModelShape())))
    given = f"--use-r3-channel --r3-delivery direct --r3-ingest-port {free_port()} --r3-token-file {tmp_path / 'token'}"
    paths = {"PYTHONPATH": f"{slime}:{ROOT}", "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    child = run("-m", "r3channel.cli", "slime", f"{slime}/train.py", *given.split(), **paths)  # pyright: ignore
    each_dp = f"(0, {5 * 3}), (0, 0)"  # rows of a sample in each layer, all of TP0
    assert child.stdout.splitlines()[-1:] == [f"7 [{each_dp}, {each_dp}]"], child.stderr[-4000:]
    assert "StepError: rollout 7 comes back from what slime converted" in child.stderr.splitlines()[-1]
