"""`make gpu`: every check of the GPU paths on this machine, one line each, all of it in gpu.json; nine minutes at most.

    python -m tests.gpu.run --device cuda [--wheels FOLDER] [--out gpu.json] [NAME ...]

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.facts import ANSWER, Facts

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0
PACKAGE = ("numpy", "xxhash", "lz4", "torch")
_TAIL = 6000
"""What is kept of the errors of a check that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A module of `tests.gpu.checks`, or the tests of this folder."""

    name: str
    about: str
    needs: tuple[str, ...] = PACKAGE
    """Modules that must be installed."""
    only_on: str = ""
    """The device without which it says nothing."""
    limit_s: float
    """It has so much in any case, and what those before it left."""


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
CHECKS = (
    Check(name="replay", about="Megatron, world of one", needs=MEGATRON, limit_s=80),
    Check(name="capture", about="FrameCapturer under SGLang's TopK", needs=SGLANG, limit_s=60),
    Check(name="capture_weights", about="the same with combine weights", needs=SGLANG, limit_s=40),
    Check(name="device", about="rows placed on the device", limit_s=35),
    Check(name="group", about="our group beside the default one", limit_s=40),
    Check(name="actor", about="relay and trainer on one GPU", limit_s=30),
    Check(name="pair", about="relay and receiver over NCCL", limit_s=45),
    Check(name="weights", about="staged copy to parameters", limit_s=30),
    Check(name="update", about="trainer to engine, two processes", needs=(*PACKAGE, "pytest"), limit_s=50),
    Check(name="tests", about="tests/gpu", needs=(*PACKAGE, "pytest", "pytest_timeout"), limit_s=20),
    Check(name="staging", about="one staging object", only_on="cuda", limit_s=15),
    Check(name="replay_cost", about="a step, of one without replay", needs=MEGATRON, limit_s=55),
    Check(name="capture_cost", about="a pass, of one without capture", needs=SGLANG, limit_s=30),
    Check(name="device_cost", about="the whole way over TCP", only_on="cuda", limit_s=10),
)
"""What proves that rows are right comes first, what it costs last."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="the sizes of a CPU: a first look in two minutes"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this machine lacks")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("names", nargs="*", choices=[[], *(check.name for check in CHECKS)])
    options = parser.parse_args(arguments)
    options.small |= options.device == "cpu"
    slow = 4 if options.small else 1  # a CPU that others work on, too
    chosen = [check for check in CHECKS if not options.names or check.name in options.names]
    with tempfile.TemporaryDirectory(prefix="r3channel-gpu-") as site:
        path = os.pathsep.join(filter(None, (str(ROOT), site, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        if options.wheels is not None:
            install(options.wheels, Path(site))
        machine = look_at(environment)
        print(f"on {', '.join(f'{name} {value}' for name, value in machine.items())}", flush=True)
        outcomes, end_s = list[Outcome](), time.monotonic() + LIMIT_S * slow
        for number, check in enumerate(chosen, start=1):
            kept_s = sum(later.limit_s for later in chosen[number:]) * slow
            outcomes.append(run(check, options, environment, machine, end_s - kept_s))
            print(outcomes[-1].line(), flush=True)
            result = {"device": options.device, "machine": machine, "checks": [*map(asdict, outcomes)]}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(one.status == "failed" or one.unfit for one in outcomes))


def install(wheels: Path, site: Path) -> None:
    """Only what this Python lacks, without the network and outside of its own packages."""
    found = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if lacks(wheel.name.split("-")[0])]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    if found:
        subprocess.run([*command, "--target", str(site), *found], check=True, timeout=300)


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


def look_at(environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions and devices, seen by the Python that runs the checks."""
    command = [sys.executable, "-c", _LOOK, *sorted({name for check in CHECKS for name in check.needs})]
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
    missing = [name for name in check.needs if name in machine["missing"]]
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
    if "sglang" in check.needs:
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


def engine_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """SGLang's binaries are not needed: our stand-in for them is found first."""
    if device == "cpu":
        from examples.embedded.sglang import environment as embedded

        return embedded(environment)
    shims = str(ROOT / "examples/embedded/shims")
    return {**environment, "PYTHONPATH": os.pathsep.join((shims, environment["PYTHONPATH"]))}


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
