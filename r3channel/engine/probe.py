"""The doctor's checks of engines: the plug-in is installed, its hooks would apply, and what a running engine says of itself."""

from __future__ import annotations

import base64
import binascii
import importlib.metadata
import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from r3channel.engine.refusals import Verdict, find_refused, flag, judgements
from r3channel.errors import R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.observe.check import Check, CheckContext
from r3channel.transport.network import urlopen
from r3channel.wire.frame import FRAME_MAGIC, parse_frame
from r3channel.wire.hello import Hello, probe_body

_PLUGIN_GROUP = "sglang.srt.plugins"
_HOOKS = "from r3channel.engine.sglang_hooks import check_hooks as check"
_NOT_ON = (
    "install r3channel in the engine's environment and start it with R3CHANNEL_ENGINE=1 and --enable-return-routed-experts; "
    "its log names a hook that failed"
)

_UNSET = (None, False, "", "auto", "none", "null", [], {})
"""Values with which a setting does nothing."""


def check_plugin(_: CheckContext) -> Iterator[Check]:
    """Check that SGLang can find our plug-in.

    SGLang finds it through installed metadata; a bare checkout on the path has none.
    """
    entries = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP)}
    yield Check(
        name="SGLang plug-in",
        ok="r3channel" in entries,
        found=entries.get("r3channel", f"no entry point in group {_PLUGIN_GROUP}"),
        remedy="install the package itself: pip install -e . (make setup does)",
    )


def check_hooks(context: CheckContext) -> Iterator[Check]:
    """Check that our hooks would apply to SGLang.

    SGLang cannot be imported without a GPU unless SGLANG_USE_CPU_ENGINE=1. There the check passes without looking.
    """
    if context.gpu or context.environment.get("SGLANG_USE_CPU_ENGINE") == "1":
        yield context.ask("SGLang hooks", _HOOKS)
    else:
        found = "not looked for: SGLang is not imported without a GPU"
        yield Check(name="SGLang hooks", ok=True, found=found)


def check_engines(context: CheckContext) -> Iterator[Check]:
    """Check each running engine of `--engine URL` by asking it."""
    for url in context.engines:
        yield from ask_engine(url, timeout_s=context.timeout_s)


def ask_engine(url: str, *, timeout_s: float) -> Iterator[Check]:
    """Send a probe of two tokens to an engine.

    Args:
        url: The engine's address.
        timeout_s: Seconds to wait for each answer.

    Returns:
        An iterator of checks: of the engine, its delivery, its hooks, its model's routing, its frame and its settings; a single
        failed check if the engine cannot be used.
    """
    try:
        reply = probe(url.rstrip("/"), timeout_s=timeout_s)
        data = base64.b64decode(reply["meta_info"]["routed_experts"], validate=True)
    except (OSError, ValueError, HTTPException) as error:
        seen = f"does not answer a request of two tokens: {error}"
        yield _failed_check(url, seen, "is it up, and is this its address?")
        return
    except (KeyError, TypeError, binascii.Error):
        yield _failed_check(url, "answers without routing", _NOT_ON)
        return
    try:
        hello, frame = Hello.split(data)
        if hello is None:
            ours, older = frame[:4] == FRAME_MAGIC, "frames, but no hello: an older r3channel"
            yield _failed_check(url, f"answers with {older if ours else 'stock int32 routing'}", _NOT_ON)
            return
        yield from _report_hello(url, hello)
        yield _frame(hello, frame)
        yield from _settings(url, hello, timeout_s=timeout_s)
    except R3Error as error:
        yield _failed_check(url, f"sends what cannot be read: {error}", "are both ends of one version?")


def _report_hello(url: str, hello: Hello) -> Iterator[Check]:
    versions = f"SGLang {hello.sglang}, torch {hello.torch or 'unknown'}, r3channel {hello.r3channel}"
    yield Check(name=f"engine {url}", ok=True, found=f"{versions}, calls itself {hello.engine}")
    delivery = f"{hello.delivery}, codec {hello.codec}"
    if hello.allowed:
        delivery += f"; refusals overridden: {', '.join(hello.allowed)}"
    yield Check(name="delivery", ok=True, found=delivery)
    hooks = ", ".join(hook.rsplit(".", 2)[-1] for hook in hello.hooks)
    yield Check(name="hooks applied", ok=bool(hello.hooks), found=hooks or "none", remedy=_NOT_ON)


def _settings(url: str, hello: Hello, *, timeout_s: float) -> Iterator[Check]:
    try:
        values = _fetch(urllib.request.Request(url.rstrip("/") + "/server_info"), timeout_s=timeout_s)
    except (OSError, ValueError, HTTPException) as error:
        found = f"/server_info cannot be read: {error}"
        yield Check(name="settings", ok=False, found=found, remedy="ask again")
        return
    for verdict in (Verdict.TESTED, Verdict.READ):
        shown = [flag(name, value) for name, value, _ in judgements(values, verdict) if value not in _UNSET]
        yield Check(name=f"settings {verdict}", ok=True, found=", ".join(shown) or "none")
    wrong = list(find_refused(values))
    yield Check(
        name="settings refused",
        ok=all(word in hello.allowed for word, _ in wrong),
        found=", ".join(reason.split(": ")[0] for _, reason in wrong) or "none",
        remedy="its rows may be wrong; its r3channel is older than this one, which would not start it",
    )
    yield Check(name="settings not read", ok=True, found=", ".join(hello.unread) or "none")


def _frame(hello: Hello, data: bytes) -> Check:
    spec = RoutingSpec.from_dict(hello.spec)
    frame = parse_frame(data, spec=spec, sample_id="probe", engine=hello.engine)
    frame.routing(sample_id="probe")
    shape = f"{spec.num_moe_layers} MoE layers of {spec.num_layers}, top-{spec.top_k} of {spec.num_experts}"
    found = f"{shape}; a frame of {frame.rows} rows, weight version {frame.weight_version}, every id checked"
    remedy = "two rows were expected for three tokens"
    return Check(name="routing", ok=frame.rows == 2, found=found, remedy=remedy)


def _failed_check(url: str, found: str, remedy: str) -> Check:
    return Check(name=f"engine {url}", ok=False, found=found, remedy=remedy)


def probe(url: str, *, timeout_s: float) -> dict[str, Any]:
    """Return an engine's answer to a probe of two tokens.

    The probe asks for the engine's hello and for the tokens' routing.

    Args:
        url: The engine's address, without a slash at its end.
        timeout_s: Seconds to wait for the answer.

    Raises:
        OSError: If the engine does not answer.
        HTTPException: If the answer is not HTTP, or is cut.
        ValueError: If the answer is not JSON.
    """
    body = json.dumps(probe_body()).encode()
    request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
    return _fetch(request, timeout_s=timeout_s)


def _fetch(request: urllib.request.Request, *, timeout_s: float) -> dict[str, Any]:
    with urlopen(request, timeout_s=timeout_s) as reply:
        return json.loads(reply.read())
