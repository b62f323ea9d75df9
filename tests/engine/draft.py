"""A tiny target and two drafts for it that agree with it now and then, so that chains are accepted in part.

Both drafts are the target cut after its first attention: same embeddings, same attention, same output. How often they agree is
set by how much the rest of the target, which they lack, adds to its hidden states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from examples.embedded.model import write_model

LAYERS = 3
REST = 0.1
"""What the rest adds, of what it would. Measured without a draft: at 0.02 both agree in 0.94, at 0.1 in 0.55, at 0.3 in 0.13."""
_WEIGHTS = "model.safetensors"


class Models(NamedTuple):
    """Folders of checkpoints."""

    target: Path
    """Every layer routes."""
    head: Path
    """A draft head (MTP) that goes on from the target's hidden states; its layer routes, too."""
    standalone: Path
    """A dense draft model that sees tokens only."""


def write_models(folder: Path) -> Models:
    target = write_model(folder / "target", layers=LAYERS, dense_layers=())
    weights = load_file(target / _WEIGHTS)
    for name in weights:
        if "down_proj" in name or ("o_proj" in name and ".layers.0." not in name):
            weights[name] *= REST
    save_file(weights, target / _WEIGHTS, metadata={"format": "pt"})
    models = Models(target, folder / "head", folder / "standalone")
    _write(models.head, head_weights(weights), target=target)
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    _write(models.standalone, standalone_weights(weights), target=target, **dense)
    return models


def _write(folder: Path, weights: dict[str, Any], *, target: Path, **changes: Any) -> None:
    folder.mkdir()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, **changes}))


def head_weights(target: dict[str, Any]) -> dict[str, Any]:
    """The head takes (embedding, hidden state), both normed, and gives its layer the embedding at its old size."""
    embedding = target["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    size = float(embedding.square().mean().sqrt())
    weights = {
        name.replace("model.", "mtp.", 1): values.clone()
        for name, values in target.items()
        if name.startswith(("model.layers.0.", "model.norm."))
    }
    weights["mtp.fc.weight"] = torch.cat([size * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    for name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
        weights[name] = torch.ones(hidden)
    return weights


def standalone_weights(target: dict[str, Any]) -> dict[str, Any]:
    """The target's first layer without its experts."""
    weights = {
        name: values.clone()
        for name, values in target.items()
        if ".mlp." not in name and not name.startswith(tuple(f"model.layers.{n}." for n in range(1, LAYERS)))
    }
    hidden = weights["model.embed_tokens.weight"].shape[1]
    wide = 2 * hidden
    for name, shape in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
        weights[f"model.layers.0.mlp.{name}_proj.weight"] = torch.zeros(shape)
    return weights
