from libc.stdint cimport int64_t, uint32_t

from flexstream.cython_ext.operators.graph cimport Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport PaneSet

cdef Step fire_windows(Operator *op, Context *context, uint32_t group, int64_t watermark) noexcept nogil
cdef void close_until(Operator *op, int64_t end) noexcept nogil
cdef bint settle(Operator *op, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil
