"""A checkout with all names of slime that we rely on and nothing else, made from the list of a known version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from r3channel.integrations.slime.api_check import files_of

_OFF = "use_routing_replay use_rollout_routing_replay colocate release_train debug_train_only"
_UNSET = "hf_checkpoint advantage_estimator rollout_max_prompt_len rollout_max_context_len dynamic_sampling_filter_path"
PARSED = {
    "num_experts": 8, "update_weight_transport": "disk", "update_weight_mode": "full", "rollout_batch_size": 32,
    "n_samples_per_prompt": 8, "rollout_max_response_len": 1000, "over_sampling_batch_size": 32, "debug_rollout_only": False,
} | dict.fromkeys(_OFF.split(), False) | dict.fromkeys(_UNSET.split())  # fmt: skip
"""What slime's parser leaves that we ask about."""
MEGATRON = {
    "actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 4,
    "sequence_parallel": True, "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "allgather_cp": False, "data_pad_size_multiplier": 128,
}  # fmt: skip


def write(folder: Path, version: str, bodies: Mapping[str, str] | None = None) -> Path:
    """`bodies` hold by name what a function does, else nothing, a class's first line, by file what stands above its names.
    Parameters may be left out."""
    bodies, texts = bodies or {}, dict[str, dict[str, list[str]]]()
    for file, names in files_of(version):
        owners = texts.setdefault(file, {"": [bodies.get(file, "")]})
        for name, parameters in names.items():
            owner, _, function = name.rpartition(".")
            if not owner and name[0].isupper():
                owners.setdefault(name, [bodies.get(name, f"class {name}:"), " known = True"])
                continue
            listed = "*unread" if parameters is None else parameters
            given = ", ".join(one if one[:1] in ("*", "") else f"{one}=None" for one in listed.split(", "))
            line = f"{' ' * bool(owner)}def {function}({given}): {bodies.get(name, 'pass')}"
            owners.setdefault(owner, [f"class {owner}:"]).append(line)
    for file, owners in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join([line for lines in owners.values() for line in lines]) + "\n")
    return folder
