"""What a table in the kernel changes of a device beside its program: noted first, and put back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.device import journal
from flexstream.nic.device.changes import undo_journal
from flexstream.nic.device.journal import left_behind
from flexstream.nic.device.receive_steering import ReceiveSteering
from flexstream.nic.device.settings import Settings
from flexstream.nic.rss.ioctl import EthtoolIoctl
from flexstream.nic.rss.transport import RssTransport
from tests.unit.nic.played_device import PlayedDevice


@pytest.fixture(autouse=True)
def eth0_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "device_index", lambda name: 7 if name == "eth0" else 0)


def settings_of(device: PlayedDevice, root: Path) -> Settings:
    return Settings(
        root, open_rss=lambda name: RssTransport(name, ioctl=EthtoolIoctl(name, device.ioctl), way="ioctl")
    )


def merging() -> dict[str, bool]:
    return {"rx-gro": True, "rx-lro": True, "rx-gro-hw": True, "rx-checksum": True}


@pytest.mark.parametrize("killed", [False, True])
def test_offloads_that_generic_xdp_switches_off_come_back(tmp_path: Path, killed: bool) -> None:
    device = PlayedDevice(features=merging())
    steering = ReceiveSteering("eth0", journal_folder=tmp_path, settings=settings_of(device, tmp_path))
    steering.stop_merging()
    assert device.features == merging() | {"rx-lro": False, "rx-gro-hw": False}
    assert [str(change) for change in steering.changes()] == [
        "eth0 feature rx-lro: on -> off",
        "eth0 feature rx-gro-hw: on -> off",
    ]
    if killed:
        [left] = left_behind("eth0", tmp_path)
        assert undo_journal(left, settings_of(device, tmp_path)).left == ()
    else:
        steering.undo()
    assert device.features == merging()
    assert list(tmp_path.iterdir()) == []


def test_offloads_that_are_off_or_fixed_or_not_told_need_no_journal(tmp_path: Path) -> None:
    for device in (
        PlayedDevice(features=merging() | {"rx-lro": False, "rx-gro-hw": False}),
        PlayedDevice(features={"rx-gro": True}),
        PlayedDevice(features=merging(), refuse={0x3A: errno.EOPNOTSUPP}),
    ):
        steering = ReceiveSteering("eth0", journal_folder=tmp_path, settings=settings_of(device, tmp_path))
        steering.stop_merging()
        assert steering.changes() == ()
        assert list(tmp_path.iterdir()) == []
    fixed = PlayedDevice(features=merging(), fixed_features=frozenset(("rx-lro", "rx-gro-hw")))
    steering = ReceiveSteering("eth0", journal_folder=tmp_path, settings=settings_of(fixed, tmp_path))
    steering.stop_merging()
    assert steering.changes() == ()
    steering.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_feature_that_there_is_not_is_named(tmp_path: Path) -> None:
    settings = settings_of(PlayedDevice(features=merging()), tmp_path)
    with pytest.raises(ConfigError, match="no feature 'rx-magic'"):
        settings.read("eth0 feature rx-magic")
    settings.write("eth0 feature rx-gro", "off")
    assert settings.read("eth0 feature rx-gro") == "off"
