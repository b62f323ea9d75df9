"""One rank of real Megatron, and every misuse of the replay driver that we know of.

Each function is one fact; all run in one process, on one model, and each must leave the driver usable.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from examples.embedded import megatron_shim
from r3channel.errors import ConfigError, R3Error, ReplayError, RouterUnsupported, UsageError
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.adapters.megatron_refusals import REFUSALS, refuse_unsupported
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from tests.dist import deepseek
from tests.dist.deepseek import MICROBATCHES, ROWS, SPEC, Bench, bench, refused
from tests.dist.ranks import facts_of, megatron_world


def test_rows_of_the_wrong_shape_or_dtype_are_refused(bench: Bench) -> None:
    spoilers = {
        "30 rows of ids for 32 tokens": lambda ids: ids[:-2],
        "34 rows of ids for 32 tokens": lambda ids: torch.cat([ids, ids[:2]]),
        "(32, 3)": lambda ids: ids[:, :3],
        "float32": lambda ids: ids.float(),
    }
    for words, spoil in spoilers.items():
        bench.routing.spoil = spoil
        with refused(ReplayError, "router of decoder layer 1", "micro-batch 0", words):
            bench.whole_step()
        bench.routing.spoil = lambda ids: ids
    bench.whole_step()


def test_a_second_model_call_in_one_block_is_refused(bench: Bench) -> None:
    twice = refused(ReplayError, "layer 1", "second time", "forward pass")
    with twice, bench.step() as step, step.microbatch(0):
        bench.forward()
        bench.forward()


def test_a_step_that_lacks_or_repeats_calls_is_refused(bench: Bench) -> None:
    never = refused(ReplayError, "layer 1", "consumed 0 times, expected 1")
    with never, bench.step() as step, step.microbatch(0):
        pass
    with refused(ReplayError, "without running any"), bench.step():
        pass
    for indices, words in (((0, 2), "micro-batch 1: consumed 0 times"), ((0, 1, 2, 2), "consumed 2 times")):
        with refused(ReplayError, words):
            bench.whole_step(indices)


def test_a_left_out_backward_pass_is_refused(bench: Bench) -> None:
    with refused(ReplayError, "recompute pass", "consumed 0 times"), bench.step() as step:
        for index in range(MICROBATCHES):
            with step.microbatch(index):
                loss = bench.forward(index)
            if index:
                loss.backward()


def test_a_forward_pass_outside_of_a_block_is_refused(bench: Bench) -> None:
    with refused(ReplayError, "outside of a micro-batch"), bench.step():
        bench.forward()
    with refused(ReplayError, "gradients off"), bench.step() as step:
        with step.microbatch(0):
            bench.forward()  # its ids wait for a recompute; a stray pass must not take them
        with torch.no_grad():
            bench.forward()


def test_a_backward_pass_after_the_step_is_refused(bench: Bench) -> None:
    kept = []
    with refused(ReplayError, "step 4"), bench.step(4) as step, step.microbatch(0):
        kept.append(bench.forward())
    with refused(R3Error, "after its step 4 was left"):
        kept[0].backward()


def test_reentrant_and_contradictory_use_is_refused(bench: Bench) -> None:
    driver = bench.driver
    with refused(UsageError, "step 2", "step 1 is open"), bench.step(), bench.step(2):
        pass
    nested = refused(UsageError, "inside micro-batch 0")
    with nested, bench.step() as step, step.microbatch(0), step.microbatch(1):
        pass
    with refused(UsageError, "micro-batch 3"), bench.step() as step, step.microbatch(3):
        pass
    with refused(UsageError, "gradients off"), bench.step() as step, torch.no_grad(), step.microbatch(0):
        pass
    with refused(UsageError, "gradients on"), bench.step() as step, step.microbatch(0, mode="logprob"):
        pass
    with refused(UsageError, "gradients on"), bench.step(), driver.disable():
        pass
    with refused(UsageError, "closed"), step.microbatch(0):
        pass


def test_backward_passes_in_any_order_recompute_with_their_own_ids(bench: Bench) -> None:
    """Megatron takes the oldest waiting ids; one backward over a summed loss runs the newest micro-batch first."""
    bench.model.zero_grad()
    bench.whole_step()
    wanted = bench.gradients()
    bench.model.zero_grad()
    with RouterTap(bench.driver) as tap, bench.step() as step:
        losses = []
        for index in range(MICROBATCHES):
            with step.microbatch(index):
                losses.append(bench.forward(index))
        torch.stack(losses).sum().backward()
    order = [
        record.microbatch for record in tap.records if record.pass_name == "recompute" and record.layer == 1
    ]
    assert sorted(order) == [0, 1, 2] and order != [0, 1, 2], order
    for record in tap.records:
        assert np.array_equal(record.ids_RK, bench.routing.layer_ids(record.microbatch, record.layer).numpy())
    for name, gradient in bench.gradients().items():
        assert torch.allclose(gradient, wanted[name], atol=1e-6), name


def calls(step: ReplayStep) -> Counter[str]:
    """Calls of routers by pass."""
    return Counter(pass_name for pass_name, _, _ in step._calls.elements())


def test_log_probs_and_training_with_its_backward_inside_the_block_share_a_step(bench: Bench) -> None:
    with bench.step() as step:
        for index in range(MICROBATCHES):
            with torch.no_grad(), step.microbatch(index, mode="logprob"):
                bench.forward(index)
            with torch.no_grad(), bench.driver.disable(microbatch=index):
                bench.forward(index)
            with step.microbatch(index):
                bench.forward(index).backward()
    assert calls(step) == dict.fromkeys(("logprob", "forward", "recompute"), 3 * 3)


REFUSED = {
    "moe_enable_routing_replay": False, "moe_router_fusion": True, "moe_router_load_balancing_type": ["sinkhorn"],
    "moe_router_force_load_balancing": True, "moe_router_force_biased": 0.5, "moe_input_jitter_eps": 0.0,
    "moe_expert_capacity_factor": 1.0, "moe_expert_rank_capacity_factor": 1.5,
    "overlap_moe_expert_parallel_comm": True, "hybrid_context_parallel": True, "cuda_graph_impl": "local",
    "enable_cuda_graph": True, "external_cuda_graph": True,
}  # fmt: skip


def test_unsupported_configs_are_refused_by_name(bench: Bench) -> None:
    settings = {row.setting: row for row in REFUSALS}
    assert settings.keys() == REFUSED.keys()
    refuse_unsupported(bench.model.config)
    for name, value in REFUSED.items():
        here = hasattr(bench.model.config, name)
        assert here or settings[name].since > megatron.version(), f"{name} is no setting of this release"
        config = copy.copy(bench.model.config)
        setattr(config, name, value)
        with refused(RouterUnsupported, f"{name}={value!r}", settings[name].why):
            refuse_unsupported(config)
    config = copy.copy(bench.model.config)
    config.moe_router_load_balancing_type = "quantile_balancing"
    config.cuda_graph_impl = "transformer_engine"
    with refused(RouterUnsupported, "type='quantile_balancing'", "cuda_graph_impl='transformer_engine'"):
        refuse_unsupported(config)


def test_a_model_that_was_built_without_replay_is_refused(bench: Bench) -> None:
    plain = deepseek.build(mtp_num_layers=None, moe_enable_routing_replay=False)
    with refused(RouterUnsupported, "moe_enable_routing_replay"):
        ReplayDriver.attach([plain], spec=SPEC, layout=bench.layout)


def test_a_wrapper_of_several_models_is_told_where_its_language_model_is(bench: Bench) -> None:
    class Pictures(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = torch.nn.Module()
            self.language_model.module = bench.model  # as Megatron's DDP has it

    with refused(RouterUnsupported, "Pictures has no decoder", "language_model.module", "vision-language"):
        ReplayDriver.attach([Pictures()], spec=SPEC, layout=bench.layout)


def test_a_custom_pipeline_is_taken_where_the_plan_can_say_it(bench: Bench) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    config, taken = copy.copy(bench.model.config), ()
    for text, layout, words in (
        ("Ettt|tL", TrainerLayout(pp=2, first_layers=3), taken),
        ("Et|t|t|tL", TrainerLayout(pp=2, vpp=2), taken),
        ("Et|tttL", TrainerLayout(pp=2), ("stage 0, chunk 0: Megatron builds 1", "plans 2")),
        ("Et|tt|t|L", TrainerLayout(pp=2, vpp=2), ("stage 1, chunk 0: Megatron builds 2", "plans 1")),
        ("", TrainerLayout(pp=2, first_layers=3), taken),
        ("", TrainerLayout(pp=2, first_layers=2), ("stage 0", "builds 3", "plans 2")),
    ):
        own = PipelineParallelLayerLayout.from_str(text, 2) if text else None
        if own is None:
            config.pipeline_model_parallel_size, config.account_for_loss_in_pipeline_split = 2, True
        config.pipeline_model_parallel_layout, config.num_layers = own, 4 if text else 5
        said = (*words, "pipeline_model_parallel_layout=") if text else words
        with refused(ConfigError, *said) if words else nullcontext():
            megatron._check_stages(layout, config)


def test_another_layout_or_spec_is_refused_with_both_values(bench: Bench) -> None:
    chunks = [bench.model]
    with refused(
        ConfigError, *(f"{name}: layout 2, Megatron 1" for name in ("dp", "tp", "pp", "cp")), "vpp: layout 2"
    ):
        ReplayDriver.attach(chunks, spec=SPEC, layout=TrainerLayout(dp=2, tp=2, pp=2, vpp=2, cp=2))
    with refused(ConfigError, "top-4 of 16", "top-2"):
        ReplayDriver.attach(chunks, spec=dataclasses.replace(SPEC, top_k=2), layout=bench.layout)
    with refused(ConfigError, "(1, 2, 3)", "(1, 2)"):
        ReplayDriver.attach(chunks, spec=dataclasses.replace(SPEC, moe_layers=(1, 2)), layout=bench.layout)


def test_the_tap_notices_a_router_that_does_not_use_its_ids(bench: Bench) -> None:
    def other_experts(_module: Any, _inputs: Any, output: Any) -> Any:
        return output[0], output[1].roll(1, dims=1)

    hook = bench.driver.handles[2].module.register_forward_hook(other_experts)
    try:
        with (
            refused(ReplayError, "decoder layer 2", "forward pass", f"{ROWS} of {ROWS} rows"),
            RouterTap(bench.driver),
        ):
            bench.whole_step()
    finally:
        hook.remove()


def test_only_one_tap_at_a_time_and_none_when_closed(bench: Bench) -> None:
    before = [handle.replay.get_replay_topk for handle in bench.driver.handles.values()]
    with RouterTap(bench.driver), refused(UsageError, "tapped already"):
        RouterTap(bench.driver).open()
    assert bench.driver.tap is None
    assert [handle.replay.get_replay_topk for handle in bench.driver.handles.values()] == before


def test_a_model_is_attached_to_once_at_a_time_and_left_as_it_was(bench: Bench) -> None:
    with refused(UsageError, "decoder layer 1", "attached to already"):
        ReplayDriver.attach([bench.model], spec=SPEC, layout=bench.layout)
    bench.whole_step()
    bench.driver.close()
    for handle in bench.driver.handles.values():
        assert "get_replay_topk" not in vars(handle.replay)
    assert len(bench.model._forward_hooks) == 0
    bench.driver = ReplayDriver.attach([bench.model], spec=SPEC, layout=bench.layout)


def test_all_names_are_found_and_the_shim_installs_once(_bench: Bench) -> None:
    assert megatron.check_names() == [] and megatron.version() in megatron.READ_AGAINST
    megatron_shim.install()
    assert megatron_shim.installed()


def run(job: dict[str, Any]) -> dict[str, Any]:
    with megatron_world(job) as layout, bench(layout, mtp_num_layers=None) as own:
        passed = list[str]()
        for name, fact in facts_of(__name__).items():
            print(name, flush=True)
            fact(own)
            for handle in own.driver.handles.values():  # Megatron's own state is never touched
                state = handle.replay
                assert not state.replay_backward_list and state.target_topk_idx is None, name
                assert state.router_replay_action is None, name
            passed.append(name)
    return {"passed": passed}
