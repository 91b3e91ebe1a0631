"""See folding.pxd."""

from libc.stdint cimport INT64_MIN, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus
from flexstream.cython_ext.operators.dense_pane cimport dense_release
from flexstream.cython_ext.includes.native cimport fs_store_relaxed
from flexstream.cython_ext.operators.merging cimport table_merge
from flexstream.cython_ext.operators.graph cimport Operator
from flexstream.cython_ext.operators.pane cimport PHASE_NONE, Pane, PaneSet
from flexstream.cython_ext.operators.panes cimport drop_pane, pane_position
from flexstream.cython_ext.operators.table cimport DIRTY_BIT, ROWS_MASK, table_destroy
from flexstream.cython_ext.operators.side_tables cimport forget_counts, sides_fold, sides_release, sides_slots

cdef enum:
    SLICE = 4096              # entries between two quiescent points


cdef ArenaStatus fold_entries(Operator *op, Arena *arena, Pane *pane, Pane *part, uint32_t *budget) noexcept nogil:
    cdef uint64_t k = part.folded
    cdef uint64_t *entry
    cdef int problem = 0
    cdef ArenaStatus status
    if k == 0 and op.n_sides:
        forget_counts(op, &part.table)        # values count when they go over themselves
    status = table_merge(&pane.table, &op.layout, &part.table, &part.folded, budget, arena, &problem)
    while k < part.folded:
        entry = <uint64_t *> (part.table.entries + k * op.layout.stride)
        entry[0] &= ~(ROWS_MASK | DIRTY_BIT)
        k += 1
    if problem:
        fs_store_relaxed(&op.failed, 1)
    return status


cdef ArenaStatus fold_part(Operator *op, Arena *arena, Pane *pane, uint32_t *budget) noexcept nogil:
    """Some of the first part's entries into the pane's own table, then those of its side tables; a part that has none
    left is dropped."""
    cdef Pane *part = pane.also
    cdef uint64_t side_slot
    cdef ArenaStatus status = ARENA_OK
    if part.folded < part.table.capacity:
        status = fold_entries(op, arena, pane, part, budget)
    if status == ARENA_OK and part.folded >= part.table.capacity:
        side_slot = part.folded - part.table.capacity
        status = sides_fold(op, arena, pane, part, &side_slot, budget)
        part.folded = part.table.capacity + side_slot
        if side_slot == sides_slots(op, part):
            pane.also = part.also
            part.also = NULL
            drop_pane(op, arena, part)
    return status


cdef bint fold_set(Operator *op, Arena *arena, PaneSet *panes, uint32_t *budget) noexcept nogil:
    """From query.fold_from on. True: all there is to fold is folded, or cannot be."""
    cdef uint32_t i = pane_position(panes, op.fold_from)
    cdef ArenaStatus status
    cdef Pane *pane
    if panes.phase != PHASE_NONE:
        return False
    while i < panes.n:
        pane = panes.panes[i]
        status = ARENA_OK
        while pane.also != NULL and budget[0] and status == ARENA_OK:
            status = fold_part(op, arena, pane, budget)
        if status == ARENA_WAIT or (pane.also != NULL and status == ARENA_OK):
            op.fold_from = pane.start
            return False
        budget[0] -= budget[0] > 0
        i += 1
    return True


cdef bint fold_slice(Operator *op, Arena *arena) noexcept nogil:
    """One slice. False: there is nothing to fold any more."""
    cdef uint32_t budget = SLICE
    if not op.unfolded:
        return False
    while op.fold_group < op.groups:
        if not fold_set(op, arena, &op.sets[op.fold_group], &budget):
            return True
        op.fold_group += 1
        op.fold_from = INT64_MIN
    op.unfolded = False
    return False


cdef void rest(Operator *op, Arena *arena) noexcept nogil:
    """No window is open here: what firing keeps from one to the next goes back to the arena."""
    if op.counters.open_panes:
        return
    op.rolling_of = NULL
    op.rolling.until = INT64_MIN
    table_destroy(&op.rolling.older, arena)
    table_destroy(&op.rolling.newer, arena)
    sides_release(op, arena)
    dense_release(op, arena)
