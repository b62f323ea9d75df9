"""The doctor says what is missing and what to do, and its exit status agrees."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded.sglang import environment
from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.tools import doctor, network
from r3channel.tools.doctor import Check
from r3channel.tools.network import Interface
from r3channel.wire.frame import encode_frame
from r3channel.wire.hello import Hello


def ask(imports: str, *, timeout_s: float) -> Check:
    return doctor.ask("names", imports, timeout_s=timeout_s)


def test_a_package_is_named_with_its_version_or_with_what_to_do_and_an_old_python_fails() -> None:
    there = doctor.check_distribution("numpy", remedy="pip install numpy")
    assert there.ok and there.line().split()[:3] == ["ok", "numpy", metadata.version("numpy")]
    line = doctor.check_distribution("r3channel-not-there", remedy="pip install it").line()
    assert line.startswith("FAIL") and line.endswith("not installed; pip install it")
    assert not doctor.check_python((3, 10, 18)).ok and doctor.check_python((3, 11, 0)).ok


def test_a_free_port_is_found_and_a_taken_or_impossible_one_fails_by_number() -> None:
    assert doctor.check_port(0).ok and not doctor.check_port(99_999).ok
    with socket.socket() as taken:
        taken.bind((doctor.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in doctor.check_port(port).line()
        assert not doctor.check_port(port).ok


def test_an_engine_that_is_not_there_fails_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine(engines=["http://127.0.0.1:9"], timeout_s=5) == 1
    assert "engine http://127.0.0.1:9" in capsys.readouterr().out


def test_a_store_that_may_outgrow_the_memory_is_told(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 2097152 kB\n")
    enough = doctor.check_memory(ChannelConfig(store_bytes=2 << 30), meminfo=meminfo)
    assert enough.ok and "room for the 2.0 GiB of rows" in enough.found
    lacking = doctor.check_memory(ChannelConfig(store_bytes=3 << 30), meminfo=meminfo)
    assert lacking.ok, "it is no fault of this machine"
    assert "2.0 GiB of memory are free, and 3.0 GiB are needed" in lacking.found
    assert "lower store_bytes" in lacking.found


@pytest.mark.parametrize(
    ("imports", "said", "timeout_s"),
    [
        ("check = lambda: []; print('noise')", "", 30.0),
        ("check = lambda: ['TopK.forward is gone']", "TopK.forward is gone", 30.0),
        ("import no_such_upstream as check", "no_such_upstream", 30.0),
        ("import time; time.sleep(60)", "0.5 s", 0.5),
    ],
)
def test_a_child_is_well_or_its_problem_is_in_the_line(imports: str, said: str, timeout_s: float) -> None:
    check = ask(imports, timeout_s=timeout_s)
    assert check.ok == (not said) and said in check.line()


def test_the_exit_status_is_1_when_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Check(name="torch", ok=False, found="not installed", remedy="install it")

    def found(**_: object) -> Iterator[Check]:
        yield Check(name="ray", ok=True, found="2.60.0")
        yield bad

    monkeypatch.setattr(doctor, "checks", found)
    assert cli.main(["doctor"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(doctor, "checks", lambda **_: iter([Check(name="ray", ok=True, found="2.60.0")]))
    assert cli.main(["doctor"]) == 0


@pytest.mark.engine
def test_the_embedded_environment_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 0, capsys.readouterr().out
    found = {line[6:28].strip(): line[29:] for line in capsys.readouterr().out.splitlines()}
    assert {"sglang", "megatron-core", "ray", "torch"} <= set(found)
    assert found["SGLang hooks"] == found["Megatron names"] == "all found"


def test_sglang_is_not_asked_where_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    check = doctor.check_hooks(timeout_s=0)
    assert check.ok and check.found == "not looked for: SGLang is not imported without a GPU"
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    assert doctor.check_hooks(timeout_s=0).found == "no answer within 0 s"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("r3channel 0.")


@contextmanager
def answering(answers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The address of an engine that gives these, by path."""

    class Engine(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_engine_is_asked_directly_whatever_proxy_the_environment_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering({"/generate": {"meta_info": {}}, "/server_info": {}}) as url:
        assert doctor.examine(engines=[url], timeout_s=5) == 1
    assert "answers without routing" in capsys.readouterr().out


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

    with answering(answers) as url:
        assert doctor.examine(engines=[url], timeout_s=5) == status
    found = {line[6:28].strip(): line[29:] for line in capsys.readouterr().out.splitlines()}
    assert found["settings tested"] == "--tp-size 2"
    assert found["settings by reading"] == "--ep-size 8"
    assert found["settings refused"].startswith("--pp-size 2")
    assert found["settings not read"] == "enable_hisparse"


ROLES = {
    "relay": (
        {"torch", "ray", "numba", "pybase64", "h11", "store_dir"},
        {"sglang", "megatron-core", "SGLang hooks"},
    ),
    "engine": ({"sglang", "SGLang plug-in", "SGLang hooks"}, {"ray", "megatron-core", "numba", "store_dir"}),
    "trainer": (
        {"megatron-core", "mbridge", "Megatron names"},
        {"sglang", "h11", "store_dir", "SGLang hooks"},
    ),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_asked_for_what_it_needs_only(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, imports: str, **options: object) -> Check:
        return Check(name=name, ok=True, found="asked")

    monkeypatch.setattr(doctor, "ask", asked)
    found = {check.name for check in doctor.checks(role=role, ports=(), timeout_s=1, channel=ChannelConfig())}
    there, elsewhere = ROLES[role]
    assert there <= found and not elsewhere & found


def test_what_only_helps_is_told_with_its_price_and_is_no_fault() -> None:
    check = doctor.check_helper("r3channel-not-there", loss="all is slower")
    assert check.ok and "all is slower; pip install r3channel-not-there" in check.line()


def test_a_store_that_cannot_hold_what_it_may_be_given_is_a_fault(tmp_path: Path) -> None:
    here = doctor.check_store(ChannelConfig(store_dir=str(tmp_path / "new"), store_bytes=64 << 20))
    assert here.ok and "free" in here.found
    assert not doctor.check_store(ChannelConfig(store_dir=str(tmp_path), store_bytes=1 << 60)).ok
    (tmp_path / "file").touch()
    assert "cannot be written" in doctor.check_store(ChannelConfig(store_dir=str(tmp_path / "file"))).line()


# -- the network: what is there, what a relay binds of it, and what NCCL is told -------------------------------------------

LO = Interface("lo", True, ("127.0.0.1",), None)
ETH = Interface("eth0", True, ("10.0.0.5",), 100_000)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_interfaces_are_read_with_state_speed_and_addresses(tmp_path: Path) -> None:
    write(tmp_path / "eth0", ifindex="4", operstate="up", flags="0x1003", speed="25000")
    write(tmp_path / "lo", ifindex="1", operstate="unknown", flags="0x9")
    write(tmp_path / "veth", ifindex="2", operstate="down", flags="0x1002", speed="-1")
    found = network.interfaces(tmp_path, addresses_of=lambda name: ("10.0.0.5",) if name == "eth0" else ())
    assert found == [
        Interface("lo", True, (), None),
        Interface("veth", False, (), None),
        Interface("eth0", True, ("10.0.0.5",), 25_000),
    ]


def test_the_loopback_interface_of_this_machine_is_found() -> None:
    (lo,) = [one for one in network.interfaces() if one.name == "lo"]
    assert lo.up and lo.addresses[0] == "127.0.0.1"


def test_what_nccl_is_told_is_said() -> None:
    told = {"NCCL_SOCKET_IFNAME": "=ens1f0", "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring"}
    assert [network.check_nccl(found).found for found in (told, {})] == [
        "NCCL_SOCKET_IFNAME==ens1f0, NCCL_IB_DISABLE=1. NCCL_DEBUG=INFO prints what it takes",
        "it chooses by itself; NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_CONF_FILE are not set. "
        "NCCL_DEBUG=INFO prints what it takes",
    ]


def test_loopback_is_a_fault_with_several_machines() -> None:
    found = network.interfaces()
    alone = network.check_interface(ChannelConfig(), found, nodes=1)
    assert alone.ok and alone.found == "lo (127.0.0.1)"
    check = network.check_interface(ChannelConfig(), found, nodes=2)
    assert not check.ok and "2 nodes" in check.line() and "R3CHANNEL_INTERFACE" in check.line()


def test_an_interface_without_a_route_is_a_fault() -> None:
    assert not network.check_interface(ChannelConfig(interface="no.such.host.invalid"), [], nodes=1).ok


def test_another_machines_address_is_named_with_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    check = network.check_interface(ChannelConfig(interface="10.0.0.9"), [LO, ETH], nodes=2)
    assert check.ok and check.found.startswith("eth0 (10.0.0.5), the route to 10.0.0.9")


def test_the_command_prints_them_and_reads_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "checks", lambda *, channel, nodes, **_: network.check_network(channel, {}, nodes=nodes)
    )
    file = tmp_path / "channel.toml"
    file.write_text('interface = "no.such.host.invalid"\n')
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "no route to interface no.such.host.invalid" in capsys.readouterr().out
    file.write_text("relais = 2\n")
    assert cli.main(["doctor", "--config", str(file)]) == 2
