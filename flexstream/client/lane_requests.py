"""The lanes that the server asks for: which there should be, which there are, and their names on the wire.

A group that is hotter than a core is served by several workers, and a connection by one. So the server may ask a
producer for further connections of a group: each has a number, which is used once, and row sequences of its own. The
native `FurtherLanes` sends on them in turn. Here is decided which are opened and ended. A lane that may have reached
the server is seen through to its EOS, whatever happens: until then the server waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexstream.cython_ext.produce.further_lanes import MOST, FurtherLanes
from flexstream.wire.frames import HEADER_BYTES, FrameType, Header, WireError, lanes_of

log = logging.getLogger("flexstream.producer")


@dataclass(frozen=True, slots=True)
class LaneName:
    """A further lane: `steer` is the group whose bucket its port should be in."""

    group: int
    number: int
    steer: int


class LaneKeeper:
    """The further lanes that the server has asked this session for. For the session's service thread."""

    def __init__(self, sender: FurtherLanes, groups: int, most: int) -> None:
        self._sender = sender
        self._groups = groups
        self._most = min(most, MOST)
        self._wanted: dict[int, dict[int, int]] = {}  # group: {number: steer}
        self._used: set[int] = set()  # numbers that were opened once
        self.names: dict[int, LaneName] = {}  # by index in the sender
        self._retired: set[int] = set()

    def learn(self, document: Mapping[str, Any]) -> bool:
        """From a control ACK: all lanes that are wanted. False: this server knows nothing of lanes."""
        told = document.get("lanes")
        self._wanted = {}
        if not isinstance(told, dict):
            return False
        for group, lanes in told.items():
            try:
                self._want(int(group), {int(number): int(steer) for number, steer in lanes})
            except (TypeError, ValueError):
                log.warning("the server asked for lanes in a form that this producer cannot read: %.80r", lanes)
        self.settle()
        return True

    def read_requests(self) -> None:
        """LANES frames of the control connection."""
        data = self._sender.requests()
        while len(data) >= HEADER_BYTES:
            try:
                header = Header.unpack(data)
                size = HEADER_BYTES + header.payload_bytes
                if header.type is FrameType.LANES:
                    self._want(header.value, lanes_of(data[HEADER_BYTES:size]))
            except WireError as error:
                log.warning("the server asked for lanes that this producer cannot open: %s", error)
                break
            data = data[size:]
        self.settle()

    def _want(self, group: int, lanes: dict[int, int]) -> None:
        if 0 <= group < self._groups:
            self._wanted[group] = {
                number: steer if 0 <= steer < self._groups else group for number, steer in lanes.items() if number > 0
            }

    def settle(self) -> None:
        """Open what is wanted for groups that have a connection, retire what is not."""
        there = self._sender.further_lanes()
        self.names = {index: name for index, name in self.names.items() if there.get(index) == name.number}
        self._retired &= set(self.names)
        for index, name in self.names.items():
            if index not in self._retired and name.number not in self._wanted.get(name.group, {}):
                self._sender.retire_lane(index)
                self._retired.add(index)
        for group, lanes in self._wanted.items():
            fresh = [(number, steer) for number, steer in lanes.items() if number not in self._used]
            if fresh and self._sender.has_opened(group):
                for number, steer in fresh:
                    self._open(LaneName(group, number, steer))

    def _open(self, name: LaneName) -> None:
        index = self._sender.add_lane(name.group, name.number) if len(self.names) < self._most else -1
        if index >= 0:
            self._used.add(name.number)
            self.names[index] = name

    def refused(self, index: int) -> bool:
        """The server does not have it. False: it had, and the lane is still needed."""
        dropped = self._sender.drop_lane(index)
        if dropped:
            del self.names[index]
        return dropped

    def open_numbers(self) -> tuple[int, ...]:
        """Of lanes that have not ended: what the server must not forget."""
        return tuple(sorted(self._sender.further_lanes().values()))

    def describe(self, key: int) -> str:
        name = self.names.get(key)
        return f"group {key}" if name is None else f"group {name.group} lane {name.number}"
