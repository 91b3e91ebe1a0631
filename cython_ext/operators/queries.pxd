"""A query's native state on one worker, as an object that owns its memory."""

from flexstream.cython_ext.operators.panes cimport Query
from flexstream.cython_ext.expressions.program cimport Program


cdef class QueryState:
    cdef Query *query             # lent to a worker between ADD_QUERY and QUERY_GONE
    cdef Program *program
    cdef readonly object bound
    cdef list plans
