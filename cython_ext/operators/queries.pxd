"""A query's graph on one worker, as an object that owns its memory."""

from flexstream.cython_ext.expressions.program cimport Program
from flexstream.cython_ext.memory.allocator cimport Allocator
from flexstream.cython_ext.operators.graph cimport Input, Operator


cdef class QueryState:
    cdef Operator *op       # lent to a worker between ADD_QUERY and QUERY_GONE, with its input
    cdef Input *input
    cdef Program *program
    cdef readonly object bound
    cdef list plans
    cdef build_operator(self, int query_id, lowered, int groups)
    cdef build_input(self, lowered)
    cdef build_edge(self, Allocator allocator, int max_chunks)
