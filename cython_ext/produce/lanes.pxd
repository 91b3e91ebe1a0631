"""The native half of a session: one lane per group and one for the control connection, behind one lock.

Threads: callers of Producer.send (one at a time: Producer serialises them) scatter rows and send (sender.pyx); the
producer's service thread serves lingers, watermarks and acknowledgements when no caller is at it, and attaches
sockets. Both hold `lock` while they touch lanes, and neither needs the GIL then; a caller that waits for room lets go
of `lock`, and lets a contender in after every block. Connecting, HELLO and errors are Python's (flexstream/client).
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.includes.linux cimport pthread_mutex_t
from flexstream.cython_ext.produce.lane cimport Lane, Pool, Shape
from flexstream.cython_ext.produce.scatter cimport Cursor

cdef enum:
    SERVE_WANTED = 1
    SERVE_BROKEN = 2
    SERVE_STOPPED = 4
    SERVE_ASKED = 8
    MOST_LANES = 32                # further ones at a time, over all groups

cdef class Lanes:
    cdef pthread_mutex_t lock
    cdef int contenders            # threads that want the lock from a caller in send; atomic
    cdef readonly uint32_t groups
    cdef Shape shape
    cdef Pool pool
    cdef Lane *lanes               # one per group, the control connection, MOST_LANES further ones
    cdef Cursor *cursors           # groups; hot, therefore apart from the lanes
    cdef uint32_t *route           # groups: the lane that has the group's open frame, or had the last one
    cdef uint32_t end              # one past the last lane in use
    cdef Cursor closed             # of lanes that have no open frame
    cdef unsigned char *bits       # the bitmap of groups with rows or connections
    cdef uint64_t linger_ns
    cdef int wake_fd               # eventfd: the service thread sleeps on it
    cdef uint64_t asleep           # it does so for long, so it must be told of new work; relaxed: it looks again anyhow
    cdef uint64_t stopping         # written once, by stop(): release; read by all: acquire
    cdef uint64_t next_scan_ns
    cdef uint64_t next_drain_ns
    cdef bint busy                 # the last scan left something that a later one must see to
    cdef uint64_t needs            # SERVE_WANTED: a lane has bytes and no connection yet, SERVE_BROKEN: one lost it,
                                   # SERVE_ASKED: the server wants other lanes than before.
                                   # Written under the lock; relaxed, for the service thread reads it without
    cdef int64_t watermark         # the session's; INT64_MIN before the first
    cdef readonly uint64_t rows    # accepted
    cdef readonly uint64_t watermarks
    cdef readonly uint64_t waited_ns
    cdef uint64_t ended_frames     # of lanes that are no more
    cdef uint64_t ended_bytes
    cdef uint64_t ended_acked

    cdef void enter(self) noexcept nogil
    cdef void enter_again(self) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef void let_in(self) noexcept nogil
    cdef void wake(self) noexcept nogil
    cdef void need(self, int what) noexcept nogil
    cdef bint carries_rows(self, uint32_t index) noexcept nogil
    cdef Cursor *cursor_of(self, uint32_t index) noexcept nogil
    cdef void mark(self, uint32_t index, uint64_t now) noexcept nogil
    cdef uint64_t tend(self, uint32_t index, uint64_t now, bint everything, bint drain) noexcept nogil
    cdef bint end_lane(self, uint32_t index) noexcept nogil
    cdef void unlink(self, uint32_t index) noexcept nogil
    cdef void recycle(self, uint32_t index) noexcept nogil
    cdef void mark_control(self, uint64_t now) noexcept nogil
    cdef void scan(self, uint64_t now, bint everything) noexcept nogil
    cdef bint settled(self) noexcept nogil
