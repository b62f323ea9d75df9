"""A whole server: rows of its replies, and of direct delivery, against what its own routers chose; what capture costs it.

On a GPU: slime's image's SGLang, bfloat16, CUDA graphs, the overlap scheduler. On a CPU the embedded one stands for it.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.engine import client
from tests.engine.test_retraction import passes_of
from tests.gpu.facts import WAITS, Facts
from tests.gpu.server import RUNNING, serving, written
from tests.support.direct import rows_here
from tests.support.waits import until

TOGETHER, HITS, NEW_TOKENS = 48, 16, 33
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
PASSES = 20
"""What a profile spans."""


def check(device: str, facts: Facts) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, spec = written(device, folder)
        relay = Relay(spec, TrainerLayout(), ChannelConfig())
        taps = {way: folder / way for way in ("reply", "direct")}
        own = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engine.tapped"} if device == "cpu" else {}
        envs = {way: {**RETRACTING, **own, "R3TEST_TAP": str(tap)} for way, tap in taps.items()}
        envs["direct"] |= client.direct_to(relay, folder)
        for tap in taps.values():
            tap.mkdir()
        variants, begin = {way: {"env": env} for way, env in envs.items()}, time.monotonic()
        with relay, serving(device, model, variants, logs=folder) as servers:
            facts.note("both servers are ready, s", time.monotonic() - begin)
            for way, server in servers.items():
                replies = asked(server.url, few=facts.small)
                if way == "reply":
                    rows = [reply.frame(spec).verify() for reply in replies]
                else:
                    samples = client.delivered(relay, replies, engine=server.url)
                    rows = [rows_here(relay, sample) for sample in samples]
                judge(way, replies, rows, taps[way], facts)


def asked(url: str, *, few: bool) -> list[client.Reply]:
    """Answers to requests of odd lengths, then to some that go on where those ended; one more is aborted meanwhile."""
    together, hits = (8, 3) if few else (TOGETHER, HITS)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(client.generate, url, [5, 6, 7], new_tokens=2000, rid="aborted")
        prompts = client.prompts_of(3 + (9 * number) % 443 for number in range(together))
        first = client.generate_together(url, prompts, new_tokens=NEW_TOKENS)
        client.post(url + "/abort_request", {"rid": "aborted"})
        reason = lost.result().meta["finish_reason"]["type"]
        assert reason == "abort", f"the aborted request ended by {reason}"
    torn = sorted(first, key=lambda reply: -reply.meta["num_retractions"])[:hits]
    again = client.generate_together(url, [[*reply.tokens, 7] for reply in torn], new_tokens=NEW_TOKENS)
    return first + again


def judge(way: str, replies: list[client.Reply], rows: list[Any], tap: Path, facts: Facts) -> None:
    passes, cached = passes_of(tap), sum(reply.meta["cached_tokens"] for reply in replies)
    retracted = sum(reply.meta["num_retractions"] for reply in replies)
    pairs = [*zip(replies, rows, strict=True)]
    differ = sum(differing(ids_TLK, reply, passes[reply.meta["id"]]) for reply, ids_TLK in pairs)
    known = {tuple(reply.tokens): ids_TLK for reply, ids_TLK in pairs}
    for reply, ids_TLK in pairs:
        if (earlier_TLK := known.get(tuple(reply.prompt[:-1]))) is not None:  # it goes on where that ended
            hit = min(reply.meta["cached_tokens"], len(earlier_TLK))
            differ += int((ids_TLK[:hit] != earlier_TLK[:hit]).any((1, 2)).sum())
    counted = sum(len(ids_TLK) for ids_TLK in rows)
    expected = sum(len(reply.tokens) - 1 for reply in replies)
    facts.expect(f"{way}: rows", counted, counted == expected, f"{expected}, one for each token but the last")
    facts.expect(f"{way}: rows that differ from the routers' own choice", differ, differ == 0, "0")
    facts.expect(f"{way}: tokens from the prefix cache", cached, cached > 0, "some")
    facts.expect(f"{way}: retractions", retracted, retracted > 0, "some")


def differing(
    ids_TLK: np.ndarray[Any, Any], reply: client.Reply, passes: Iterable[tuple[int, bool, Any]]
) -> int:
    """Rows that are not the one of the pass that made the next token; of a prompt's, of none of its passes.

    What the prefix cache had was computed for another request, whose rows they must be.
    """
    made, seen = dict[int, Any](), dict[int, list[Any]]()
    for start, makes, own_TLK in passes:
        for row, ids_LK in enumerate(own_TLK, start):
            seen.setdefault(row, []).append(ids_LK)
        if makes:
            made[start + len(own_TLK) - 1] = own_TLK[-1]
    wrong = 0
    for row, found_LK in enumerate(ids_TLK):
        wanted = [made[row]] if row in made else seen.get(row, [])
        answered = row >= len(reply.prompt) - 1
        wrong += (answered or bool(wanted)) and not any(np.array_equal(found_LK, one) for one in wanted)
    return wrong


# -- what it costs ---------------------------------------------------------------------------------------------------------


def cost(device: str, facts: Facts) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, spec = written(device, folder)
        relay = Relay(spec, TrainerLayout(), ChannelConfig())
        variants = {
            "off": {"r3channel": False, "capture": False}, "SGLang's own": {"r3channel": False},
            "reply": {}, "direct": {"env": client.direct_to(relay, folder)},
        }  # fmt: skip
        with relay, serving(device, model, variants, logs=folder) as servers:
            urls = {variant: server.url for variant, server in servers.items()}
            for running in (1, 4) if facts.small else (1, 32, RUNNING):
                compare(urls, running, facts)
            waits = {name: waits_of(url, folder / name) for name, url in urls.items() if device == "cuda"}
    if not waits:
        facts.left_out.append("waits of the host: a CPU has none")
        return
    for variant in ("reply", "direct"):
        facts.expect(
            f"waits of the host in {PASSES} passes, {variant}", waits[variant], waits[variant] <= waits["off"],
            f"at most {waits['off']}, as without capture",
        )  # fmt: skip
    facts.note("waits of the host, SGLang's own", waits["SGLang's own"])


def compare(urls: dict[str, str], running: int, facts: Facts) -> None:
    """All servers take turns; ratios are of one round each, and their median counts."""
    tokens = 16 if facts.small else 256
    rounds = list[dict[str, tuple[float, list[float]]]]()
    for number in range(2 if facts.small else 4):
        turns = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
        seen = {variant: load(urls[variant], running, tokens, routing=variant != "off") for variant in turns}
        rounds += [seen] if number else []  # the first warms up
    for variant in urls:
        told = f"{running} running, {variant}"
        gaps = sorted(gap for seen in rounds for gap in seen[variant][1])
        between = [1e3 * gaps[min(int(part * len(gaps)), len(gaps) - 1)] for part in (0.5, 0.99)]
        facts.note(f"{told}: ms between tokens, p50 and p99", between)
        if variant == "off":
            facts.note(f"{told}: tokens/s", statistics.median(seen[variant][0] for seen in rounds))
            continue
        share = statistics.median(seen[variant][0] / seen["off"][0] for seen in rounds)
        if variant == "SGLang's own":
            facts.note(f"{told}: tokens/s, of off's", share)
        else:
            facts.limit(f"{told}: tokens/s, of off's", share, share >= 0.99, "at least 0.99")


def load(url: str, running: int, tokens: int, *, routing: bool) -> tuple[float, list[float]]:
    """(tokens a second of so many requests at once, seconds between the tokens of one of them)."""
    first, *others = client.prompts_of([32] * running, seed=time.monotonic_ns() % 10**6)
    with ThreadPoolExecutor(running) as pool:
        begin = time.perf_counter()
        waiting = [
            pool.submit(client.generate, url, prompt, new_tokens=tokens, routing=routing) for prompt in others
        ]
        came = [time.perf_counter() for _ in client.stream(url, first, new_tokens=tokens, routing=routing)]
        for one in waiting:
            one.result()
        spent_s = time.perf_counter() - begin
    return running * tokens / spent_s, [late - early for early, late in pairwise(came)]


def waits_of(url: str, folder: Path) -> int:
    """How often the scheduler's process waited for the device in `PASSES` decode passes, by its profile."""
    body = {"output_dir": str(folder), "num_steps": PASSES, "activities": ["CPU", "GPU"]}
    prompts = client.prompts_of(range(32, 64))
    with ThreadPoolExecutor(len(prompts)) as pool:
        waiting = [
            pool.submit(client.generate, url, prompt, new_tokens=1024, routing=False) for prompt in prompts
        ]
        time.sleep(0.5)  # all of them decode
        client.post(url + "/start_profile", body)
        until(lambda: bool(events_of(folder)), "the profile of the server", limit_s=60)
        for one in waiting:
            one.result()
    seen = Counter(event["name"] for event in events_of(folder) if event.get("cat") == "cuda_runtime")
    return sum(seen[name] for name in WAITS)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """What the trace holds, once it is written to its end."""
    for file in folder.rglob("*.json.gz"):
        with suppress(EOFError, OSError, ValueError):
            return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return []
