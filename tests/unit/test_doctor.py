"""The doctor says what is missing and what to do, and its exit status agrees."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from examples.embedded.sglang import environment
from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.tools import doctor
from r3channel.tools.doctor import Check
from r3channel.wire.frame import encode_frame
from r3channel.wire.hello import Hello


def ask(imports: str, *, timeout_s: float = 30.0) -> Check:
    return doctor.ask("names", imports, timeout_s=timeout_s)


def test_an_installed_package_is_named_with_its_version() -> None:
    check = doctor.check_distribution("numpy", remedy="pip install numpy")
    assert check.ok
    assert check.line().split()[:2] == ["ok", "numpy"]


def test_a_missing_package_fails_and_says_what_to_do() -> None:
    check = doctor.check_distribution("r3channel-not-there", remedy="pip install it")
    assert check.line().startswith("FAIL")
    assert check.line().endswith("not installed; pip install it")


def test_an_old_python_fails() -> None:
    assert not doctor.check_python((3, 10, 18)).ok
    assert doctor.check_python((3, 11, 0)).ok


def test_a_free_port_is_found() -> None:
    assert doctor.check_port(0).ok


def test_a_taken_port_fails_by_number() -> None:
    with socket.socket() as taken:
        taken.bind((doctor.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in doctor.check_port(port).line()
        assert not doctor.check_port(port).ok


def test_an_engine_that_is_not_there_fails_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine(engines=["http://127.0.0.1:9"], timeout_s=5) == 1
    assert "engine http://127.0.0.1:9" in capsys.readouterr().out


def test_an_impossible_port_fails() -> None:
    assert not doctor.check_port(99_999).ok


def test_a_store_that_may_outgrow_the_memory_is_told(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 2097152 kB\n")
    enough = doctor.check_memory(ChannelConfig(store_bytes=2 << 30), meminfo=meminfo)
    assert enough.ok and "room for the 2.0 GiB of rows" in enough.found
    lacking = doctor.check_memory(ChannelConfig(store_bytes=3 << 30), meminfo=meminfo)
    assert lacking.ok, "it is no fault of this machine"
    assert (
        "2.0 GiB of memory are free, and 3.0 GiB are needed" in lacking.found
        and "lower store_bytes" in lacking.found
    )


def test_a_child_that_finds_no_problem_is_well() -> None:
    assert ask("check = lambda: []; print('noise')").ok


def test_a_childs_problems_are_in_the_line() -> None:
    check = ask("check = lambda: ['TopK.forward is gone']")
    assert not check.ok
    assert "TopK.forward is gone" in check.line()


def test_a_child_that_breaks_says_why() -> None:
    check = ask("import no_such_upstream as check")
    assert not check.ok
    assert "no_such_upstream" in check.found


def test_a_child_that_hangs_ends_by_the_deadline() -> None:
    check = ask("import time; time.sleep(60)", timeout_s=0.5)
    assert not check.ok
    assert "0.5 s" in check.found


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


def test_an_engine_is_asked_directly_whatever_proxy_the_environment_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stock(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"meta_info": {}}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Stock) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert doctor.examine(engines=[f"http://127.0.0.1:{server.server_port}"], timeout_s=5) == 1
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
        assert doctor.examine(engines=[f"http://127.0.0.1:{server.server_port}"], timeout_s=5) == status
        server.shutdown()
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
def test_a_role_is_asked_for_what_it_needs_and_nothing_else(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
