"""RSS by generic netlink: the ethtool family's RSS_GET and RSS_SET, and the netdev family's queues and counters.

The messages are pyroute2's classes with attributes of our own, since pyroute2 knows neither command; the socket is a
plain one, because every request must be acknowledged within a time limit and from any thread: a request without an
acknowledgement was seen to hang. Import this module only when it is needed: pyroute2 takes a while to load.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyroute2.netlink import (
    CTRL_CMD_GETFAMILY,
    GENL_ID_CTRL,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    ctrlmsg,
    genlmsg,
    nla,
)

from flexstream.nic.rss.ioctl import HASH_FUNCTIONS, Rss

ANSWER_LIMIT_S = 3.0
NLM_F_DUMP_INTR = 0x10
NETLINK_GENERIC = 16
SOL_NETLINK, NETLINK_CAP_ACK, NETLINK_EXT_ACK = 270, 10, 11
ETHTOOL_MSG_RSS_GET, ETHTOOL_MSG_RSS_SET = 38, 48
COMMANDS = {ETHTOOL_MSG_RSS_GET: "RSS_GET", ETHTOOL_MSG_RSS_SET: "RSS_SET"}
NETDEV_CMD_QUEUE_GET, NETDEV_CMD_QSTATS_GET = 10, 12
NETDEV_QUEUE_TYPE_RX, NETDEV_QSTATS_SCOPE_QUEUE = 0, 1

_sequence = itertools.count(1)
_families: dict[str, tuple[int, frozenset[int]]] = {}
_families_lock = threading.Lock()


class _Header(nla):
    nla_flags = NLA_F_NESTED
    nla_map = (
        ("ETHTOOL_A_HEADER_UNSPEC", "none"),
        ("ETHTOOL_A_HEADER_DEV_INDEX", "uint32"),
        ("ETHTOOL_A_HEADER_DEV_NAME", "asciiz"),
        ("ETHTOOL_A_HEADER_FLAGS", "uint32"),
    )


class RssMessage(genlmsg):
    """include/uapi/linux/ethtool_netlink_generated.h, ETHTOOL_A_RSS_*."""

    nla_map = (
        ("ETHTOOL_A_RSS_UNSPEC", "none"),
        ("ETHTOOL_A_RSS_HEADER", "_header"),
        ("ETHTOOL_A_RSS_CONTEXT", "uint32"),
        ("ETHTOOL_A_RSS_HFUNC", "uint32"),
        ("ETHTOOL_A_RSS_INDIR", "cdata"),
        ("ETHTOOL_A_RSS_HKEY", "cdata"),
        ("ETHTOOL_A_RSS_INPUT_XFRM", "uint32"),
        ("ETHTOOL_A_RSS_START_CONTEXT", "uint32"),
        ("ETHTOOL_A_RSS_FLOW_HASH", "cdata"),
    )
    _header = _Header


class QueueMessage(genlmsg):
    """include/uapi/linux/netdev.h, NETDEV_A_QUEUE_*."""

    nla_map = (
        ("NETDEV_A_QUEUE_UNSPEC", "none"),
        ("NETDEV_A_QUEUE_ID", "uint32"),
        ("NETDEV_A_QUEUE_IFINDEX", "uint32"),
        ("NETDEV_A_QUEUE_TYPE", "uint32"),
        ("NETDEV_A_QUEUE_NAPI_ID", "uint32"),
    )


class CounterMessage(genlmsg):
    """include/uapi/linux/netdev.h, NETDEV_A_QSTATS_*; the counters are of 4 or 8 bytes, as their value needs."""

    nla_map = (
        ("NETDEV_A_QSTATS_UNSPEC", "none"),
        ("NETDEV_A_QSTATS_IFINDEX", "uint32"),
        ("NETDEV_A_QSTATS_QUEUE_TYPE", "uint32"),
        ("NETDEV_A_QSTATS_QUEUE_ID", "uint32"),
        ("NETDEV_A_QSTATS_SCOPE", "cdata"),
        ("NETDEV_A_QSTATS_PAD5", "none"),
        ("NETDEV_A_QSTATS_PAD6", "none"),
        ("NETDEV_A_QSTATS_PAD7", "none"),
        ("NETDEV_A_QSTATS_RX_PACKETS", "cdata"),
    )


class GenericNetlink:
    """Requests to the kernel by generic netlink, each on its own socket: nothing is shared, so any thread may ask."""

    def __init__(self, limit_s: float = ANSWER_LIMIT_S) -> None:
        self._limit_s = limit_s

    def family(self, name: str) -> tuple[int, frozenset[int]]:
        """A family's number and the commands that this kernel has in it. Raises OSError (ENOENT: no such family)."""
        with _families_lock:
            if name not in _families:
                message = ctrlmsg()
                message["cmd"], message["version"] = CTRL_CMD_GETFAMILY, 1
                message["attrs"] = [("CTRL_ATTR_FAMILY_NAME", name)]
                [reply] = self.ask(GENL_ID_CTRL, message, ctrlmsg)
                commands = (item.get_attr("CTRL_ATTR_OP_ID") for item in reply.get_attr("CTRL_ATTR_OPS") or ())
                _families[name] = reply.get_attr("CTRL_ATTR_FAMILY_ID"), frozenset(commands)
            return _families[name]

    def ask(self, family: int, message: Any, answers: type, *, dump: bool = False) -> list[Any]:
        """Send, and wait for the acknowledgement. Raises OSError: the kernel's errno, or ETIMEDOUT."""
        sequence = next(_sequence) & 0xFFFFFFFF
        header = message["header"]
        header["type"], header["sequence_number"], header["pid"] = family, sequence, 0
        header["flags"] = NLM_F_REQUEST | NLM_F_ACK | (NLM_F_DUMP if dump else 0)
        message.encode()
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_GENERIC) as link:
            link.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
            link.bind((0, 0))
            link.send(bytes(message.data))
            replies: list[Any] = []
            for kind, flags, data in self._messages(link, sequence):
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = -struct.unpack_from("=i", data, 16)[0] if len(data) >= 20 else 0
                    if code:
                        raise OSError(code, os.strerror(code))
                    return replies
                if flags & NLM_F_DUMP_INTR:
                    raise OSError(errno.EAGAIN, "the devices changed while they were listed")
                reply = answers(data)
                reply.decode()
                replies.append(reply)
        raise AssertionError("unreachable: _messages ends with an exception")

    def _messages(self, link: socket.socket, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        deadline = time.monotonic() + self._limit_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OSError(errno.ETIMEDOUT, f"the kernel did not acknowledge within {self._limit_s:g} s")
            link.settimeout(left)
            try:
                data = link.recv(1 << 20)
            except TimeoutError:
                continue
            at = 0
            while at + 16 <= len(data):
                size, kind, flags, number = struct.unpack_from("=IHHI", data, at)
                if size < 16:
                    raise OSError(errno.EPROTO, "the kernel sent a netlink message of an impossible length")
                if number == sequence:
                    yield kind, flags, data[at : at + size]
                at += size + 3 & ~3


class RssNetlink:
    """One device's RSS by netlink. Thread-safe."""

    def __init__(self, device: str, netlink: GenericNetlink | None = None) -> None:
        self.device = device
        self._netlink = netlink or GenericNetlink()

    def commands(self) -> frozenset[str]:
        """Which of RSS_GET and RSS_SET this kernel has. Raises OSError."""
        _, known = self._netlink.family("ethtool")
        return frozenset(name for number, name in COMMANDS.items() if number in known)

    def rss(self) -> Rss:
        replies = self._ask(ETHTOOL_MSG_RSS_GET, [])
        if not replies:
            raise OSError(errno.ENODATA, "the kernel acknowledged RSS_GET but sent no answer")
        reply = replies[0]
        table = reply.get_attr("ETHTOOL_A_RSS_INDIR") or b""
        return Rss(
            struct.unpack(f"={len(table) // 4}I", table),
            bytes(reply.get_attr("ETHTOOL_A_RSS_HKEY") or b""),
            HASH_FUNCTIONS.get(reply.get_attr("ETHTOOL_A_RSS_HFUNC") or 0),
            reply.get_attr("ETHTOOL_A_RSS_INPUT_XFRM") or 0,
        )

    def set_rss(self, *, table: Sequence[int] | None = None, key: bytes | None = None) -> None:
        """One request for all that is given; `table=()` puts the driver's default back."""
        attributes: list[tuple[str, Any]] = []
        if table is not None:
            attributes.append(("ETHTOOL_A_RSS_INDIR", struct.pack(f"={len(table)}I", *table)))
        if key is not None:
            attributes.append(("ETHTOOL_A_RSS_HKEY", key))
        self._ask(ETHTOOL_MSG_RSS_SET, attributes)

    def queue_packets(self) -> dict[int, int]:
        """Packets per receive queue (Linux 6.10, where the driver takes part); empty where nobody counts."""
        attributes = [
            ("NETDEV_A_QSTATS_IFINDEX", self._index()),
            ("NETDEV_A_QSTATS_SCOPE", struct.pack("=Q", NETDEV_QSTATS_SCOPE_QUEUE)),
        ]
        found = {}
        for reply in self._netdev(NETDEV_CMD_QSTATS_GET, CounterMessage, attributes):
            raw = reply.get_attr("NETDEV_A_QSTATS_RX_PACKETS")
            if reply.get_attr("NETDEV_A_QSTATS_QUEUE_TYPE") == NETDEV_QUEUE_TYPE_RX and raw:
                found[int(reply.get_attr("NETDEV_A_QSTATS_QUEUE_ID"))] = int.from_bytes(raw, "little")
        return found

    def queue_napi(self) -> dict[int, int]:
        """NAPI id of each receive queue (Linux 6.8, where the driver says); empty where it is not said."""
        attributes = [("NETDEV_A_QUEUE_IFINDEX", self._index())]
        found = {}
        for reply in self._netdev(NETDEV_CMD_QUEUE_GET, QueueMessage, attributes):
            napi = reply.get_attr("NETDEV_A_QUEUE_NAPI_ID")
            if reply.get_attr("NETDEV_A_QUEUE_TYPE") == NETDEV_QUEUE_TYPE_RX and napi:
                found[int(reply.get_attr("NETDEV_A_QUEUE_ID"))] = int(napi)
        return found

    def _index(self) -> int:
        try:
            return socket.if_nametoindex(self.device)
        except OSError:
            return 0

    def _netdev(self, command: int, answers: type, attributes: list[tuple[str, Any]]) -> list[Any]:
        """An optional extra: whatever the kernel says against it means that there is none."""
        try:
            family, commands = self._netlink.family("netdev")
            if command not in commands:
                return []
            message = answers()
            message["cmd"], message["version"], message["attrs"] = command, 1, attributes
            return self._netlink.ask(family, message, answers, dump=True)
        except OSError:
            return []

    def _ask(self, command: int, attributes: list[tuple[str, Any]]) -> list[Any]:
        family, known = self._netlink.family("ethtool")
        if command not in known:
            raise OSError(errno.EOPNOTSUPP, f"this kernel has no {COMMANDS[command]}")
        message = RssMessage()
        message["cmd"], message["version"] = command, 1
        name = {"attrs": [("ETHTOOL_A_HEADER_DEV_NAME", self.device)]}
        message["attrs"] = [("ETHTOOL_A_RSS_HEADER", name), *attributes]
        return self._netlink.ask(family, message, RssMessage)
