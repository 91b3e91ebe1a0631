"""A stream's state on one worker, as an object that owns its memory."""

from libc.stdint cimport int64_t

from flexstream.cython_ext.worker.sketch cimport KeySketch
from flexstream.cython_ext.worker.worker cimport StreamState


cdef class StreamHandle:
    cdef StreamState *state       # lent to the worker's thread for good; freed when that has ended
    cdef readonly object stream
    cdef readonly int index
    cdef readonly KeySketch keys

    cdef (int64_t, int64_t) session_span(self, int slot)


cdef void *zeroed(size_t n) except NULL
