"""What gloo and NCCL would use here: network interfaces, RDMA adapters, and the rules by which each is chosen. Linux only.

Everything is read from /sys and /proc, and from the same variables that the libraries read. gloo takes the interface on the
route to `config.interface` (`transport.process_group`). NCCL's rules are those of its source (socket interfaces: the given ones,
else names that begin with ib, else all but docker and lo, then docker, then lo) and of its documented variables.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from r3channel.config import ChannelConfig
from r3channel.report.check import Check

_NET, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    """IPv4 first."""
    speed_mbit_s: int | None
    """None where the driver does not say (virtual and loopback interfaces)."""


@dataclass(frozen=True, slots=True)
class Hca:
    """A port of an RDMA adapter."""

    device: str
    port: int
    active: bool
    rate: str
    """As the driver says it, such as `400 Gb/sec (4X NDR)`."""
    link: str
    """`InfiniBand` or `Ethernet` (RoCE)."""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


# -- what is there -------------------------------------------------------------------------------------------------------


def interfaces(
    root: Path = _NET, *, addresses_of: Callable[[str], tuple[str, ...]] | None = None
) -> list[Interface]:
    """All of them, in the order of the kernel's numbers."""
    found = [
        Interface(name, _is_up(root / name), (addresses_of or addresses)(name), _speed(root / name))
        for name in sorted(path.name for path in root.glob("*"))
    ]
    return sorted(found, key=lambda one: int(_read(root / one.name / "ifindex") or 0))


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


def hcas(root: Path = _RDMA) -> list[Hca]:
    """Every port of every RDMA adapter."""
    return [
        Hca(
            device=port.parent.parent.name,
            port=int(port.name),
            active="ACTIVE" in _read(port / "state"),
            rate=_read(port / "rate"),
            link=_read(port / "link_layer"),
        )
        for port in sorted(root.glob("*/ports/*"))
    ]


def _is_up(folder: Path) -> bool:
    """By the operational state; drivers that do not report it (loopback) count by their flag."""
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


# -- what would be used --------------------------------------------------------------------------------------------------


def route_to(address: str) -> str | None:
    """This machine's address on the route to an IPv4 address; None when there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def nccl_sockets(found: Sequence[Interface], settings: Mapping[str, str]) -> list[str]:
    """The interfaces that NCCL would use, the first one for its bootstrap; empty when it would find none.

    >>> lo, eth = Interface("lo", True, ("127.0.0.1",), None), Interface("eth0", True, ("10.0.0.1",), 100000)
    >>> nccl_sockets([lo, eth], {}), nccl_sockets([lo, eth], {"NCCL_SOCKET_IFNAME": "=lo"}), nccl_sockets([lo], {})
    (['eth0'], ['lo'], ['lo'])
    """
    usable = [one.name for one in found if one.up and one.addresses]
    given = settings.get("NCCL_SOCKET_IFNAME", "")
    for rule in [given] if given else ["ib", "^docker,lo", "docker", "lo"]:
        chosen = [name for name in usable if matches(name, rule)]
        if chosen:
            return chosen
    return []


def nccl_hcas(found: Sequence[Hca], settings: Mapping[str, str]) -> list[str]:
    """The adapter ports that NCCL would use for its data; empty when it goes over sockets."""
    if settings.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    rule = settings.get("NCCL_IB_HCA", "")
    return [
        one.name for one in found if one.active and (not rule or matches(one.device, rule, port=one.port))
    ]


def matches(name: str, rule: str, *, port: int | None = None) -> bool:
    """NCCL's lists: prefixes by comma, `^` in front excludes, then `=` in front means whole names; `name:port` names a port.

    >>> [matches("eth0", rule) for rule in ("eth", "=eth", "^eth", "^docker,lo", "^=eth", "ib,eth0")]
    [True, False, False, True, True, True]
    >>> matches("mlx5_1", "mlx5_0:1,mlx5_1:2", port=1), matches("mlx5_1", "=mlx5_1", port=1)
    (False, True)
    """
    excludes = rule.startswith("^")
    rule = rule.removeprefix("^")
    whole = rule.startswith("=")
    listed = any(_is(name, port, item, whole=whole) for item in rule.removeprefix("=").split(",") if item)
    return listed != excludes


def _is(name: str, port: int | None, item: str, *, whole: bool) -> bool:
    wanted, _, number = item.partition(":")
    if number and port is not None and number != str(port):
        return False
    return name == wanted if whole else name.startswith(wanted)


def nccl_settings(environment: Mapping[str, str], *, files: Sequence[Path] | None = None) -> dict[str, str]:
    """NCCL's variables: the environment's before those of its configuration files."""
    found: dict[str, str] = {}
    own = (
        Path(environment.get("NCCL_CONF_FILE", ""))
        if environment.get("NCCL_CONF_FILE")
        else Path.home() / ".nccl.conf"
    )
    for path in (Path("/etc/nccl.conf"), own) if files is None else files:
        for line in _read(path).splitlines():
            name, is_set, value = line.partition("=")
            if is_set and not line.lstrip().startswith("#"):
                found[name.strip()] = value.strip()
    return found | {name: value for name, value in environment.items() if name.startswith("NCCL_")}


# -- findings ------------------------------------------------------------------------------------------------------------


def check_network(
    config: ChannelConfig, environment: Mapping[str, str], *, nodes: int = 1
) -> Iterator[Check]:
    """A line per interface and adapter, then what gloo and NCCL would use. `nodes`: machines of the run."""
    found, adapters = interfaces(), hcas()
    for one in found:
        yield Check(name=f"network {one.name}", ok=True, found=_describe(one))
    if not adapters:
        yield Check(name="RDMA", ok=True, found="no adapter (/sys/class/infiniband)")
    for hca in adapters:
        state = "active" if hca.active else "not active"
        yield Check(name=f"RDMA {hca.name}", ok=True, found=f"{hca.link}, {hca.rate}, {state}")
    yield check_gloo(config, found, nodes=nodes)
    yield check_nccl(found, adapters, nccl_settings(environment), needed=config.transport == "nccl")


def check_gloo(config: ChannelConfig, found: Sequence[Interface], *, nodes: int) -> Check:
    """Which interface a relay binds and gloo uses, and whether other machines can reach it."""
    local = route_to(config.interface)
    over = next((one for one in found if local in one.addresses), None)
    where = f"{over.name} ({local})" if over is not None else str(local)
    name, remedy = "gloo", "set R3CHANNEL_INTERFACE to this machine's address on the network of the trainers"
    if local is None:
        return Check(name=name, ok=False, found=f"no route to interface {config.interface}", remedy=remedy)
    several = nodes > 1 or config.relays > 1
    if several and ipaddress.ip_address(local).is_loopback:
        what = f"{nodes} nodes" if nodes > 1 else f"{config.relays} relays"
        return Check(
            name=name,
            ok=False,
            found=f"{where}, which only this machine reaches; {what} are configured",
            remedy=remedy,
        )
    if local != config.interface:
        return Check(
            name=name,
            ok=True,
            found=f"{where}, the route to {config.interface}; a relay cannot bind that address here",
        )
    return Check(name=name, ok=True, found=where)


def check_nccl(
    found: Sequence[Interface], adapters: Sequence[Hca], settings: Mapping[str, str], *, needed: bool
) -> Check:
    """Which interfaces and adapters NCCL would use; a fault only where NCCL is `needed`."""
    sockets, ports = nccl_sockets(found, settings), nccl_hcas(adapters, settings)
    names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")
    given = ", ".join(f"{name}={settings[name]}" for name in names if name in settings)
    data = f"data over {', '.join(ports)}" if ports else f"data over sockets of {', '.join(sockets)}"
    if not sockets:
        return Check(
            name="NCCL", ok=not needed, found=f"no usable interface{f' ({given})' if given else ''}",
            remedy="correct NCCL_SOCKET_IFNAME",
        )  # fmt: skip
    return Check(
        name="NCCL", ok=True, found=f"bootstrap over {sockets[0]}, {data}{f' ({given})' if given else ''}"
    )


def _describe(one: Interface) -> str:
    speed = f"{one.speed_mbit_s / 1000:g} Gbit/s" if one.speed_mbit_s else "speed unknown"
    return f"{', '.join(one.addresses) or 'no address'}; {speed}; {'up' if one.up else 'down'}"
