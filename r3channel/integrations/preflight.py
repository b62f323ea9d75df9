"""What a run needs of this machine, looked at before any process starts: ports, folders, room, memory, packages, and a layout
beside its model.

Each look returns a fault as text, empty where all is well: the option to change, what was seen, what to give instead. Nothing
is started, and nothing is left behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from r3channel.config import ENV_PREFIX, ChannelConfig
from r3channel.errors import ConfigError, EngineUnavailable
from r3channel.observe.check import Check, CheckContext
from r3channel.plan.layout import TrainerLayout
from r3channel.transport.network import local_address

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
NEXT = "\n  "
"""Stands between the faults of one error."""
_LAST_PORT = 65535
MEMINFO = Path("/proc/meminfo")


def refuse(faults: Iterable[str]) -> None:
    """Raises ConfigError with every fault, one a line."""
    found = [fault for fault in faults if fault]
    if found:
        raise ConfigError(NEXT.join(found))


def of_channel(config: ChannelConfig, *, ranks: int) -> Iterator[str]:
    """What a relay and the trainers beside it would find wrong on this machine."""
    host = local_address(config.interface)
    pages = {"the relay": 0} | {f"trainer rank {rank}": 1 + rank for rank in range(ranks)}
    for whose, offset in pages.items() if config.metrics_port > 0 else ():
        at = config.metrics_port + offset
        yield port(f"{_named('metrics_port')}, of {whose}: port ", at, host=host)
    if config.ingest_port:
        yield port(f"{_named('ingest_port')}: port ", config.ingest_port, host=host)
    for name in ("journal", "metrics_dir", "trace"):
        yield folder(_named(name), getattr(config, name))
    if config.token_file and not Path(config.token_file).is_file():
        yield folder(_named("token_file"), Path(config.token_file).parent)


def _named(field: str) -> str:
    """
    >>> _named("journal")
    '--r3-journal (R3CHANNEL_JOURNAL)'
    """
    return f"--r3-{field.replace('_', '-')} ({ENV_PREFIX}{field.upper()})"


def port(before: str, number: int, *, host: str) -> str:
    """A fault if the port cannot be bound now, with the option that stands before its number; 0 asks for any port."""
    try:
        if number > _LAST_PORT:  # the C library would count on from 0
            raise OverflowError(f"expected at most {_LAST_PORT}")
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except (OSError, OverflowError) as error:
        wrong = f"{before}{number} cannot be bound on {host} ({error})"
        return f"{wrong}; stop what listens there (ss -ltnp), or give another port: 0 takes a free one"
    return ""


def folder(option: str, path: str | os.PathLike[str], *, room_bytes: int = 0) -> str:
    """A fault if files cannot be made there or room is missing; an option that is not given has an empty path."""
    if not path:
        return ""
    at = Path(path).absolute()
    there = next(one for one in (at, *at.parents) if os.path.exists(one))
    try:
        # Tried and not asked for: a superuser is told yes of any folder.
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{option}: {there} cannot be written ({error.strerror}); give a folder that can"
    free = shutil.disk_usage(there).free
    if free < room_bytes:
        room = f"{free / 1e9:.1f} GB are free in {there}, and {room_bytes / 1e9:.1f} GB are needed"
        return f"{option}: {room}; give a folder with more room"
    return ""


def memory(needed_bytes: int, *, remedy: str, meminfo: Path = MEMINFO) -> str:
    """Whether so much memory is free without swapping; no fault if the system does not tell."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if found and found[0] < needed_bytes:
        return f"{found[0] / 2**30:.1f} GiB of memory are free, and {needed_bytes / 2**30:.1f} GiB are needed; {remedy}"
    return ""


def layout(option: str, given: TrainerLayout, model: Mapping[str, Any]) -> str:
    """A fault if Megatron does not cut the model of a checkpoint's `config.json` so."""
    heads, groups = model["num_attention_heads"], model["num_key_value_heads"]
    if heads % given.tp or (groups % given.tp and given.tp % groups):
        cut = f"the model's {heads} attention heads in {groups} groups"
        return f"{option}: tp={given.tp} does not divide {cut}; give a tp that does"
    if model["num_experts"] % given.ep:
        return f"{option}: ep={given.ep} does not divide the model's {model['num_experts']} experts; give an ep that does"
    try:
        given.stage_sizes(model["num_hidden_layers"])
    except ConfigError as error:
        return f"{option}: {error}; give other pp, vpp, first_layers or last_layers"
    return ""


# -- the doctor's ----------------------------------------------------------------------------------------------------------


def check_ports(context: CheckContext) -> Iterator[Check]:
    """Whether each port can be bound on loopback now, and, but for an engine, any port at all."""
    for number in context.ports if context.role == "engine" else (0, *context.ports):
        fault = port("", number, host=LOOPBACK)
        yield Check(name="port", ok=not fault, found=fault or f"{number or 'any'} is free on {LOOPBACK}")


def check_memory(context: CheckContext, *, meminfo: Path = MEMINFO) -> Iterator[Check]:
    """Memory for the rows that `store_bytes` allows. Never a fault: a relay may never hold so many, or run elsewhere."""
    size = context.config.store_bytes
    remedy = "the store may hold so many bytes of rows: lower store_bytes to twice a step (`r3channel plan` says it)"
    enough = f"room for the {size / 2**30:.1f} GiB of rows that store_bytes allows"
    found = memory(size, remedy=remedy, meminfo=meminfo) or enough
    yield Check(name="memory of the relay", ok=True, found=found)


def check_store(context: CheckContext) -> Iterator[Check]:
    """Whether `journal` takes what a killed relay would leave; a fault where it cannot be written or has no room."""
    path, size = context.config.journal, context.config.store_bytes
    fault = folder("journal", path, room_bytes=size)
    well = f"{path} takes up to {size / 1e9:.1f} GB of rows (store_bytes), and so much is free"
    found = fault or (well if path else "not set: what a killed relay holds is lost")
    yield Check(name="journal", ok=not fault, found=found, remedy="or lower store_bytes")


def probe_all(urls: Sequence[str], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """What each answers to `probe`, all asked at once. One that takes longer than `timeout_s` is busy: left out, said in the log.

    Raises EngineUnavailable for those that cannot be asked.
    """
    from r3channel.engine.probe import probe  # a run without the flag enters no room of the channel

    found, dead = dict[str, dict[str, Any]](), dict[str, str]()
    with ThreadPoolExecutor(len(urls) or 1) as pool:
        asked = {url: pool.submit(probe, url, timeout_s=timeout_s) for url in urls}
    for url, answer in asked.items():
        if (error := answer.exception()) is None:
            found[url] = answer.result()
        elif isinstance(getattr(error, "reason", error), TimeoutError):
            log.warning("r3channel: %s has not answered for %.0f s; is it busy?", url, timeout_s)
        else:
            dead[url] = f"{url}: {error}"
    if dead:
        said = f"no answer to a request of two tokens from {'; '.join(dead.values())}"
        raise EngineUnavailable(said, engines=dead)
    return found
