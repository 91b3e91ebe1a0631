"""What a worker works on: tasks, which take rows through kernels and watermarks through firings.

A task is a value (worker.pxd): what is left to do is in it, so it can stop at every batch and slice, and another can run
before it goes on. There is one place for rows and one for watermarks at each depth of the graph. `pick` says which runs
next; a task that runs goes on until it is done, has to wait, or wants another before it, so that rows are worked off
while the block that they are in is in the cache.

Everything here runs on the worker's thread. A step returns STEP_WAIT when it needs a free block or memory and has
changed nothing that a second call would repeat.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.includes.native cimport FS_TIME_LIMIT, fs_count, fs_plus
from flexstream.cython_ext.operators.graph cimport Step
from flexstream.cython_ext.worker.worker cimport ROWS_TASK, StreamState, Task, Work, WorkerState

cdef extern from *:
    int __builtin_clz(unsigned int n) noexcept nogil

cdef int64_t NO_WATERMARK
cdef int64_t END_OF_STREAM


cdef inline int64_t finite(int64_t watermark) noexcept nogil:
    """A watermark as a peer may give it: no value of it means the end of the stream."""
    if watermark > FS_TIME_LIMIT:
        return FS_TIME_LIMIT
    return -FS_TIME_LIMIT if watermark < -FS_TIME_LIMIT else watermark


cdef inline bint is_working(const WorkerState *worker) noexcept nogil:
    """Whether rows or watermarks are being worked on."""
    return worker.work.pending != 0


cdef inline Task *pick(Work *work) noexcept nogil:
    """The task that runs next; NULL: there is nothing to do. The deepest goes first, so that what an operator has handed
    on never piles up; and at one depth watermarks before rows, because a late row may have made windows due again, which
    must hear of it before the next row.
    """
    if work.pending == 0:
        return NULL
    return &work.tasks[31 - __builtin_clz(work.pending)]


cdef inline uint64_t rows_left(const Work *work, const StreamState *stream, uint32_t group) noexcept nogil:
    """Rows of the group that a task has and has not worked off: held up by a missing block, or by memory."""
    cdef const Task *task = &work.tasks[<int> ROWS_TASK]
    if not work.pending & (1 << ROWS_TASK) or task.stream != stream or task.group != group:
        return 0
    return task.n - task.done


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
cdef bint report(WorkerState *worker, uint32_t kind, uint32_t stream, uint32_t slot, void *ptr, int64_t value,
                 size_t tag) noexcept nogil
