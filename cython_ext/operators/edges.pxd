"""How results leave an operator, and late rows an input: into an open block, which goes to its reader when it is full or
flushed."""

from libc.stdint cimport uint32_t

from flexstream.cython_ext.operators.graph cimport Context, Input, Operator

cdef unsigned char *edge_row(Operator *op, Context *context) noexcept nogil
cdef bint operator_flush(Operator *op, Context *context) noexcept nogil
cdef bint has_late_room(Input *input, Context *context, uint32_t n) noexcept nogil
