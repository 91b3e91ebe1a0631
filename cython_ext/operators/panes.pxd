"""Panes: where they are, how they come and go. What they look like: pane.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport Context, Operator
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.table cimport Table
from flexstream.cython_ext.operators.windower cimport final_until, revises, windows_of_pane


cdef inline uint64_t pane_bytes(const Operator *op) noexcept nogil:
    """Of a Pane, with its side tables and the counts of its windows behind it."""
    cdef uint64_t windows = windows_of_pane(&op.windower) if revises(&op.windower) else 0
    return sizeof(Pane) + op.n_sides * sizeof(Table) + windows * sizeof(uint32_t)


cdef inline int64_t closed_until(const Operator *op, const PaneSet *panes) noexcept nogil:
    """Windows that end at or before this never change any more: beyond their lateness, or fired before a restart."""
    return max(final_until(&op.windower, panes.watermark), panes.restored_until)


cdef inline void next_part(PaneSet *panes) noexcept nogil:
    panes.cursor = 0
    panes.merge_part = panes.merge_part.also
    if panes.merge_part == NULL:
        panes.merge_next += 1
        if panes.merge_next < panes.n:
            panes.merge_part = panes.panes[panes.merge_next]


cdef inline void mark_dirty(PaneSet *panes, Pane *pane) noexcept nogil:
    """Windows of the pane that have fired are to hear of it."""
    pane.dirty = True
    if not panes.dirty or pane.start < panes.dirty_from:
        panes.dirty_from = pane.start
    if not panes.dirty or pane.start > panes.dirty_to:
        panes.dirty_to = pane.start
    panes.dirty = True


cdef void operator_init(Operator *op) noexcept nogil
cdef void operator_release(Operator *op, Arena *arena) noexcept nogil
cdef uint32_t pane_position(const PaneSet *panes, int64_t start) noexcept nogil
cdef ArenaStatus pane_get(Operator *op, Context *context, PaneSet *panes, int64_t start, Pane **out) noexcept nogil
cdef void list_skip(PaneSet *panes, uint32_t n) noexcept nogil
cdef void list_release(Arena *arena, PaneSet *panes) noexcept nogil
cdef void before_release(const Operator *op, Arena *arena, Pane *pane) noexcept nogil
cdef void drop_pane(Operator *op, Arena *arena, Pane *pane) noexcept nogil
cdef void drop_panes(Operator *op, Arena *arena, PaneSet *panes, uint32_t n) noexcept nogil
cdef void pane_absorb(Operator *op, Context *context, Pane *pane, Pane *other) noexcept nogil
cdef bint panes_absorb(Operator *op, Context *context, PaneSet *panes, PaneSet *others,
                       bint theirs_first) noexcept nogil
cdef void panes_reset(PaneSet *panes) noexcept nogil
cdef bint next_due(Operator *op, PaneSet *panes, int64_t watermark, int64_t *end) noexcept nogil
