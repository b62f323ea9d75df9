"""The network of this machine: its interfaces, the address that the option `interface` means here, and what NCCL is told.

gloo takes the interface on the route to the relay (`transport.process_group`), which on its machine is the one that it binds.
`urlopen` asks the named machine itself, whatever proxy the environment names: engines are on the cluster's network.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from r3channel.errors import ConfigError
from r3channel.observe.check import Check, CheckContext

AUTO = "auto"
_ANY_PORT = 9
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_OUTSIDE = "192.0.2.1"
"""An address reserved for documents, which no machine has: the route to it is the default route."""
_NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_CONF_FILE")
"""Environment variables that tell NCCL what to use, or where that is written."""

_PEER_S = 5.0
"""Seconds after which two packets lost in a row have been sent again."""
_REMEDY = "set R3CHANNEL_INTERFACE to this machine's address on the network of the trainers, its network device, or auto"


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


def interfaces() -> list[Interface]:
    """Return all network interfaces of this machine.

    Raises:
        ModuleNotFoundError: psutil is not installed.
    """
    import psutil

    states, kinds, found = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6), list[Interface]()
    for name, own in psutil.net_if_addrs().items():
        addresses = tuple(at.address.partition("%")[0] for kind in kinds for at in own if at.family == kind)
        if (state := states.get(name)) is not None:
            found.append(Interface(name, state.isup, addresses, state.speed or None))
    return found


def route_to(address: str) -> str | None:
    """Return this machine's address on the route to an address.

    Returns:
        The address; None when there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def local_address(interface: str, *, towards: str = "", others: bool = True) -> str:
    """Return this machine's address that the option `interface` means.

    Args:
        interface: a network device's name or a network (`10.0.0.0/8`) means this machine's address there. `auto` means the
            address on the route to `towards`. An address or host name of this machine means itself. One of another machine means
            this machine's address on the route to it.
        towards: an address, for `auto`; empty for the default route.
        others: False returns another machine's address or host name as it is; nobody can bind it here.

    Raises:
        ConfigError: there is no such address, or `interface` means every interface: nobody can be told to connect to that.
    """
    if interface == AUTO:
        return route_to(towards or _OUTSIDE) or "127.0.0.1"
    own = next(_addresses(interface), None)
    address = own or (interface if _is_here(interface) or not others else route_to(interface))
    if address is None:
        raise ConfigError(
            f"no route to interface {interface}, and no address of this machine in it; expected an address, the name of a "
            "network device or a network such as 10.0.0.0/8 (both need psutil, extra metrics), or auto"
        )
    return address


def _addresses(interface: str) -> Iterator[str]:
    with suppress(ModuleNotFoundError, ValueError):  # ModuleNotFoundError: without psutil there are none
        network = ipaddress.ip_network(interface, strict=False) if "/" in interface else ()
        for device in interfaces():
            own = map(ipaddress.ip_address, device.addresses)
            yield from (str(one) for one in own if device.name == interface or one in network)


def _is_here(host: str) -> bool:
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"interface {host!r} means every interface and cannot be advertised: name one, or auto"
        )
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def urlopen(request: str | urllib.request.Request, *, timeout_s: float) -> Any:
    """Open a request without any proxy and return the response.

    The response is closed by `with`. Any thread may call.

    Raises:
        OSError: whatever `urllib.request.urlopen` raises.
    """
    return _OPENER.open(request, timeout=timeout_s)


# -- findings ------------------------------------------------------------------------------------------------------------


def check_network(context: CheckContext) -> Iterator[Check]:
    """Check the interfaces, the one a relay binds, and NCCL.

    There is a line for each interface.
    """
    try:
        found = interfaces()
    except ModuleNotFoundError:
        found = []
        text = "interfaces are not listed: psutil is not installed (extra `metrics`)"
        yield Check(name="network", ok=True, found=text)
    for interface in found:
        yield Check(name=f"network {interface.name}", ok=True, found=_describe(interface))
    relay = context.role in ("relay", "all")
    yield check_interface(context.config.interface, found, nodes=context.nodes, relay=relay)
    yield check_nccl(context.environment)


def check_peers(context: CheckContext) -> Iterator[Check]:
    """Check that each port of another node is reached from here.

    A port at which nobody listens yet is reached.
    """
    relay = urlsplit(context.environment.get("R3CHANNEL_RELAY_URL", "")).netloc
    for peer in dict.fromkeys(filter(None, (*context.peers, relay))):
        host, _, port = peer.rpartition(":")
        found, fault = "it is reached and answers", ""
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PEER_S).close()
        except ConnectionRefusedError:
            found = "it is reached, and nobody listens there yet"
        except TimeoutError:
            fault = f"nothing came back within {_PEER_S:g} s: a firewall drops it, or its node is down"
        except (OSError, OverflowError, ValueError) as error:
            fault = f"it is not reached: {error}"
        remedy = "open it between the nodes: `r3channel/relay/README.md`, Over several nodes"
        yield Check(name=f"peer {peer}", ok=not fault, found=fault or found, remedy=remedy)


def check_interface(address: str, found: Sequence[Interface], *, nodes: int, relay: bool = False) -> Check:
    """Check the interface that a relay binds and gloo uses.

    The finding says which one it is, and whether other machines can reach it.

    Args:
        address: the option `interface`.
        found: this machine's interfaces.
        nodes: machines of the run.
        relay: whether a relay is to run here; then the address has to be this machine's.
    """
    try:
        local = local_address(address)
    except ConfigError as error:
        return Check(name="interface", ok=False, found=str(error), remedy=_REMEDY)
    over = next((interface for interface in found if local in interface.addresses), None)
    where = f"{over.name} ({local})" if over is not None else str(local)
    ok, said = True, where if local == address else f"{where}, the route to {address}"
    if nodes > 1 and ipaddress.ip_address(route_to(local) or local).is_loopback:
        ok, said = False, f"{where}, which only this machine reaches; {nodes} nodes are configured"
    elif relay and local_address(address, others=False) != local:
        ok, said = False, f"{address} is no address of this machine, and a relay binds it"
    return Check(name="interface", ok=ok, found=said, remedy=_REMEDY)


def check_nccl(environment: Mapping[str, str]) -> Check:
    """Return what NCCL is told of interfaces and adapters.

    It matters for rows or weights that go over NCCL. Only NCCL can say which interfaces and adapters it takes.
    """
    told = ", ".join(f"{name}={environment[name]}" for name in _NCCL if name in environment)
    found = told or f"it chooses by itself; {', '.join(_NCCL)} are not set"
    return Check(name="NCCL", ok=True, found=f"{found}. NCCL_DEBUG=INFO prints what it takes")


def _describe(interface: Interface) -> str:
    speed = f"{interface.speed_mbit_s / 1000:g} Gbit/s" if interface.speed_mbit_s else "speed unknown"
    return f"{', '.join(interface.addresses) or 'no address'}; {speed}; {'up' if interface.up else 'down'}"
