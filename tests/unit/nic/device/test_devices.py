"""What stands in the way of a table is found, with the command that removes it on this distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.device.devices import (
    DeviceFiles,
    has_net_admin,
    irqbalance_finding,
    queue_findings,
    rule_findings,
    steering_findings,
)
from flexstream.nic.device.facts import read_facts
from flexstream.nic.device.link_settings import Discovered, discover, read_link
from flexstream.nic.device.settings import Settings
from flexstream.nic.rss.ioctl import EthtoolIoctl
from flexstream.nic.rss.transport import RssTransport, kernel_release
from tests.unit.nic.played_device import PlayedDevice, machine_of


def running(root: Path, name: str = "irqbalance") -> Path:
    (root / "proc/4711").mkdir(parents=True)
    (root / "proc/4711/comm").write_text(name + "\n")
    return root


def test_no_irqbalance_no_finding(tmp_path: Path) -> None:
    assert irqbalance_finding([0, 1], running(tmp_path, "bash")) is None


@pytest.mark.parametrize(
    ("marker", "file"),
    [
        ("etc/debian_version", "/etc/default/irqbalance"),
        ("etc/default/irqbalance", "/etc/default/irqbalance"),
        ("etc/sysconfig/irqbalance", "/etc/sysconfig/irqbalance"),
        ("etc/fedora-release", "/etc/sysconfig/irqbalance"),
    ],
)
def test_the_ban_list_is_named_where_this_distribution_has_it(tmp_path: Path, marker: str, file: str) -> None:
    (tmp_path / marker).parent.mkdir(parents=True)
    (tmp_path / marker).write_text("# nothing set\n")
    found = irqbalance_finding([0, 1, 3], running(tmp_path))
    assert found is not None
    assert found.level == "warn"
    assert f"IRQBALANCE_BANNED_CPULIST=0-1,3 into {file}" in found.fix


def test_a_ban_list_that_is_set_is_shown(tmp_path: Path) -> None:
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / "etc/default/irqbalance").write_text("#x\nIRQBALANCE_BANNED_CPULIST=0-3\n")
    found = irqbalance_finding([0], running(tmp_path))
    assert found is not None
    assert (found.level, "IRQBALANCE_BANNED_CPULIST=0-3" in found.what) == ("info", True)


def test_rps_and_rfs_on_top_of_a_table_are_found_with_the_loop_that_ends_them(tmp_path: Path) -> None:
    root = machine_of(PlayedDevice(), tmp_path)
    files = DeviceFiles("eth0", root)
    assert steering_findings(files) == []
    (files.folder / "queues/rx-2/rps_cpus").write_text("0000000c\n")
    (files.folder / "queues/rx-2/rps_flow_cnt").write_text("2048\n")
    rps, rfs = steering_findings(files)
    assert "rx-2 (cores 2-3)" in rps.what
    assert "rps_cpus" in rps.fix
    assert "2048 flow entries" in rfs.what


def test_ntuple_rules_bypass_the_table() -> None:
    assert rule_findings("eth0", False, 0) == []
    assert rule_findings("eth0", False, None) == []
    assert rule_findings("eth0", True, 0)[0].level == "info"
    [rules] = rule_findings("eth0", True, 3)
    assert (rules.level, "3 ntuple rules" in rules.what, "ethtool -N eth0 delete" in rules.fix) == ("warn", True, True)


@pytest.mark.parametrize(
    ("queues", "most", "workers", "level", "words"),
    [
        (2, 8, 8, "warn", "ethtool -L eth0 combined 8"),
        (2, 4, 8, "warn", "ethtool -L eth0 combined 4"),
        (2, 2, 8, "warn", "no more than 2"),
        (8, 8, 2, "info", "combined 2"),
    ],
)
def test_queues_and_workers_that_do_not_match(queues: int, most: int, workers: int, level: str, words: str) -> None:
    [found] = queue_findings("eth0", queues, most, workers)
    assert (found.level, words in found.fix) == (level, True)
    assert queue_findings("eth0", 4, 4, 4) == []


def test_all_findings_of_a_device_come_from_one_reading(tmp_path: Path) -> None:
    device = PlayedDevice(queues=2, table=[0, 1] * 64, flags=1 << 27, rules=2, hashed={1: 0xF0, 5: 0x30})
    root = running(machine_of(device, tmp_path))
    transport = RssTransport("eth0", ioctl=EthtoolIoctl("eth0", device.ioctl), way="ioctl")
    (root / "sys/class/net/eth0/flags").write_text("0x1002\n")
    (root / "sys/class/net/eth0/queues/rx-0/rps_cpus").write_text("f\n")
    facts = read_facts("eth0", root=root, transport=transport)
    words = "\n".join(finding.what for finding in facts.findings([0, 1, 2, 3], root))
    for part in ("is down", "receive hashing is off", "IPv6", "2 receive queues for 4", "2 ntuple", "RPS is on"):
        assert part in words
    assert "irqbalance is running" in words
    assert facts.to_dict()["numa_node"] == 0
    assert facts.numa_cpus == "0-3"


def test_an_interrupt_folder_that_is_not_there_is_a_clear_state(tmp_path: Path) -> None:
    device = PlayedDevice()
    root = machine_of(device, tmp_path)
    for irq in (25, 27, 29, 31):
        (root / f"proc/irq/{irq}/smp_affinity_list").unlink()
    transport = RssTransport("eth0", ioctl=EthtoolIoctl("eth0", device.ioctl), way="ioctl")
    facts = read_facts("eth0", root=root, transport=transport)
    assert facts.queue_cpu() == (None,) * 4
    assert any("cannot be pinned" in finding.what for finding in facts.findings([0], root))


def test_devices_are_discovered_by_the_ethtool_package_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def module_of(name: str) -> str:
        if name != "eth0":
            raise OSError(95, "Operation not supported")
        return "ixgbe"

    package = SimpleNamespace(
        version="python-ethtool v0.15",
        get_devices=lambda: ["lo", "eth0", "odd0"],
        get_module=module_of,
        get_businfo=lambda name: "0000:01:00.0" if name == "eth0" else module_of(name),
    )
    monkeypatch.setitem(sys.modules, "ethtool", package)
    found, by = discover()
    assert found == [Discovered("eth0", "ixgbe", "0000:01:00.0"), Discovered("odd0", "", "")]
    assert by == "python-ethtool v0.15"


def test_without_the_ethtool_package_the_ioctl_tells_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ethtool", None)
    found, by = discover()
    assert "not installed" in by
    assert all(device.name != "lo" for device in found)


def test_without_pyroute2_rings_are_read_by_ioctl_and_setting_them_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyroute2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pyroute2 is not installed" in read_link("lo")["by"]
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(ConfigError, match="not installed") as seen:
        Settings().write("lo ring rx", "512")
    assert "flexstream[nic]" in str(seen.value.hint)


def test_capabilities_are_read_from_the_kernel(tmp_path: Path) -> None:
    root = machine_of(PlayedDevice(), tmp_path, privileged=False)
    assert not has_net_admin(root)
    (root / "proc/self/status").write_text("Name: x\nCapEff:\t000001ffffffffff\n")
    assert has_net_admin(root)
    assert not has_net_admin(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "release"), [("6.18.44-fc-v445", (6, 18)), ("5.15.0-generic", (5, 15)), ("odd", (0, 0)), ("6.1", (6, 1))]
)
def test_a_kernel_release_is_read(text: str, release: tuple[int, int]) -> None:
    assert kernel_release(text) == release
