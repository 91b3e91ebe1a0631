from libc.stdint cimport int64_t, uint32_t

from flexstream.cython_ext.operators.panes cimport Context, PaneSet, Query, Step

cdef Step query_fire(Query *query, Context *context, uint32_t group, int64_t watermark) noexcept nogil
cdef void close_until(Query *query, int64_t end) noexcept nogil
cdef bint settle(Query *query, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil
