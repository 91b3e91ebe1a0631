"""The current item of a worker: rows through kernels, watermarks through firings; resumable at every batch.

Everything here runs on the worker's thread. A step returns STEP_WAIT when it needs a free block or memory and has
changed nothing that a second call would repeat.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.includes.native cimport FS_TIME_LIMIT, fs_count, fs_plus
from flexstream.cython_ext.operators.graph cimport Step
from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.worker cimport StreamState, WorkerState

cdef int64_t NO_WATERMARK
cdef int64_t END_OF_STREAM


cdef inline int64_t finite(int64_t watermark) noexcept nogil:
    """A watermark as a peer may give it: no value of it means the end of the stream."""
    if watermark > FS_TIME_LIMIT:
        return FS_TIME_LIMIT
    return -FS_TIME_LIMIT if watermark < -FS_TIME_LIMIT else watermark


cdef inline bint is_working(const WorkerState *worker) noexcept nogil:
    """Whether rows or watermarks are being worked on."""
    return worker.item.stream != NULL or worker.advance.stream != NULL


cdef inline void bound_times(StreamState *stream, uint64_t realtime_ns) noexcept nogil:
    """How late a time may be, now. Without a bound: the last one there is."""
    stream.clock = FS_TIME_LIMIT
    stream.latest = FS_TIME_LIMIT
    if stream.max_future >= 0:
        stream.clock = <int64_t> realtime_ns // stream.unit_ns
        stream.latest = fs_plus(stream.clock, stream.max_future)
        if stream.latest > FS_TIME_LIMIT:
            stream.latest = FS_TIME_LIMIT


cdef inline int64_t believable(StreamState *stream, int64_t watermark) noexcept nogil:
    """A watermark as a peer may give it. One that is too far ahead of the clock cannot be meant: the clock it is."""
    watermark = finite(watermark)
    if watermark <= stream.latest:
        return watermark
    fs_count(&stream.capped, 1)
    return stream.clock


cdef void look_at_clock(WorkerState *worker) noexcept nogil
cdef Step worker_progress(WorkerState *worker) noexcept nogil
cdef void begin_rows(WorkerState *worker, StreamState *stream, uint32_t group, const unsigned char *rows,
                     size_t n, uint32_t slot, uint64_t sequence) noexcept nogil
cdef void begin_advance(WorkerState *worker, StreamState *stream, uint32_t group, uint32_t end) noexcept nogil
cdef void begin_revision(WorkerState *worker, StreamState *stream, uint32_t group) noexcept nogil
cdef void note_session(StreamState *stream, uint32_t slot, uint32_t group, int64_t watermark) noexcept nogil
cdef void raise_session(WorkerState *worker, StreamState *stream, uint32_t slot, uint32_t group,
                        int64_t watermark) noexcept nogil
cdef void detach(WorkerState *worker, Connection *connection) noexcept nogil
cdef void close_connection(WorkerState *worker, Connection *connection, int64_t why) noexcept nogil
cdef void ack_the_rest(Connection *connection) noexcept nogil
cdef void send_ack(Connection *connection) noexcept nogil
cdef bint report(WorkerState *worker, uint32_t kind, uint32_t stream, uint32_t slot, void *ptr, int64_t value,
                 size_t tag) noexcept nogil
cdef void push_limbo(WorkerState *worker) noexcept nogil
