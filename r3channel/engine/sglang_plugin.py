"""The entries for SGLang: entry point `r3channel` of group `sglang.srt.plugins`; and `hook`, where patches/ was applied.

SGLang calls `register` once in each of its processes. The engine's modules are imported only if the settings ask for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from r3channel.config import EngineConfig


def register() -> None:
    """Apply the engine's hooks if the settings ask for them.

    With R3CHANNEL_ENGINE=1 or R3CHANNEL_WEIGHTS=1 hooks are applied; otherwise the call does nothing at all. SGLang only logs
    what a plug-in raises and serves on without it. So a plug-in that was asked for and cannot work ends the process with the
    reason: an engine that starts is an engine that captures.

    Raises:
        SystemExit: If the plug-in cannot be applied.
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
    """Return what `apply` would register under this name.

    Sources with hooks of patches/ in them call it if R3CHANNEL_ENGINE=1. An engine asks for `refuse_engine` first. So an error
    that is raised here for a setting, or for a name that is gone, ends the engine's start.

    Args:
        name: Name of a hook in `sglang` or `sglang_tensors`.

    Raises:
        PluginNotApplied: If names that the hooks rely on are gone.
        ConfigError: If the settings are refused.
    """
    return _set_up_engine()[name]


@functools.cache
def _set_up_engine() -> dict[str, Any]:
    from r3channel.config import EngineConfig

    engine, _ = _engine()
    engine.set_up(EngineConfig.from_environment())
    return vars(engine.sglang_tensors) | vars(engine)


def _receive_weights(config: EngineConfig) -> None:
    from r3channel.errors import PluginNotApplied
    from r3channel.transport.auth import read_token
    from r3channel.weights import receiver

    if receiver.hooks():
        receiver.apply(read_token(config.token_file) if config.token_file else "")
    elif config.weights:
        raise PluginNotApplied(
            "R3CHANNEL_WEIGHTS: this SGLang has no WeightUpdater to receive with; 0.5.23 has"
        )
