"""What a user meets who mistypes: a named value, what was expected, exit status 2, and no traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.async_grpo.options import parse as parse_demo
from r3channel import cli, errors
from r3channel.bench import BENCHES
from r3channel.tools.commands import COMMANDS
from r3channel.tools.plan import count
from tests.support import children
from tests.support.pages import options
from tests.support.waits import PROGRAM_S
from tests.unit.test_documents import PAGES, ROOT

PLAN = ["plan", "--model", "qwen3-30b-a3b"]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+\w")


def ended(*argv: str) -> object:
    """Run a command, or the demo; return its exit status."""
    try:
        return parse_demo(list(argv[1:])) if argv[:1] == ("demo",) else cli.main(argv)
    except SystemExit as end:
        return end.code


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that cannot run says on stderr."""
    assert ended(*argv) == 2
    return capsys.readouterr().err


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `--help` prints."""
    assert ended(*argv, "--help") == 0
    return capsys.readouterr().out


CHANNEL = ["demo", "--use-r3-channel"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "nothing"], "benchmark 'nothing', expected one of"),
        (["bench", "plan", "--rounds", "0"], "'0', expected a whole number of at least 1"),
        (["bench", "wire", "--only", "nothing"], "choose from 'codecs'"),
        (PLAN, "needs --model and --layout"),
        (["plan", "--model", "nobody", "--layout", "dp=1", "--tokens", "16384"], "built-in table"),
        (
            ["plan", "--model", "deepseek-r1", "--layout", "pp=4", "--tokens", "16384"],
            "4 equal stages. Give last_layers=13: the other stages have 16",
        ),
        (["plan", "--model", "/no/such", "--layout", "dp=1", "--tokens", "16384"], "not a checkpoint folder"),
        (["plan", "--model", "missing.json", "--layout", "dp=1", "--tokens", "16384"], "config.json"),
        ([*PLAN, "--layout", "dp=1", "--tokens", "-5"], "expected at least 1"),
        ([*PLAN, "--layout", "dp=1", "--tokens", "1.5"], "invalid count value: '1.5'"),
        (["plam"], "did you mean plan?"),
        (["plan", "--model", "qwen3-235b", "--layout", "dp=1", "--tokens", "16M"], "mean qwen3-235b-a22b?"),
        (["plan", "--modle", "x"], "unrecognized arguments: --modle x; did you mean --model?"),
        (["errors", "storeful"], "did you mean StoreFull?"),
        (["export", f"{ROOT}/tests/golden/recording", "--format", "npz", "--out=/dev/null/x"], "null/x"),
        (["record", ""], "expected either a folder to record into, or --stop"),
        ([*PLAN, "--layout", "dp=2,dp=3", "--tokens", "32768"], "'dp' stands twice"),
        ([*PLAN, "--layout", "dp=1"], "plan needs --tokens (all tokens of one step), or --lengths"),
        ([*PLAN, "--layout", "dp=1", "--tokens", "100", "--sequence", "0"], "--sequence 0"),
        ([*PLAN, "--layout", "dp=1", "--tokens", "16384", "--microbatch-size", "0"], "at least 1"),
        (["weights", "verify", "--engine", "http://127.0.0.1:1"], "is it up, and is this its address?"),
        (["doctor", "--config", "none.toml"], "none.toml: expected a readable TOML file"),
        (["demo", "--layout", "zz=1"], "layout key 'zz'"),
        (["demo", "--layout", "dp=2,tp=2,sp=0"], "leave sp on"),
        (["demo", "--steps", "0"], "--steps 0, expected at least 1"),
        (["demo", "--engines", "0"], "--engines 0, expected at least 1"),
        (["demo", "--engine-tp", "0"], "--engine-tp 0, expected at least 1"),
        (["demo", "--micro-batch-size", "0"], "--micro-batch-size 0, expected at least 1"),
        (["demo", "--samples", "5"], "--samples 5, expected at least 8"),
        ([*CHANNEL, "--r3-transport", "mpi"], "transport 'mpi', expected one of"),
        (["demo", "--dump", "here"], "need --use-r3-channel"),
        (
            ["demo", "--device", "cuda", "--layout", "dp=100"],
            "100 trainer rank(s) of --layout, and torch sees",
        ),
    ],
)
def test_what_cannot_run_says_why(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in said_by(capsys, *argv)


@pytest.mark.parametrize("text", ["", "[1,", '["x"]', "[1.5]", "[true]", '{"a": 1}'])
def test_lengths_are_whole_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    assert str(file) in said_by(capsys, *PLAN, "--layout", "dp=1", "--lengths", str(file))


def test_a_lost_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without(module: str) -> None:
        def run(argv: list[str]) -> int:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr("r3channel.tools.plan.run", run)

    without("r3channel.gone")
    with pytest.raises(ModuleNotFoundError):  # a fault of ours keeps its traceback
        cli.main(["plan"])
    without("torch.cuda")
    assert "needs the package torch, which is not installed" in said_by(capsys, "plan")


@pytest.mark.parametrize("name", ["demo", *COMMANDS, *(f"bench {name}" for name in BENCHES)])
def test_a_help_begins_with_how_the_command_is_typed(capsys: pytest.CaptureFixture[str], name: str) -> None:
    first, *rest = (text := helped(capsys, *name.split())).splitlines()
    assert not name.startswith("bench ") or {"[--quick]", "[--json]"} <= set(text.split())
    typed, called = ("make demo", "python -m examples.demo") if name == "demo" else (f"r3channel {name}", "")
    assert f"{first} ".startswith(f"  {typed} ") and any(f"usage: {called}" in line for line in rest)


def test_the_demo_may_have_more_samples_than_fill_a_step() -> None:
    assert parse_demo(["--layout", "dp=3", "--samples", "16"]).samples == 16
    assert parse_demo(["--layout", "pp=2", "--samples", "4", "--micro-batch-size", "2"]).samples == 4


def test_every_option_that_a_page_gives_the_demo_is_one_of_its(capsys: pytest.CaptureFixture[str]) -> None:
    typed = re.findall(r'make (?:-s )?demo[^\n`]* ARGS="([^"]*)"', "\n".join(PAGES.values()))
    assert len(typed) >= 3
    assert set(OPTION.findall(" ".join(typed))) - set(OPTION.findall(helped(capsys, "demo"))) == set()


def test_the_overview_has_every_command_and_examples_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    assert text.startswith("  r3channel doctor ") and all(f"\n  {name} " in text for name in COMMANDS)
    assert cli.main([]) == 2 and "commands:" in capsys.readouterr().err
    assert "command 'sel', expected one of: doctor" in said_by(capsys, "sel")
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("r3channel 0.")


@pytest.mark.parametrize(
    ("tokens", "dp", "size", "samples", "longest"),
    [("16000000", 4, 1, 976, 0), ("16M", 4, 244, 976, 16394), ("100", 1, 1, 1, 100), ("64", 2, 1, 2, 32),
     ("64", 2, 4, 8, 8)],
)  # fmt: skip
def test_a_round_number_of_tokens_is_planned(
    capsys: pytest.CaptureFixture[str], tokens: str, dp: int, size: int, samples: int, longest: int
) -> None:
    """Samples as equal as can be: in micro-batches of `size`, each is padded to the longest."""
    options = ["--layout", f"dp={dp}", "--tokens", tokens, "--microbatch-size", str(size)]
    assert cli.main([*PLAN, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["samples"]) == (count(tokens), samples)
    assert found["padded_tokens"] == (samples * longest or count(tokens))


def test_an_error_is_told_by_its_name_and_by_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["errors", "FrameMissing"]) == 0 and cli.main(["errors", "frame_missing"]) == 0
    first, what, second, remedy = capsys.readouterr().out.splitlines()
    assert first == second and "(RoutingMissing, reason frame_missing)" in first
    assert what == remedy == errors.FrameMissing.remedy


def test_a_pipe_that_closes_ends_a_command_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes) as closed:
        command = [sys.executable, "-m", "r3channel.cli", "errors"]
        child = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=PROGRAM_S)
    assert (child.returncode, child.stderr) == (141, "")


def test_a_relay_needs_no_package_of_direct_delivery() -> None:
    program = (
        "import sys; sys.modules['h11'] = None\nfrom r3channel.relay import Relay; print(Relay.__name__)"
    )
    assert children.said_by(program) == "Relay\n"


def typed_commands() -> dict[str, set[str]]:
    """Command -> the options that any page shows with it, in a code span or a block of commands."""
    found: dict[str, set[str]] = {}
    for page in PAGES.values():
        prose, blocks = "\n".join(page.split("```")[::2]), "\n".join(page.split("```")[1::2])
        texts = re.findall(r"`r3channel ([^`\n]+)`", prose)
        for text in [*texts, *re.findall(r"^\s*r3channel (.+?)(?:\s#.*)?$", blocks, re.MULTILINE)]:
            words = text.split()
            name = " ".join(words[: 1 + (words[0] == "bench" and "".join(words[1:2]) in BENCHES)])
            # not the settings that the doctor is asked about
            own = re.sub('"[^"]*"', "", text.split(" -- ")[0])
            found.setdefault(name, set()).update(re.findall(r"--[a-z][\w-]*", own))
    return {name: found[name] for name in found if re.fullmatch(r"[a-z]+( [a-z0-9]+)?", name)}


SUBCOMMANDS = {"weights": ("verify",), "patch": ("check", "apply", "reverse"), "bench": BENCHES}
OTHERS = {
    "slime and miles": "update-weight-transport use-rollout-routing-replay save-debug-rollout-data colocate offload-train "
    "rollout-data-transport",
    "pip and git": "index-url no-deps full-index",
}
"""What the pages name beside our options and SGLang's."""


def options_of_sglang() -> set[str]:
    """Its own list of its settings; the package is not imported."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations  # pyright: ignore[reportOptionalMemberAccess,reportGeneralTypeIssues]
    text = (Path(folder) / "srt" / "arg_groups" / "field_order.py").read_text()
    return {f"--{name.replace('_', '-')}" for name in re.findall(r'"(\w+)"', text)}


def options_of_scripts() -> set[str]:
    """Options of our programs that are no commands, and of the pytest plug-in."""
    rooms = ("r3channel", "examples", "tests/upstream/slime_cpu", "tests/chaos")
    files = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    added = re.compile(r'add_?(?:argument|option)\(\s*"(--[\w-]+)"')
    return {option for path in files for option in added.findall(path.read_text())}


def test_every_option_on_a_page_is_ours_or_a_known_others(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [[name, *more] for name in COMMANDS for more in ([], *([n] for n in SUBCOMMANDS.get(name, ())))]
    told = set(OPTION.findall("".join(helped(capsys, *argv) for argv in (["demo"], *asked))))
    others = {f"--{name}" for names in OTHERS.values() for name in names.split()}
    known = told | options_of_scripts() | options_of_sglang() | others
    assert {page: gone for page, text in PAGES.items() if (gone := {*OPTION.findall(text)} - known)} == {}


def test_every_variable_on_a_page_is_one_that_is_read() -> None:
    read, name = {option.variable for option in options()}, re.compile(r"\bR3CHANNEL_[A-Z_]+")
    assert {page: gone for page, text in PAGES.items() if (gone := {*name.findall(text)} - read)} == {}


def test_the_changelog_names_no_option_that_is_gone() -> None:
    """Names of more than one word, as options and functions have them, are words of our code."""
    files = (path for room in ("r3channel", "examples") for path in (ROOT / room).rglob("*.py"))
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    named = {
        word
        for span in re.findall(r"`([^`]+)`", PAGES["CHANGELOG.md"])
        for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b(?!\.sh)", span)
    }
    assert named and named - words == set()


def test_the_page_of_the_commands_has_each_of_them() -> None:
    commands = re.findall(r"^- .*(?:\n  .*)*", PAGES["r3channel/tools/README.md"], re.MULTILINE)
    assert set(COMMANDS) - set(re.findall(r"`(?:r3channel )?(\w+)\b", "\n".join(commands))) == set()


def test_every_command_on_a_page_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    typed = typed_commands()
    assert {"doctor", "slime", "plan", "bench relay", "check"} <= set(typed)
    slimes = {"--use-r3-channel", "--update-weight-transport", "--use-rollout-routing-replay"}
    for name, shown in typed.items():
        asked = name.split() + {"weights": ["verify"], "bench": ["plan"]}.get(name, [])
        known = set(re.findall(r"--[a-z][\w-]*", helped(capsys, *asked)))
        assert shown - known - slimes == set(), name


def test_the_first_page_has_what_plan_computes(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"`r3channel (plan --model [^`]+)`", PAGES["README.md"])
    assert cli.main([*command.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = f"{found['default_bytes_per_rank'] / 1e9:.2f} GB of each trainer process by default and "
    assert said + f"{found['landed_bytes_per_rank'] / 1e6:.2f} MB with r3channel" in PAGES["README.md"]
