"""How panes come by a dense front, and lose it. See dense_front.pxd."""

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.operators.dense_front cimport Front
from flexstream.cython_ext.operators.graph cimport Context, Operator
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet

cdef Front *dense_front(Operator *op, Context *context, Pane *pane) noexcept nogil
cdef void dense_settle(Operator *op, Arena *arena, Pane *pane) noexcept nogil
cdef void dense_release(Operator *op, Arena *arena) noexcept nogil
cdef bint dense_settle_all(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil
