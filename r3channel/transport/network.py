"""The network of this machine: its interfaces, the one that a relay binds, and what NCCL is told. Linux only.

Everything is read from /sys and /proc. gloo takes the interface on the route to the option `interface`
(`transport.process_group`), which on the relay's machine is the one that it binds.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from r3channel.observe.check import Check, CheckContext

_NET = Path("/sys/class/net")
_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
_NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_CONF_FILE")
"""The variables by which NCCL is told what to use, or where that is written."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    """IPv4 first."""
    speed_mbit_s: int | None
    """None where the driver does not say (virtual and loopback interfaces)."""


# -- what is there -------------------------------------------------------------------------------------------------------


def interfaces(
    root: Path = _NET, *, addresses_of: Callable[[str], tuple[str, ...]] | None = None
) -> list[Interface]:
    """All interfaces, in the order of the kernel's numbers."""
    found = [
        Interface(name, _is_up(root / name), (addresses_of or addresses)(name), _speed(root / name))
        for name in sorted(path.name for path in root.glob("*"))
    ]
    return sorted(found, key=lambda interface: int(_read(root / interface.name / "ifindex") or 0))


def addresses(name: str) -> tuple[str, ...]:
    """The first IPv4 address of an interface and its IPv6 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has none
    for line in _read(_INET6).splitlines():
        digits, *_, owner = line.split()
        if owner == name:
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return tuple(found)


def _is_up(folder: Path) -> bool:
    """Whether it is up by its operational state; drivers that do not report one (loopback) count by their flag."""
    state = _read(folder / "operstate")
    return state == "up" or (state == "unknown" and bool(int(_read(folder / "flags") or "0", 16) & 1))


def _speed(folder: Path) -> int | None:
    text = _read(folder / "speed")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def route_to(address: str) -> str | None:
    """This machine's address on the route to an IPv4 address; None when there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


# -- findings ------------------------------------------------------------------------------------------------------------


def check_network(context: CheckContext) -> Iterator[Check]:
    """A line per interface, the one that a relay binds, and what NCCL is told."""
    found = interfaces()
    for interface in found:
        yield Check(name=f"network {interface.name}", ok=True, found=_describe(interface))
    yield check_interface(context.config.interface, found, nodes=context.nodes)
    yield check_nccl(context.environment)


def check_interface(address: str, found: Sequence[Interface], *, nodes: int) -> Check:
    """Which interface a relay binds and gloo uses, and whether other machines can reach it. `nodes`: machines of the run."""
    local = route_to(address)
    over = next((interface for interface in found if local in interface.addresses), None)
    where = f"{over.name} ({local})" if over is not None else str(local)
    remedy = "set R3CHANNEL_INTERFACE to this machine's address on the network of the trainers"
    if local is None:
        ok, said = False, f"no route to interface {address}"
    elif nodes > 1 and ipaddress.ip_address(local).is_loopback:
        ok, said = False, f"{where}, which only this machine reaches; {nodes} nodes are configured"
    elif local != address:
        ok, said = True, f"{where}, the route to {address}; a relay cannot bind that address here"
    else:
        ok, said = True, where
    return Check(name="interface", ok=ok, found=said, remedy=remedy)


def check_nccl(environment: Mapping[str, str]) -> Check:
    """What NCCL is told, for rows or weights that go over it; which interfaces and adapters it takes, only NCCL can say."""
    told = ", ".join(f"{name}={environment[name]}" for name in _NCCL if name in environment)
    found = told or f"it chooses by itself; {', '.join(_NCCL)} are not set"
    return Check(name="NCCL", ok=True, found=f"{found}. NCCL_DEBUG=INFO prints what it takes")


def _describe(interface: Interface) -> str:
    speed = f"{interface.speed_mbit_s / 1000:g} Gbit/s" if interface.speed_mbit_s else "speed unknown"
    return f"{', '.join(interface.addresses) or 'no address'}; {speed}; {'up' if interface.up else 'down'}"
