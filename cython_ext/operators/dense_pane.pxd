"""How panes come by a dense front, and lose it. See dense_front.pxd."""

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.operators.dense_front cimport Front
from flexstream.cython_ext.operators.panes cimport Context, Pane, PaneSet, Query

cdef Front *dense_front(Query *query, Context *context, Pane *pane) noexcept nogil
cdef void dense_settle(Query *query, Arena *arena, Pane *pane) noexcept nogil
cdef void dense_release(Query *query, Arena *arena) noexcept nogil
cdef bint dense_settle_all(Query *query, Arena *arena, PaneSet *panes) noexcept nogil
