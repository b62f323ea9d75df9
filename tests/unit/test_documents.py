"""READMEs and DESIGN name what is there: tests, files, modules, calls with their parameters. The first one is short."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r3channel.config import ChannelConfig, EngineConfig
from r3channel.errors import RouterUnsupported
from r3channel.tools.commands import COMMANDS
from r3channel.tools.errors import describe, every_error
from r3channel.trainer.adapters import megatron_refusals as refusals
from tests.support.pages import TABLES, options, put_into

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "r3channel"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for top in (ROOT, PACKAGE, ROOT / "dashboards", ROOT / "examples", ROOT / "patches", ROOT / "tests")
    for path in (top.glob("*.md") if top == ROOT else top.rglob("*.md"))
}
SCRIPTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "examples").rglob("*.sh")}
MAKEFILE = (ROOT / "Makefile").read_text()
SNIPPETS = [
    (page, text) for page in PAGES for text in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
]

RESULTS = {"relay": "Relay", "channel": "TrainerChannel", "step": "ReplayStep", "sync": "WeightSync"}
"""What the names in the pages' code hold."""


def known_tests() -> Iterator[tuple[str, bool]]:
    """Every test and whether `make test` leaves it out."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        marks = [
            ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)
        ]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                texts = [*marks, *(ast.unparse(decorator) for decorator in node.decorator_list)]
                yield node.name, any(re.search(r"\b(full|long)\b", text) for text in texts)


def test_every_test_that_a_page_names_is_there_and_starred_where_it_is_long() -> None:
    """A test's own name, or its file's."""
    named = {
        name: bool(star) for page in PAGES.values() for name, star in re.findall(r"`(test_\w+)`(\*?)", page)
    }
    files = {path.stem: False for path in (ROOT / "tests").rglob("test_*.py")}
    known = files | dict(known_tests())
    assert named and {name: known.get(name) for name in named} == named


def test_the_first_page_is_read_in_minutes() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_every_room_has_a_page() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {f"r3channel/{room}/README.md" for room in rooms} <= set(PAGES)


@pytest.mark.parametrize(
    "page", sorted(set(PAGES) - {"patches/README.md", "CHANGELOG.md"})
)  # files of upstreams, and of a wheel
def test_every_file_that_is_named_with_its_folder_is_there(page: str) -> None:
    """From the repository's root, the package, or the page's own folder."""
    named = set(re.findall(r"(?:`|\]\()([\w-]+/[\w/.-]*)[`)]", PAGES[page]))
    places = (ROOT, PACKAGE, (ROOT / page).parent)
    found = {name for at in places for name in named for end in ("", ".py") if (at / f"{name}{end}").exists()}
    assert named - found == set()


def code_of(text: str, *, shell: bool = False) -> str:
    """Return what a page shows as code; of a shell script its lines, and what its comments show so."""
    shown = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    return re.sub(r"(^|\s)#.*", "", shown + text * shell, flags=re.MULTILINE)


def missing(code: str) -> set[str]:
    """Return what the code names and is not there: modules, targets of make, commands, paths of tests, the channel's flags."""
    modules = {name: name.replace(".", "/") for name in re.findall(r"python3? -m ([\w.]+)", code)}
    ours = {name: at for name, at in modules.items() if (ROOT / at.partition("/")[0]).is_dir()}
    files = {f"python -m {name}": (f"{at}.py", f"{at}/__main__.py") for name, at in ours.items()}
    files |= {path: (path,) for path in re.findall(r"\btests/[\w./-]*\w", code)}
    known = {
        r"\bmake(?: -\w+)* ([a-z][\w-]*)": re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE),
        r"(?m)(?:^|[`;&|-]) *r3channel ([a-z]\w*)": COMMANDS,
        r"(?<![\w-])(--r3-\w[\w-]*\w)": {"--r3-config", "--r3-recording"}
        | {option.flag for option in options()},
    }
    named = {name for name, places in files.items() if not any((ROOT / place).exists() for place in places)}
    return named.union(*(set(re.findall(pattern, code)) - set(there) for pattern, there in known.items()))


@pytest.mark.parametrize("page", sorted(set(PAGES) | set(SCRIPTS)))
def test_what_a_page_tells_its_reader_to_type_is_there(page: str) -> None:
    assert missing(code_of(PAGES.get(page) or SCRIPTS[page], shell=page in SCRIPTS)) == set()


def test_what_a_page_names_and_was_deleted_is_noticed() -> None:
    there = "`python -m tests.support.pages`, `make -s demo`, `r3channel plan --r3-config`, `tests/golden`"
    gone = "`python -m tests.upstream.gone`, `make gone`, `r3channel gone --r3-gone`, `tests/unit/gone.py`"
    assert missing(code_of(there)) == set()
    assert missing(code_of(gone)) == {
        "python -m tests.upstream.gone",
        "gone",
        "--r3-gone",
        "tests/unit/gone.py",
    }
    assert missing(code_of("# make gone of it\nmake gone\n", shell=True)) == {"gone"}


def _namespace() -> dict[str, Any]:
    """What the pages import."""
    found: dict[str, Any] = {}
    for node in (node for _, text in SNIPPETS for node in ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and node.module != "my_job":  # the reader's own
            assert node.module is not None
            for alias in node.names:
                found[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    found["ReplayStep"] = importlib.import_module("r3channel.trainer.replay").ReplayStep
    return found


def test_the_pages_calls_fit_their_signatures() -> None:
    names, checked = _namespace(), 0
    for call in (
        node for _, text in SNIPPETS for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
    ):
        bound = 0
        match call.func:
            case ast.Name(id=name) if name in names:
                target = names[name]
            case ast.Attribute(value=ast.Name(id=holder), attr=attribute) if (
                holder in RESULTS or holder in names
            ):
                target = getattr(names[RESULTS.get(holder, holder)], attribute)
                bound = holder not in names  # called on an instance, so `self` is taken
            case _:
                continue
        arguments = [None] * (bound + len(call.args))
        inspect.signature(target).bind(*arguments, **{str(word.arg): None for word in call.keywords})
        checked += 1
    assert checked >= 14


# -- generated tables are the committed ones; options and errors are complete, and each name means one thing --------


@pytest.mark.parametrize("name", TABLES)
def test_the_committed_table_is_the_generated_one(name: str) -> None:
    text = TABLES[name].page.read_text()
    assert text == put_into(text, name), "run: python -m tests.support.pages"


def test_every_error_says_what_to_do_and_has_a_reason_of_its_own() -> None:
    found = every_error()
    assert len(found) <= 45  # one class per remedy
    assert [
        error for error in found if not {"reason", "remedy"} <= set(vars(error)) or not describe(error)
    ] == []
    assert [word for word, times in Counter(error.reason for error in found).items() if times > 1] == []


def test_an_option_that_relay_and_engines_share_means_the_same_to_both() -> None:
    shared = {f.name for f in fields(ChannelConfig)} & {f.name for f in fields(EngineConfig)}
    page = {"interface", "metrics_dir", "metrics_port", "run_name", "trace"}
    assert shared == {"token_file", "token_tensors"} | page


def test_every_option_is_in_the_table_once_and_is_explained() -> None:
    found = list(options())
    variables = [option.variable for option in found if option.variable]
    assert len(set(variables)) == len(variables) == len(fields(ChannelConfig)) + len(fields(EngineConfig)) - 7
    assert [option for option in found if not option.meaning] == []


# -- refused Megatron settings: every row refuses what it says --------------------------------------------------------------

GOOD = {
    "moe_enable_routing_replay": True, "moe_router_load_balancing_type": "aux_loss", "cuda_graph_impl": "none",
}  # fmt: skip


def test_settings_that_a_release_lacks_are_passed_over() -> None:
    refusals.refuse_unsupported(SimpleNamespace(**GOOD))
    refusals.refuse_unsupported(SimpleNamespace(**{row.setting: None for row in refusals.REFUSALS} | GOOD))


def test_one_bad_kind_of_balancing_among_good_ones_is_refused_beside_what_else_is_wrong() -> None:
    bad = {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"], "moe_input_jitter_eps": 0.01}
    with pytest.raises(RouterUnsupported, match=r"(?s)quantile_balancing.*moe_input_jitter_eps=0\.01"):
        refusals.refuse_unsupported(SimpleNamespace(**GOOD | bad))


def test_the_pages_are_short_enough_to_be_read() -> None:
    """Generated tables are not counted."""
    generated = re.compile(r"<!-- (\w+): generated -->.*?<!-- /\1 -->", re.DOTALL)
    words = {page: len(generated.sub("", text).split()) for page, text in PAGES.items()}
    assert sum(count for page, count in words.items() if page != "tests/README.md") <= 14_000
    limits = {
        "examples/slime/README.md": 1_500, "README.md": 1_300, "r3channel/DESIGN.md": 900,
        "r3channel/DECISIONS.md": 3_000,
    }  # fmt: skip
    assert {page: count for page, count in words.items() if count > limits.get(page, 900)} == {}


def test_a_decision_has_a_number_of_its_own_and_each_that_is_cited_is_there() -> None:
    numbers = re.findall(r"^- \*\*(\d+)\. ", PAGES["r3channel/DECISIONS.md"], re.MULTILINE)
    files = (path for folder in ("r3channel", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))
    texts = [*PAGES.values(), *(path.read_text() for path in files)]
    cited = {number for text in texts for number in re.findall(r"[Dd]ecision (\d+)", text)}
    assert len(set(numbers)) == len(numbers) > 60 and "87" in cited and cited - set(numbers) == set()
