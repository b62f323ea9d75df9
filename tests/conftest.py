"""Fixtures that several test folders share. Real engines are started once per configuration and test run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from examples.embedded import sglang
from examples.embedded.model import write_model
from examples.embedded.sglang import EngineOptions, EngineServer
from tests.support.children import ROOT
from tests.support.forked_engines import EngineForks
from tests.support.waits import ENGINE_S

# Ray counts the page cache of what tests read as memory, and kills workers for it; they are nice to everybody by 15, which left
# each a thirtieth of a core beside a busy process. Two threads that wait for each other in every loop took twice the CPU of one.
_EQUAL = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
os.environ.update(_EQUAL | os.environ)
settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("untimed")


class ByEngine(LoadFileScheduling):
    """A file's tests stay together, and all files that ask for the shared engine, so that one is started."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "engine" if re.search(r"\bengine_(url|server):", (ROOT / file).read_text()) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine:
    config.option.loadscopereorder = False  # it would begin with the files of the most tests
    return ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that may take longest, then of the most tests: else one worker ends with them alone."""
    tests, limits = Counter(item.path for item in items), Counter[Path]()
    for item in items:
        for limit in item.iter_markers("timeout"):
            limits[item.path] = max(limits[item.path], *map(int, limit.args))
    items.sort(key=lambda item: (-limits[item.path], -tests[item.path]))


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    with EngineForks() as forks, patch.object(sglang, "_popen", forks):
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 Qwen3-MoE: 4 layers of which layer 0 is dense, 128 experts, top-8."""
    return write_model(tmp_path_factory.mktemp("model") / "qwen3-moe-tiny")


@pytest.fixture(scope="session")
def engine_server(model_dir: Path) -> Iterator[EngineServer]:
    """A real SGLang server in float32 with frames; prompts above 128 tokens are prefilled in chunks."""
    with EngineServer(EngineOptions(model=model_dir, chunked_prefill_size=128)) as server:
        server.wait_ready(ENGINE_S)
        yield server


@pytest.fixture(scope="session")
def engine_url(engine_server: EngineServer) -> str:
    """Base address of `engine_server`. Who changes its weight version puts "0" back."""
    return engine_server.url
