"""The doctor's look at the network: what is there, and what gloo and NCCL would take of it."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from r3channel import cli
from r3channel.config import ChannelConfig
from r3channel.report import network
from r3channel.report.network import Hca, Interface

LO = Interface("lo", True, ("127.0.0.1",), None)
ETH = Interface("eth0", True, ("10.0.0.5",), 100_000)
DOCKER = Interface("docker0", True, ("172.17.0.1",), 10_000)
IB = Interface("ibp1s0", True, ("10.1.0.5",), 400_000)
DOWN = Interface("eth1", False, ("10.0.1.5",), 25_000)
PORTS = [Hca("mlx5_0", 1, True, "400 Gb/sec (4X NDR)", "InfiniBand"), Hca("mlx5_1", 1, False, "", "Ethernet")]


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_the_examples_of_its_functions_hold() -> None:
    result = doctest.testmod(importlib.import_module("r3channel.report.network"))
    assert result.attempted >= 4 and not result.failed


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


def test_every_port_of_every_adapter_is_read(tmp_path: Path) -> None:
    rate = "400 Gb/sec (4X NDR)"
    write(tmp_path / "mlx5_0" / "ports" / "1", state="4: ACTIVE", rate=rate, link_layer="InfiniBand")
    write(tmp_path / "mlx5_1" / "ports" / "1", state="1: DOWN", rate="", link_layer="Ethernet")
    assert network.hcas(tmp_path) == PORTS
    assert network.hcas(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("found", "settings", "expected"),
    [
        ([LO, DOCKER, ETH], {}, ["eth0"]),
        ([LO, DOCKER, ETH, IB], {}, ["ibp1s0"]),
        ([LO, DOCKER], {}, ["docker0"]),
        ([LO], {}, ["lo"]),
        ([LO, DOWN], {}, ["lo"]),
        ([LO, ETH, IB], {"NCCL_SOCKET_IFNAME": "eth"}, ["eth0"]),
        ([LO, ETH, IB], {"NCCL_SOCKET_IFNAME": "^ib,lo"}, ["eth0"]),
        ([LO, ETH, IB], {"NCCL_SOCKET_IFNAME": "bond"}, []),
    ],
)
def test_nccl_takes_the_sockets_that_its_rules_say(
    found: list[Interface], settings: dict[str, str], expected: list[str]
) -> None:
    assert network.nccl_sockets(found, settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["mlx5_0:1"]),
        ({"NCCL_IB_DISABLE": "1"}, []),
        ({"NCCL_IB_DISABLE": "0"}, ["mlx5_0:1"]),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, ["mlx5_0:1"]),
        ({"NCCL_IB_HCA": "=mlx5_0:2"}, []),
        ({"NCCL_IB_HCA": "^mlx5_0"}, []),
        ({"NCCL_IB_HCA": "mlx5_1"}, []),
    ],
)
def test_nccl_takes_the_active_ports_that_its_rules_say(
    settings: dict[str, str], expected: list[str]
) -> None:
    assert network.nccl_hcas(PORTS, settings) == expected


def test_the_environment_comes_before_nccls_files(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("# NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME==ens1f0\nNCCL_IB_DISABLE=1\n")
    settings = network.nccl_settings({"NCCL_IB_DISABLE": "0", "HOME": "/"}, files=[tmp_path / "nccl.conf"])
    assert settings == {"NCCL_SOCKET_IFNAME": "=ens1f0", "NCCL_IB_DISABLE": "0"}


def test_nccl_without_an_interface_is_a_fault_only_where_it_is_needed() -> None:
    given = {"NCCL_SOCKET_IFNAME": "bond"}
    assert network.check_nccl([LO, ETH], [], given, needed=False).ok
    check = network.check_nccl([LO, ETH], [], given, needed=True)
    assert not check.ok and "NCCL_SOCKET_IFNAME=bond" in check.line()
    line = network.check_nccl([LO, ETH], PORTS, {}, needed=True).line()
    assert "bootstrap over eth0, data over mlx5_0:1" in line


def test_loopback_is_a_fault_with_several_machines_or_relays() -> None:
    found = network.interfaces()
    alone = network.check_gloo(ChannelConfig(), found, nodes=1)
    assert alone.ok and alone.found == "lo (127.0.0.1)"
    for config, nodes, what in ((ChannelConfig(), 2, "2 nodes"), (ChannelConfig(relays=3), 1, "3 relays")):
        check = network.check_gloo(config, found, nodes=nodes)
        assert not check.ok and what in check.line() and "R3CHANNEL_INTERFACE" in check.line()


def test_an_interface_without_a_route_is_a_fault() -> None:
    assert not network.check_gloo(ChannelConfig(interface="no.such.host.invalid"), [], nodes=1).ok


def test_another_machines_address_is_named_with_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    check = network.check_gloo(ChannelConfig(interface="10.0.0.9"), [LO, ETH], nodes=2)
    assert check.ok and check.found.startswith("eth0 (10.0.0.5), the route to 10.0.0.9")


def test_the_command_prints_them_and_reads_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from r3channel.report import doctor

    monkeypatch.setattr(
        doctor, "checks", lambda *, channel, nodes, **_: network.check_network(channel, {}, nodes=nodes)
    )
    file = tmp_path / "channel.toml"
    file.write_text("relays = 2\n")
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "2 relays are configured" in capsys.readouterr().out
    file.write_text("relais = 2\n")
    assert cli.main(["doctor", "--config", str(file)]) == 2
