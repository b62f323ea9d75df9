"""`r3channel slime` on a stand-in of slime 0.4.0: signatures are those that were read, what they do is the least of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from examples.embedded.model import ModelShape, config_of
from examples.embedded.sglang import free_port
from tests import slime_checkout
from tests.children import ROOT, run

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.timeout(180)]

_ALONE = {
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_critic": False,
}
_ALONE |= {
    "actor_num_gpus_per_node": 2,
    "data_pad_size_multiplier": 1,
    "debug_train_only": True,
}  # no engine is probed

BODIES = {
    "slime/utils/arguments.py": "import argparse",
    "parse_args": f"""
 parser = argparse.ArgumentParser()
 parser.add_argument("--hf-checkpoint")
 args = add_custom_arguments(parser).parse_args()
 vars(args).update({slime_checkout.PARSED | slime_checkout.MEGATRON | _ALONE}, hf_checkpoint=args.hf_checkpoint)
 return (args, "a plan") if return_restore_plan else args""",
    "slime/ray/placement_group.py": "import copy, ray, types",
    "create_rollout_manager": """
 from slime.ray.rollout import RolloutManager
 from slime.ray.serving import ServingCluster
 args, kept = copy.deepcopy(args), {"lifetime": "detached", "get_if_exists": True}
 serving = ServingCluster.options(name="serving", **kept).remote(args, restore_plan)
 engine = ray.get(serving.started.remote())
 manager = RolloutManager.options(name="manager", num_gpus=0, **kept).remote(args, None, serving=serving, deployment=engine)
 return types.SimpleNamespace(manager=manager)""",
    "slime/ray/serving.py": "import ray\nfrom slime.backends.sglang_utils import engine_group",
    "ServingCluster": "@ray.remote\nclass ServingCluster:",
    "ServingCluster.__init__": """
  self.engine = ray.remote(engine_group.SGLangEngine).remote(args)
  ray.get(self.engine.init.remote())
 def started(self): return self.engine""",
    "slime/backends/sglang_utils/sglang_engine.py": "import os, pathlib\nfrom tests.direct import Engine, until",
    "SGLangEngine.init": """
  self.plugin = Engine(os.environ["R3CHANNEL_RELAY_URL"], pathlib.Path(os.environ["R3CHANNEL_TOKEN_FILE"]))
 def __init__(self, args): self.args = args
 def finish(self, request, tokens, first_row): return self.plugin.finish(request, tokens, first_row=first_row)
 def delivered(self): until(lambda: self.plugin.frames("direct"), "a frame went directly")""",
    "slime/ray/rollout.py": "import ray\nfrom slime.data.batch_builder import BatchBuilder\nfrom slime.utils.types import Sample",
    "RolloutManager": "@ray.remote\nclass RolloutManager:",
    "RolloutManager.__init__": """
  self.args, self.engine, self.controller = args, deployment, "a controller"
 def generate(self, rollout_id):
  self.rollout_id = self.batch_builder.rollout_id = rollout_id
  samples = [Sample(), Sample()]
  for index, sample in enumerate(samples):
   sample.index = index
   for turn in ([1, 2, 3, 4], [5, 6]):
    sample.tokens, first = sample.tokens + turn, sample.get_rollout_routed_experts_length()
    reply = ray.get(self.engine.finish.remote(f"{sample.index}.{first}", len(sample.tokens), first))["meta_info"]
    sample._apply_meta_info(self.args, reply | {"routed_experts_start_len": first, "finish_reason": {"type": "stop"}})
  self.data = self.batch_builder.convert(samples)
  return self.batch_builder.split_by_dp(self.data)
 def replay(self): return self.batch_builder.replay_converted(self.data, None)""",
    "RolloutManager.set_train_parallel_config": "self.batch_builder.train_parallel_config = config",
    "Sample._apply_meta_info": """assert "routed_experts" not in meta_info, "it would be decoded as int32"
 tokens = []""",
    "Sample.get_rollout_routed_experts_length": "return 0",
    "slime/data/batch_builder.py": "import ray\nfrom slime.utils import dp_schedule, misc\n"
    "build_dp_schedule = dp_schedule.build_dp_schedule",
    "BatchBuilder.__init__": "self.args, self.controller = args, controller",
    "BatchBuilder.convert": """
  if self.args.use_rollout_routing_replay: raise ValueError("routed experts are missing of live samples")
  return {"tokens": [sample.tokens for sample in samples], "sample_indices": [sample.index for sample in samples]}""",
    "BatchBuilder.replay_converted": "return self.split_by_dp(data)",
    "BatchBuilder.split_by_dp": """
  partitions, *_ = build_dp_schedule(self.args, self.train_parallel_config, [6, 6])
  return [misc.Box(inner=[data["tokens"][at] for at in places]) for places in partitions]""",
    "build_dp_schedule": "return [[1], [0]], [[[0]], [[0]]], [1], [2]",
    "slime/utils/misc.py": "import types",
    "Box": "class Box(types.SimpleNamespace):",
}  # fmt: skip

SCRIPT = """
import collections, json, numpy, ray, types
from slime.ray.placement_group import create_rollout_manager
from slime.utils.arguments import parse_args
from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay
from tests.delivery import compare, receive, receivers_of
from tests.samples import random_ids

args, restore_plan = parse_args(return_restore_plan=True)
manager = create_rollout_manager(args, restore_plan=restore_plan).manager
ray.get(manager.set_train_parallel_config.remote("a configuration"))
boxes = ray.get(manager.generate.remote(7))
(sealed,) = {box.r3_ticket for box in boxes}
ticket = Ticket.from_bytes(ray.get(sealed))
relay = types.SimpleNamespace(spec=ticket.spec, layout=ticket.layout, config=ChannelConfig(**args.r3_channel))
receivers = receivers_of(relay, control=RayRelay(manager))
ids = numpy.concatenate([random_ids(3), random_ids(5)[3:]])
told = {"step": ticket.step, "tokens": [box.inner for box in boxes]}
told["rows"] = [compare(shard, collections.defaultdict(lambda: ids)) for shard in receive(receivers, ticket)]
engine = ray.get(ray.get_actor("serving").started.remote())
ray.get(engine.delivered.remote())
ray.get(manager.dispose.remote(5))
print(json.dumps(told), flush=True)
ray.get(manager.replay.remote())
"""


def test_engines_that_start_first_deliver_slimes_split_is_sealed_and_a_conversion_without_rows_is_refused(
    tmp_path: Path,
) -> None:
    slime = slime_checkout.write(tmp_path / "slime", "0.4.0", BODIES)
    (slime / "train.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(config_of(ModelShape())))
    given = f"--use-r3-channel --hf-checkpoint {tmp_path} --r3-delivery direct --r3-ingest-port {free_port()}"
    given += f" --r3-token-file {tmp_path / 'token'}"
    paths = {"PYTHONPATH": os.pathsep.join([str(slime), str(ROOT)]), "RAY_AUTH_MODE": "disabled"}
    child = run("-m", "r3channel.cli", "slime", str(slime / "train.py"), *given.split(), **paths)
    assert child.returncode == 2, child.stderr[-4000:]
    rows = 5 * 3  # of a rank's sample, in each layer
    told = {"step": 7, "tokens": [[[1, 2, 3, 4, 5, 6]]] * 2, "rows": [[0, rows]] * 2}
    assert json.loads(child.stdout.splitlines()[-1]) == told, child.stderr[-4000:]
    last = child.stderr.splitlines()[-1]
    assert last.startswith("r3channel: StepError: rollout 7 comes back from what slime converted")
