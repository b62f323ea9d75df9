"""pytest's plug-in: a user's own test fails when their model code stops consuming recorded routing exactly, and says why.

    @pytest.mark.r3_layouts("dp=1", "tp=2", "cp=2,packing=thd")
    def test_my_model(r3_step):
        for rank in r3_step.ranks():
            my_model.run(rank)                  # calls rank.record_used(microbatch, layer, ids) at each router
        r3_step.check()

    pytest --r3-recording rec

Nothing of r3channel but this file is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from r3channel.recordings.consumed import ConsumedRows
    from r3channel.recordings.recording import Recording
    from r3channel.recordings.run_ranks import Rank
    from r3channel.recordings.step import RecordedStep

_TOLD = 5
_UNTESTED = "r3channel_untested"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("r3channel", "recorded routing")
    group.addoption(
        "--r3-recording", metavar="PATH", help="a recording (--record) that r3_recording and r3_step read"
    )
    group.addoption("--r3-steps", metavar="N", type=int, help="its newest N steps (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "r3_layouts(*layouts): run with the recorded step cut for each of these trainers"
    )
    config.addinivalue_line(
        "markers", "r3_recording(path, step=None): the recording and its step, instead of --r3-recording"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("r3_layouts")
    if marker is not None and "r3_layout" in metafunc.fixturenames:
        metafunc.parametrize("r3_layout", marker.args, indirect=True)
    if "r3_number" in metafunc.fixturenames and (steps := _steps(metafunc)):
        metafunc.parametrize("r3_number", steps, indirect=True, ids=lambda step: f"step{step}")


def _steps(metafunc: pytest.Metafunc) -> list[int]:
    """Return the steps to run.

    There are none where the marker names one, or where the fixtures will say why there is no step.
    """
    from r3channel.errors import RecordingInvalid
    from r3channel.recordings.recording import Recording

    path, step = _find_recording(metafunc.definition)
    if path is not None and step is None:
        with suppress(RecordingInvalid):
            return list(Recording.open(path).steps)[-(metafunc.config.getoption("--r3-steps") or 0) :]
    return []


def _find_recording(test: pytest.Item) -> tuple[Any, int | None]:
    """Return the path and the step that the marker, or --r3-recording, names."""
    marker = test.get_closest_marker("r3_recording")
    if marker is None:
        return test.config.getoption("--r3-recording"), None
    return marker.args[0], marker.kwargs.get("step")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the recorded steps do not show in the tested layouts."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
    told = {what: None for one in reports for name, what in one.user_properties if name == _UNTESTED}
    for what in told:
        terminalreporter.write_line(f"r3channel: not tested: {what}")


@pytest.fixture
def r3_layout(request: pytest.FixtureRequest) -> str | None:
    """Return the layout of this run of the test.

    None is the recorded layout.
    """
    return getattr(request, "param", None)


@pytest.fixture
def r3_recording(request: pytest.FixtureRequest) -> Recording:
    """Return the recording of the marker, or of --r3-recording.

    A test is skipped where neither is given.
    """
    from r3channel.recordings.recording import Recording

    path, _ = _find_recording(request.node)
    if path is None:
        pytest.skip(
            "no recording: give --r3-recording PATH (a folder that --record wrote), or mark it r3_recording(PATH)"
        )
    return Recording.open(path)


@pytest.fixture
def r3_number(r3_recording: Recording, request: pytest.FixtureRequest) -> int:
    """Return the step of this run of the test.

    A test runs with each recorded step, unless the marker names one.
    """
    _, named = _find_recording(request.node)
    return int(getattr(request, "param", max(r3_recording.steps, default=0) if named is None else named))


@pytest.fixture
def r3_step(
    r3_recording: Recording, r3_layout: str | None, r3_number: int, request: pytest.FixtureRequest
) -> StepUnderTest:
    """Return a step of the recording, cut for the matrix's layout.

    Its micro-batches have the recorded size.
    """
    from r3channel.plan.layout import TrainerLayout
    from r3channel.recordings.consumed import fit

    step = fit(r3_recording.step(r3_number), None if r3_layout is None else TrainerLayout.parse(r3_layout))
    for what in step.untested:
        request.node.user_properties.append((_UNTESTED, f"step {step.number}, {step.ticket.layout}: {what}"))
    return StepUnderTest(step)


@pytest.fixture
def r3_ranks(r3_recording: Recording, r3_step: StepUnderTest) -> Callable[..., None]:
    """Return a call that runs a function in each rank's process.

    `r3_ranks(function)` calls `function` with a `recordings.run_ranks.Rank` in a real gloo process for each rank, then `check`.
    """
    from r3channel.recordings.run_ranks import run_ranks

    def run(function: Callable[[Rank], object], *, timeout_s: float = 120.0) -> None:
        consumed, _ = run_ranks(function, r3_step.recorded, Path(r3_recording.folder), timeout_s=timeout_s)
        r3_step.check(consumed)

    return run


@dataclass
class StepUnderTest:
    """A recorded step, the ranks that consume it, and the judgement of what they used."""

    recorded: RecordedStep
    _ranks: list[Rank] = field(default_factory=list)

    def ranks(self) -> list[Rank]:
        """Return every rank of the layout, in this process."""
        from r3channel.recordings.run_ranks import all_ranks

        self._ranks = self._ranks or all_ranks(self.recorded)
        return self._ranks

    def check(self, consumed: ConsumedRows | None = None) -> None:
        """Check that every recorded row was used as the engine chose.

        The rows of every layer are checked. The test fails with each mistake by name.

        Args:
            consumed: The rows that were used; without it those that `ranks` used.
        """
        __tracebackhide__ = True
        from r3channel.recordings.aligned_pair import AlignedPair
        from r3channel.recordings.consumed import ConsumedRows
        from r3channel.recordings.diagnose import judge
        from r3channel.recordings.mistakes import NOTES

        found = consumed or ConsumedRows(self.recorded.ticket, self.recorded.ticket.spec)
        for rank in self._ranks if consumed is None else ():
            found.merge(rank.consumed)
        if unused := _describe_unused(self.recorded, found):
            pytest.fail(unused, pytrace=False)
        findings = [one for sides in AlignedPair.align(self.recorded, found.step()) for one in judge(sides)]
        faults = [str(one) for one in findings if one.name not in NOTES]
        if faults:
            said = "\n".join(["recorded routing was not consumed exactly", *faults[:_TOLD]])
            pytest.fail(said, pytrace=False)


def _describe_unused(step: RecordedStep, found: ConsumedRows) -> str:
    layers = step.ticket.spec.moe_layers
    silent = list[tuple[str, list[int]]]()
    for sample in step.samples:
        there_TL = found.there.get(("forward", sample.sample_id))
        used = [there_TL is not None and bool(there_TL[:, place].any()) for place in range(len(layers))]
        if lacking := [layer for layer, one in zip(layers, used, strict=True) if not one]:
            silent.append((sample.sample_id, lacking))
    if not silent:
        return ""
    (name, lacking), *_ = silent
    return (
        f"no router used rows of {len(silent)} of {len(step.samples)} samples: the first is {name}, layers {lacking[:20]}; "
        f"expected all of {list(layers)[:20]}. Is rank.record_used called at each router, in every micro-batch, on every rank?"
    )
