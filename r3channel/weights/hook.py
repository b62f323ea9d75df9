"""Our hook into SGLang's way of receiving weights: the only module of this room that imports SGLang. Read against 0.5.23.

`WeightUpdater.receive_weights_from_distributed` runs on each rank's scheduler thread; what it raises becomes HTTP 400 with
the first rank's reason. `load_format` is free text, so an order of ours travels as the one name of an update without tensors.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from r3channel.errors import WeightsError
from r3channel.weights.receiver import Receiver, gathered_words
from r3channel.weights.sglang import LOAD_FORMAT

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_RECEIVE = "WeightUpdater.receive_weights_from_distributed"
_PARAMETERS = {"names", "dtypes", "shapes", "group_name", "load_format"}

_run_token = ""
_receiver: Receiver | None = None


def available() -> bool:
    """Whether this SGLang has what is hooked; 0.5.15.post1 has not."""
    try:
        updater: Any = importlib.import_module(_UPDATER)
        receive = updater.WeightUpdater.receive_weights_from_distributed
    except (ImportError, AttributeError):
        return False
    return set(inspect.signature(receive).parameters) >= _PARAMETERS


def apply(run_token: str) -> None:
    """Register the hook. `run_token`: the run's secret, which a trainer must know too; empty: the session's own is enough."""
    global _run_token
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _run_token = run_token
    HookRegistry.register(f"{_UPDATER}.{_RECEIVE}", receive, HookType.AROUND)


def receive(
    original: Any, updater: Any, *, names: Any, group_name: str, load_format: Any = None, **rest: Any
) -> Any:
    """An order of ours is carried out; other updates pass, unless a session holds this engine."""
    receiver = _own()
    if load_format != LOAD_FORMAT:
        holder = receiver.holder()
        if holder and not group_name.startswith(holder):
            raise WeightsError(f"the engine is held by weight session {holder}, whose trainer lives")
        return original(updater, names=names, group_name=group_name, load_format=load_format, **rest)
    receiver.order(updater.get_model(), json.loads(names[0]))
    return []


def _own() -> Receiver:
    global _receiver
    if _receiver is None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()

        def agree(word: str) -> list[str]:
            return gathered_words(word, parallel.tp_group.cpu_group, parallel.tp_size)

        _receiver = Receiver(rank=parallel.tp_rank, run_token=_run_token, agree=agree)
    return _receiver
