"""The late output of a stream on a worker: a row that is late for several queries is in it once.

Each row is followed by a LateRow (late_marks.pxd), which says for whom: slots of queries' inputs, as QUERY_HERE said them. Reports
are read in their order, and what is written of a query is handed over before QUERY_GONE: a slot that another query has
next is never taken for it.
"""

from libc.stdint cimport uint32_t

from flexstream.cython_ext.operators.graph cimport Context, Input
from flexstream.cython_ext.worker.worker cimport StreamState


cdef void take_slot(StreamState *stream, Input *input) noexcept nogil
cdef void free_slot(StreamState *stream, const Input *input) noexcept nogil
cdef bint has_late_room(StreamState *stream, Context *context, uint32_t n) noexcept nogil
cdef bint write_late(StreamState *stream, Context *context, const unsigned char *rows, uint32_t n,
                     uint32_t group) noexcept nogil
cdef bint flush_late(StreamState *stream, Context *context) noexcept nogil
cdef bint flush_stream(StreamState *stream, Context *context) noexcept nogil
