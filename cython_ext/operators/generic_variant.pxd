from libc.stdint cimport uint32_t

from flexstream.cython_ext.operators.panes cimport Context, PaneSet, Query, Step

cdef Step generic_kernel(Query *query, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil
