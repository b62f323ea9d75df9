"""The doctor's look at the network: what is there, what a relay binds of it, and what NCCL is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.tools import network
from r3channel.tools.network import Interface

LO = Interface("lo", True, ("127.0.0.1",), None)
ETH = Interface("eth0", True, ("10.0.0.5",), 100_000)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_interfaces_are_read_with_state_speed_and_addresses(tmp_path: Path) -> None:
    write(tmp_path / "eth0", ifindex="4", operstate="up", flags="0x1003", speed="25000")
    write(tmp_path / "lo", ifindex="1", operstate="unknown", flags="0x9")
    write(tmp_path / "veth", ifindex="2", operstate="down", flags="0x1002", speed="-1")
    found = network.interfaces(tmp_path, addresses_of=lambda name: ("10.0.0.5",) if name == "eth0" else ())
    assert found == [
        Interface("lo", True, (), None),
        Interface("veth", False, (), None),
        Interface("eth0", True, ("10.0.0.5",), 25_000),
    ]


def test_the_loopback_interface_of_this_machine_is_found() -> None:
    (lo,) = [one for one in network.interfaces() if one.name == "lo"]
    assert lo.up and lo.addresses[0] == "127.0.0.1"


def test_what_nccl_is_told_is_said() -> None:
    told = {"NCCL_SOCKET_IFNAME": "=ens1f0", "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring"}
    assert [network.check_nccl(found).found for found in (told, {})] == [
        "NCCL_SOCKET_IFNAME==ens1f0, NCCL_IB_DISABLE=1. NCCL_DEBUG=INFO prints what it takes",
        "it chooses by itself; NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_CONF_FILE are not set. "
        "NCCL_DEBUG=INFO prints what it takes",
    ]


def test_loopback_is_a_fault_with_several_machines() -> None:
    found = network.interfaces()
    alone = network.check_interface(ChannelConfig(), found, nodes=1)
    assert alone.ok and alone.found == "lo (127.0.0.1)"
    check = network.check_interface(ChannelConfig(), found, nodes=2)
    assert not check.ok and "2 nodes" in check.line() and "R3CHANNEL_INTERFACE" in check.line()


def test_an_interface_without_a_route_is_a_fault() -> None:
    assert not network.check_interface(ChannelConfig(interface="no.such.host.invalid"), [], nodes=1).ok


def test_another_machines_address_is_named_with_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    check = network.check_interface(ChannelConfig(interface="10.0.0.9"), [LO, ETH], nodes=2)
    assert check.ok and check.found.startswith("eth0 (10.0.0.5), the route to 10.0.0.9")


def test_the_command_prints_them_and_reads_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from r3channel.tools import doctor

    monkeypatch.setattr(
        doctor, "checks", lambda *, channel, nodes, **_: network.check_network(channel, {}, nodes=nodes)
    )
    file = tmp_path / "channel.toml"
    file.write_text('interface = "no.such.host.invalid"\n')
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "no route to interface no.such.host.invalid" in capsys.readouterr().out
    file.write_text("relais = 2\n")
    assert cli.main(["doctor", "--config", str(file)]) == 2
