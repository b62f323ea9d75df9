"""The embedded mode around the engine: environment, shims, the tiny model, a server that ends with its starter, a user's loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.embedded.model import write_model
from examples.embedded.sglang import EngineOptions, EngineServer, environment
from r3channel.errors import ConfigError, UsageError
from tests.engine.client import post, serving
from tests.support.children import printed, said_by
from tests.support.waits import ENGINE_S, SOON_S, until

SHIMS = Path(__file__).parents[2] / "examples" / "embedded" / "shims"
HOOKED = "import sys; print([type(f).__name__ for f in sys.meta_path].count('_DeclareTorchvisionOperators'))"


def test_the_environment_of_a_child_is_a_fixed_point() -> None:
    once = environment({"PATH": "/bin", "PYTHONPATH": "/elsewhere"}, r3channel=True)
    assert environment(once, r3channel=True) == once
    assert once["PYTHONPATH"].split(os.pathsep)[0] == str(SHIMS)
    assert once["PYTHONPATH"].endswith("/elsewhere")


def test_shims_act_in_embedded_children_only() -> None:
    assert said_by(HOOKED, **environment()).strip() == "1"
    assert said_by(HOOKED, **environment() | {"R3DEMO_EMBEDDED": "0"}).strip() == "0"


def test_another_sitecustomize_still_runs_and_a_copy_of_the_shims_declares_once(tmp_path: Path) -> None:
    copy = (SHIMS / "sitecustomize.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(copy + "print('the other one')\n")
    env = environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert said_by(HOOKED, **env).splitlines() == ["the other one", "1"]


def test_the_model_is_written_once_and_again_when_its_shape_changes(tmp_path: Path) -> None:
    weights = write_model(tmp_path, layers=2, experts=8, top_k=2) / "model.safetensors"
    first = (weights.stat().st_mtime_ns, weights.read_bytes())
    write_model(tmp_path, layers=2, experts=8, top_k=2)
    assert weights.stat().st_mtime_ns == first[0]
    write_model(tmp_path, layers=2, experts=8, top_k=2, seed=1)
    assert weights.read_bytes() != first[1]
    write_model(tmp_path, layers=2, experts=8, top_k=2)
    assert weights.read_bytes() == first[1]


def test_a_server_that_was_not_started_says_so(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        EngineServer(EngineOptions(model=tmp_path))
    server = EngineServer(EngineOptions(model=model_dir))
    with pytest.raises(UsageError, match="start"):
        server.wait_ready(1)
    server.close()
    server.close()
    with pytest.raises(UsageError):
        server.start()


@pytest.mark.long
@pytest.mark.engine
def test_the_whole_server_ends_when_its_starter_is_killed(model_dir: Path) -> None:
    program = (
        "import time; from examples.embedded.sglang import EngineOptions, EngineServer\n"
        f"server = EngineServer(EngineOptions(model={str(model_dir)!r})).start()\n"
        "print(server.pid, flush=True); time.sleep(120)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        until(lambda: len(server.children(recursive=True)) >= 2, "its processes", limit_s=ENGINE_S)
        family = [server, *server.children(recursive=True)]
    finally:
        starter.kill()
        starter.wait(SOON_S)
    _, alive = psutil.wait_procs(family, timeout=SOON_S)
    assert alive == []


@pytest.mark.engine
def test_a_paused_engine_leaves_the_cores_to_the_trainers(engine_server: EngineServer) -> None:
    post(engine_server.url + "/pause_generation", {"mode": "in_place"})
    try:
        scheduler = max(psutil.Process(engine_server.pid).children(), key=cpu_s)
        begin_s = cpu_s(scheduler)
        time.sleep(4)
        used_s = cpu_s(scheduler) - begin_s
    finally:
        post(engine_server.url + "/continue_generation", {})
    assert used_s < 1, f"{scheduler.name()} used {used_s:.1f} s of CPU in 4 s"


def cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


@pytest.mark.long
@pytest.mark.engine
def test_an_own_loop_of_two_engines_two_turns_and_a_discard_runs(model_dir: Path, engine_url: str) -> None:
    with serving(model_dir) as second:
        said = printed("examples/05_own_loop.py", str(model_dir), engine_url, second.url, OMP_NUM_THREADS="1")
    steps = re.findall(r"step (\d): 4 samples, 88 tokens, live router agrees (\d\.\d+)", said)
    assert [number for number, _ in steps] == ["0", "1"]
    # Engines and trainer hold the same float32 weights in step 0: rows of other tokens would agree by chance, 0.06.
    assert float(steps[0][1]) > 0.99 and float(steps[1][1]) > 0.9
