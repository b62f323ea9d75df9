"""What an update would leave old, committed and verified: refused by name, before anything is linked or a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3channel.errors import CannotStage, ConfigError, EngineRefused, ManifestMismatch
from r3channel.weights.loader_map import Learned
from r3channel.weights.refusals import ANY_WAY, STAGED
from r3channel.weights.session import WeightSync
from tests.support.fake_engine import FakeEngine, Model
from tests.support.weights import COMMIT, NAMES, give, holds, refused, serving, session, weights

EITHER_WAY: list[tuple[str, Any, str]] = [
    ("dp_size", 2, "one replica alone"),
    ("pp_size", 2, "only its first stage answers"),
    ("weight_cache_mode", "client", "shared with a daemon"),
    ("offload_group_size", 2, "fetched before"),
    ("dcp_replicate_q_proj", True, "copies of weights"),
    ("enable_elastic_expert_backup", True, "the checkpoint it was started from"),
    ("modelopt_quant", "fp8", "quantises a plain checkpoint"),
    ("quantize_and_serve", True, "quantises a plain checkpoint"),
    ("torchao_config", "int8wo", "quantises a plain checkpoint"),
]
STAGED_ONLY: list[tuple[str, Any, str]] = [
    ("version", "0.5.15.post1", "no begin and end of"),
    ("elastic_ep_backend", "mooncake", "come and go"),
    ("speculative_algorithm", "EAGLE", "the draft would stay old"),
    ("moe_runner_backend", "flashinfer_trtllm_routed", "kept repacked"),
    ("load_format", "flash_rl", "quantises what it is given"),
]
ORDINARY = {
    "dp_size": 1, "pp_size": 1, "weight_cache_mode": "off", "offload_group_size": -1,
    "enable_elastic_expert_backup": False, "modelopt_quant": None, "quantize_and_serve": False,
    "torchao_config": "", "version": "0.5.23", "dcp_replicate_q_proj": False, "elastic_ep_backend": None,
    "speculative_algorithm": "NGRAM", "moe_runner_backend": "auto", "load_format": "auto",
}  # fmt: skip


def test_every_setting_of_the_table_is_tried_here() -> None:
    for table, cases in ((ANY_WAY, EITHER_WAY), (STAGED, STAGED_ONLY)):
        assert [one.name for one in table] == [name for name, _, _ in cases]
    assert ORDINARY.keys() == {name for name, _, _ in (*EITHER_WAY, *STAGED_ONLY)}


@pytest.mark.parametrize(("name", "value", "why"), EITHER_WAY)
@pytest.mark.parametrize("staged", [True, False])
def test_a_setting_that_allows_no_update_is_refused(name: str, value: Any, why: str, staged: bool) -> None:
    good, bad = serving(), serving()
    good.settings, bad.settings = ORDINARY, ORDINARY | {name: value}
    said = rf"engine {bad.url} was started with {name}={value}: .*{why}.*\(.+\)"
    with pytest.raises(ConfigError, match=said):
        session(good, bad, staged=staged)
    assert bad.calls == ["/server_info"] and holds(bad, 0) and holds(good, 0)


@pytest.mark.parametrize(
    ("option", "said"),
    [("wire", "tcp or shared_memory or cuda_ipc or nccl or gloo"), ("backend", "gloo or nccl")],
    ids=["wire", "backend"],
)
def test_a_way_for_bytes_that_does_not_exist_is_refused(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} 'auto': expected {said}$"):
        WeightSync.whole(["http://127.0.0.1:9"], **{option: "auto"})


@pytest.mark.parametrize(("name", "value", "why"), STAGED_ONLY)
def test_a_setting_that_forbids_staging_is_refused_or_broadcast(name: str, value: Any, why: str) -> None:
    engine = serving()
    engine.settings = ORDINARY | {name: value}
    with session(engine) as sync:
        refused(sync, 1, rf"engine {engine.url} .*{name}={value}: .*{why}", cause=CannotStage)
        assert engine.calls == ["/server_info"] and holds(engine, 0)
    with session(engine, staged="auto") as sync:
        report = give(sync, 1)
        assert report.way.startswith("broadcast: ") and why in report.way and holds(engine, 1)


def test_linking_processes_no_weights_and_a_commit_does_once() -> None:
    """The engine has ordinary settings."""
    engine = serving()
    engine.settings = ORDINARY
    with session(engine) as sync:
        half = dict(list(weights(1).items())[:4])
        refused(sync, 1, f"would keep their old values.*{NAMES[4]}", half.items(), cause=ManifestMismatch)
        assert "order/open" in engine.calls and engine.processed == 0 and holds(engine, 0)
        assert give(sync, 1).way == "staged" and holds(engine, 1)
        assert engine.processed == 1 and engine.calls[-3:] == COMMIT


class _Config(SimpleNamespace):
    pass


CONFIGS = [_Config(is_checkpoint_fp8_serialized=is_so) for is_so in (False, True)]
ONLINE, SERIALISED = (SimpleNamespace(quant_config=config) for config in CONFIGS)
KEEPS_SOMETHING_OLD: list[tuple[str, Any, Any, str]] = [
    ("quant_method", ONLINE, SERIALISED, r"online quantisation \(_Config\).*old scales|its old scales"),
    ("use_intel_amx_backend", True, False, "packed for AMX"),
    ("_derived_weight_cache_error", "copies of k_norm are kept", None, "copies of k_norm are kept"),
]


@pytest.mark.parametrize(("attribute", "value", "harmless", "why"), KEEPS_SOMETHING_OLD)
@pytest.mark.parametrize("staged", [True, False])
def test_a_model_that_keeps_something_old_is_refused_by_our_half(
    attribute: str, value: Any, harmless: Any, why: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layer = serving(), torch.nn.Module()
    setattr(layer, attribute, value)

    def built(self: FakeEngine) -> Model:
        model = Model(self.tensors)
        model.layer = layer
        return model

    monkeypatch.setattr(FakeEngine, "model", built)
    with session(engine, staged=staged) as sync:
        refused(sync, 1, f"leave something old: .*({why})", cause=EngineRefused)
        assert holds(engine, 0)
        setattr(layer, attribute, harmless)
        give(sync, 1)
        assert holds(engine, 1)


# -- whole tensors, which the model's own loader places ----------------------------------------------------------------

Load = Callable[[Model, Iterable[tuple[str, torch.Tensor]]], None]


def computing(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As a loader that derives: of the first tensor there is arithmetic, the others are copied."""
    for name, tensor in named:
        if name in model.held:
            model.held[name].copy_(tensor * 1.0 if name == NAMES[0] else tensor)


def fusing(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As MLA's: two tensors become one parameter, by way of a dict of those that wait."""
    waiting = dict(named)
    for at in range(0, len(NAMES), 2):
        pair = [waiting[name] for name in NAMES[at : at + 2] if name in waiting]
        if len(pair) == 2:
            model.held[f"fused.{at}"].copy_(torch.cat(pair))


def valued(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As SGLang's default loader does with scales of one item."""
    for name, tensor in named:
        if name in model.held:
            model.held[name].fill_(tensor.flatten()[0].item())


def moved(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """By way of memory of its own, on the parameter's device."""
    for name, tensor in named:
        if name in model.held:
            room = torch.zeros(16, 16)
            room.add_(tensor.to(room.device))
            model.held[name].copy_(room)


def held(load: Load) -> dict[str, torch.Tensor]:
    if load is fusing:
        return {f"fused.{at}": torch.zeros(32, 16) for at in range(0, len(NAMES), 2)}
    return weights(0)


@pytest.mark.parametrize("load", [computing, fusing, valued, moved])
def test_an_absent_or_misspelt_tensor_fails_at_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_weights", load)
    engine = FakeEngine(receives=held(load))
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    given = weights(1)
    given.pop(NAMES[7])
    given["model.layers.6.mlp.gatee.weight"] = given.pop(NAMES[6])
    keep = "fused.6" if load is fusing else NAMES[6]
    with session(engine) as sync:
        said = refused(sync, 1, "would keep their old values", given.items(), cause=ManifestMismatch)
        assert keep in said and "model.layers.6.mlp.gatee.weight" in said
        assert engine.version == "0" and not engine.paused and "order/commit" not in engine.calls
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in before.items())
    with session(engine) as sync:  # a tensor that no parameter has a place for keeps none from its update
        extra = weights(1) | {"rotary_emb.inv_freq": torch.ones(4)}
        report = give(sync, 1, extra.items())
        assert bool(report.loaded) is (load is not fusing) and report.skipped == ("rotary_emb.inv_freq",)
        compared = len(NAMES) - 1 if load is computing else 0
        assert report.verified == (len(NAMES) // 2 if load is fusing else compared)
        assert load is fusing or holds(engine, 1)


GIVEN = {f"m.layers.0.experts.0.w{n}.weight": torch.full((2, 4), float(n)) for n in (1, 2, 3)}
"""As Mixtral's checkpoints name them."""
KEPT = {"model.layers.0.experts.w13_weight": (4, 4), "model.layers.0.experts.w2_weight": (2, 4)}


def renaming(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Names that no table of ours has, and a prefix that the engine has otherwise."""
    w13, w2 = (model.held[name] for name in KEPT)
    places = {"w1": w13[:2], "w2": w2, "w3": w13[2:]}
    for name, tensor in named:
        if (module := name.split(".")[-2]) in places:
            places[module].copy_(tensor)


def unreadable(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A dry run of it does not show which names it takes."""
    renaming(model, ((name, torch.from_numpy(tensor.numpy())) for name, tensor in named))


def as_kept() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in KEPT.items()}


@pytest.mark.parametrize("wire", ["tcp", "shared_memory"])
def test_the_engines_loader_says_what_a_broadcast_fills(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_weights", renaming)
    engine = FakeEngine(receives=as_kept())
    wrong = {name.replace("w3", "w33"): tensor for name, tensor in GIVEN.items()}
    with session(engine, staged=False, wire=wire) as sync:
        why = "keep their old values.*w13_weight.*no place"
        said = refused(sync, 1, why, wrong.items(), cause=ManifestMismatch)
        assert "experts.0.w33.weight" in said and not engine.received and not engine.paused
        extra = GIVEN | {"rotary_emb.inv_freq": torch.ones(4)}
        reports = [give(sync, version, extra.items()) for version in (1, 2)]
        assert [report.skipped for report in reports] == 2 * [("rotary_emb.inv_freq",)]
    assert engine.received and engine.version == "2" and engine.calls.count("order/hold") == 2


class Drafted(FakeEngine):
    """Beside its target an engine has a draft, whose parameters SGLang's checksums name by its role."""

    def checksums(self) -> dict[str, str]:
        return super().checksums() | {f"{self.settings['role']}.model.fc.weight": "0"}


@pytest.mark.parametrize(("staged", "role"), [(False, "draft"), ("auto", "draft"), (False, "draft_step_0")])
def test_a_broadcast_of_the_targets_tensors_leaves_no_draft_old_in_silence(staged: Any, role: str) -> None:
    engine = Drafted(receives=weights(0))
    engine.settings = {"version": "0.5.23", "speculative_algorithm": "EAGLE", "role": role}
    with session(engine, staged=staged) as sync:
        said = rf"1 parameters of its draft may stay old.*'{role}\.model\.fc\.weight'.*NGRAM.*frozen"
        refused(sync, 1, said)
    assert holds(engine, 0)
    with session(engine, staged=False, expected=None) as sync:
        give(sync, 1)  # both models' tensors, as the caller says
    engine.die()


@pytest.mark.parametrize("load", [None, unreadable])
def test_an_unknown_family_is_not_called_misspelt(load: Load | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our half, and with a loader that does more than copy."""
    if load is not None:
        monkeypatch.setattr(Model, "load_weights", load)
    engine = FakeEngine(receives=as_kept() if load else None)
    engine.tensors = as_kept()
    with session(engine, staged=False) as sync:
        said = refused(sync, 1, "this family are not known here", GIVEN.items(), cause=ManifestMismatch)
        assert "misspelt" not in said and "experts.0.w1.weight" in said and not engine.received
    with session(engine, staged=False, expected=None) as sync:
        give(sync, 1, GIVEN.items())
    assert engine.received and engine.version == "1"


def test_a_name_that_a_loader_looks_up_in_vain_fails_before_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_weights", lambda model, named: [model.held[name] for name, _ in named])
    engine, misspelt = serving(), weights(1) | {"model.gatee": torch.ones(2)}
    with session(engine) as sync:
        refused(sync, 1, r"no place for 'model\.gatee'", misspelt.items())
        assert holds(engine, 0) and "order/commit" not in engine.calls


def test_what_a_loader_was_seen_to_copy_is_compared_once_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        computing(model, ((n, t) for n, t in named if t.is_meta or n != NAMES[3]))

    monkeypatch.setattr(Model, "load_weights", forgetful)
    engine = FakeEngine(receives=weights(0))
    with session(engine) as sync:
        refused(sync, 1, f"{NAMES[3]} holds other values than were given for it")
        assert engine.paused and sync.routable() == ()


def test_moved_experts_are_learned_anew_or_nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by EPLB's rebalancing: names and shapes stay. SGLang's own is in tests/engine/test_weight_sync.py."""
    place = [0, 1, 2, 3]

    def load(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            model.held["model.experts.w"][place[int(name[-1])]].copy_(tensor)

    def experts(version: int) -> dict[str, torch.Tensor]:
        return {f"model.experts.{at}": torch.full((8,), 10.0 * version + at) for at in range(4)}

    def move(*_: Any) -> Any:
        engine.tensors["model.experts.w"].copy_(engine.tensors["model.experts.w"].roll(1, 0))
        place[:] = [(slot + 1) % 4 for slot in place]
        return {"success": True}

    def right(version: int) -> bool:
        found = engine.tensors["model.experts.w"][place, 0].tolist()
        return engine.version == str(version) and found == [10 * version + at for at in range(4)]

    monkeypatch.setattr(Model, "load_weights", load)
    engine, other = (FakeEngine(receives={"model.experts.w": torch.zeros(4, 8)}) for _ in range(2))
    assert engine.receiver is not None and other.receiver is not None
    engine.receiver.learned = Learned(placed=lambda: str(place))
    other.receiver.learned = Learned(placed=lambda: "elsewhere")
    with session(engine, other) as sync:
        give(sync, 1, experts(1).items())
        assert engine.receiver.may_move() and move()
        assert give(sync, 2, experts(2).items()) and right(2)

        refused(sync, 3, "relink", (named for at, named in enumerate(experts(3).items()) if at or move()))
        assert right(2) and other.version == "2"
        assert give(sync, 3, experts(3).items()) and right(3)
    with session(engine) as sync:
        give(sync, 4, experts(4).items())
        with monkeypatch.context() as pausing:
            pausing.setattr(engine, "_set", lambda **_: move())
            refused(sync, 5, "nothing was touched: .*relink", experts(5).items())
        assert right(4) and give(sync, 5, experts(5).items()) and right(5)
