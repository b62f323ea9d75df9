"""The doors that SGLang opens: entry point `r3channel` of group `sglang.srt.plugins`; and `hook`, where patches/ was applied.

SGLang calls `register` once in each of its processes. Nothing of the engine room is imported there until it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from r3channel.config import EngineConfig


def register() -> None:
    """Apply the engine's hooks when R3CHANNEL_ENGINE=1 or R3CHANNEL_WEIGHTS=1; otherwise do nothing at all.

    SGLang only logs what a plug-in raises and serves on without it. So a plug-in that was asked for and cannot work ends the
    process with the reason instead: an engine that starts is an engine that captures.
    """
    try:
        _apply()
    except Exception as error:
        raise SystemExit(f"r3channel: the SGLang plug-in cannot be applied: {error}") from error


def _apply() -> None:
    from r3channel.config import EngineConfig

    config = EngineConfig.from_environment()
    if config.engine or config.weights:
        _receive_weights(config)
    if config.engine:
        engine, is_patched = _engine()
        if not is_patched:
            engine.apply(config)


def _engine() -> tuple[ModuleType, bool]:
    """The module of the hooks, and whether SGLang's sources call them. Raises PluginNotApplied where some could not be called."""
    from r3channel.engine.sglang_hooks import check_hooks, is_patched
    from r3channel.errors import PluginNotApplied

    problems = check_hooks()
    if problems:
        raise PluginNotApplied("; ".join(problems))
    patched = is_patched()
    from r3channel.engine import sglang

    return sglang, patched


@functools.cache
def hook(name: str) -> Callable[..., Any]:
    """What `apply` would register under this name, for sources with hooks of patches/ in them; they ask where R3CHANNEL_ENGINE=1.

    An engine asks for `refuse_engine` first, so what is raised here for a setting or for a name that is gone ends its start.
    """
    return _set_up_engine()[name]


@functools.cache
def _set_up_engine() -> dict[str, Any]:
    """The names of both modules that have hooks."""
    from r3channel.config import EngineConfig

    engine, _ = _engine()
    engine.set_up(EngineConfig.from_environment())
    return vars(engine.sglang_tensors) | vars(engine)


def _receive_weights(config: EngineConfig) -> None:
    """The receiving half of weight updates; a release without the places that it hooks into goes without, unless asked."""
    from r3channel.errors import PluginNotApplied
    from r3channel.transport.auth import read_token
    from r3channel.weights import receiver

    if receiver.hooks():
        receiver.apply(read_token(config.token_file) if config.token_file else "")
    elif config.weights:
        raise PluginNotApplied(
            "R3CHANNEL_WEIGHTS: this SGLang has no WeightUpdater to receive with; 0.5.23 has"
        )
