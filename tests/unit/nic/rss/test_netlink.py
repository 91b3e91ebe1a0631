"""RSS by generic netlink: our messages as the kernel's header lays them out, acknowledged, within a time limit."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.rss.ioctl import EthtoolIoctl, Rss
from flexstream.nic.rss.netlink import GenericNetlink, RssMessage, RssNetlink
from flexstream.nic.rss.transport import RssTransport
from tests.unit.nic.played_device import KEY, PlayedDevice


def attribute(kind: int, payload: bytes) -> bytes:
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + bytes(-size % 4)


class PlayedNetlink(GenericNetlink):
    """The kernel's side: it reads the request's bytes and answers with bytes."""

    def __init__(self, commands: frozenset[int] = frozenset({38, 48}), refuse: dict[int, int] | None = None) -> None:
        super().__init__()
        self.commands = commands
        self.refuse = refuse or {}
        self.requests: list[tuple[int, dict[int, bytes]]] = []
        self.reply = b""

    def family(self, name: str) -> tuple[int, frozenset[int]]:
        return 21, self.commands

    def ask(self, family: int, message: object, answers: type, *, dump: bool = False) -> list[object]:
        message.encode()  # type: ignore[attr-defined]
        data = bytes(message.data)  # type: ignore[attr-defined]
        command, found, at = data[16], {}, 20
        while at < len(data):
            size, kind = struct.unpack_from("=HH", data, at)
            found[kind & 0x3FFF] = data[at + 4 : at + size]
            at += size + 3 & ~3
        self.requests.append((command, found))
        if command in self.refuse:
            raise OSError(self.refuse[command], os.strerror(self.refuse[command]))
        if command != 38:
            return []
        body = struct.pack("=BBH", 38, 1, 0) + self.reply
        reply = answers(struct.pack("=IHHII", 16 + len(body), family, 0, 1, 0) + body)
        reply.decode()  # type: ignore[attr-defined]
        return [reply]


def test_table_key_function_and_transform_are_read_from_the_answer() -> None:
    played = PlayedNetlink()
    header = attribute(1 | 0x8000, attribute(1, struct.pack("=I", 4)) + attribute(2, b"eth0\0"))
    played.reply = (
        header
        + attribute(3, struct.pack("=I", 1))
        + attribute(4, struct.pack("=4I", 3, 2, 1, 0))
        + attribute(5, KEY)
        + attribute(6, struct.pack("=I", 1))
    )
    assert RssNetlink("eth0", played).rss() == Rss((3, 2, 1, 0), KEY, "toeplitz", 1)
    [(command, attributes)] = played.requests
    assert command == 38
    assert attributes[1] == attribute(2, b"eth0\0")


def test_a_device_without_a_table_answers_without_one() -> None:
    played = PlayedNetlink()
    played.reply = attribute(3, struct.pack("=I", 1))
    assert RssNetlink("eth0", played).rss() == Rss((), b"", "toeplitz", 0)


def test_what_is_written_is_what_the_kernel_reads() -> None:
    played = PlayedNetlink()
    device = RssNetlink("eth0", played)
    device.set_rss(table=[1, 0, 3])
    device.set_rss(key=KEY)
    device.set_rss(table=())
    tables = [attributes for command, attributes in played.requests if command == 48]
    assert tables[0][4] == struct.pack("=3I", 1, 0, 3)
    assert 5 not in tables[0]
    assert (tables[1][5], 4 in tables[1]) == (KEY, False)
    assert tables[2][4] == b""


def test_a_kernel_without_rss_set_is_not_asked() -> None:
    played = PlayedNetlink(commands=frozenset({38}))
    device = RssNetlink("eth0", played)
    assert device.commands() == {"RSS_GET"}
    with pytest.raises(OSError, match="no RSS_SET") as seen:
        device.set_rss(table=[0])
    assert seen.value.errno == errno.EOPNOTSUPP
    assert played.requests == []


def test_this_kernel_answers_within_the_limit() -> None:
    """Any kernel: a device that is not there, and loopback, which has no table."""
    netlink = RssNetlink("lo")
    if "RSS_GET" not in netlink.commands():
        with pytest.raises(OSError, match="no RSS_GET"):
            netlink.rss()
        return
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        netlink.rss()
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        RssNetlink("nosuchdevice").rss()
    assert netlink.queue_packets() == {}
    assert netlink.queue_napi() == {}


def test_a_family_that_does_not_exist_is_an_error_not_a_hang() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        GenericNetlink().family("nosuchfamily")


def test_a_request_that_is_never_acknowledged_ends_with_the_time_limit() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        theirs.send(struct.pack("=IHHII", 16, 21, 0, 99, 0))  # an answer to somebody else
        began = time.monotonic()
        with pytest.raises(OSError, match="did not acknowledge") as seen:
            list(GenericNetlink(limit_s=0.2)._messages(ours, 5))
        assert seen.value.errno == errno.ETIMEDOUT
        assert time.monotonic() - began >= 0.2


def test_a_message_with_an_impossible_length_is_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        theirs.send(struct.pack("=IHHII", 3, 21, 0, 5, 0))
        with pytest.raises(OSError, match="impossible length"):
            list(GenericNetlink(limit_s=2.0)._messages(ours, 5))


def test_threads_may_ask_at_the_same_time() -> None:
    errors: list[object] = []

    def ask() -> None:
        netlink = RssNetlink("nosuchdevice")
        for _ in range(20):
            try:
                netlink.rss()
            except OSError as error:
                errors.append(error.errno)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80
    assert len(set(errors)) == 1


def test_rss_set_that_a_driver_refuses_is_tried_by_ioctl_and_remembered() -> None:
    played = PlayedDevice()
    transport = RssTransport("eth0", ioctl=EthtoolIoctl("eth0", played.ioctl), way="ioctl")
    netlink = PlayedNetlink(refuse={48: errno.EOPNOTSUPP})
    transport._netlink, transport._netlink_writes = RssNetlink("eth0", netlink), True
    assert (transport.reads_by, transport.writes_by) == ("netlink", "netlink")
    transport.set_rss(table=[2] * 128)
    assert played.table == [2] * 128
    assert transport.writes_by == "ioctl"
    assert "EOPNOTSUPP" in transport.reason


def test_both_ways_refusing_is_the_drivers_answer() -> None:
    played = PlayedDevice(refuse={0x47: errno.EOPNOTSUPP, 0x39: errno.EOPNOTSUPP})
    transport = RssTransport("eth0", ioctl=EthtoolIoctl("eth0", played.ioctl), way="ioctl")
    transport._netlink, transport._netlink_writes = RssNetlink("eth0", PlayedNetlink(refuse={48: 95})), True
    with pytest.raises(OSError, match="refused"):
        transport.set_rss(table=[2] * 128)
    assert transport.writes_by == "netlink"


def test_the_way_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSTREAM_NIC_WAY", "ioctl")
    assert RssTransport("lo").reads_by == "ioctl"
    monkeypatch.setenv("FLEXSTREAM_NIC_WAY", "smoke")
    with pytest.raises(ConfigError, match="FLEXSTREAM_NIC_WAY"):
        RssTransport("lo")
    monkeypatch.setenv("FLEXSTREAM_NIC_WAY", "auto")
    monkeypatch.setattr("flexstream.nic.rss.transport.kernel_release", lambda: (6, 1))
    old = RssTransport("lo")
    assert (old.reads_by, "6.2" in old.reason) == ("ioctl", True)


def test_messages_go_round_through_the_library() -> None:
    message = RssMessage()
    message["attrs"] = [("ETHTOOL_A_RSS_HKEY", KEY)]
    message.encode()
    again = RssMessage(message.data)
    again.decode()
    assert again.get_attr("ETHTOOL_A_RSS_HKEY") == KEY
