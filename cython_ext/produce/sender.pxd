"""The way of rows into the lanes. One caller at a time is in send(); all fields below are its own."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.includes.linux cimport pollfd
from flexstream.cython_ext.produce.further_lanes cimport FurtherLanes
from flexstream.cython_ext.produce.scatter cimport scatter_fn
from flexstream.cython_ext.wire.murmur3 cimport Grouping

cdef class Sender(FurtherLanes):
    cdef Grouping grouping
    cdef scatter_fn scatter
    cdef size_t block_rows
    cdef uint32_t send_frames      # complete frames that a caller hands to the kernel at once
    cdef uint16_t *ids             # one block
    cdef pollfd *polls             # as many as there can be lanes
    cdef uint32_t time_offset
    cdef int64_t call_time         # largest event time handed in, the call in progress included
    cdef int64_t max_disorder
    cdef int64_t unit_ns           # of an event time
    cdef int64_t max_future        # the server rejects rows that are further ahead of the clock; -1: it does not
    cdef int64_t latest            # so this is the last time that the watermark may go by
    cdef bint auto_watermark

    cdef void partition(self, const unsigned char *rows, size_t n) noexcept nogil
    cdef bint make_room(self, uint32_t group) noexcept nogil
    cdef void wait_room(self, uint32_t group, int timeout_ms) noexcept nogil
    cdef int put(self, const unsigned char *rows, size_t n, size_t *position, bint wait) noexcept nogil
