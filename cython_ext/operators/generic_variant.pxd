from libc.stdint cimport uint32_t

from flexstream.cython_ext.operators.graph cimport Context, Input, Step
from flexstream.cython_ext.operators.pane cimport PaneSet

cdef Step generic_kernel(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil
