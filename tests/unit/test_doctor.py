"""What is missing or wrong on this machine is said with what to do: by the doctor, and by a run before any process starts."""

from __future__ import annotations

import base64
import importlib
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.async_grpo.options import packages
from examples.embedded.model import ModelShape, config_of
from examples.embedded.sglang import environment
from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.engine import probe
from r3channel.errors import ConfigError, EngineUnavailable
from r3channel.integrations import preflight
from r3channel.model.spec import RoutingSpec
from r3channel.observe.check import Check, CheckContext
from r3channel.plan.layout import TrainerLayout
from r3channel.tools import doctor, extras
from r3channel.transport import network
from r3channel.transport.network import Interface
from r3channel.wire.frame import encode_frame
from r3channel.wire.hello import Hello
from tests.support.children import run, said_by
from tests.support.http_answers import Answering
from tests.support.waits import ENGINE_S, PROGRAM_S, SOON_S


def context(config: ChannelConfig | None = None, **options: Any) -> CheckContext:
    return CheckContext(config=config or ChannelConfig(), **options)


def test_a_package_is_named_with_its_version_its_remedy_or_its_price_and_an_old_python_fails() -> None:
    there = extras.check_distribution("numpy")
    assert there.ok and there.line().split()[:3] == ["ok", "numpy", metadata.version("numpy")]
    line = extras.check_distribution("r3channel-not-there").line()
    assert line.startswith("FAIL") and line.endswith("not installed; pip install r3channel-not-there")
    helper = extras.check_distribution("r3channel-not-there", loss="all is slower")
    assert helper.ok and "all is slower; pip install r3channel-not-there" in helper.line()
    assert extras.check_python((3, 11, 0), gpu=False).ok
    assert not extras.check_python((3, 10, 18), gpu=False).ok


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((preflight.LOOPBACK, 0)) as held:
        yield held.getsockname()[1]


def test_a_free_port_is_found_and_a_taken_or_impossible_one_fails_by_number(taken: int) -> None:
    found = list(preflight.check_ports(context(ports=[99_999, taken])))
    assert [check.ok for check in found] == [True, False, False]
    assert re.search(rf"^FAIL  port +{taken} cannot be bound .*free one$", found[-1].line())


def test_a_store_that_may_outgrow_the_memory_is_told(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 2097152 kB\n")
    enough = next(preflight.check_memory(context(ChannelConfig(store_bytes=2 << 30)), meminfo=meminfo))
    assert enough.ok and "room for the 2.0 GiB of rows" in enough.found
    lacking = next(preflight.check_memory(context(ChannelConfig(store_bytes=3 << 30)), meminfo=meminfo))
    assert lacking.ok, "it is no fault of this machine"
    assert "2.0 GiB of memory are free, and 3.0 GiB are needed" in lacking.found
    assert "lower store_bytes" in lacking.found


@pytest.mark.parametrize(
    ("imports", "said", "timeout_s"),
    [
        ("check = lambda: []; print('noise')", "", PROGRAM_S),
        ("check = lambda: ['TopK.forward is gone']", "TopK.forward is gone", PROGRAM_S),
        ("import no_such_upstream as check", "no_such_upstream", PROGRAM_S),
        ("import time; time.sleep(60)", "0.5 s", 0.5),
    ],
)
def test_a_child_is_well_or_its_problem_is_in_the_line(imports: str, said: str, timeout_s: float) -> None:
    check = context(timeout_s=timeout_s).ask("names", imports)
    assert check.ok == (not said) and said in check.line()


@pytest.mark.long
@pytest.mark.engine
def test_the_embedding_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--timeout-s", str(ENGINE_S)]) == 0, capsys.readouterr().out
    found = {line[6:28].strip(): line[29:] for line in capsys.readouterr().out.splitlines()}
    assert {"sglang", "megatron-core", "ray", "torch"} <= set(found)
    assert found["SGLang hooks"] == found["Megatron names"] == "all found"


def test_sglang_is_not_asked_where_it_cannot_be_imported() -> None:
    check = next(probe.check_hooks(context(gpu=False, environment={})))
    assert check.ok and check.found == "not looked for: SGLang is not imported without a GPU"
    for gpu, variables in ((True, {}), (False, {"SGLANG_USE_CPU_ENGINE": "1"})):
        asked = context(gpu=gpu, environment=variables, timeout_s=0)
        assert next(probe.check_hooks(asked)).found == "no answer within 0 s"


def answering(answers: dict[str, dict[str, Any]]) -> Answering:
    """An engine that gives these, by path."""
    return Answering(lambda path, _: (200, json.dumps(answers[path]).encode()))


def test_an_engine_is_asked_directly_whatever_proxy_is_named_and_what_is_none_fails_with_its_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering({"/generate": {"meta_info": {}}, "/server_info": {}}) as engine:
        assert doctor.examine(context(engines=[engine.url], timeout_s=SOON_S)) == 1
    assert "answers without routing" in capsys.readouterr().out
    with Answering(lambda *_: (1000, b"")) as other:  # no status of HTTP
        for url in ("http://127.0.0.1:9", other.url):
            asked = context(engines=[url], engine_arguments=["--tp-size", "2"], timeout_s=SOON_S)
            assert doctor.examine(asked) == 1
            said = capsys.readouterr().out
            assert f"engine {url}" in said and "--tp-size 2" in said, "both subjects"


def test_engines_are_probed_at_once_and_a_busy_one_is_not_dead(caplog: pytest.LogCaptureFixture) -> None:
    meeting, reply = threading.Barrier(2), {"meta_info": {}}

    class Both(dict[str, Any]):
        def __getitem__(self, path: str) -> Any:
            meeting.wait(SOON_S)  # until the other is asked too
            return reply

    nobody = "http://127.0.0.1:9"
    here = ("127.0.0.1", 0)
    with answering(Both()) as one, answering(Both()) as other, socket.create_server(here) as silent:
        busy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        first, second = one.url, other.url
        assert preflight.probe_all([busy, first, second], timeout_s=5) == {first: reply, second: reply}
        assert f"{busy} has not answered" in caplog.text
    with pytest.raises(EngineUnavailable, match=nobody) as raised:
        preflight.probe_all([nobody], timeout_s=SOON_S)
    assert raised.value.engines == (nobody,)


@pytest.mark.parametrize(("allowed", "status"), [((), 1), (("pp", "unread"), 0)])
def test_an_engines_settings_are_judged_and_refused_ones_are_a_fault_unless_allowed(
    allowed: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=8, top_k=2)
    hello = Hello(
        engine="e", boot_id=1, spec_digest=spec.digest, spec=spec.to_dict(), sglang="0.5.23", r3channel="0",
        hooks=("a",), delivery="inband", codec="auto", allowed=allowed, unread=("enable_hisparse",),
    )  # fmt: skip
    frame = encode_frame(spec, expert_ids_TLK=np.array([[[1, 2]], [[3, 4]]], np.uint8))
    routing = base64.b64encode(hello.to_bytes() + frame).decode()
    answers = {
        "/generate": {"meta_info": {"routed_experts": routing}},
        "/server_info": {"pp_size": 2, "tp_size": 2, "ep_size": 8, "host": "::", "enable_hisparse": True},
    }

    with answering(answers) as engine:
        assert doctor.examine(context(engines=[engine.url], timeout_s=SOON_S)) == status
    found = {line[6:28].strip(): line[29:] for line in capsys.readouterr().out.splitlines()}
    assert found["settings tested"] == "--tp-size 2"
    assert found["settings by reading"] == "--ep-size 8"
    assert found["settings refused"].startswith("--pp-size 2")
    assert found["settings not read"] == "enable_hisparse"


@pytest.mark.parametrize(
    ("typed", "well", "said"),
    [
        ("--tp 2 --ep-size=2", True, "--tp-size 2 tested: in-band and direct|--ep-size 2 tested: with experts on both ranks"),
        ("--page-size 64", True, "--page-size 64 by reading: rows are kept by KV slot"),
        ("--pipeline-parallel-size 2", False, "--pp-size 2 refused: each stage holds .*; R3CHANNEL_ALLOW=pp overrides"),
        ("--enable-pdmux", True, "--enable-pdmux refused: decode passes run"),
        ("--enable-hisparse", False, "--enable-hisparse refused: these settings were neither tested nor read"),
        ("--pp-sice 2", False, "--pp-sice 2 no setting of the SGLang that is installed here; did you mean --pp-size?"),
        (
            "--enable-dp-attention --speculative-algorithm EAGLE --moe-runner-backend flashinfer_cutlass", False,
            "--enable-dp-attention tested|--speculative-algorithm EAGLE tested|--moe-runner-backend flashinfer_cutlass by read|"
            "together refused: moe_runner.*=a2a overrides|together refused: --speculative-algorithm.*=speculative overrides",
        ),
    ],
)  # fmt: skip
def test_settings_that_are_typed_are_told_tested_read_or_refused_and_why(
    typed: str, well: bool, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R3CHANNEL_ALLOW", "pdmux")
    assert cli.main(["doctor", "--engine-arguments", typed]) == (not well)
    lines = [re.sub(r" +", " ", line[6:]) for line in capsys.readouterr().out.splitlines()]
    assert all(re.match(want, line) for want, line in zip(said.split("|"), lines, strict=True)), lines


ROLES = {
    "relay": ({"torch", "ray", "numba", "pybase64", "h11", "journal"}, {"sglang", "megatron-core", "SGLang hooks"}),
    "engine": ({"sglang", "SGLang plug-in", "SGLang hooks"}, {"ray", "megatron-core", "numba", "journal"}),
    "trainer": ({"megatron-core", "mbridge", "Megatron names"}, {"sglang", "h11", "journal", "SGLang hooks"}),
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_asked_for_what_it_needs_only(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckContext, "ask", lambda _, name, __: Check(name=name, ok=True, found="asked"))
    found = {check.name for check in doctor.findings(context(role=role))}
    there, elsewhere = ROLES[role]
    assert there <= found and not elsewhere & found


def test_each_check_of_the_list_is_there_and_its_room_is_imported_when_it_is_run() -> None:
    assert all(callable(getattr(importlib.import_module(room), name)) for _, room, name in doctor.CHECKS)
    # The command line itself says how to get a package.
    lazy = {room for _, room, _ in doctor.CHECKS} - {extras.__name__}
    program = f"import sys, r3channel.cli, r3channel.tools.doctor; print({lazy!r} & set(sys.modules))"
    assert said_by(program) == "set()\n"


# -- the network: what is there, what a relay binds of it, and what NCCL is told -------------------------------------------

LO = Interface("lo", True, ("127.0.0.1",), None)
ETH = Interface("eth0", True, ("10.0.0.5",), 100_000)


def test_interfaces_are_listed_with_state_speed_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(ip: str, family: int) -> SimpleNamespace:
        return SimpleNamespace(address=ip, family=family)

    eth = [found("fe80::1%eth0", socket.AF_INET6), found("0a:00", 17), found("10.0.0.5", socket.AF_INET)]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"veth": [], "eth0": eth, "gone": []})
    states = {"veth": SimpleNamespace(isup=False, speed=0), "eth0": SimpleNamespace(isup=True, speed=25_000)}
    monkeypatch.setattr("psutil.net_if_stats", lambda: states)
    assert network.interfaces() == [
        Interface("veth", False, (), None), Interface("eth0", True, ("10.0.0.5", "fe80::1"), 25_000)
    ]  # fmt: skip


def test_interfaces_are_unlisted_without_psutil_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    first, interface, _ = network.check_network(context())
    assert first.ok and "psutil is not installed" in first.found and interface.found == "127.0.0.1"


def test_loopback_is_a_fault_with_several_machines_and_no_route_with_one() -> None:
    found = network.interfaces()
    alone = network.check_interface("127.0.0.1", found, nodes=1)
    assert alone.ok and alone.found == "lo (127.0.0.1)"
    check = network.check_interface("127.0.0.1", found, nodes=2)
    assert not network.check_interface("localhost", found, nodes=2).ok
    assert not check.ok and "2 nodes" in check.line() and "R3CHANNEL_INTERFACE" in check.line()
    assert not network.check_interface("no.such.host.invalid", found, nodes=1).ok


@pytest.mark.parametrize("wrong", ["0.0.0.0", "::", "", "none.such.invalid", "10.0.0.0/99", "198.18.0.0/15"])
def test_what_no_peer_can_be_told_is_no_interface(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"interface '?{wrong}"):
        network.local_address(wrong)
    assert network.local_address("127.0.0.2") == "127.0.0.2"


def test_another_machines_address_is_named_with_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    check = network.check_interface("10.0.0.9", [LO, ETH], nodes=2)
    assert check.ok and check.found.startswith("eth0 (10.0.0.5), the route to 10.0.0.9")
    relay = network.check_interface("10.0.0.9", [LO, ETH], nodes=2, relay=True)
    assert not relay.ok and relay.found == "10.0.0.9 is no address of this machine, and a relay binds it"


def test_the_command_prints_them_and_reads_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [listed for listed in doctor.CHECKS if "check_network" in listed]
    monkeypatch.setattr(doctor, "CHECKS", alone)
    file = tmp_path / "channel.toml"
    file.write_text('interface = "no.such.host.invalid"\n')
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "no route to interface no.such.host.invalid" in capsys.readouterr().out
    file.write_text("relais = 2\n")
    assert cli.main(["doctor", "--config", str(file)]) == 2


# -- before any process starts: the option, what was seen, what to give instead --------------------------------------------


def faults_of(config: ChannelConfig, *, ranks: int = 4) -> str:
    return "\n".join(filter(None, preflight.of_channel(config, ranks=ranks)))


def test_the_demo_says_all_that_is_wrong_at_once_and_starts_nothing(tmp_path: Path, taken: int) -> None:
    (file := tmp_path / "file").touch()
    options = f"--layout dp=3,tp=5 --samples 12 --report {file}/report --record {file}/record --r3-journal {file}/store"
    asked = f"-m examples.demo {options} --r3-metrics-port {taken - 2}"
    done = run(*asked.split(), TMPDIR=str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    said = done.stderr
    assert "--layout dp=3,tp=5: tp=5 does not divide the model's 4 attention heads" in said
    metrics_port = "--r3-metrics-port (R3CHANNEL_METRICS_PORT), of trainer rank 1"
    assert f"{metrics_port}: port {taken} cannot be bound" in said
    assert f"--r3-journal (R3CHANNEL_JOURNAL): {file} cannot be written (Not a directory)" in said
    for option in ("--report", "--record", "--r3-trace (R3CHANNEL_TRACE)"):
        assert f"{option}: {file} cannot be written (Not a directory); give a folder that can" in said
    assert list(tmp_path.iterdir()) == [file]
    lines = (line for line in said.splitlines() if line.startswith("import time:"))
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "r3channel.integrations.preflight" in imported
    assert not imported & {"ray", "torch", "sglang"}  # they take several seconds


def test_every_process_that_serves_a_page_needs_its_port(taken: int) -> None:
    config = ChannelConfig(metrics_port=taken - 4)  # its neighbours may be held by others
    named = f"of trainer rank 3: port {taken} cannot be bound"
    assert faults_of(config).count(named) == 1 == faults_of(config).count(f"port {taken} ")
    assert f"port {taken} " not in faults_of(config, ranks=3)
    assert "--r3-ingest-port (R3CHANNEL_INGEST_PORT): port" in faults_of(ChannelConfig(ingest_port=taken))


def test_a_folder_is_written_in_earnest_and_nothing_stays(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    new = tmp_path / "new" / "deeper"
    assert preflight.folder("--report", new) == "" == preflight.folder("--report", "")
    assert "cannot be written" in preflight.folder("--report", file / "below")
    # though a superuser may be told that it can
    assert "cannot be written" in preflight.folder("--report", "/proc/1/x")
    assert "needed; give a folder with more room" in preflight.folder("--report", new, room_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == [file]
    config = ChannelConfig(journal=str(file), metrics_dir=f"{file}/a", token_file=f"{file}/b/token")
    named = [line.split()[0] for line in faults_of(config).splitlines()]
    assert named == ["--r3-journal", "--r3-metrics-dir", "--r3-token-file"]


def test_a_package_in_a_version_that_was_not_read_is_named() -> None:
    assert list(packages(["numpy"], {})) == []
    (said,) = packages(["numpy"], {"numpy": ("0.1",)})
    assert said.startswith("numpy ") and said.endswith("was not read, only 0.1; pip install numpy==0.1")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=2,tp=2", ""),
        ("tp=4", ""),
        ("tp=3", "tp=3 does not divide the model's 4 attention heads in 2 groups; give a tp that does"),
        ("dp=3,ep=3", "ep=3 does not divide the model's 128 experts"),
        ("pp=3", "4 layers do not divide into pp=3 stages"),
    ],
)
def test_a_layout_is_held_against_its_model(layout: str, said: str) -> None:
    found = preflight.layout("--layout", TrainerLayout.parse(layout), config_of(ModelShape()))
    assert found.startswith(f"--layout: {said}" if said else "") and bool(found) == bool(said)
