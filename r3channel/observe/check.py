"""What a room tells the doctor: a check takes a `CheckContext` and yields its findings.

Each room owns its checks; `tools/doctor.py` lists them. An upstream is asked in a child process with a deadline, so no
check imports it into this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ANSWER = "R3CHANNEL-DOCTOR "
"""Marks the answer among whatever an upstream prints on import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `found` says what was seen; `remedy` what to do when it is not well."""

    name: str
    ok: bool
    found: str
    remedy: str = ""

    def line(self) -> str:
        text = f"{'ok' if self.ok else 'FAIL':4}  {self.name:22} {self.found}"
        return text if self.ok or not self.remedy else f"{text}; {self.remedy}"


def has_gpu() -> bool:
    """Return whether there is an NVIDIA driver.

    The system is asked, because asking torch would import it.
    """
    return Path("/dev/nvidiactl").exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What the doctor was asked to check; every check gets the same one."""

    config: Any
    """The `ChannelConfig`, which this room lies below."""
    role: str = "all"
    """What this machine is to run."""
    ports: Sequence[int] = ()
    nodes: int = 1
    """Machines of the run."""
    peers: Sequence[str] = ()
    """host:port of other machines that this one must reach."""
    engines: Sequence[str] = ()
    """URLs of running engines."""
    engine_arguments: Sequence[str] = ()
    """SGLang's settings, as they are typed."""
    slime: str | None = None
    """A checkout of slime."""
    arguments: Sequence[str] = ()
    """Arguments of a slime job."""
    timeout_s: float = 120.0
    """Deadline of each child process and of each engine's answer."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    gpu: bool = field(default_factory=has_gpu)

    def ask(self, name: str, imports: str) -> Check:
        """Run an upstream's check in a child process.

        Args:
            name: the finding's name.
            imports: a statement that makes `check`, a call that returns a list of problems.

        Returns:
            The finding. A child that does not answer within `timeout_s` is a failure.
        """
        program = f"import json; {imports}; print({_ANSWER!r} + json.dumps(check()))"
        options = {"stdin": subprocess.DEVNULL, "errors": "replace", "timeout": self.timeout_s}
        command = [sys.executable, "-c", program]
        try:
            child = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            found, remedy = f"no answer within {self.timeout_s:g} s", "raise --timeout-s"
        else:
            found, remedy = _judge(child.stdout, child.stderr, imports)
        return Check(name=name, ok=not remedy, found=found, remedy=remedy)


def _judge(stdout: str, stderr: str, imports: str) -> tuple[str, str]:
    answers = [line for line in stdout.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        said = ["it ended without a word", *(line.strip() for line in stderr.splitlines() if line.strip())]
        remedy = f"see it whole with: {sys.executable} -c '{imports}; print(check())'"
        return f"could not be asked: {said[-1]}", remedy
    problems = json.loads(answers[0].removeprefix(_ANSWER))
    if problems:
        return "; ".join(map(str, problems)), "install the versions that this release was read against"
    return "all found", ""  # no remedy
