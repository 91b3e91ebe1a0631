"""A partial into another: what firing does with the panes of a window, pane after pane, in slices."""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.partial cimport Layout, Table

cdef ArenaStatus table_merge(Table *into, const Layout *layout, const Table *source, uint64_t *cursor,
                             uint32_t *budget, Arena *arena, int *problem) noexcept nogil
cdef bint layout_invertible(const Layout *layout) noexcept nogil
cdef bint table_take_out(Table *sum_, const Layout *layout, const Table *source, uint64_t *cursor,
                         uint32_t *budget) noexcept nogil
