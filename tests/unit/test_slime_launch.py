"""`r3channel slime`: what is refused before anything starts, what engines are told, and a bare flag that would do nothing."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.embedded.model import ModelShape, config_of
from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, UsageError
from r3channel.integrations import guard as bare
from r3channel.integrations.slime import api_check, relay_gpu
from r3channel.integrations.slime import arguments as slime_arguments
from r3channel.integrations.slime import launch as slime_launch
from r3channel.integrations.slime.engine_variables import engine_variables
from r3channel.model.presets import model_named
from r3channel.observe.check import CheckContext
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import beside_bytes, relay_gpu_bytes
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.tools import slime as slime_command
from r3channel.transport.auth import create_token, read_token
from r3channel.wire.frame import encode_frame
from r3channel.wire.parcel import REFERENCE_BYTES
from r3channel.wire.routing import RowKind
from tests.support import slime_checkout
from tests.support.children import ROOT, run
from tests.support.direct import Engine
from tests.support.samples import SPEC, random_ids, span
from tests.support.waits import until

PTH = ROOT / "r3channel/r3channel.pth"


def parsed(*given: str, **slime: Any) -> argparse.Namespace:
    """What slime's parser would leave, with our arguments among them."""
    args = slime_arguments.add_arguments(argparse.ArgumentParser()).parse_args(["--use-r3-channel", *given])
    return argparse.Namespace(**vars(args) | slime_checkout.PARSED | slime)


def test_engines_and_requests_give_routing_and_slimes_own_replay_is_off() -> None:
    own = dict.fromkeys(("use_rollout_routing_replay", "use_routing_replay"), True)
    args = slime_arguments.prepare(parsed("--r3-bucket-bytes", "65536", "--r3-trace", "run", **own))
    replays = args.use_rollout_routing_replay, args.use_routing_replay, args.moe_enable_routing_replay
    assert replays == (True, False, True)
    assert args.r3_channel["bucket_bytes"] == 65536 and args.r3_channel["expiry_s"] > 365 * 86_400
    assert args.r3_channel["trace"] == os.path.abspath("run"), "actors are elsewhere"
    assert slime_arguments.prepare(parsed(colocate=True, update_weight_transport="nccl")), "by memory"
    woken = {"offload_train": True, "advantage_estimator": "ppo"}
    assert slime_arguments.prepare(parsed("--r3-weights", "broadcast", **woken)), "the critic's turn is over"


@pytest.mark.parametrize(
    "given, slime, words",
    [
        ((), {"num_experts": None}, "without experts"), ((), {"use_routing_replay": True}, "--use-routing-replay"),
        ((), {"debug_rollout_only": True}, "trains nothing"),
        (("--r3-invalid-rows", "mask"), {}, "--r3-invalid-rows mask"),
        (("--r3-max-staleness", "1", "--r3-on-stale", "mask"), {}, "--r3-on-stale mask"),
        (("--r3-token-tensors", "sampling_masks"), {}, "--r3-token-tensors"),
        ((), {"update_weight_transport": "nccl"}, "--update-weight-transport disk"),
        (("--r3-weights", "broadcast"), {"colocate": True}, "--colocate"),
        (("--r3-weights", "broadcast"), {"update_weight_mode": "delta"}, "--update-weight-mode full"),
        (("--r3-weights", "broadcast"), {"offload_train": True}, "no --offload-train"),
        ((), {"rollout_data_transport": "straw"}, "transport straw"), ((), {"rollout_data_transport": "nixl"}, "transport nixl"),
        (("--r3-delivery", "direct", "--r3-ingest-port", "9000"), {"detached": True}, "--r3-token-file"),
        (("--r3-weights", "broadcast"), {"detached": True}, "0.4.0"), (("--r3-transport", "nccl"), {"detached": True}, "0.4.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given: tuple[str, ...], slime: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        slime_arguments.prepare(parsed(*given, **slime), detached="detached" in slime)


def test_this_machine_and_the_layout_are_looked_at_before_slime_starts_a_part(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    given = ("--r3-journal", f"{file}/store", "--r3-record", f"{file}/record")

    def faults(*more: str, **slime: Any) -> list[str]:
        args = slime_arguments.prepare(parsed(*given, *more, **slime_checkout.MEGATRON | slime))
        return [fault.split()[0] for fault in slime_arguments.faults(args) if fault]

    assert faults() == ["--r3-journal", "--r3-record:"]
    # the relay may be on any node
    assert faults("--r3-interface", "10.0.0.5") == faults(actor_num_nodes=2) == []
    with pytest.raises(ConfigError, match="8 trainer ranks do not divide by tp=3 x pp=1 x cp=1"):
        faults(tensor_model_parallel_size=3)


ROW_BYTES = 3 * 8  # three layers with routers, top-8
BESIDE = 2 * beside_bytes(SPEC, spans=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(config_of(ModelShape())))
    return str(folder)


def sized(checkpoint: str, *given: str, **slime: Any) -> argparse.Namespace:
    large = {"hf_checkpoint": checkpoint, "n_samples_per_prompt": 800, "rollout_max_prompt_len": 200}
    return slime_arguments.prepare(parsed(*given, **slime_checkout.MEGATRON | large | slime))


@pytest.mark.parametrize(
    "slime, prompts, tokens",
    [
        ({}, 64, 1200),  # a step that is trained on, and the next
        ({"colocate": True}, 32, 1200), ({"over_sampling_batch_size": 48}, 80, 1200),
        ({"dynamic_sampling_filter_path": "a.filter"}, 96, 1200), ({"rollout_max_context_len": 1100}, 64, 1100),
        ({"rollout_max_prompt_len": None}, 64, 2000),  # counted as long as a response, for all that slime says
    ],
)  # fmt: skip
def test_the_store_has_room_for_the_steps_that_live_at_once_and_an_eighth(
    checkpoint: str, slime: dict[str, Any], prompts: int, tokens: int
) -> None:
    expected = prompts * 800 * (tokens * ROW_BYTES + BESIDE) * 9 // 8
    assert sized(checkpoint, **slime).r3_channel["store_bytes"] == expected
    assert sized(checkpoint, **slime, rollout_max_response_len=None).r3_channel["store_bytes"] == 16 << 30


def test_a_store_below_one_step_is_refused_with_the_number_to_give(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 32 * 800 * (1200 * ROW_BYTES + BESIDE)
    assert sized(checkpoint, "--r3-store-bytes", str(step)).r3_channel["store_bytes"] == step
    monkeypatch.setenv("R3CHANNEL_STORE_BYTES", str(step - 1))  # however it was given
    said = rf"--r3-store-bytes {step - 1}: .* 32 prompts x 800 samples x .1200 tokens x {ROW_BYTES} .* Expected {step},"
    with pytest.raises(ConfigError, match=said):
        sized(checkpoint)


def test_a_store_of_exactly_that_number_holds_a_step_of_two_turns_each(checkpoint: str) -> None:
    args = sized(checkpoint, rollout_batch_size=6, n_samples_per_prompt=8, rollout_max_response_len=59_800)
    size, spec = slime_arguments.step_size(args), slime_arguments.spec_of(args)
    names, ids = [*map(str, range(48))], np.tile(random_ids(100, spec=spec), (600, 1, 1))
    assert size is not None
    config = ChannelConfig(store_bytes=size.step, backpressure_timeout_s=0.1)
    with Relay(spec, TrainerLayout(), config) as relay:
        for name, (first, middle, end) in product(names, ((0, 100, 30_000), (30_000, 31_000, 59_999))):
            spans = [span(first, middle, kind=RowKind.PREFILLED), span(middle, end)]
            how: dict[str, Any] = {"first_row": first, "provenance": spans, "codec": "stored"}
            frame = encode_frame(spec, expert_ids_TLK=ids[first:end], **how)
            relay.add_frame(name, frame, range(end + 1), append=first > 0)
        assert relay.seal(0, Assignment.given([[names]], steps=[1])).samples[47].tokens == 60_000
        relay.abandon(0)


def test_rows_that_there_is_no_memory_for_are_missed_unless_the_store_is_bounded(checkpoint: str) -> None:
    huge = sized(checkpoint, rollout_max_response_len=1 << 40, rollout_max_prompt_len=0)
    (fault,) = filter(None, slime_arguments.faults(huge))
    step = 32 * 800 * ((1 << 40) * ROW_BYTES + BESIDE)
    assert "GiB of memory are free" in fault and f"give --r3-store-bytes, at least {step}" in fault
    small = sized(checkpoint, rollout_max_response_len=10, n_samples_per_prompt=1)
    assert not any(slime_arguments.faults(small))


def test_the_model_is_named_as_slime_takes_it_a_folder_or_a_hub_id(checkpoint: str, tmp_path: Path) -> None:
    cached = tmp_path / "models--our--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("now")
    (cached / "snapshots").mkdir()
    (cached / "snapshots/now").symlink_to(checkpoint)
    program = (
        "import argparse, sys\nfrom r3channel.integrations.slime.arguments import spec_of\n"
        "for name in sys.argv[1:]: print(spec_of(argparse.Namespace(hf_checkpoint=name)).bytes_per_token, flush=True)"
    )
    hub: dict[str, Any] = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    child = run("-c", program, checkpoint, "our/model", "our/other", **hub)
    assert child.stdout.split() == [str(ROW_BYTES)] * 2
    assert "ConfigError: --hf-checkpoint our/other: no folder" in child.stderr


def test_the_example_of_a_job_on_several_nodes_is_taken_and_its_comments_say_what_is_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slime_arguments, "spec_of", lambda _: model_named("qwen3-30b-a3b").spec)
    text = (ROOT / "examples/slime/qwen3-30b-a3b.sh").read_text()
    (given,) = re.findall(r"^CHANNEL=\((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    own = {"hf_checkpoint": "given", "rollout_max_response_len": 8192, **slime_checkout.MEGATRON}
    args = slime_arguments.prepare(parsed(*shlex.split(given, comments=True), **own))
    relay = SimpleNamespace(config=ChannelConfig(), serve=lambda token_file: "http://10.0.0.1:1")
    assert engine_variables(relay, args, nodes=4)["R3CHANNEL_TOKEN_FILE"] == "$TOKEN_FILE"
    assert f"the reply names them in {REFERENCE_BYTES} bytes" in text
    assert f"{args.r3_channel['store_bytes'] / 1e9:.1f} GB here" in text


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.py is no file"):
        slime_launch.run([str(tmp_path / "none.py"), "--use-r3-channel"])
    with pytest.raises(ConfigError, match=r"--use-r3-channel=1 is no option .* mean --use-r3-channel\?"):
        slime_command.run([str(tmp_path / "none.py"), "--use-r3-channel=1"])


# -- seams ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0"])
def test_a_slime_with_all_names_is_known_and_what_moved_is_said_exactly(tmp_path: Path, version: str) -> None:
    assert api_check.nearest(slime_checkout.write(tmp_path / "whole", version)) == (version, [])
    root = slime_checkout.write(tmp_path / "moved", version)
    file = root / "slime/ray/placement_group.py"
    file.write_text(file.read_text().replace("create_training_models(args=None, ", "create_training_models("))
    (root / "slime/utils/misc.py").write_text("")
    (root / "slime/utils/types.py").unlink()
    found = api_check.nearest(root)
    pgs = "(pgs, rollout_manager, actor_cls), expected (args, pgs, rollout_manager, actor_cls)"
    lines = f"placement_group.py: create_training_models{pgs}", "misc.py has no Box", "types.py is not there"
    assert found.version == version and all(any(line in one for one in found.moved) for line in lines)


def test_a_newer_slime_that_moved_on_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = slime_checkout.write(tmp_path, "0.4.0") / "slime/data/batch_builder.py"
    file.write_text(file.read_text().replace("split_by_dp(self=None, data=None", "split_by_dp(self, more"))
    monkeypatch.syspath_prepend(tmp_path)
    said = r"nearest to slime 0.4.0 \(0b0c277d\), but: .*BatchBuilder.split_by_dp\(self, more\), expected \(self, data\);"
    with pytest.raises(ConfigError, match=said):
        slime_launch.hook()


# -- a command line as it is typed ---------------------------------------------------------------------------------------

GOOD = (
    "--use-r3-channel --r3-delivery direct --r3-store-bytes=100000000 --moe-router-load-balancing-type aux_loss --num-experts 8 "
    "--sglang-pp-size 1 --sglang-server-concurrency 512 --sglang-mem-fraction-static 0.8 --cuda-graph-impl none "
    "--sglang-enable-expert-distribution-metrics --update-weight-transport disk"
)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--r3-transpot host", "--r3-transpot is no option of r3channel; did you mean --r3-transport?"),
        ("--r3_delivery=direct", "--r3_delivery is no option of r3channel; did you mean --r3-delivery?"),
        ("--moe-router-load-balancing-type aux_loss sinkhorn", "sinkhorn']: chooses without asking for ids"),
        ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0: drops tokens"),
        ("--moe-router-fusion", "--moe-router-fusion: the fused router returns before the replay"),
        ("--sglang-pipeline-parallel-size 2", "--sglang-pp-size 2: each stage holds the ids of its own layers only"),
        ("--sglang-enable-hierarchical-cache", "[R3CHANNEL_ALLOW=external_cache overrides]"),
        ("--sglang-enable-hisparse", "--sglang-enable-hisparse: these settings were neither tested nor read"),
        ("--r3-store-bytes lots", "argument --r3-store-bytes: invalid int value: 'lots'"),
    ],
)  # fmt: skip
def test_a_fault_of_a_command_line_is_named(tmp_path: Path, words: str, said: str) -> None:
    (fault,) = arguments_found(tmp_path, f"{GOOD} {words}")
    assert said in fault
    if "lots" not in words:  # slime's own parser says that
        with pytest.raises(ConfigError, match=re.escape(said)):
            slime_command.run(["no_script.py", *GOOD.split(), *words.split()])


def arguments_found(folder: Path, words: str, version: str = "0.3.1") -> list[str]:
    """The faults that the doctor names in a job's arguments."""
    root = slime_checkout.write(folder, version)
    job = {"arguments": words.split(), "environment": {"R3CHANNEL_ALLOW": "pdmux"}}
    checks = [*slime_command.check_arguments(CheckContext(config=None, slime=str(root), **job))]
    assert {check.name for check in checks} == {"arguments"}
    return [check.found for check in checks if not check.ok]


def test_all_faults_of_a_command_line_come_at_once_but_what_is_allowed(tmp_path: Path) -> None:
    words = "--use-r3-chanel --sglang-pp-size 2 --sglang-enable-pdmux --use-routing-replay"
    found = arguments_found(tmp_path, f"{words} --r3-token-tensors x --update-weight-transport disk")
    said = "mean --use-r3-channel?|pp-size 2|nothing of r3channel happens|--num-experts|--use-routing-replay|--r3-token-tensors"
    assert [want for want, fault in zip(said.split("|"), found, strict=True) if want not in fault] == []
    assert arguments_found(tmp_path, GOOD) == []


def test_the_doctor_says_of_a_slime_that_it_was_only_read(tmp_path: Path) -> None:
    context = CheckContext(config=None, slime=str(slime_checkout.write(tmp_path, "0.4.0")))
    (read,) = (check for check in api_check.check_checkout(context) if check.name == "only read")
    assert "no job of it was run" in read.found and read.ok
    assert "expected --r3-ingest-port" in arguments_found(tmp_path, GOOD, "0.4.0")[0]


def test_who_cannot_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "sglang/srt/entrypoints/http_server.py"
    server.parent.mkdir(parents=True)
    server.touch()  # as of 0.5.15.post1: no begin_weight_update
    (tmp_path / "sglang/__init__.py").touch()
    asked = "--num-experts", "8", "--r3-weights"
    assert slime_arguments.refusals_of([*asked, "exact"]) == []  # 0.5.23 is installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (exact,), (colocated,), broadcast = (
        slime_arguments.refusals_of([*asked, way]) for way in ("exact", "colocated", "broadcast")
    )
    assert "--r3-weights exact" in exact and "no begin_weight_update" in colocated and not broadcast


def test_the_launchers_help_tells_nothing_that_slime_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert slime_launch.run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--r3-on-stale" in said and "--r3-token-tensors" not in said and "`mask`" not in said
    assert (
        "Default: what the job needs." in said and "Default: the time." in said and "Default: never." in said
    )


# -- what engines that a framework starts are told: enough to deliver, and nothing that the framework may not log --------------


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay(SPEC, TrainerLayout()) as relay:
        yield relay


def told(relay: Relay, token_file: str = "", *, nodes: int = 1) -> argparse.Namespace:
    """A framework's arguments behind `tell_engines`."""
    args = argparse.Namespace(
        r3_delivery="direct", r3_channel={"token_file": token_file, "interface": "127.0.0.1", "trace": ""}
    )
    args.r3_engine = engine_variables(relay, args, nodes=nodes)
    return args


@pytest.mark.parametrize("given", [True, False])
def test_an_engine_delivers_by_what_it_is_told(relay: Relay, tmp_path: Path, given: bool) -> None:
    path = str(tmp_path / "token") if given else ""
    if given:
        create_token(path)
    args = told(relay, path)
    token = read_token(args.r3_engine["R3CHANNEL_TOKEN_FILE"])
    texts = repr(args), str(vars(args)), json.dumps(vars(args)), pickle.dumps(args, protocol=0).decode()
    assert not [text for text in texts if token in text]
    with Engine(args.r3_engine["R3CHANNEL_RELAY_URL"], Path(args.r3_engine["R3CHANNEL_TOKEN_FILE"])):
        until(lambda: relay.samples.engines.counts()[0], "the engine said hello")


def test_in_band_nothing_is_opened(relay: Relay) -> None:
    args = argparse.Namespace(r3_delivery="inband", r3_channel={"interface": "10.0.0.1", "trace": "/run"})
    told = engine_variables(relay, args, nodes=2)
    assert (told["R3CHANNEL_METRICS_PORT"], told["R3CHANNEL_TRACE"]) == ("-1", "/run")
    assert not {"R3CHANNEL_DELIVERY", "R3CHANNEL_RELAY_URL"} & set(told)


def test_several_nodes_need_a_file_that_all_of_them_can_read(relay: Relay) -> None:
    with pytest.raises(ConfigError, match="on 2 nodes without --r3-token-file"):
        told(relay, nodes=2)


_HOLDER = """
from r3channel.transport.auth import token_in_memory
print(token_in_memory(), flush=True)
input()
"""


def test_a_token_in_memory_is_read_by_other_processes_and_is_gone_when_its_own_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        try:
            assert len(read_token(path)) == 64  # which refuses a mode other than 0600
        finally:
            holder.kill()
    assert not path.exists()


# -- a bare flag ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False], ids=["with the flag", "without it"])
def test_slime_without_the_hooks_ends_with_2_and_the_command_and_without_the_flag_imports_nothing_of_ours(
    tmp_path: Path, flag: bool
) -> None:
    """A script that imports slime's parser, started as if r3channel were installed: its .pth first."""
    program = "import sys, slime.utils.arguments\nprint('r3channel' in sys.modules, 'trained')\n"
    files = {"train_async.py": program, "site/r3channel.pth": PTH.read_text()}
    files |= dict.fromkeys(("slime/__init__.py", "slime/utils/__init__.py", "slime/utils/arguments.py"), "")
    files["sitecustomize.py"] = f"import site; site.addsitedir({str(tmp_path / 'site')!r})"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    asked = ("--num-rollout", "3", *["--use-r3-channel"] * flag)
    child = run(
        str(tmp_path / "train_async.py"), *asked, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT)))
    )
    assert (child.returncode, child.stdout) == ((2, "") if flag else (0, "False trained\n")), child.stderr
    if flag:
        assert "r3channel slime train_async.py" in child.stderr and len(child.stderr.splitlines()) == 1


def test_miles_with_the_flag_ends_with_2_and_its_own_command_unless_the_launcher_lifts_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = type(bare.refusal)()
    with pytest.raises(SystemExit) as ended:
        refusal.find_spec("miles.utils.arguments")
    assert ended.value.code == 2 and "r3channel miles train_async.py" in capsys.readouterr().err
    refusal.hooked = True
    assert refusal.find_spec("miles.utils.arguments") is None


def test_the_line_is_installed_beside_the_package() -> None:
    assert "r3channel.pth" in map(str, metadata.files("r3channel") or [])


# -- the GPU that the relay sends from --------------------------------------------------------------------------------------

ENGINES = {0: "first", 1: "first", 2: "second", 3: "second"}, (3, 2), ("1", "0")
"""As Ray and slime have it: bundle -> node, then the bundles of engines and their GPUs; trainers have bundles 0 and 1."""


def test_a_relay_shares_the_first_engines_gpu_on_its_node_by_the_number_that_its_process_counts() -> None:
    assert relay_gpu.shared_gpu(*ENGINES) == ("second", "1")
    assert [relay_gpu.device_of("5", visible) for visible in (None, "", "4, 5")] == [5, 5, 1]


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (lambda: relay_gpu.shared_gpu({}, (), ()), "starts no engine whose GPU"),
        (lambda: relay_gpu.device_of("0", "4,5"), r"sees the GPUs 4,5 .*expected 0"),
        (lambda: relay_gpu.check_own(16, 16), "a GPU of its own, and slime takes 16 of 16"),
        (lambda: slime_arguments.prepare(parsed("--r3-transport", "nccl", colocate=True)), "every GPU has a trainer"),
    ],
)  # fmt: skip
def test_a_gpu_that_the_relay_cannot_have_is_refused_by_name(look: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why}.*tcp"):
        look()


def test_an_engine_that_leaves_the_relay_no_memory_of_their_gpu_is_refused_with_the_number() -> None:
    args = slime_arguments.prepare(parsed("--r3-transport", "nccl"))

    def check(fraction: float | None, receivers: int) -> None:
        args.sglang_mem_fraction_static = fraction
        relay_gpu.check_room(args, 80 << 30, receivers=receivers)

    for leaves in ((None, 64), (0.88, 64), (0.98, 4)):
        check(*leaves)
    needed = relay_gpu_bytes(args.r3_channel["bucket_bytes"], receivers=64)
    said = rf"0.98 leaves 1.7 of the 86 GB .*takes about {needed / 1e9:.1f}; .*most 0.95"
    with pytest.raises(ConfigError, match=said):
        check(0.98, 64)
