"""The refusals of weight updates against the real SGLang: its settings, its scheduler's fields, its own online quantisation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from examples.embedded.sglang import environment
from r3channel.weights.dryrun import _POST_LOAD
from r3channel.weights.receiver import RELEASED
from r3channel.weights.refusals import ANY_WAY, STAGED

pytestmark = pytest.mark.engine

FACTS = """
import json
import torch
from sglang.srt import constants
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_loader import loader
from sglang.srt.server_args import ServerArgs
from r3channel.weights.refusals import refused_model

def found(serialised):
    layer = torch.nn.Module()
    layer.quant_method = Fp8LinearMethod(Fp8Config(is_checkpoint_fp8_serialized=serialised))
    return list(refused_model(torch.nn.Sequential(layer)))

class Derives(torch.nn.Module):
    def post_load_weights(self):
        self.derived = True
model = Derives()
loader.post_load_weights(model)
print(json.dumps({
    "settings": ServerArgs(model_path="none").__struct_fields__,
    "manager": list(SchedulerWeightUpdaterManager.__dataclass_fields__),
    "answer": UpdateWeightsFromDistributedReqOutput(success=True, message="").success,
    "released": constants.GPU_MEMORY_TYPE_WEIGHTS,
    "derives": model.derived,
    "online": found(False), "serialised": found(True),
}, default=list))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", FACTS], env=environment(r3channel=False), capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_every_setting_of_the_table_is_one_of_sglangs(facts: dict[str, Any]) -> None:
    names = {one.name for one in (*ANY_WAY, *STAGED)} - {"version", "torchao_config"}
    assert names <= set(facts["settings"]), names - set(facts["settings"])


def test_the_schedulers_fields_that_an_order_without_a_bracket_reads_are_there(facts: dict[str, Any]) -> None:
    assert {"_session", "offload_tags", "tp_worker"} <= set(facts["manager"]) and facts["answer"]
    assert facts["released"] == RELEASED and facts["derives"] and _POST_LOAD == "post_load_weights"


def test_online_float8_is_refused_by_what_sglangs_own_layer_says(facts: dict[str, Any]) -> None:
    (why,) = facts["online"]
    assert why.startswith("online quantisation (Fp8Config)") and facts["serialised"] == []
