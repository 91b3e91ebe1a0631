"""Partition, frame and send with the GIL released: the native half of `flexstream.Producer`."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MIN
from libc.stdlib cimport calloc, free, malloc

from flexstream.cython_ext.includes.linux cimport POLLIN, POLLOUT, poll
from flexstream.cython_ext.includes.native cimport (
    FS_TIME_LIMIT, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_plus, fs_realtime_ns,
)
from flexstream.cython_ext.produce.lane cimport (
    LANE_UNOPENED, PUMP_AWAY, Lane, lane_close_frame, lane_drain, lane_open_frame, lane_pump, lane_unsent,
    lane_unsent_slots,
)
from flexstream.cython_ext.produce.lanes cimport MOST_LANES, SERVE_BROKEN, SERVE_WANTED
from flexstream.cython_ext.produce.scatter cimport scatter_block_rows, scatter_for, scatter_max_time
from flexstream.cython_ext.wire.murmur3 cimport KeyHasher, groups_of, grouping_of

cdef enum:
    SEND_DONE = 0
    SEND_FULL = 1
    WAIT_MS = 5                # how long a caller sleeps in poll before it looks again
    PATIENCE_NS = 100_000_000  # how long it does so before Python gets to see signals and failures

# What send() returns
DONE = SEND_DONE               # every row is in a log
FULL = SEND_FULL               # a ring is full (and the caller did not want to wait, or has waited a while)


cdef class Sender(FurtherLanes):
    """The lanes of one session and the way into them. Made by `flexstream.client`; not for applications."""

    def __cinit__(self, KeyHasher key not None, *, groups, row_bytes, time_offset, auto_watermark=True,
                  max_disorder=0, send_frames=1, max_future_ns=None, unit_ns=1, **others):
        if key.spec.end > <uint32_t> row_bytes or time_offset + 8 > row_bytes:
            raise ValueError(f"key and time do not lie in a row of {row_bytes} bytes")
        self.grouping = grouping_of(&key.spec, groups)
        self.scatter = scatter_for(row_bytes)
        self.block_rows = scatter_block_rows(row_bytes)
        self.time_offset = time_offset
        self.auto_watermark = auto_watermark
        self.max_disorder = max_disorder
        self.max_future = -1 if max_future_ns is None else max_future_ns // unit_ns
        self.unit_ns = unit_ns
        self.latest = FS_TIME_LIMIT
        self.send_frames = send_frames
        self.call_time = INT64_MIN
        self.polls = <pollfd *> calloc(groups + 1 + MOST_LANES, sizeof(pollfd))
        self.ids = <uint16_t *> malloc(self.block_rows * sizeof(uint16_t))
        if self.polls == NULL or self.ids == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.polls)
        free(self.ids)

    cdef void partition(self, const unsigned char *rows, size_t n) noexcept nogil:
        groups_of(&self.grouping, rows, self.shape.row_bytes, n, self.ids)
        self.call_time = scatter_max_time(rows + self.time_offset, self.shape.row_bytes, n, self.call_time, self.latest)

    cdef bint make_room(self, uint32_t group) noexcept nogil:
        """The group's frame is full, or there is none: send it and open the next. False: the ring is full.

        A group with further lanes goes on with the next of them that has room.
        """
        cdef uint32_t index = self.route[group]
        cdef uint32_t first = self.lanes[index].sibling
        cdef Lane *lane = &self.lanes[index]
        cdef uint64_t now = fs_now_ns()
        lane_close_frame(lane, &self.cursors[group], &self.shape)
        if lane.tail == lane.head:
            self.bits[group >> 3] |= <unsigned char> (1 << (group & 7))
        else:
            self.mark(index, now)
            # Two frames in one call cost little more than one: the kernel makes one packet of them, and the receiver
            # wakes once. Linger bounds the wait. The acknowledgement of the frames before has had time to come.
            if lane.fd < 0 or lane_unsent_slots(lane, &self.shape) >= self.send_frames:
                if self.shape.acks:
                    lane_drain(lane, &self.pool, &self.shape)
                if lane_pump(lane, &self.pool, &self.shape) == PUMP_AWAY:
                    self.need(SERVE_WANTED if lane.state == LANE_UNOPENED else SERVE_BROKEN)
        index = first
        while True:
            lane = &self.lanes[index]
            self.route[group] = index
            if lane_open_frame(lane, &self.cursors[group], &self.pool, &self.shape, now):
                return True
            if lane.sibling == index:
                return False
            lane_drain(lane, &self.pool, &self.shape)
            if lane_open_frame(lane, &self.cursors[group], &self.pool, &self.shape, now):
                return True
            index = lane.sibling
            if index == first:
                return False

    cdef void wait_room(self, uint32_t group, int timeout_ms) noexcept nogil:
        """Lets go of the lock until a socket of the group, or another one with bytes to send, may have moved."""
        cdef uint32_t i, n = 0
        cdef Lane *lane
        cdef uint64_t began = fs_now_ns()
        for i in range(self.end):
            lane = &self.lanes[i]
            if lane.fd >= 0 and self.carries_rows(i) and (lane.group == group or lane_unsent(lane, &self.shape)):
                self.polls[n].fd = lane.fd
                self.polls[n].events = POLLIN if lane.group == group and not lane.ending else 0
                if lane_unsent(lane, &self.shape):
                    self.polls[n].events |= POLLOUT
                n += 1
        if self.lanes[group].fd < 0:
            self.wake()
            timeout_ms = 1
        self.leave()
        poll(self.polls, n, timeout_ms)
        self.enter_again()
        for i in range(self.end):
            lane = &self.lanes[i]
            if lane.fd >= 0 and self.carries_rows(i):
                if lane_unsent(lane, &self.shape):
                    lane_pump(lane, &self.pool, &self.shape)
                if lane.group == group:
                    lane_drain(lane, &self.pool, &self.shape)
        self.waited_ns += fs_now_ns() - began

    cdef int put(self, const unsigned char *rows, size_t n, size_t *position, bint wait) noexcept nogil:
        cdef size_t at = position[0], block, done
        cdef uint64_t now, patience
        cdef const unsigned char *row
        cdef int status = 0
        while at < n and status == 0:
            block = self.block_rows if n - at > self.block_rows else n - at
            row = rows + at * self.shape.row_bytes
            self.partition(row, block)
            done = 0
            while True:
                done += self.scatter(self.cursors, self.ids + done, row + done * self.shape.row_bytes,
                                     self.shape.row_bytes, block - done)
                if done == block:
                    break
                if self.make_room(self.ids[done]):
                    continue
                patience = fs_now_ns() + PATIENCE_NS
                while wait and not fs_load_acquire(&self.stopping):
                    self.wait_room(self.ids[done], WAIT_MS)
                    now = fs_now_ns()
                    if now >= self.next_scan_ns:
                        self.scan(now, False)
                    if self.make_room(self.ids[done]):
                        break
                    if now > patience:
                        wait = False
                if self.cursors[self.ids[done]].at == self.cursors[self.ids[done]].end:
                    status = SEND_FULL
                    break
            at += done
            self.rows += done
            if self.linger_ns:                # without a linger frames are closed at the end of the call
                now = fs_now_ns()
                if now >= self.next_scan_ns:
                    self.scan(now, False)
            self.let_in()
        position[0] = at
        return status

    def send(self, rows, Py_ssize_t start=0, bint wait=True):
        """Rows `start` and after into the lanes, in order. Returns (status, rows taken so far).

        FULL with `wait` means that it waited a while: look for signals and failures, then call again. Not for two
        threads at once.
        """
        cdef Py_buffer view
        cdef size_t position = <size_t> start
        cdef size_t n
        cdef int status
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
        try:
            n = <size_t> view.len // self.shape.row_bytes
            if <size_t> view.len != n * self.shape.row_bytes or position > n:
                raise ValueError(f"{view.len} bytes are not whole rows of {self.shape.row_bytes} bytes")
            with nogil:
                if self.max_future >= 0:
                    self.latest = fs_plus(<int64_t> fs_realtime_ns() // self.unit_ns, self.max_future)
                    if self.latest > FS_TIME_LIMIT:
                        self.latest = FS_TIME_LIMIT
                self.enter()
                status = self.put(<const unsigned char *> view.buf, n, &position, wait)
                if status == 0:
                    if self.auto_watermark and self.call_time >= INT64_MIN + self.max_disorder:
                        if self.call_time - self.max_disorder > self.watermark:
                            self.watermark = self.call_time - self.max_disorder
                    if self.linger_ns == 0:
                        self.scan(fs_now_ns(), True)
                    elif fs_load_relaxed(&self.asleep):
                        self.wake()
                self.leave()
        finally:
            PyBuffer_Release(&view)
        return status, position
