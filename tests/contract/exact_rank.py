"""One of several trainer ranks: each has half of the rows of every tensor, the third what the second has; or whole tensors."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from examples.float8_blocks import float8_blocks
from r3channel.errors import R3Error
from r3channel.transport.collective_lock import Slot
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.weights import ranks
from r3channel.weights.convert import Shard
from r3channel.weights.engine import EngineHandle
from r3channel.weights.geometry import Box, ShardMap
from r3channel.weights.groups import WeightGroup
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.rank_link import RankLink
from r3channel.weights.send_planner import _RECORD_BYTES, SendPlanner
from r3channel.weights.session import WeightSync
from r3channel.weights.update import Staged
from tests.dist.ranks import write_result
from tests.support import weights as whole
from tests.support.waits import UPDATE_S, until

NAMES = [f"model.layers.{index}.mlp.gate.weight" for index in range(4)]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {n: torch.arange(64.0).view(8, 8) + 100 * version + at for at, n in enumerate(NAMES)}


FLOAT8 = "model.layers.0.mlp.down_proj.weight"


def plain() -> torch.Tensor:
    """What becomes float8."""
    return torch.randn(512, 200, generator=torch.Generator().manual_seed(3))


def shards(rank: int, version: int) -> list[Shard]:
    at = 4 * min(rank, 1)
    box = Box((at, 0), (at + 4, 8))
    return [Shard(TensorMeta.of(n, t), box, t[at : at + 4]) for n, t in weights(version).items()]


def die_after_the_commit(job: dict[str, Any], version: int) -> None:
    """This rank ends once every engine serves the version: before it is told so, or before it tells."""

    def dying() -> Any:
        clients = [EngineHandle(url) for url in job["engines"]]
        while any(client.weight_version(timeout_s=5) != str(version) for client in clients):
            time.sleep(0.01)
        write_result(job, {})
        os._exit(0)

    Staged._tell = lambda self: dying()


def run(job: dict[str, Any]) -> dict[str, Any]:
    gc.disable()  # a session without an error must not need it to end
    dist.init_process_group("gloo", **{key: job[key] for key in ("init_method", "rank", "world_size")})
    what = {"like": float8, "stops": stopping, "late": late, "kills": grouped, "hows": in_stages}
    result = next((call for key, call in what.items() if key in job), plain_weights)(job)
    if "like" not in job:
        gc.collect()  # a kept error's traceback holds the session
    dist.destroy_process_group()
    # A thread of gloo that comes for the interpreter while it ends would end the process.
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not any("gloo" in name for name in names), names
    assert not [thread for thread in threading.enumerate() if "listener" in thread.name]
    return result


def plain_weights(job: dict[str, Any]) -> dict[str, Any]:
    """Updates that succeed, that fail, and one in which a rank dies."""
    rank, result = job["rank"], dict[str, Any]()
    with WeightSync.sharded(job["engines"], group=dist.group.WORLD, verify=True) as sync:
        sync.connect(timeout_s=UPDATE_S)
        update = partial(sync.update, timeout_s=UPDATE_S)
        report = update(shards(rank, 1), version=1)
        result["sent"] = report.sent_bytes
        spoiled = shards(rank, 2)
        if rank:
            spoiled[0].tensor[0, 0] = float("nan")
        result["spoiled"] = failure(lambda: update(spoiled, version=2))
        short = shards(rank, 2)[rank:]  # nobody has the lower half of the first tensor
        result["short"] = [failure(lambda: update(short, version=2)) for _ in range(2)]
        result["version"] = sync.version
        republish = partial(sync.republish, timeout_s=UPDATE_S)
        result["other"] = failure(lambda: republish(shards(rank, 3), engines=job["engines"]))
        republish(shards(rank, 1), engines=job["engines"][:1])
        if rank == job["dies"]:
            die_after_the_commit(job, 2)
        result["lost"] = failure(lambda: update(shards(rank, 2), version=2))
        result |= {"after": sync.version, "held": sync.held.version if sync.held else None}
    return result


def stopping(job: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 stops alone in each of these ways, one update after another, the last for good: what the others are told, when."""
    rank, told = job["rank"], dict[str, Any]()
    with WeightSync.sharded(job["engines"], group=dist.group.WORLD) as sync:
        sync.connect(timeout_s=UPDATE_S)
        sync.update(shards(rank, 1), version=1, timeout_s=UPDATE_S)
        for version, how in enumerate(job["stops"], start=2):
            dist.barrier()  # the test's own
            begun_s = time.monotonic()
            # in a survey of what all hold, that of the others has changed
            mine = shards(rank, version)[:: -1 if how == "survey" and rank != 1 else 1]
            with stopped(how) if rank == 1 else nullcontext():
                given = failing(job, how, mine, at=2) if rank == 1 else mine
                said = failure(partial(sync.update, given, version=version, timeout_s=UPDATE_S))
            told[how] = [time.monotonic() - begun_s, *said]
            if how != "kill":
                dist.barrier()
                sync.update(mine, version=version, timeout_s=UPDATE_S)
    return told


@contextmanager
def stopped(how: str) -> Iterator[None]:
    """Something of this rank that an update uses is in use, or fails."""
    if how == "slot":
        busy, use = Slot(), Slot.use
        with ThreadPoolExecutor(1) as pool, patch("r3channel.weights.session.PROCESS_SLOT", busy):
            held = busy.use("routing", "step 3", timeout_s=1)
            pool.submit(held.__enter__).result()
            with patch.object(Slot, "use", lambda *what, timeout_s: use(*what, timeout_s=0.2)):
                yield
    elif how == "link":
        with patch.object(RankLink, "send", side_effect=OSError("no buffer space")):
            yield
    elif how == "survey":  # when the others have heard what all hold
        with patch.object(ShardMap, "gathered", side_effect=OSError("no room")):
            yield
    elif how == "plan":  # when the other one has its plan
        with (
            patch.object(SendPlanner, "aim", forgetful(SendPlanner.aim)),
            patch.object(SendPlanner, "outdated_links", lambda _, links: [*range(len(links))]),
        ):
            yield
    else:
        yield


def forgetful(aim: Callable[..., None]) -> Callable[..., None]:
    def aimed(self: SendPlanner, links: Sequence[RankLink], *values: Any) -> None:
        aim(self, links, *values)
        for link in links:
            link.aimed = None
        raise OSError("no memory")

    return aimed


def failing(
    job: dict[str, Any], how: str, given: Iterable[Any], *, at: int, sent: Sequence[int] = (0,)
) -> Iterator[Any]:
    """What this rank gives, of which one does not come as it should; it is killed once something was sent."""
    for number, one in enumerate(given):
        if number == at and how == "convert":
            raise ValueError("gather failed")
        if number == at and how == "slow":
            time.sleep(1.2 * job["engine_timeout_s"])
        if number == at and how == "kill":
            until(lambda: sent)
            write_result(job, {})
            os._exit(0)
        yield one


def late(job: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 stands still beyond the deadline of every second update; then both go on. Of each: what failed it, and whether the
    log tells of a wait."""
    rank, told, logged = job["rank"], list[Any](), list[object]()
    ranks.log.addFilter(lambda record: logged.append(record) or True)
    sync, other = (WeightSync.sharded(job["engines"], group=dist.group.WORLD) for _ in "12")
    with sync, other:
        if not rank:
            failure(lambda: sync.connect(timeout_s=0.1))
        dist.barrier()  # the test's own
        sync.connect(timeout_s=UPDATE_S)
        time.sleep(0.5 * (1 - rank))  # rank 1 is there first, where rank 0's word of the first session lies
        other.connect(timeout_s=UPDATE_S)
        for version in range(1, 2 * job["late"] + 1):
            stands_still = version % 2 == 0
            if rank and stands_still:
                waking = subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                waking.wait()
            limit_s = 0.6 if stands_still else UPDATE_S
            logged.clear()
            said = failure(lambda v=version, s=limit_s: sync.update(shards(rank, v), version=v, timeout_s=s))
            told.append((said, bool(logged)))
    return {"told": told}


def grouped(job: dict[str, Any]) -> dict[str, Any]:
    """Updates in a joint group, of a record for each half of a tensor; one that fails; one in which rank 1 dies in some round."""
    rank, result = job["rank"], dict[str, Any]()
    with (
        patch.dict(_RECORD_BYTES, gloo=128),
        WeightSync.sharded(job["engines"], group=dist.group.WORLD, wire="gloo") as sync,
    ):
        sync.connect(timeout_s=UPDATE_S)
        noted, start = list[int](), ProcessGroupTransport.start_send
        with patch.object(
            ProcessGroupTransport, "start_send", lambda *sent: noted.append(sent[1]) or start(*sent)
        ):
            result["first"] = sync.update(shards(rank, 0), version=0, timeout_s=UPDATE_S).version
        result["order"] = noted
        result["sent"] = sync.update(shards(rank, 1), version=1, timeout_s=UPDATE_S).sent_bytes
        spoiled = shards(rank, 2)
        if rank == 1:
            spoiled[-1].tensor[0, 0] = float("nan")
        result["spoiled"] = failure(lambda: sync.update(spoiled, version=2, timeout_s=UPDATE_S))
        for version in (2, 3):
            sync.update(shards(rank, version), version=version, timeout_s=UPDATE_S)
        if rank == 1:
            die_at_send(job, result)
        result["lost"] = failure(lambda: sync.update(shards(rank, 4), version=4, timeout_s=UPDATE_S))
    return result


def die_at_send(job: dict[str, Any], result: dict[str, Any]) -> None:
    inner, left = ProcessGroupTransport.start_send, itertools.count()

    def dying(self: ProcessGroupTransport, *arguments: Any) -> Any:
        if next(left) == job["kills"]:
            write_result(job, result)
            os._exit(0)
        return inner(self, *arguments)

    setattr(ProcessGroupTransport, "start_send", dying)  # noqa: B010


def in_stages(job: dict[str, Any]) -> dict[str, Any]:
    """Updates by whole tensors of each rank's own, as of its pipeline stage; the last rank has none, and the second one fails."""
    rank, sources, broadcast = job["rank"], job["world_size"] - 1, WeightGroup.broadcast
    sent, told, version = list[int](), dict[str, Any](), 0

    def counted(self: WeightGroup, payload: torch.Tensor, *, timeout_s: float) -> None:
        broadcast(self, payload, timeout_s=timeout_s)
        sent.append(len(payload))

    WeightGroup.broadcast = counted
    options = {"staged": job.get("staged", False), "engine_timeout_s": job["engine_timeout_s"]}
    options |= {"group": dist.group.WORLD, "bucket_bytes": 1024}
    with WeightSync.whole(job["engines"], **options) as sync:
        sync.connect(timeout_s=UPDATE_S)
        for how in job["hows"]:
            version += 1
            stage = [*whole.weights(version).items()][rank::sources] if rank < sources else []
            if rank == 1 and how == "nan":
                stage[1] = stage[1][0], torch.full_like(stage[1][1], float("nan"))
            given = failing(job, how, stage, at=1, sent=sent) if rank == 1 else stage
            sent.clear()
            said = failure(partial(sync.update, given, version=version, timeout_s=UPDATE_S))
            version -= bool(said)
            told[how] = {"said": said, "sent": list(sent), "routable": sync.routable()}
    write_result(job, told)
    os._exit(0)  # gloo's threads that still wait for a lost rank would abort it (`transport/README.md`)


def float8(job: dict[str, Any]) -> dict[str, Any]:
    """An update of an engine of float8 weights, from this rank's rows; then the joining of a second one."""
    half = Box((256 * job["rank"], 0), (256 * job["rank"] + 256, 200))
    given = Shard(TensorMeta.of(FLOAT8, plain()), half, plain()[half.slices_in(Box.whole((512, 200)))])
    with WeightSync.sharded(job["engines"], group=dist.group.WORLD) as sync:
        sync.connect(timeout_s=UPDATE_S)
        absent = [failure(lambda: sync.add_engine("http://127.0.0.1:9", timeout_s=UPDATE_S)) for _ in "12"]
        report = sync.update(float8_blocks([given], like=job["like"]), version=1, timeout_s=UPDATE_S)
        joined = sync.add_engine(job["joins"], timeout_s=UPDATE_S)
        facts = {"joined": joined and joined.version, "routable": list(sync.routable()), "absent": absent}
        return {"tensors": report.tensors} | facts


def failure(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except R3Error as error:
        return [type(error).__name__, str(error)]
    return []
