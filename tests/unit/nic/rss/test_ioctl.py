"""RSS by ioctl: the structures as the kernel reads them, and its refusals in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.rss.ioctl import Channels, DeviceRefused, Driver, EthtoolIoctl, Rss, refused
from tests.unit.nic.played_device import KEY, PlayedDevice

FOUR_TUPLE = ("src_ip", "dst_ip", "src_port", "dst_port")


def opened(device: PlayedDevice) -> EthtoolIoctl:
    return EthtoolIoctl(device.name, device.ioctl)


def test_driver_channels_rings_and_coalescing_are_read() -> None:
    device = opened(PlayedDevice(driver="mlx5_core", bus="0000:3b:00.0"))
    assert device.driver() == Driver("mlx5_core", "1.0", "fw", "0000:3b:00.0")
    assert device.channels() == Channels(0, 0, 0, 4, 0, 0, 0, 4)
    assert (device.channels().receive, device.channels().max_receive) == (4, 4)
    assert device.rx_rings() == 4
    assert device.rings() == {"rx_max": 1024, "tx_max": 512, "rx": 256, "tx": 128}
    read = device.coalescing()
    assert (read["rx_usecs"], read["rx_frames"], read["tx_usecs"], read["tx_frames"]) == (1, 2, 5, 6)
    assert read["adaptive_rx"] == 10


def test_table_key_function_and_transform_are_read() -> None:
    played = PlayedDevice(transform=1, before_6_8=False)
    assert opened(played).rss() == Rss(tuple(e % 4 for e in range(128)), KEY, "toeplitz", 1)
    played.function, played.table, played.key = 2, [], b""
    assert opened(played).rss() == Rss((), b"", "xor", 1)
    played.function = 64
    assert opened(played).rss().function is None


@pytest.mark.parametrize("before_6_8", [True, False])
def test_a_table_is_written_without_touching_key_or_input_transform(before_6_8: bool) -> None:
    played = PlayedDevice(before_6_8=before_6_8, transform=0 if before_6_8 else 1)
    opened(played).set_rss(table=[3] * 128)
    assert played.table == [3] * 128
    assert played.key == KEY
    assert played.transform == (0 if before_6_8 else 1)


def test_key_alone_and_both_at_once() -> None:
    played = PlayedDevice()
    device = opened(played)
    device.set_rss(key=bytes(range(40)))
    assert (played.key, played.table[:5]) == (bytes(range(40)), [0, 1, 2, 3, 0])
    device.set_rss(table=[1] * 128, key=KEY)
    assert (played.key, played.table) == (KEY, [1] * 128)


def test_an_empty_table_asks_for_the_driver_s_default() -> None:
    played = PlayedDevice(table=[2] * 128)
    opened(played).set_rss(table=())
    assert played.table[:5] == [0, 1, 2, 3, 0]


def test_drivers_that_know_only_the_older_call_are_read_and_written_by_it() -> None:
    played = PlayedDevice(refuse={0x46: errno.EOPNOTSUPP, 0x47: errno.EOPNOTSUPP})
    device = opened(played)
    assert device.rss() == Rss(tuple(e % 4 for e in range(128)), b"", None)
    device.set_rss(table=[0] * 128)
    assert played.table == [0] * 128
    with pytest.raises(OSError, match="refused"):
        device.set_rss(key=KEY)


def test_a_queue_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    played = PlayedDevice()
    with pytest.raises(OSError, match="Invalid argument"):
        opened(played).set_rss(table=[4] * 128)
    assert played.table[:4] == [0, 1, 2, 3]


def test_hash_fields_flags_and_rules() -> None:
    played = PlayedDevice(hashed={1: 0x30, 5: 0xF0}, rules=3)
    device = opened(played)
    assert device.hash_fields("tcp4") == ("src_ip", "dst_ip")
    assert device.hash_fields("tcp6") == FOUR_TUPLE
    device.set_hash_fields("tcp4", FOUR_TUPLE)
    assert played.hashed[1] == 0xF0
    assert device.rule_count() == 3
    assert device.flags() == {"rxhash": True, "ntuple": False}
    device.set_flag("ntuple", True)
    device.set_flag("rxhash", False)
    assert device.flags() == {"rxhash": False, "ntuple": True}


def test_channels_that_are_not_named_stay() -> None:
    played = PlayedDevice()
    opened(played).set_channels(combined=2)
    assert played.queues == 2


def test_statistics_have_the_driver_s_names() -> None:
    played = PlayedDevice(statistics={"rx_queue_0_packets": 5, "x" * 31: 1 << 40})
    assert opened(played).statistics() == {"rx_queue_0_packets": 5, "x" * 31: 1 << 40}
    assert opened(PlayedDevice()).statistics() == {}


def test_a_refusal_says_who_answered_what_and_what_to_do() -> None:
    error = refused("set the table", "eth0", OSError(errno.EOPNOTSUPP, ""), "veth")
    assert isinstance(error, DeviceRefused)
    assert error.message == "eth0: set the table: driver veth answered EOPNOTSUPP (Operation not supported)"
    assert "CAP_NET_ADMIN" in str(refused("x", "eth0", OSError(errno.EPERM, "")).hint)
    assert "read-only" in str(refused("x", "eth0", OSError(errno.EROFS, "")).hint)
    assert refused("x", "eth0", OSError(errno.ENODEV, "")).error == errno.ENODEV


@pytest.mark.parametrize("name", ["", "a/b", "x" * 16, " eth0", "eth0\n", "ä" * 8])
def test_what_is_no_device_name_never_reaches_the_kernel(name: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a device"):
        EthtoolIoctl(name)


def test_loopback_answers_as_the_kernel_does() -> None:
    device = EthtoolIoctl("lo")
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        device.rss()
    assert set(device.flags()) == {"rxhash", "ntuple"}
    device.close()


def test_a_device_that_is_gone_answers_enodev() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)) as seen:
        EthtoolIoctl("nosuchdevice").driver()
    assert seen.value.errno == errno.ENODEV


def test_a_device_that_another_thread_left_is_an_answer_not_a_crash() -> None:
    device = opened(PlayedDevice())
    device.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.rss()


def test_the_library_is_not_needed_for_the_ioctl(project: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['pyroute2'] = None; import flexstream.nic.ethtool as e; e.EthtoolNic('lo', groups=4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=project)
    assert done.returncode == 0, done.stderr
