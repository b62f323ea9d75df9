"""What slime is given by path: the layers, a reward, a filter, and a generate function of several turns."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from examples.embedded.megatron_modules import use_local_modules

_TURNS = 2


def layers(_args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """--spec: Megatron's local layers, with attention for packs and context parallelism."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config.deallocate_pipeline_outputs = False  # an asynchronous gloo send may still read them
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    return use_local_modules(block)


async def reward(_args: Namespace, sample: Any, **_options: Any) -> float:
    """--custom-rm-path: the samples of a group differ."""
    answer = sample.tokens[-sample.response_length :] if sample.response_length else []
    return len(set(answer)) / max(1, len(answer)) + (sum(answer) % 7) / 10


def every_third_group_goes(_args: Namespace, group: list[Any], **_options: Any) -> Any:
    """--dynamic-sampling-filter-path: slime discards whole groups and asks for others."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput  # pyright: ignore[reportMissingImports]

    drop = drops(group[0].index)
    return DynamicFilterOutput(keep=not drop, reason="third" if drop else None)


def drops(sample: int) -> bool:
    """Whether the filter drops this sample's group, of the four that run.py asks for."""
    return sample // 4 % 3 == 2


async def turns(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """--custom-generate-function-path: the model speaks, a tool answers (loss mask 0), the model speaks again."""
    from slime.rollout.sglang_rollout import generate  # pyright: ignore[reportMissingImports]

    # One that was aborted comes back, in the turn it was in.
    for turn in range(sample.metadata.get("turn", 0), _TURNS):
        sample.metadata["turn"] = turn
        sample.status = type(sample).Status.PENDING
        budget = sampling_params["max_new_tokens"] * (turn + 1) // _TURNS
        # generate() takes what was said already off the budget
        spoken = {**sampling_params, "max_new_tokens": budget}
        sample = await generate(args, sample, spoken)
        if sample.status == type(sample).Status.ABORTED:
            break
        if turn + 1 < _TURNS:
            sample.append_response_tokens(args, tokens=[7, 8, 9], trainable=False, text=" t7 t8 t9")
        await asyncio.sleep(0)
    return sample


async def cut_short(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """--custom-generate-function-path: as `turns`, and up to 12 tokens are then cut off, as for a length that agents may have."""
    sample = await turns(args, sample, sampling_params)
    less = min(4 * (sample.index % 4), sample.response_length - 1)
    if sample.status != type(sample).Status.ABORTED and less > 0:
        sample.response_length -= less
        for column in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
            del column[-less:]
    return sample


async def tool_speaks_last(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """--custom-generate-function-path: as `turns`, and a tool answers what was said last, as at the end of an agent's budget."""
    sample = await turns(args, sample, sampling_params)
    if sample.status != type(sample).Status.ABORTED:
        sample.append_response_tokens(args, tokens=[9, 8, 7], trainable=False, text=" t9 t8 t7")
    return sample
