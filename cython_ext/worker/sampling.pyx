"""See sampling.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_now_ns, fs_store_relaxed, fs_store_release
from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.work_item cimport rows_left
from flexstream.cython_ext.worker.worker cimport StreamState

cdef extern from "<sys/ioctl.h>" nogil:
    enum:
        FIONREAD
    int ioctl(int fd, unsigned long request, int *n) noexcept


cdef enum:
    RECENT_NS = 200000000         # rows older than this are forgotten


cdef void sample_links(WorkerState *worker) noexcept nogil:
    """How many connections each group has here, and how busy these are."""
    cdef uint64_t now = fs_now_ns()
    cdef uint64_t elapsed = now - worker.counters.sampled_ns
    cdef Connection *connection = worker.net.connections
    cdef StreamState *stream
    cdef uint32_t s, g
    worker.counters.sampled_ns = now
    for s in range(worker.n_streams):
        stream = worker.streams[s]
        for g in range(stream.groups):
            fs_store_relaxed(&stream.links[g], 0)
            fs_store_relaxed(&stream.recent[g], 0)
            fs_store_relaxed(&stream.busiest[g], 0)
    while connection != NULL:
        stream = worker.streams[connection.stream]
        g = connection.group
        connection.recent = connection.recent * (RECENT_NS - elapsed) // RECENT_NS if elapsed < RECENT_NS else 0
        connection.recent += connection.rows - connection.sampled_rows
        connection.sampled_rows = connection.rows
        if not connection.decoder.ended:
            fs_store_relaxed(&stream.links[g], stream.links[g] + 1)
            fs_store_relaxed(&stream.recent[g], stream.recent[g] + connection.recent)
            if connection.recent > stream.busiest[g]:
                fs_store_relaxed(&stream.busiest[g], connection.recent)
        connection = connection.next


cdef void sample_sockets(WorkerState *worker) noexcept nogil:
    cdef uint64_t wanted = fs_load_acquire(&worker.sample_wanted)
    cdef Connection *connection = worker.net.connections
    cdef StreamState *stream
    cdef uint64_t rows
    cdef uint32_t s, g
    cdef int n
    sample_links(worker)
    for s in range(worker.n_streams):
        memset(worker.streams[s].counting, 0, <size_t> worker.streams[s].groups * 8)
    while connection != NULL:
        n = 0
        if ioctl(connection.fd, FIONREAD, &n) == 0 and n > 0:
            worker.streams[connection.stream].counting[connection.group] += <uint64_t> n
        connection = connection.next
    for s in range(worker.n_streams):
        stream = worker.streams[s]
        for g in range(stream.groups):
            rows = stream.counting[g] // stream.row_bytes
            fs_store_relaxed(&stream.arrived[g], rows + stream.group_rows[g] - stream.fed_rows[g])
            fs_store_relaxed(&stream.waiting[g], rows + rows_left(&worker.work, stream, g))
    fs_store_release(&worker.counters.sampled, wanted)
