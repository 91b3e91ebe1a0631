"""See lanes.pxd."""

from libc.stdint cimport INT64_MIN
from libc.stdlib cimport calloc, free, malloc

from flexstream.cython_ext.includes.linux cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, POLLIN, close, eventfd, poll, pollfd, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock, read, sched_yield, write,
)
from flexstream.cython_ext.includes.native cimport (
    fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_realtime_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.produce.lane cimport (
    LANE_BROKEN, LANE_ENDED, LANE_UNOPENED, SLOT_SPARE_BYTES, Slot, lane_append, lane_attach, lane_break,
    lane_close_frame, lane_drain, lane_pump, lane_recycle, lane_shut, lane_unsent, pool_free,
)
from flexstream.cython_ext.wire.frame cimport CONTROL_GROUP, FRAME_EOS, FRAME_MARKER, FRAME_WATERMARK, HEADER_BYTES

cdef extern from *:
    """
    #define flexstream_add(p, n) __atomic_add_fetch((p), (n), __ATOMIC_SEQ_CST)
    #define flexstream_load(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
    """
    int flexstream_add(int *p, int n) noexcept nogil
    int flexstream_load(int *p) noexcept nogil

# What serve() returns: a sum of these
WANTED = SERVE_WANTED      # lanes need a first connection: wanted_groups()
BROKEN = SERVE_BROKEN      # lanes lost theirs: faults()
STOPPED = SERVE_STOPPED
ASKED = SERVE_ASKED        # the server wants other lanes: requests()

cdef enum:
    IDLE_MS = 100
    DRAIN_NS = 20_000_000


cdef class Lanes:
    """One lane per group and one for the control connection."""

    def __cinit__(self, *args, groups, row_bytes, rows_per_frame, ring=8, linger_ns=5_000_000, crc=False, acks=True,
                  **others):
        cdef uint32_t g
        if not 1 <= groups <= 65535 or row_bytes < 8 or rows_per_frame < 1 or ring < 2:
            raise ValueError(f"groups={groups}, row_bytes={row_bytes}, rows_per_frame={rows_per_frame}, ring={ring}")
        pthread_mutex_init(&self.lock, NULL)
        self.groups = groups
        self.shape.row_bytes = row_bytes
        self.shape.rows_per_frame = rows_per_frame
        self.shape.ring = ring
        self.shape.crc = crc
        self.shape.acks = acks
        self.linger_ns = linger_ns
        self.watermark = INT64_MIN
        self.wake_fd = -1
        self.pool.slot_bytes = max(HEADER_BYTES + rows_per_frame * row_bytes, HEADER_BYTES + (groups + 7) // 8)
        self.pool.slot_bytes += SLOT_SPARE_BYTES
        self.pool.free = <unsigned char **> malloc((groups + 1 + MOST_LANES) * ring * sizeof(void *))
        self.lanes = <Lane *> calloc(groups + 1 + MOST_LANES, sizeof(Lane))
        self.route = <uint32_t *> calloc(groups, sizeof(uint32_t))
        self.end = groups + 1
        self.cursors = <Cursor *> calloc(groups, sizeof(Cursor))
        self.bits = <unsigned char *> calloc((groups + 7) // 8, 1)
        if (self.pool.free == NULL or self.lanes == NULL or self.cursors == NULL or self.bits == NULL
                or self.route == NULL):
            raise MemoryError
        for g in range(self.groups):
            self.route[g] = g
        for g in range(self.groups + 1 + MOST_LANES):
            self.lanes[g].fd = -1
            self.lanes[g].sibling = g
            self.lanes[g].group = <uint16_t> (g if g < self.groups else CONTROL_GROUP)
            self.lanes[g].watermark = INT64_MIN
            self.lanes[g].slots = <Slot *> calloc(ring, sizeof(Slot))
            if self.lanes[g].slots == NULL:
                raise MemoryError
        self.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if self.wake_fd < 0:
            raise OSError("cannot make an eventfd: too many open files?")

    def __dealloc__(self):
        cdef uint32_t g
        if self.lanes != NULL:
            for g in range(self.groups + 1 + MOST_LANES):
                if self.lanes[g].fd >= 0:
                    close(self.lanes[g].fd)
                free(self.lanes[g].slots)
                free(self.lanes[g].inbox)
                free(self.lanes[g].requests)
        pool_free(&self.pool)
        if self.wake_fd >= 0:
            close(self.wake_fd)
        free(self.pool.free)
        free(self.lanes)
        free(self.route)
        free(self.cursors)
        free(self.bits)
        pthread_mutex_destroy(&self.lock)

    # -- the lock

    cdef void enter(self) noexcept nogil:
        flexstream_add(&self.contenders, 1)
        pthread_mutex_lock(&self.lock)
        flexstream_add(&self.contenders, -1)

    cdef void leave(self) noexcept nogil:
        pthread_mutex_unlock(&self.lock)

    cdef void enter_again(self) noexcept nogil:
        pthread_mutex_lock(&self.lock)        # by the caller in send: nobody need let it in

    cdef void let_in(self) noexcept nogil:
        # A mutex is not fair: without this a caller that sends without pause would keep the service thread out.
        cdef int i
        if flexstream_load(&self.contenders) == 0:
            return
        pthread_mutex_unlock(&self.lock)
        for i in range(1000):
            if flexstream_load(&self.contenders) == 0:
                break
            sched_yield()
        pthread_mutex_lock(&self.lock)

    cdef void wake(self) noexcept nogil:
        cdef uint64_t one = 1
        fs_store_relaxed(&self.asleep, False)
        if write(self.wake_fd, &one, 8) < 0:
            pass                              # full: then it will wake anyhow

    cdef void need(self, int what) noexcept nogil:
        """Tells the service thread that lanes need connecting: once, or again if it went to sleep meanwhile."""
        cdef uint64_t before = fs_load_relaxed(&self.needs)
        fs_store_relaxed(&self.needs, before | <uint64_t> what)
        if not before & <uint64_t> what or fs_load_relaxed(&self.asleep):
            self.wake()

    # -- watermarks, lingers, ends

    cdef bint carries_rows(self, uint32_t index) noexcept nogil:
        """Whether it is a lane in use, and not the control connection's."""
        return index < self.groups or (index > self.groups and self.lanes[index].used)

    cdef Cursor *cursor_of(self, uint32_t index) noexcept nogil:
        """That of the lane's open frame; one that is closed if it has none."""
        cdef uint32_t group = self.lanes[index].group
        return &self.cursors[group] if self.route[group] == index else &self.closed

    cdef void mark(self, uint32_t index, uint64_t now) noexcept nogil:
        """Appends the session's watermark if it is new and the last one is a linger ago. Assumes: no frame is open.

        Rows of completed calls are all before it in the log; rows of the call in progress are not older than it, as
        far as the producer keeps to max_disorder.
        """
        cdef Lane *lane = &self.lanes[index]
        if self.watermark <= lane.watermark or lane.ending or now - lane.watermark_ns < self.linger_ns:
            return
        if lane_append(lane, &self.pool, &self.shape, FRAME_WATERMARK, <uint64_t> self.watermark, NULL, 0):
            lane.watermark = self.watermark
            lane.watermark_ns = now
            self.watermarks += 1

    cdef void mark_control(self, uint64_t now) noexcept nogil:
        cdef Lane *lane = &self.lanes[self.groups]
        if self.watermark <= lane.watermark or lane.fd < 0 or lane.ending or now - lane.watermark_ns < self.linger_ns:
            return
        if lane_append(lane, &self.pool, &self.shape, FRAME_WATERMARK, <uint64_t> self.watermark, self.bits,
                       (self.groups + 7) // 8):
            lane.watermark = self.watermark
            lane.watermark_ns = now
            self.watermarks += 1

    cdef uint64_t tend(self, uint32_t index, uint64_t now, bint everything, bint drain) noexcept nogil:
        """A lane's turn in a scan. Returns what it needs of Python."""
        cdef Lane *lane = &self.lanes[index]
        cdef Cursor *cursor = self.cursor_of(index)
        if cursor.at != NULL and (everything or now - lane.filled_ns >= self.linger_ns):
            lane_close_frame(lane, cursor, &self.shape)
        if cursor.at == NULL and (lane.attached_once or not lane.used):     # the first attach would pass it over
            self.mark(index, now)
        if lane.retired and not lane.ending:
            self.end_lane(index)
        if lane.fd >= 0:
            if lane_unsent(lane, &self.shape) and (cursor.at == NULL or now - lane.unsent_ns >= self.linger_ns):
                lane_pump(lane, &self.pool, &self.shape)
            if lane.retired and lane.eos_sent and lane.acked == lane.next_row:
                lane_shut(lane)
            if drain and lane.fd >= 0:
                lane_drain(lane, &self.pool, &self.shape)
        self.busy |= (cursor.at != NULL or lane.acked < lane.next_row or lane_unsent(lane, &self.shape) or lane.retired
                      or (lane.fd >= 0 and lane.watermark < self.watermark))
        if lane.state == LANE_BROKEN:
            return SERVE_BROKEN
        if lane.state == LANE_UNOPENED and (lane.used or lane_unsent(lane, &self.shape)):
            return SERVE_WANTED
        return 0

    cdef void scan(self, uint64_t now, bint everything) noexcept nogil:
        """One round over the lanes: close lingering frames, append watermarks, send, read acknowledgements."""
        cdef uint32_t i
        cdef Lane *lane
        cdef uint64_t needs = 0
        cdef bint drain = everything or now >= self.next_drain_ns
        self.busy = False
        for i in range(self.end):
            lane = &self.lanes[i]
            if not self.carries_rows(i) or (lane.head == lane.tail and lane.state == LANE_UNOPENED and not lane.used):
                continue
            needs |= self.tend(i, now, everything, drain)
            if lane.used and lane.state == LANE_ENDED:
                self.recycle(i)
        lane = &self.lanes[self.groups]
        self.mark_control(now)
        if lane.fd >= 0:
            lane_pump(lane, &self.pool, &self.shape)
            lane_drain(lane, &self.pool, &self.shape)
        if lane.state == LANE_BROKEN:
            needs |= SERVE_BROKEN
        if lane.requests_bytes:
            needs |= SERVE_ASKED
        fs_store_relaxed(&self.needs, needs)
        self.busy |= (lane_unsent(lane, &self.shape) or lane.watermark < self.watermark
                      or (lane.ending and lane.acks == 0))
        if drain:
            self.next_drain_ns = now + DRAIN_NS
        self.next_scan_ns = now + self.linger_ns

    cdef bint end_lane(self, uint32_t index) noexcept nogil:
        """EOS behind all that the lane has. False: its ring is full, again later."""
        cdef Lane *lane = &self.lanes[index]
        lane_close_frame(lane, self.cursor_of(index), &self.shape)
        self.mark(index, lane.watermark_ns + self.linger_ns)
        lane_pump(lane, &self.pool, &self.shape)
        lane_drain(lane, &self.pool, &self.shape)
        if lane_append(lane, &self.pool, &self.shape, FRAME_EOS, 0, NULL, 0):
            lane.ending = True
            lane_pump(lane, &self.pool, &self.shape)
        return lane.ending

    cdef void unlink(self, uint32_t index) noexcept nogil:
        """The lane gets no more rows."""
        cdef Lane *lane = &self.lanes[index]
        cdef uint32_t group = lane.group
        cdef uint32_t before = group
        if not lane.linked:
            return
        lane_close_frame(lane, self.cursor_of(index), &self.shape)
        while self.lanes[before].sibling != index:
            before = self.lanes[before].sibling
        self.lanes[before].sibling = lane.sibling
        lane.sibling = index
        lane.linked = False
        if self.route[group] == index:
            self.route[group] = group

    cdef void recycle(self, uint32_t index) noexcept nogil:
        """The place is free for another lane."""
        cdef Lane *lane = &self.lanes[index]
        self.unlink(index)
        self.ended_frames += lane.frames
        self.ended_bytes += lane.sent_bytes
        self.ended_acked += lane.acked
        lane_recycle(lane, &self.pool, &self.shape)
        lane.sibling = index
        while self.end > self.groups + 1 and not self.lanes[self.end - 1].used:
            self.end -= 1

    def put_watermark(self, int64_t value):
        """An explicit watermark: in order, behind every row so far, on every lane. It never goes back."""
        cdef uint32_t i
        cdef Lane *lane
        with nogil:
            self.enter()
            if value > self.watermark:
                self.watermark = value
                for i in range(self.end):
                    lane = &self.lanes[i]
                    if self.carries_rows(i) and (lane.head != lane.tail or lane.state != LANE_UNOPENED):
                        lane_close_frame(lane, self.cursor_of(i), &self.shape)
                        self.mark(i, lane.watermark_ns + self.linger_ns)
                self.mark_control(self.lanes[self.groups].watermark_ns + self.linger_ns)
                self.wake()
            self.leave()

    def put_marker(self):
        """A MARKER with the time of now behind the rows of every open connection; returns on how many."""
        cdef uint32_t g
        cdef int count = 0
        cdef uint64_t now
        cdef Lane *lane
        with nogil:
            self.enter()
            now = fs_realtime_ns()
            for g in range(self.end):
                lane = &self.lanes[g]
                if lane.fd < 0 or lane.ending or not self.carries_rows(g):
                    continue
                lane_close_frame(lane, self.cursor_of(g), &self.shape)
                count += lane_append(lane, &self.pool, &self.shape, FRAME_MARKER, now, NULL, 0)
                lane_pump(lane, &self.pool, &self.shape)
            self.leave()
        return count

    def put_end(self):
        """EOS on every lane with rows and on the control lane. False: a ring is full, call again."""
        cdef uint32_t g
        cdef Lane *lane
        cdef bint complete = True
        with nogil:
            self.enter()
            for g in range(self.end):
                lane = &self.lanes[g]
                if not self.carries_rows(g) or lane.ending or (lane.head == lane.tail and lane.state == LANE_UNOPENED
                                                               and not lane.used):
                    continue
                if g > self.groups:
                    lane_close_frame(lane, self.cursor_of(g), &self.shape)
                    self.unlink(g)
                    lane.retired = True
                complete = self.end_lane(g) and complete
            lane = &self.lanes[self.groups]
            if complete and not lane.ending:
                lane.ending = lane_append(lane, &self.pool, &self.shape, FRAME_EOS, 0, self.bits,
                                          (self.groups + 7) // 8)
                lane_pump(lane, &self.pool, &self.shape)
                complete = lane.ending
            self.wake()
            self.leave()
        return complete

    cdef bint settled(self) noexcept nogil:
        cdef uint32_t g
        cdef Lane *lane
        for g in range(self.end):
            lane = &self.lanes[g]
            if self.carries_rows(g) and (self.cursor_of(g).at != NULL or lane.acked < lane.next_row
                                         or lane_unsent(lane, &self.shape)):
                return False
        return not lane_unsent(&self.lanes[self.groups], &self.shape)

    def flush(self, int timeout_ms):
        """Sends what is buffered and waits until the server has acknowledged it. False: not in this time."""
        cdef uint64_t now = fs_now_ns()
        cdef uint64_t deadline = now + <uint64_t> timeout_ms * 1_000_000
        cdef bint done = False
        with nogil:
            while True:
                self.enter()
                self.scan(now, True)
                done = self.settled()
                if fs_load_relaxed(&self.needs):
                    self.wake()
                self.leave()
                now = fs_now_ns()
                if done or now >= deadline or fs_load_acquire(&self.stopping):
                    break
                poll(NULL, 0, 1)
                now = fs_now_ns()
        return done

    # -- the service thread

    def serve(self, int timeout_ms, bint watch_wanted=True, bint watch_broken=True):
        """Rounds of `scan` while no caller makes them, until something needs Python or the time is over."""
        cdef int reasons = 0
        cdef int watched = SERVE_STOPPED | SERVE_ASKED
        cdef int nap
        cdef bint busy
        cdef uint64_t now = fs_now_ns()
        cdef uint64_t deadline = now + <uint64_t> timeout_ms * 1_000_000
        cdef uint64_t count
        cdef pollfd wait
        watched |= (SERVE_WANTED if watch_wanted else 0) | (SERVE_BROKEN if watch_broken else 0)
        with nogil:
            wait.fd = self.wake_fd
            wait.events = POLLIN
            while True:
                busy = True                   # somebody is at it: look again soon
                if pthread_mutex_trylock(&self.lock) == 0:
                    now = fs_now_ns()
                    if now >= self.next_scan_ns or now >= self.next_drain_ns or not self.busy:
                        self.scan(now, False)
                    busy = self.busy
                    fs_store_relaxed(&self.asleep, not busy)
                    self.leave()
                reasons = <int> fs_load_relaxed(&self.needs)
                if fs_load_acquire(&self.stopping):
                    reasons |= SERVE_STOPPED
                reasons &= watched
                now = fs_now_ns()
                if reasons or now >= deadline:
                    break
                nap = IDLE_MS
                if busy:
                    nap = <int> (self.linger_ns // 1_000_000)
                    nap = 1 if nap < 1 else nap
                if now + <uint64_t> nap * 1_000_000 > deadline:
                    nap = <int> ((deadline - now) // 1_000_000) + 1
                if poll(&wait, 1, nap) > 0 and read(self.wake_fd, &count, 8) < 0:
                    pass
        return reasons

    def stop(self):
        """Nothing waits after this: send, flush and serve return at once."""
        fs_store_release(&self.stopping, True)
        self.wake()

    def attach(self, int group, int fd, uint64_t wanted):
        """The socket `fd` (non-blocking, HELLO answered) becomes the group's; -1 is the control connection, and more than
        the groups a further lane, which gets rows from now on.

        Returns the rows that were acknowledged once and that the server does not have any more, or -1 when it asks
        for rows that this producer never sent (then `fd` is still the caller's).
        """
        cdef int64_t lost
        cdef Lane *lane = &self.lanes[self.groups if group < 0 else group]
        with nogil:
            self.enter()
            lost = lane_attach(lane, &self.pool, &self.shape, fd, wanted)
            if lost >= 0:
                if lane.used and not lane.linked and not lane.retired:
                    lane.sibling = self.lanes[lane.group].sibling
                    self.lanes[lane.group].sibling = <uint32_t> group
                    lane.linked = True
                lane_pump(lane, &self.pool, &self.shape)
            self.leave()
        return lost

    def sever(self, int group):
        """Closes a connection, as if it had broken: the service thread will connect again."""
        cdef Lane *lane = &self.lanes[self.groups if group < 0 else group]
        with nogil:
            self.enter()
            if lane.fd >= 0:
                lane_break(lane, 0)
            self.leave()

    def close_all(self):
        """Closes every connection and lets waiting threads go."""
        cdef uint32_t g
        self.stop()
        with nogil:
            self.enter()
            for g in range(self.end):
                if self.lanes[g].fd >= 0:
                    lane_break(&self.lanes[g], 0)
            self.leave()
