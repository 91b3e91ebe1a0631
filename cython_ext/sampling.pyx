"""See sampling.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_store_relaxed, fs_store_release
from flexstream.cython_ext.shared cimport Connection
from flexstream.cython_ext.worker cimport StreamState

cdef extern from "<sys/ioctl.h>" nogil:
    enum:
        FIONREAD
    int ioctl(int fd, unsigned long request, int *n) noexcept


cdef void sample_sockets(WorkerState *worker) noexcept nogil:
    cdef uint64_t wanted = fs_load_acquire(&worker.sample_wanted)
    cdef Connection *connection = worker.connections
    cdef StreamState *stream
    cdef uint64_t rows
    cdef uint32_t s, g
    cdef int n
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
            if worker.item.stream == stream and worker.item.group == g:
                rows += worker.item.n - worker.item.done        # begun, and held up by a missing block or memory
            fs_store_relaxed(&stream.waiting[g], rows)
    fs_store_release(&worker.sampled, wanted)
