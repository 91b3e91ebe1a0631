"""See streams.pxd."""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free

from flexstream.cython_ext.expressions.program cimport BATCH
from flexstream.cython_ext.includes.native cimport fs_load_relaxed, fs_realtime_ns
from flexstream.cython_ext.memory.allocator cimport Allocator
from flexstream.cython_ext.memory.blocks cimport output_bytes, output_destroy, output_init
from flexstream.cython_ext.operators.late_marks cimport LateRow
from flexstream.cython_ext.wire.murmur3 cimport KeyHasher
from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.sketch cimport KeySketch
from flexstream.cython_ext.worker.work_item cimport bound_times
from flexstream.cython_ext.worker.worker cimport StreamState

from flexstream.cython_ext.worker.reports import Links

cdef enum:
    BLOCKS_PER_CHUNK = 4
    MAX_CHUNKS = 64               # the cap on unread late rows


cdef void *zeroed(size_t n) except NULL:
    cdef void *memory = calloc(n if n else 1, 1)
    if memory == NULL:
        raise MemoryError(f"no memory for {n} bytes of worker state")
    return memory


cdef class StreamHandle:
    """A stream's state on one worker. Lent to the worker's thread for good; freed when that has ended."""

    def __cinit__(self, stream, int index, list placement, int worker, int max_sessions, int batch_bytes,
                  Allocator allocator, max_future_ns=None):
        cdef KeyHasher hasher = stream.key_hasher
        cdef uint32_t groups = len(placement)
        cdef size_t cells = <size_t> groups * max_sessions
        cdef uint32_t g
        self.stream = stream
        self.index = index
        self.state = <StreamState *> zeroed(sizeof(StreamState))
        self.state.index = index
        self.state.groups = groups
        self.state.row_bytes = stream.schema.row_bytes
        self.state.batch_rows = max(8, min(<int> BATCH, batch_bytes // <int> self.state.row_bytes))
        self.state.max_sessions = max_sessions
        self.state.key = hasher.spec
        self.state.unit_ns = stream.unit_ns
        self.state.max_future = -1 if max_future_ns is None else max_future_ns // stream.unit_ns
        bound_times(self.state, fs_realtime_ns())
        self.state.owned = <uint64_t *> zeroed(groups * 8)
        self.state.deferred = <uint8_t *> zeroed(groups)
        self.state.ends_due = <uint8_t *> zeroed(groups)
        self.state.counted = <uint8_t *> zeroed(cells)
        self.state.lent = <uint32_t *> zeroed(cells * 4)
        self.state.borrowed = <uint8_t *> zeroed(cells)
        self.state.borrows = <uint32_t *> zeroed(groups * 4)
        self.state.shared_until = <int64_t *> zeroed(groups * 8)
        self.state.watermark = <int64_t *> zeroed(groups * 8)
        self.state.session_watermark = <int64_t *> zeroed(cells * 8)
        self.state.next_row = <uint64_t *> zeroed(cells * 8)
        self.state.connection = <Connection **> zeroed(cells * 8)
        self.state.session_state = <uint8_t *> zeroed(max_sessions)
        self.state.session_number = <uint64_t *> zeroed(max_sessions * 8)
        self.state.session_done = <uint32_t *> zeroed(max_sessions * 4)
        self.state.seen_ns = <uint64_t *> zeroed(max_sessions * 8)
        self.state.group_rows = <uint64_t *> zeroed(groups * 8)
        self.state.fed_rows = <uint64_t *> zeroed(groups * 8)
        self.state.counting = <uint64_t *> zeroed(groups * 8)
        self.state.arrived = <uint64_t *> zeroed(groups * 8)
        self.state.waiting = <uint64_t *> zeroed(groups * 8)
        self.state.links = <uint64_t *> zeroed(groups * 8)
        self.state.recent = <uint64_t *> zeroed(groups * 8)
        self.state.busiest = <uint64_t *> zeroed(groups * 8)
        if not output_init(&self.state.late, self.state.row_bytes + sizeof(LateRow), self.state.batch_rows,
                           BLOCKS_PER_CHUNK, MAX_CHUNKS, allocator.wake_fd):
            raise MemoryError("no memory for a stream's late rows")
        self.keys = KeySketch(stream, groups, worker + 1)
        self.state.sketches = &self.keys.sketches
        for g in range(groups):
            self.state.watermark[g] = INT64_MIN
            if placement[g] == worker:
                self.state.owned[g] = 1

    def __dealloc__(self):
        if self.state != NULL:
            output_destroy(&self.state.late)
            free(self.state.owned)
            free(self.state.watermark)
            free(self.state.session_watermark)
            free(self.state.next_row)
            free(self.state.connection)
            free(self.state.session_state)
            free(self.state.session_number)
            free(self.state.deferred)
            free(self.state.ends_due)
            free(self.state.counted)
            free(self.state.lent)
            free(self.state.borrowed)
            free(self.state.borrows)
            free(self.state.shared_until)
            free(self.state.session_done)
            free(self.state.seen_ns)
            free(self.state.group_rows)
            free(self.state.fed_rows)
            free(self.state.counting)
            free(self.state.arrived)
            free(self.state.waiting)
            free(self.state.links)
            free(self.state.recent)
            free(self.state.busiest)
            free(self.state)

    def counters(self):
        cdef uint32_t g
        return {
            "received": fs_load_relaxed(&self.state.received),
            "accepted": fs_load_relaxed(&self.state.accepted),
            "unqueried": fs_load_relaxed(&self.state.unqueried),
            "groups": [fs_load_relaxed(&self.state.group_rows[g]) for g in range(self.state.groups)],
        }

    @property
    def output_bytes(self):
        """Memory for late rows on their way to the log. It is not part of the bound on window state."""
        return output_bytes(&self.state.late)

    @property
    def received(self):
        return fs_load_relaxed(&self.state.received)

    @property
    def fed(self):
        """Of the rows received, those that were fed. Counted before they are: read it after `received`."""
        cdef uint32_t g
        cdef uint64_t rows = 0
        for g in range(self.state.groups):
            rows += fs_load_relaxed(&self.state.fed_rows[g])
        return rows

    @property
    def watermarks_capped(self):
        return fs_load_relaxed(&self.state.capped)

    def add_load(self, arrived, waiting):
        """Add the last sample to arrays of doubles, one per group: rows that came by socket; rows that wait, less
        those that were fed and have been taken (what was fed, the caller knows)."""
        cdef uint32_t g
        cdef Py_buffer came, waits
        PyObject_GetBuffer(arrived, &came, PyBUF_WRITABLE)
        try:
            PyObject_GetBuffer(waiting, &waits, PyBUF_WRITABLE)
            try:
                if came.len != 8 * <Py_ssize_t> self.state.groups or waits.len != came.len:
                    raise ValueError(f"room for {self.state.groups} groups is needed")
                for g in range(self.state.groups):
                    (<double *> came.buf)[g] += <double> fs_load_relaxed(&self.state.arrived[g])
                    (<double *> waits.buf)[g] += (<double> fs_load_relaxed(&self.state.waiting[g])
                                                  - <double> fs_load_relaxed(&self.state.fed_rows[g]))
            finally:
                PyBuffer_Release(&waits)
        finally:
            PyBuffer_Release(&came)

    def links(self, uint32_t group):
        return Links(fs_load_relaxed(&self.state.links[group]), fs_load_relaxed(&self.state.recent[group]),
                     fs_load_relaxed(&self.state.busiest[group]))

    def watermarks(self):
        """{group: watermark} of the groups that this worker owns and that have one."""
        cdef uint32_t g
        cdef int64_t watermark
        found = {}
        for g in range(self.state.groups):
            watermark = <int64_t> fs_load_relaxed(<uint64_t *> &self.state.watermark[g])
            if fs_load_relaxed(&self.state.owned[g]) and watermark != INT64_MIN:
                found[g] = watermark
        return found

    def groups_without_watermark(self):
        """How many of the groups that this worker owns have none yet."""
        cdef uint32_t g
        return sum(1 for g in range(self.state.groups) if fs_load_relaxed(&self.state.owned[g])
                   and <int64_t> fs_load_relaxed(<uint64_t *> &self.state.watermark[g]) == INT64_MIN)

    cdef (int64_t, int64_t) session_span(self, int slot):
        """The least watermark of the session over this worker's groups, and the largest but for an end."""
        cdef uint32_t g
        cdef int64_t least = INT64_MAX
        cdef int64_t most = INT64_MIN
        cdef int64_t watermark
        for g in range(self.state.groups):
            if fs_load_relaxed(&self.state.owned[g]):
                watermark = <int64_t> fs_load_relaxed(
                    <uint64_t *> &self.state.session_watermark[<size_t> g * self.state.max_sessions + slot])
                least = min(least, watermark)
                if watermark != INT64_MAX:
                    most = max(most, watermark)
        return least, most

    def session_watermark(self, int slot):
        """The least watermark of the session over this worker's groups; None: it has sent none yet."""
        least, _ = self.session_span(slot)
        return None if least == INT64_MIN else least

    def session_reached(self, int slot):
        """The largest watermark that the session has sent in one of this worker's groups; None: none yet."""
        _, most = self.session_span(slot)
        return None if most == INT64_MIN else most

    def seen_ns(self, int slot):
        return fs_load_relaxed(&self.state.seen_ns[slot])

    def next_row(self, int slot, int group):
        """Only when the worker has ended or at a quiescent point."""
        return self.state.next_row[<size_t> group * self.state.max_sessions + slot]
