"""`make gpu`: every check of the GPU paths on this machine, one line each, all of it in gpu.json; nine minutes at most, and ten
for those that are run by their names: whole servers, several processes.

    python -m tests.gpu.run --device cuda [--wheels FOLDER] [--out gpu.json] [NAME ...]
    make gpu WHEELS=FOLDER ARGS="imports engine"        and so on, a part after the other, each with a file of its own

Each check is a process of its own, so that one that hangs, aborts or patches takes nothing with it. With `--device cpu` the same
checks run in small, so that the command works when a GPU is at hand. Nothing but Python is needed to start: what is missing is
named. A row has what was measured, whatever its verdict: `passed`; `missed`, right but beyond a limit of time; `failed`, wrong,
too late, or ended by an error, whose traceback it has; `not run`. The exit status is 1 where a check failed, or could not run
here for want of a package or of any GPU; not where one is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.facts import ANSWER, Facts
from tests.gpu.wheels import RELEASE
from tests.support.waits import busy

ROOT = Path(__file__).parents[2]
LIMIT_S = {False: 540.0, True: 600.0}
"""What a run has on a GPU, by whether it has checks that run by their names: one alone has all of it."""
PACKAGE = ("numpy", "xxhash", "lz4", "torch")
_TAIL = 6000
"""What is kept of the errors of a check that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A function of a module of `tests.gpu.checks`."""

    name: str
    about: str
    needs: tuple[str, ...] = PACKAGE
    """Modules that must be installed."""
    only_on: str = ""
    """The device without which it says nothing."""
    limit_s: float
    """It has so much in any case, and what those before it left."""
    apart: bool = False
    """On a GPU it runs by its name alone; ten minutes for all of these."""
    server: bool = False
    """It starts servers of the release that slime's image has."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    about: str
    status: str
    """passed, missed, failed, not run."""
    why: str = ""
    unfit: bool = False
    """This machine lacks what each machine for this command must have."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    traceback: str = ""

    def line(self) -> str:
        figures = ", ".join(f"{name}: {value}" for name, value in self.figures.items())
        parts = [self.why, figures if len(figures) <= 300 else f"{len(self.figures)} figures", *self.left_out]
        told = "; ".join(part for part in parts if part)
        return f"{self.name:<14} {self.status:<11} {self.seconds:5.1f} s  {self.about}: {told}"


SGLANG, MEGATRON = (*PACKAGE, "sglang", "h11"), (*PACKAGE, "megatron.core")
SERVER: dict[str, Any] = {
    "needs": (*SGLANG, "sgl_kernel", "fastapi", "openai", "uvicorn", "pytest"), "apart": True, "server": True,
}  # fmt: skip
LOOP: dict[str, Any] = {
    **SERVER,
    "needs": (*SERVER["needs"], "ray", "mbridge", "megatron.core", "prometheus_client"),
}
CHECKS = (
    Check(name="replay", about="Megatron, world of one", needs=MEGATRON, limit_s=80),
    Check(name="capture", about="FrameCapturer under SGLang's TopK", needs=SGLANG, limit_s=60),
    Check(name="capture_weights", about="the same with combine weights", needs=SGLANG, limit_s=40),
    Check(name="device", about="rows placed on the device", limit_s=35),
    Check(name="peers", about="groups of two and three beside the default one", limit_s=50),
    Check(name="actor", about="relay and trainer on one GPU", limit_s=30),
    Check(name="pair", about="relay and receiver over NCCL", limit_s=45),
    Check(name="weights", about="staged copy to parameters", limit_s=30),
    Check(name="update", about="trainer to engine, two processes", needs=(*PACKAGE, "pytest"), limit_s=50),
    Check(name="imports", about="a server's packages", **SERVER, only_on="cuda", limit_s=45),
    Check(name="engine", about="a server's rows", **SERVER, limit_s=170),
    Check(name="loop", about="the demo", **LOOP, limit_s=150),
    Check(name="device_digests", about="digests on the device", only_on="cuda", limit_s=10),
    Check(name="staging", about="one staging object", only_on="cuda", limit_s=15),
    Check(name="replay_cost", about="a step, of one without replay", needs=MEGATRON, limit_s=55),
    Check(name="capture_cost", about="a pass, of one without capture", needs=SGLANG, limit_s=30),
    Check(name="engine_cost", about="a server's tokens", **SERVER, limit_s=190),
    Check(name="device_cost", about="the whole way over TCP", only_on="cuda", limit_s=10),
)
"""What proves that rows are right comes first, what it costs last."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a CPU's sizes: a first look in two minutes")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this machine lacks")
    parser.add_argument("--out", type=Path, help="gpu.json, with names in it where some checks are given")
    parser.add_argument("names", nargs="*", choices=[[], *(check.name for check in CHECKS)])
    options = parser.parse_args(arguments)
    options.small |= options.device == "cpu"
    out: Path = options.out or Path("-".join(["gpu", *options.names]) + ".json")
    slow = 4 * busy() if options.small else 1  # a CPU that others work on, too
    names = options.names or [check.name for check in CHECKS if options.device == "cpu" or not check.apart]
    chosen = [check for check in CHECKS if check.name in names]
    site = installed(options.wheels) if options.wheels is not None else ROOT / "nothing"
    path = os.pathsep.join(filter(None, (str(ROOT), str(site / "parts"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    server = engine_environment(options.device, environment, server=site / "server")
    machine = look_at(environment) | {"server lacks": look_at(server, server=True)["missing"]}
    print(f"on {', '.join(f'{name} {value}' for name, value in machine.items())}", flush=True)
    least_s, all_s = sum(check.limit_s for check in chosen), LIMIT_S[any(check.apart for check in chosen)]
    outcomes, end_s = list[Outcome](), time.monotonic() + max(least_s, all_s) * slow
    for number, check in enumerate(chosen, start=1):
        kept_s = sum(later.limit_s for later in chosen[number:]) * slow
        own = server if check.server else environment
        outcomes.append(run(check, options, own, machine, end_s - kept_s))
        print(outcomes[-1].line(), flush=True)
        result = {"device": options.device, "machine": machine, "checks": [*map(asdict, outcomes)]}
        out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(one.status == "failed" or one.unfit for one in outcomes))


def installed(wheels: Path) -> Path:
    """The folder of what this Python lacks (`parts`) and of the servers' release (`server`), made once of these wheels.

    Without the network and outside of Python's own packages; it stays, because the parts of a run share it.
    """
    found = sorted(wheels.rglob("*.whl"))
    names = "".join([sys.executable, *(wheel.name for wheel in found)]).encode()
    site = Path(tempfile.gettempdir(), f"r3channel-gpu-{blake2b(names, digest_size=6).hexdigest()}")
    if not site.exists():
        release = [wheel for wheel in found if RELEASE.get(distribution(wheel)) == wheel.name.split("-")[1]]
        parts = [wheel for wheel in found if wheel not in release and lacks(distribution(wheel))]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        new = Path(tempfile.mkdtemp(prefix="r3channel-gpu-"))
        for name, some in {"parts": parts, "server": release}.items():
            if some:
                target = ["--target", str(new / name), *map(str, some)]
                subprocess.run([*command, *target], check=True, timeout=300)
        new.rename(site)
    return site


def distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-").lower()


def lacks(distribution: str) -> bool:
    try:
        return not version(distribution)
    except PackageNotFoundError:
        return True


_LOOK = """
import importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
missing = [name for name in sys.argv[1:] if not there(name)]
found = {"missing": missing, "GPUs": 0}
if there("torch"):
    import torch
    found.update(torch=torch.__version__, CUDA=str(torch.version.cuda), GPUs=torch.cuda.device_count())
    if found["GPUs"]:
        found["GPU"] = torch.cuda.get_device_name(0)
print(json.dumps(found))
"""


def look_at(environment: Mapping[str, str], *, server: bool = False) -> dict[str, Any]:
    """Versions and devices, seen by the Python that runs the checks; what is missing for those with a server, or without."""
    needs = {name for check in CHECKS for name in check.needs if check.server == server}
    command = [sys.executable, "-c", _LOOK, *sorted(needs)]
    child = subprocess.run(command, **_read(environment), timeout=120, check=True)
    seen = json.loads(child.stdout.splitlines()[-1])
    return {"Python": platform.python_version(), "driver": driver(), **seen}


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    return {"env": dict(environment), "cwd": ROOT, "capture_output": True, "text": True}


def driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    except (OSError, IndexError):
        return "none"


def run(
    check: Check, options: argparse.Namespace, environment: Mapping[str, str], machine: Mapping[str, Any],
    end_s: float,
) -> Outcome:  # fmt: skip
    device: str = options.device
    outcome = Outcome(name=check.name, about=check.about, status="not run")
    missing = [name for name in check.needs if name in machine["server lacks" if check.server else "missing"]]
    left_s = end_s - time.monotonic()
    outcome.unfit = bool(missing) or (device == "cuda" and not machine["GPUs"])
    if missing:
        outcome.why = f"{', '.join(missing)} not installed (WHEELS=, see make gpu-wheels)"
    elif check.only_on and check.only_on != device:
        outcome.why = "needs a CUDA device: it would say nothing on a CPU"
    elif outcome.unfit:
        outcome.why = "needs a GPU, torch sees 0"
    elif left_s < 1:
        outcome.why = "the checks before it took all the time"
    else:
        begin = time.monotonic()
        told(outcome, child(check, options, environment, timeout_s=left_s))
        outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def child(
    check: Check, options: argparse.Namespace, environment: Mapping[str, str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Ends with all that the check has started, by `timeout_s` at the latest."""
    command = [sys.executable, "-m", "tests.gpu.facts", check.name, options.device]
    command += ["small"] * options.small
    if "sglang" in check.needs and not check.server:
        environment = engine_environment(options.device, environment)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams: dict[str, Any] = {"stdout": out, "stderr": errors, "start_new_session": True}
        process, note = subprocess.Popen(command, env=dict(environment), cwd=ROOT, **streams), ""
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it says where each of its threads is
            time.sleep(1)
            note = f"\nstill running after {timeout_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), errors.read() + note)


def engine_environment(
    device: str, environment: Mapping[str, str], *, server: Path | None = None
) -> dict[str, str]:
    """`server`: the folder of a whole server's release, with its kernels. Without, no binaries of SGLang's are needed."""
    if device == "cpu":
        from examples.embedded.sglang import environment as embedded

        return embedded(environment)
    first = [server, ROOT / "tests/gpu/stand_ins"] if server else []
    folders = (*first, ROOT / "examples/embedded/shims", environment["PYTHONPATH"])
    return {**environment, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def told(outcome: Outcome, ended: subprocess.CompletedProcess[str]) -> None:
    """What a check said before it ended; one that says nothing, or ends otherwise than by itself, has failed."""
    answers = [line for line in ended.stdout.splitlines() if line.startswith(ANSWER)]
    facts = vars(Facts()) | (json.loads(answers[-1].removeprefix(ANSWER)) if answers else {})
    outcome.figures, outcome.left_out = facts["figures"], facts["left_out"]
    wrong, missed = [*facts["wrong"]], facts["missed"]
    if ended.returncode or not answers:
        outcome.traceback = facts["traceback"] or ended.stderr[-_TAIL:]
        last = [line.strip() for line in outcome.traceback.splitlines() if line.strip()][-1:]
        wrong.append(f"ended with {ended.returncode}: {''.join(last)[:500]}")
    verdicts = {"failed": wrong, "missed": missed, "not run": facts["not_run"], "passed": True}
    outcome.status = next(verdict for verdict, holds in verdicts.items() if holds)
    outcome.why = "; ".join([*wrong, *missed]) or facts["not_run"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
