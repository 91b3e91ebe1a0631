"""A partial into another: what firing does with the panes of a window, pane after pane, in slices."""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.operators.table cimport ROWS_MASK, Layout, Table

cdef enum:
    SCAN = 64                 # slots looked at together


cdef inline uint32_t positions_in_use(const Layout *layout, const Table *source, uint64_t at, uint64_t end,
                                      uint32_t *positions) noexcept nogil:
    """A list first, without a branch: which slots are in use is random."""
    cdef uint32_t n = 0
    while at < end:
        positions[n] = <uint32_t> at
        n += ((<const uint64_t *> (source.entries + at * layout.stride))[0] & ROWS_MASK) != 0
        at += 1
    return n


cdef ArenaStatus table_merge(Table *into, const Layout *layout, const Table *source, uint64_t *cursor,
                             uint32_t *budget, Arena *arena, int *problem) noexcept nogil
cdef bint layout_invertible(const Layout *layout) noexcept nogil
cdef bint table_take_out(Table *sum_, const Layout *layout, const Table *source, uint64_t *cursor,
                         uint32_t *budget) noexcept nogil
