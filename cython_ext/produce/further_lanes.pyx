"""Lanes that the server asks for, their life, and what there is to know of all lanes.

A further lane is added without a connection, gets rows once it is attached, and none any more when it is retired: EOS
goes out behind its last row, and its place is free when the server has closed. It is known by its index, which is above
the number of groups.
"""

from libc.stdint cimport INT64_MIN, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc

from flexstream.cython_ext.includes.native cimport fs_load_relaxed, fs_store_relaxed
from flexstream.cython_ext.produce.lane cimport LANE_BROKEN, LANE_UNOPENED, Lane, Slot, lane_open_rows
from flexstream.cython_ext.produce.lanes cimport MOST_LANES, SERVE_ASKED
from flexstream.cython_ext.wire.frame cimport HEADER_BYTES

from flexstream.cython_ext.produce.lane_facts import LaneFacts, LaneFault

MOST = MOST_LANES


cdef class FurtherLanes(Lanes):
    """One lane per group, further ones on request, and one for the control connection."""

    def add_lane(self, uint32_t group, uint32_t number):
        """A further lane of the group, to be connected like any other; returns its index, or -1: there is no room."""
        cdef uint32_t i
        cdef Lane *lane
        cdef int found = -1
        if group >= self.groups or number == 0:
            raise ValueError(f"lane {number} of group {group}")
        with nogil:
            self.enter()
            for i in range(self.groups + 1, self.groups + 1 + MOST_LANES):
                lane = &self.lanes[i]
                if lane.slots == NULL:
                    lane.slots = <Slot *> calloc(self.shape.ring, sizeof(Slot))
                if not lane.used and lane.slots != NULL and not self.lanes[self.groups].ending:
                    lane.used = True
                    lane.group = <uint16_t> group
                    lane.number = number
                    if i >= self.end:
                        self.end = i + 1
                    found = <int> i
                    break
            self.leave()
        return found

    def retire_lane(self, uint32_t index):
        """It gets no more rows, and ends when the server has those that it got."""
        with nogil:
            self.enter()
            if index > self.groups and self.lanes[index].used:
                self.unlink(index)
                self.lanes[index].retired = True
            self.wake()
            self.leave()

    def drop_lane(self, uint32_t index):
        """The server did not want it: its place is free. False: it was attached once, and may not be dropped."""
        cdef bint dropped
        with nogil:
            self.enter()
            dropped = index > self.groups and self.lanes[index].used and not self.lanes[index].attached_once
            if dropped:
                self.recycle(index)
            self.leave()
        return dropped

    def further_lanes(self):
        """{index: number} of the further lanes that have not ended."""
        cdef uint32_t i
        with nogil:
            self.enter()
        found = {i: self.lanes[i].number for i in range(self.groups + 1, self.end) if self.lanes[i].used}
        self.leave()
        return found

    def has_opened(self, uint32_t group):
        """Whether the group has had a connection."""
        cdef bint opened
        with nogil:
            self.enter()
            opened = self.lanes[group].attached_once
            self.leave()
        return opened

    def requests(self):
        """LANES frames that came since the last call, one behind the other."""
        cdef Lane *control = &self.lanes[self.groups]
        with nogil:
            self.enter()
        found = control.requests[:control.requests_bytes] if control.requests_bytes else b""
        control.requests_bytes = 0
        fs_store_relaxed(&self.needs, fs_load_relaxed(&self.needs) & ~<uint64_t> SERVE_ASKED)
        self.leave()
        return found

    # -- what there is to know

    cdef list look(self):
        """[LaneFacts], one for each lane in use, all as of one moment; the last, at -1, is of those that are no more."""
        cdef uint32_t i
        cdef uint64_t end_row
        cdef Lane *lane
        found = []
        with nogil:
            self.enter()
        for i in range(self.end):
            lane = &self.lanes[i]
            said = b""
            end_row = lane.next_row
            if self.carries_rows(i):        # others have no group, and no cursor
                end_row += lane_open_rows(lane, self.cursor_of(i), &self.shape)
            if lane.state == LANE_BROKEN and lane.error_value and lane.inbox_bytes > HEADER_BYTES:
                said = lane.inbox[HEADER_BYTES:lane.inbox_bytes]
            found.append(LaneFacts(
                i, self.carries_rows(i), lane.state == LANE_UNOPENED and (lane.used or lane.head != lane.tail),
                lane.state == LANE_BROKEN, lane.fault, lane.error_value, said, lane.fd >= 0, lane.linked, lane.acked,
                end_row, lane.base, lane.frames, lane.sent_bytes,
            ))
        found.append(LaneFacts(-1, acked=self.ended_acked, frames=self.ended_frames, sent_bytes=self.ended_bytes))
        self.leave()
        return found

    def wanted_groups(self):
        """Groups with rows and without a first connection, and further lanes without one."""
        return [lane.at for lane in self.look() if lane.carries_rows and lane.wanted]

    def faults(self):
        """[LaneFault] of the connections that broke."""
        return [
            LaneFault(lane.at if lane.at != self.groups else -1, lane.fault, lane.error_value, lane.said)
            for lane in self.look() if lane.broken
        ]

    def pending(self):
        """{group or index: (first, end)} of rows that the server has not acknowledged, numbered as on the wire."""
        return {
            lane.at: (lane.acked + lane.base, lane.end_row + lane.base)
            for lane in self.look() if lane.carries_rows and lane.end_row > lane.acked
        }

    def control_acks(self):
        """ACK frames that came on the control connection after its HELLO."""
        cdef uint32_t acks
        with nogil:
            self.enter()
            acks = self.lanes[self.groups].acks
            self.leave()
        return acks

    def stats(self):
        """Counters over all lanes."""
        lanes = self.look()
        return {
            "rows": self.rows,
            "rows_acked": sum(lane.acked for lane in lanes),
            "frames": sum(lane.frames for lane in lanes),
            "bytes": sum(lane.sent_bytes for lane in lanes),
            "watermarks": self.watermarks,
            "watermark": None if self.watermark == INT64_MIN else self.watermark,
            "connections": sum(lane.is_open for lane in lanes if lane.at != self.groups),
            "further_lanes": sum(lane.linked for lane in lanes if lane.at > self.groups),
            "buffer_bytes": self.pool.allocated,
            "waited_s": self.waited_ns / 1e9,
        }
