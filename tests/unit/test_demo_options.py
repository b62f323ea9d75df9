"""What the demo refuses before it starts anything: exit status 2, the value, what was expected, no traceback."""

from __future__ import annotations

import pytest

from examples.async_grpo.options import parse


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layout", "zz=1"], "layout key 'zz'"), (["--layout", "dp=2,tp=2,sp=0"], "leave sp on"),
        (["--steps", "0"], "--steps 0, expected at least 1"), (["--engines", "0"], "--engines 0, expected at least 1"),
        (["--engine-tp", "0"], "--engine-tp 0, expected at least 1"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0, expected at least 1"),
        (["--samples", "5"], "--samples 5, expected at least 8"),
        (["--use-r3-channel", "--r3-transport", "mpi"], "transport 'mpi', expected one of"),
        (["--use-r3-channel", "--r3-transport", "auto"], "transport 'auto'"),
        (["--use-r3-channel", "--r3-config", "none.toml"], "none.toml: expected a readable TOML file"),
        (["--dump", "here"], "need --use-r3-channel"),
        (["--device", "cuda", "--layout", "dp=100"], "100 trainer rank(s) of --layout, and torch sees"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_step_may_hold_more_samples_than_fill_it() -> None:
    assert parse(["--layout", "dp=3", "--samples", "16"]).samples == 16
    assert parse(["--layout", "pp=2", "--samples", "4", "--micro-batch-size", "2"]).samples == 4
