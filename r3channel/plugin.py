"""The door that SGLang opens: entry point `r3channel` of group `sglang.srt.plugins`.

SGLang calls `register` once in each of its processes. Nothing of the engine room is imported there until it is asked for.
"""

from __future__ import annotations


def register() -> None:
    """Apply the engine's hooks when R3CHANNEL_ENGINE=1; otherwise do nothing at all.

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
    if not config.engine:
        return
    from r3channel.engine.hooks import check_hooks
    from r3channel.errors import PluginNotApplied

    problems = check_hooks()
    if problems:
        raise PluginNotApplied("; ".join(problems))
    from r3channel.engine.sglang import apply

    apply(config)
