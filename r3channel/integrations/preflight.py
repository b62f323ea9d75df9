"""Checks what a run needs of this machine before any process starts: ports, folders, room, memory, packages, and a layout for its
model.

Each check returns a fault as text, which is empty if all is well. The text names the option to change, what was seen, and what to
give instead. Nothing is started, and nothing is left behind.
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
"""Separates the faults of one error."""
_LAST_PORT = 65535
MEMINFO = Path("/proc/meminfo")


def refuse(faults: Iterable[str]) -> None:
    """Raise if there are faults.

    Args:
        faults: Texts of faults; empty texts are ignored.

    Raises:
        ConfigError: With every fault, one a line.
    """
    if found := [fault for fault in faults if fault]:
        raise ConfigError(NEXT.join(found))


def of_channel(config: ChannelConfig, *, ranks: int) -> Iterator[str]:
    """Yield the faults of this machine for a relay and its trainers.

    Args:
        config: The channel's settings.
        ranks: Number of trainer ranks whose metrics pages are served on this machine.
    """
    host = local_address(config.interface)
    pages = {"the relay": 0} | {f"trainer rank {rank}": 1 + rank for rank in range(ranks)}
    for whose, offset in pages.items() if config.metrics_port > 0 else ():
        at = config.metrics_port + offset
        yield port(f"{_option_names('metrics_port')}, of {whose}: port ", at, host=host)
    if config.ingest_port:
        yield port(f"{_option_names('ingest_port')}: port ", config.ingest_port, host=host)
    for name in ("journal", "metrics_dir", "trace"):
        yield folder(_option_names(name), getattr(config, name))
    if config.token_file and not Path(config.token_file).is_file():
        yield folder(_option_names("token_file"), Path(config.token_file).parent)


def _option_names(field: str) -> str:
    """Return the option and the variable that set a field.

    >>> _option_names("journal")
    '--r3-journal (R3CHANNEL_JOURNAL)'
    """
    return f"--r3-{field.replace('_', '-')} ({ENV_PREFIX}{field.upper()})"


def port(before: str, number: int, *, host: str) -> str:
    """Return a fault if the port cannot be bound now.

    Args:
        before: Text that the fault puts before the number, such as the option.
        number: The port; 0 stands for any port.
        host: Name or address to bind.
    """
    try:
        if number > _LAST_PORT:  # the C library would wrap around to 0
            raise OverflowError(f"expected at most {_LAST_PORT}")
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except (OSError, OverflowError) as error:
        wrong = f"{before}{number} cannot be bound on {host} ({error})"
        return f"{wrong}; stop what listens there (ss -ltnp), or give another port: 0 takes a free one"
    return ""


def folder(option: str, path: str | os.PathLike[str], *, room_bytes: int = 0) -> str:
    """Return a fault if files cannot be made in a folder.

    Args:
        option: The option that names the folder, for the fault.
        path: The folder, which need not exist; empty if the option is not given, which is no fault.
        room_bytes: Free bytes that the folder needs; less is a fault.
    """
    if not path:
        return ""
    at = Path(path).absolute()
    there = next(one for one in (at, *at.parents) if os.path.exists(one))
    try:
        # A file is tried: a check of permissions says yes to a superuser for any folder.
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{option}: {there} cannot be written ({error.strerror}); give a folder that can"
    if (free := shutil.disk_usage(there).free) < room_bytes:
        room = f"{free / 1e9:.1f} GB are free in {there}, and {room_bytes / 1e9:.1f} GB are needed"
        return f"{option}: {room}; give a folder with more room"
    return ""


def memory(needed_bytes: int, *, remedy: str, meminfo: Path = MEMINFO) -> str:
    """Return a fault if too little memory is free without swapping.

    If the system does not tell how much is free, there is no fault.

    Args:
        needed_bytes: Bytes that are needed.
        remedy: What to change, for the fault.
        meminfo: The file to read.
    """
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if found and found[0] < needed_bytes:
        return f"{found[0] / 2**30:.1f} GiB of memory are free, and {needed_bytes / 2**30:.1f} GiB are needed; {remedy}"
    return ""


def layout(option: str, given: TrainerLayout, model: Mapping[str, Any]) -> str:
    """Return a fault if Megatron does not cut the model like this.

    Args:
        option: The option that gives the layout, for the fault.
        given: The layout.
        model: A checkpoint's `config.json`.
    """
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
    """Check that each port can be bound on loopback now.

    For every role but an engine, also check that any port at all can be bound.
    """
    for number in context.ports if context.role == "engine" else (0, *context.ports):
        fault = port("", number, host=LOOPBACK)
        yield Check(name="port", ok=not fault, found=fault or f"{number or 'any'} is free on {LOOPBACK}")


def check_memory(context: CheckContext, *, meminfo: Path = MEMINFO) -> Iterator[Check]:
    """Check the memory for the rows that `store_bytes` allows.

    This is never a fault: a relay may never hold so many rows, or may run elsewhere.
    """
    size = context.config.store_bytes
    remedy = "the store may hold so many bytes of rows: lower store_bytes to twice a step (`r3channel plan` says it)"
    enough = f"room for the {size / 2**30:.1f} GiB of rows that store_bytes allows"
    found = memory(size, remedy=remedy, meminfo=meminfo) or enough
    yield Check(name="memory of the relay", ok=True, found=found)


def check_store(context: CheckContext) -> Iterator[Check]:
    """Check that `journal` has room for what a killed relay would leave.

    It is a fault if the folder cannot be written or lacks room.
    """
    path, size = context.config.journal, context.config.store_bytes
    fault = folder("journal", path, room_bytes=size)
    well = f"{path} takes up to {size / 1e9:.1f} GB of rows (store_bytes), and so much is free"
    found = fault or (well if path else "not set: what a killed relay holds is lost")
    yield Check(name="journal", ok=not fault, found=found, remedy="or lower store_bytes")


def probe_all(urls: Sequence[str], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Probe all engines at the same time.

    An engine that takes longer than `timeout_s` is busy: it is left out of the answers and named in the log.

    Args:
        urls: Addresses of engines.
        timeout_s: Seconds to wait for an answer.

    Returns:
        The answer to `probe` by address.

    Raises:
        EngineUnavailable: For the engines that cannot be asked.
    """
    from r3channel.engine.probe import probe  # a run without the flag imports nothing else of the channel

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
