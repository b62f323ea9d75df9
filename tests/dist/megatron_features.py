"""What the replay driver does beside full recompute and softmax, on a DeepSeek-V3-like model of real Megatron.

Each function is one fact. With tensor parallelism only those that need it run, and their sums go out for comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from r3channel.errors import ConfigError
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.mismatch import MismatchReport, RoutingAudit
from tests.dist import deepseek
from tests.dist.deepseek import LENGTH, MICROBATCHES, ROWS, SAMPLES, Bench, Routing, bench, refused
from tests.dist.ranks import facts_of, megatron_world

PLAIN = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
"""No recompute."""


def used(records: list[Any], own: Bench, *passes: str) -> None:
    """Each named (pass, layer, micro-batch) consumed exactly the given ids."""
    layers = list(own.driver.handles)
    found = Counter((r.pass_name, r.layer, r.microbatch) for r in records)
    assert found == Counter({(p, layer, i) for p in passes for layer in layers for i in range(MICROBATCHES)})
    for record in records:
        wanted = own.routing.layer_ids(record.microbatch, record.layer).numpy()
        assert np.array_equal(record.ids_RK, wanted), (record.pass_name, record.layer, record.microbatch)


# -- facts on every layout ---------------------------------------------------------------------------------------------


def router_gradients(own: Bench) -> dict[str, list[float]]:
    """Gradients of all routers, over the rows of all ranks."""
    found = {}
    for name, weight in own.model.named_parameters():
        if name.endswith("router.weight"):
            gradient = weight.grad.clone()
            if own.layout.world_size > 1:
                dist.all_reduce(gradient)
                gradient /= own.layout.dp
            found[name] = gradient.flatten().tolist()
    return found


def test_mla_with_biased_sigmoid_groups_and_mtp_left_out(layout: TrainerLayout) -> dict[str, Any]:
    with bench(layout) as own:
        assert list(own.driver.handles) == [1, 2, 3]
        used(own.train(), own, "forward", "recompute")
        return {"loss": own.loss, "gradients": router_gradients(own)}


def test_a_mapped_mtp_layer_replays_too(layout: TrainerLayout) -> dict[str, Any]:
    with bench(replace(layout, mtp=(3,))) as own:
        assert list(own.driver.handles) == [1, 2, 3, 4]
        used(own.train(), own, "forward", "recompute")
        return {"mtp_loss": own.loss, "mtp_gradients": router_gradients(own)}


# -- facts on one rank -------------------------------------------------------------------------------------------------


def test_a_map_of_more_mtp_layers_than_there_are_is_refused() -> None:
    with refused(ConfigError, "maps 2 MTP layers", "model has 1"), bench(TrainerLayout(mtp=(3, 3))):
        pass


def test_recompute_of_some_layers_and_of_moe_modules_gives_the_same_gradients() -> None:
    kinds: dict[str, dict[str, Any]] = {
        "none": PLAIN,
        "uniform": {},
        "block": {"recompute_method": "block", "recompute_num_layers": 2},
        "moe": PLAIN | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "others": PLAIN
        | {"recompute_granularity": "selective", "recompute_modules": ["mlp", "shared_experts"]},
    }
    recomputed = {"none": [], "uniform": [1, 2, 3], "block": [1], "moe": [1, 2, 3], "others": []}
    wanted: dict[str, torch.Tensor] = {}
    for kind, changes in kinds.items():
        with bench(mtp_num_layers=None, **changes) as own:
            again = Counter(r.layer for r in own.train() if r.pass_name == "recompute")
            assert again == Counter(dict.fromkeys(recomputed[kind], MICROBATCHES)), (kind, again)
            found = own.gradients()
            wanted = wanted or found
            for name, gradient in found.items():
                assert torch.allclose(gradient, wanted[name], atol=1e-6), (kind, name)


def test_expert_bias_counts_are_of_replayed_rows_without_padding_in_every_kind_of_recompute() -> None:
    padding = torch.arange(ROWS) >= ROWS - 3 * SAMPLES
    for changes, left_out in (({}, padding & False), ({}, padding), (PLAIN, padding)):
        with bench(mtp_num_layers=None, **changes) as own:
            own.routing.padding = left_out
            own.train()
            for layer, handle in own.driver.handles.items():
                rows = torch.cat([own.routing.layer_ids(i, layer)[~left_out] for i in range(MICROBATCHES)])
                wanted = torch.bincount(rows.flatten().long(), minlength=16).float()
                counts = handle.counts()
                assert counts is not None and torch.equal(counts, wanted), layer


def test_padding_stays_out_of_auxiliary_and_z_losses_where_the_model_is_told() -> None:
    """Without `padding_mask` Megatron counts padding; with it, gradients are those of the batch without padding."""
    kinds = (
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
        {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.5},
    )

    def gradient(kind: dict[str, Any], pads: int, *, told: bool) -> torch.Tensor:
        with bench(mtp_num_layers=None, moe_router_enable_expert_bias=False, **kind, **PLAIN) as own:
            spread = torch.arange(pads * SAMPLES * 4, dtype=torch.uint8).view(-1, 4) % 16
            own.routing.whole = {key: torch.cat([ids, spread]) for key, ids in own.routing.whole.items()}
            mask = (torch.arange(LENGTH + pads) >= LENGTH).expand(SAMPLES, -1)
            given: dict[str, Any] = {"padding_mask": mask} if told else {}
            own.whole_step(pads=pads, **given)
            return torch.cat([h.module.weight.grad.flatten() for h in own.driver.handles.values()])  # type: ignore[union-attr]

    for kind in kinds:
        wanted = gradient(kind, 0, told=False)
        assert torch.allclose(gradient(kind, 4, told=True), wanted, atol=1e-6), kind
        assert not torch.allclose(gradient(kind, 4, told=False), wanted, atol=1e-4), kind


def test_a_padding_mask_beside_an_expert_bias_is_an_error_of_megatrons() -> None:
    """`_apply_expert_bias` of this release lays a mask of [rows] over counts of [rows, experts]."""
    # one that can: then the trainer room's README says too little
    error = pytest.raises(RuntimeError, match=rf"\({ROWS}\) at non-singleton dimension 1")
    with bench(mtp_num_layers=None, **PLAIN) as own, own.driver.disable(microbatch=0), error:
        own.forward(padding_mask=torch.zeros(SAMPLES, LENGTH, dtype=torch.bool))


def test_auxiliary_losses_count_the_natural_choice_and_not_the_replayed_one() -> None:
    kind = {
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
    }
    found = []
    for shift in (0, 1):  # other ids, equal weights: layer 1 sees the same input
        from megatron.core.transformer.moe import router

        name = "switch_load_balancing_loss_func"
        with (
            bench(mtp_num_layers=None, **kind) as own,
            patch.object(router, name, wraps=getattr(router, name)) as loss,
        ):
            own.routing.whole = {key: (ids + shift) % 16 for key, ids in own.routing.whole.items()}
            own.train()
        # the recompute runs the layers from the last to the first
        found.append(loss.call_args_list[2].kwargs["tokens_per_expert"])
    assert torch.equal(*found) and found[0].sum() == ROWS * 4


def test_a_live_mtp_router_takes_no_decoder_layers_ids_whatever_its_number_says() -> None:
    """It calls itself layer 5 of 4 in 0.16.1 and layer 1 in 0.19.2; among all instances of RouterReplay it is the last."""
    with bench() as own:
        (mtp,) = [m for n, m in own.model.named_modules() if n.startswith("mtp") and n.endswith("router")]
        assert mtp.layer_number in (1, deepseek.LAYERS + 1)
        assert "get_replay_topk" not in vars(mtp.router_replay)
        routed: list[torch.Tensor] = []
        hook = mtp.register_forward_hook(lambda _m, _i, output: routed.append(output[1].bool()))
        used(own.train(), own, "forward", "recompute")
        hook.remove()
        assert len(routed) == 2 * MICROBATCHES  # forward and recompute of each
        for layer in (1, 2, 3):
            ids = own.routing.layer_ids(0, layer).long()
            replayed = torch.zeros(ROWS, 16, dtype=torch.bool).scatter(1, ids, True)
            assert (routed[0] != replayed).any(dim=1).float().mean() > 0.9, layer


def test_rows_left_to_the_live_router_are_the_same_in_forward_and_recompute() -> None:
    live = torch.zeros(ROWS, dtype=torch.bool)
    live[::5] = True
    choices: dict[tuple[str, int, int], Any] = {}
    with bench(mtp_num_layers=None) as own:
        given = {key: ids.clone() for key, ids in own.routing.whole.items()}
        own.natural()
        # layer 1 sees the same input
        first = {i: own.routing.whole[i, 1].clone() for i in range(MICROBATCHES)}
        own.routing.whole, own.routing.live = given, live
        for record in own.train():
            choices[record.pass_name, record.layer, record.microbatch] = record.ids_RK
            wanted = given[record.microbatch, record.layer].numpy()
            assert np.array_equal(record.ids_RK[~live], wanted[~live])
        for layer in own.driver.handles:
            for index in range(MICROBATCHES):
                assert np.array_equal(choices["forward", layer, index], choices["recompute", layer, index])
        for index, natural in first.items():
            found = np.sort(choices["forward", 1, index][live], axis=1)
            assert np.array_equal(found, np.sort(natural.numpy()[live], axis=1))
        with_recompute = own.gradients()
    with bench(mtp_num_layers=None, **PLAIN) as own:
        own.routing.live = live
        own.train()
        for name, gradient in own.gradients().items():
            assert torch.allclose(gradient, with_recompute[name], atol=1e-6), name


def audited(own: Bench, change: Callable[[Routing], None] | None = None) -> MismatchReport:
    audit = RoutingAudit(
        step=4, microbatches=MICROBATCHES, count=1, counted_rows=lambda _: torch.arange(ROWS) < ROWS - SAMPLES
    )
    before = dict(own.routing.whole)
    if change is not None:
        change(own.routing)
    own.train(audit=audit)
    own.routing.whole = before
    return audit.report()


def by_one_layer(routing: Routing) -> None:
    whole = dict(routing.whole)
    routing.whole |= {(i, layer): whole[i, 1 + layer % 3] for i, layer in whole if layer in (1, 2, 3)}


def by_one_token(routing: Routing) -> None:
    routing.whole = {key: ids.roll(SAMPLES, 0) for key, ids in routing.whole.items()}


def test_the_audit_is_silent_on_right_routing_jumps_on_a_shift_and_less_on_a_drift() -> None:
    with bench(mtp_num_layers=None) as own:
        own.natural()
        right = audited(own)
        assert right.microbatches == (1,) and right.pairs == 3 * right.tokens == 3 * (ROWS - SAMPLES)
        assert right.different_fraction == 0 and right.mean_overlap == 1 and right.tokens_different == 0
        for shift in (by_one_layer, by_one_token):
            wrong = audited(own, shift)
            assert wrong.different_fraction > 0.8 and wrong.mean_overlap < 0.6, shift
            assert wrong.tokens_different > 0.9 * wrong.tokens
            assert all(layer.disjoint for layer in wrong.layers)
        with torch.no_grad():  # weights that drift differ less
            for weight in own.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 3e-3)
        assert 0 < audited(own).different_fraction < 0.5


def test_two_models_replay_in_one_process_at_the_same_time() -> None:
    """Policy and critic, each with its own routing, their micro-batches interleaved; a reference without replay."""
    with bench(mtp_num_layers=None) as policy, bench(mtp_num_layers=None) as critic:
        reference, tokens = deepseek.build(mtp_num_layers=None), torch.zeros(1, 4, dtype=torch.int64)
        alone = reference(tokens, torch.arange(4)[None], None, labels=tokens)
        critic.routing.whole = {key: (ids + 1) % 16 for key, ids in critic.routing.whole.items()}
        taps = RouterTap(policy.driver), RouterTap(critic.driver)
        steps = policy.driver.step(policy.routing, step=0), critic.driver.step(critic.routing, step=9)
        with taps[0], taps[1], steps[0] as ours, steps[1] as theirs:
            for index in range(MICROBATCHES):
                with ours.microbatch(index), theirs.microbatch(index):
                    losses = policy.forward(index), critic.forward(index)
                    with torch.no_grad():
                        again = reference(tokens, torch.arange(4)[None], None, labels=tokens)
                    assert torch.equal(again, alone)
                for loss in losses:
                    loss.backward()
        used(taps[0].records, policy, "forward", "recompute")
        used(taps[1].records, critic, "forward", "recompute")


def run(job: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"passed": []}
    with megatron_world(job) as layout:
        if job.get("export"):
            result |= deepseek.export(job, layout)
        for name, fact in facts_of(__name__).items() if job.get("facts", True) else ():
            everywhere = fact.__code__.co_argcount == 1
            if (everywhere or layout.world_size == 1) and job.get("left_out", "nothing") not in name:
                print(name, flush=True)
                result |= (fact(layout) if everywhere else fact()) or {}
                result["passed"].append(name)
    return result
