"""What the service may write of a device: those files and no others, and root's again afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.device import grant as grants
from tests.unit.nic.played_device import PlayedDevice, machine_of

GROUP = os.getgid() or 65534  # one that this user may give files to


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = machine_of(PlayedDevice(), tmp_path / "root")
    other = made / "proc/irq/99"
    other.mkdir()
    (other / "smp_affinity_list").write_text("0")
    (made / "etc").mkdir()
    (made / "etc/shadow").write_text("secret")
    return made


def of_the_group(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o020 and path.stat().st_gid == GROUP
    }


def test_exactly_the_device_s_interrupts_and_queues_are_granted_and_taken_back(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    given = grants.grant("eth0", GROUP, root)
    assert given.problems == ()
    device = "sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/queues"
    assert of_the_group(root) == {
        *(f"proc/irq/{irq}/smp_affinity_list" for irq in (25, 27, 29, 31)),
        *(f"{device}/rx-{queue}/{name}" for queue in range(4) for name in ("rps_cpus", "rps_flow_cnt")),
        *(f"{device}/tx-{queue}/xps_cpus" for queue in range(4)),
    }
    if os.geteuid() == 0:  # only root may give files back to root
        assert len(grants.take_back(GROUP, root).files) == len(given.files)
        assert of_the_group(root) == set()
        assert (root / "proc/irq/25/smp_affinity_list").stat().st_mode & 0o777 == 0o644


def test_no_device_and_no_group_are_told(root: Path) -> None:
    with pytest.raises(ConfigError, match="no device nosuch"):
        grants.grant("nosuch", GROUP, root)
    with pytest.raises(ConfigError, match="no group"):
        grants.group_id("no-such-group")
    with pytest.raises(ConfigError, match="root needs no grant"):
        grants.group_id("root")


def test_the_settings_say_which_device_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flexstream.cli.nic_grant import _device_of

    file = tmp_path / "flexstream.toml"
    file.write_text('nic = "kernel:eth7"\n')
    assert _device_of(file) == ("eth7", "")
    file.write_text('nic = "user"\n')
    assert _device_of(file)[0] is None
    file.write_text('nic = "auto"\ndata = "127.0.0.1:7400"\n')
    assert "loopback" in _device_of(file)[1]
    file.write_text('nic = "magic"\n')
    with pytest.raises(ConfigError, match="magic"):
        _device_of(file)
