"""How results leave an operator: into an open block, which goes to its reader when it is full or flushed."""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.blocks cimport Output
from flexstream.cython_ext.operators.graph cimport Context, Operator

cdef bint hand_over(Output *output, Context *context, uint32_t kind, uint64_t tag) noexcept nogil
cdef unsigned char *edge_row(Operator *op, Context *context) noexcept nogil
cdef bint operator_flush(Operator *op, Context *context) noexcept nogil
