"""The names of SGLang that the engine room relies on, per version, and a check of each. Imports SGLang only when asked, by name.

The names are in sglang_names.toml, read against SGLang 0.5.15.post1 and 0.5.23; what lies between follows one table or
is refused. When a release moves a name, `check_hooks` says which, before anything is patched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import pkgutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.errors import PluginNotApplied

READ_AGAINST = ("0.5.15.post1", "0.5.23")
_SRT = "sglang.srt"

CAPTURER = f"{_SRT}.state_capturer.routed_experts.RoutedExpertsCapturer"
_PROCESSOR = f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
COLLECT = f"{_PROCESSOR}._maybe_collect_routed_experts"
MASKS = f"{_PROCESSOR}.add_sampling_mask_return_values"
WEIGHTS = f"{_SRT}.layers.moe.topk._post_process_topk_ids"
STREAM = f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
TOP_LOGPROBS = (
    f"{_SRT}.layers.utils.logprob.get_top_logprobs",
    f"{_SRT}.layers.logprob_processor.get_top_logprobs",
)
"""The name in 0.5.15.post1, and the one in 0.5.23."""
RELEASE = f"{_SRT}.managers.schedule_batch.release_req"
INIT_BATCH = f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new"
TRANSFERRED = (
    f"{_SRT}.disaggregation.decode_schedule_batch_mixin"
    ".ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt"
)
INIT_CAPTURER = f"{_SRT}.model_executor.model_runner.ModelRunner.init_routed_experts_capturer"
UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{UPDATER}.update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc"))


class Name(NamedTuple):
    """A dotted name and, for a callable, parameters that it must still have."""

    path: str
    parameters: tuple[str, ...] = ()


_TABLES: Mapping[str, Mapping[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("sglang_names.toml").read_text()
)
TABLES: Mapping[str, tuple[Name, ...]] = {
    version: tuple(
        Name(f"{_SRT}.{name}", tuple(parameters))
        for table in ("common", version)
        for name, parameters in _TABLES[table].items()
    )
    for version in READ_AGAINST
}
"""Version -> every name that we rely on there."""


def installed_version() -> str:
    """Return SGLang's version from its metadata.

    Nothing of SGLang is imported.

    Returns:
        The version, or "not installed".
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hooked(table: str) -> tuple[str, ...]:
    """Return the names that we replace or wrap.

    Args:
        table: A table of `TABLES`.
    """
    updates = UPDATES if table == "0.5.15.post1" else ()
    return CAPTURER, COLLECT, INIT_BATCH, RELEASE, TRANSFERRED, INIT_CAPTURER, *updates


def is_patched() -> bool:
    """Return whether SGLang's sources have the hooks in them (patches/).

    These hooks are on with R3CHANNEL_ENGINE=1. Call this before hooks are registered.

    Raises:
        PluginNotApplied: If the sources have only some of the hooks.
    """
    paths = [path for path in hooked(matching_table() or "") if path != CAPTURER]
    bare = [path for path in paths if not hasattr(pkgutil.resolve_name(path), "r3channel_hook")]
    if 0 < len(bare) < len(paths):
        raise PluginNotApplied(
            f"this SGLang was patched by another r3channel, which had no hook in {', '.join(bare)}; put SGLang's own files back, "
            "then `r3channel patch apply`"
        )
    return not bare


def matching_table() -> str | None:
    """Return the table whose names are all there.

    It is the installed version's own table, or for a version between two tables the one that it follows.

    Returns:
        The name of the table, or None if no table matches.
    """
    own = installed_version()
    candidates = [own] if own in TABLES else sorted(TABLES, reverse=True)
    return next((table for table in candidates if not _problems(table)), None)


def check_hooks() -> list[str]:
    """Return one line for each name that is gone or changed.

    A name is changed if it lacks a parameter that we rely on. The call imports SGLang, which on a machine without a GPU needs the
    environment of `examples.embedded`. It patches nothing.

    Returns:
        Problems; empty if the hooks will apply.
    """
    if importlib.util.find_spec("sglang") is None:
        return [f"SGLang is not installed; r3channel was read against SGLang {' and '.join(READ_AGAINST)}"]
    if matching_table() is not None:
        return []
    own = installed_version()
    if own in TABLES:
        return _problems(own)
    return min((_problems(table) for table in TABLES), key=len)


def _problems(table: str) -> list[str]:
    return [problem for name in TABLES[table] if (problem := _problem(name)) is not None]


def _problem(name: Name) -> str | None:
    where = f"r3channel was read against SGLang {' and '.join(READ_AGAINST)}, this is {installed_version()}"
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        return f"{name.path} is gone ({error}); {where}"
    missing = [parameter for parameter in name.parameters if parameter not in _parameters(found)]
    if missing:
        return f"{name.path} no longer takes {', '.join(missing)}; {where}"
    return None


def _parameters(found: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(found).parameters)
