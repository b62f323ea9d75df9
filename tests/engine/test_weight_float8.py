"""Our float8 blocks as SGLang itself reads them. No float8 engine runs on a CPU: its kernels are for GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.embedded.sglang import environment
from r3channel.weights.quantise import quantise

pytestmark = pytest.mark.engine

BLOCK = (128, 128)
DEQUANTISE = """
import sys
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
import torch
given = load_file(sys.argv[1])
found = block_quant_dequant(given["values"], given["scales"], [128, 128], torch.float32)
save_file({"weight": found}, sys.argv[1])
"""


def test_sglangs_own_dequantisation_gives_the_weights_back(tmp_path: Path) -> None:
    weight = torch.randn(320, 200, generator=torch.Generator().manual_seed(3))
    weight[:128] *= 1e-4  # one scale for the whole tensor would lose these
    values, scales = quantise(weight, BLOCK)
    file = tmp_path / "blocks.safetensors"
    save_file({"values": values, "scales": scales}, file)
    child = subprocess.run(
        [sys.executable, "-c", DEQUANTISE, str(file)],
        env=environment(r3channel=False),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found = load_file(file)["weight"]
    for rows in (slice(0, 128), slice(128, 320)):
        assert (found[rows] - weight[rows]).norm() / weight[rows].norm() < 0.03
