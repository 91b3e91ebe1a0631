"""See folding.pxd."""

from libc.stdint cimport INT64_MIN, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus
from flexstream.cython_ext.operators.dense_pane cimport dense_release
from flexstream.cython_ext.includes.native cimport fs_store_relaxed
from flexstream.cython_ext.operators.merging cimport table_merge
from flexstream.cython_ext.operators.panes cimport PHASE_NONE, Pane, PaneSet, Query, drop_pane, pane_position
from flexstream.cython_ext.operators.table cimport DIRTY_BIT, ROWS_MASK, table_destroy
from flexstream.cython_ext.operators.side_tables cimport forget_counts, sides_fold, sides_release, sides_slots

cdef enum:
    SLICE = 4096              # entries between two quiescent points


cdef ArenaStatus fold_entries(Query *query, Arena *arena, Pane *pane, Pane *part, uint32_t *budget) noexcept nogil:
    cdef uint64_t k = part.folded
    cdef uint64_t *entry
    cdef int problem = 0
    cdef ArenaStatus status
    if k == 0 and query.n_sides:
        forget_counts(query, &part.table)        # values count when they go over themselves
    status = table_merge(&pane.table, &query.layout, &part.table, &part.folded, budget, arena, &problem)
    while k < part.folded:
        entry = <uint64_t *> (part.table.entries + k * query.layout.stride)
        entry[0] &= ~(ROWS_MASK | DIRTY_BIT)
        k += 1
    if problem:
        fs_store_relaxed(&query.failed, 1)
    return status


cdef ArenaStatus fold_part(Query *query, Arena *arena, Pane *pane, uint32_t *budget) noexcept nogil:
    """Some of the first part's entries into the pane's own table, then those of its side tables; a part that has none
    left is dropped."""
    cdef Pane *part = pane.also
    cdef uint64_t side_slot
    cdef ArenaStatus status = ARENA_OK
    if part.folded < part.table.capacity:
        status = fold_entries(query, arena, pane, part, budget)
    if status == ARENA_OK and part.folded >= part.table.capacity:
        side_slot = part.folded - part.table.capacity
        status = sides_fold(query, arena, pane, part, &side_slot, budget)
        part.folded = part.table.capacity + side_slot
        if side_slot == sides_slots(query, part):
            pane.also = part.also
            part.also = NULL
            drop_pane(query, arena, part)
    return status


cdef bint fold_set(Query *query, Arena *arena, PaneSet *panes, uint32_t *budget) noexcept nogil:
    """From query.fold_from on. True: all there is to fold is folded, or cannot be."""
    cdef uint32_t i = pane_position(panes, query.fold_from)
    cdef ArenaStatus status
    cdef Pane *pane
    if panes.phase != PHASE_NONE:
        return False
    while i < panes.n:
        pane = panes.panes[i]
        status = ARENA_OK
        while pane.also != NULL and budget[0] and status == ARENA_OK:
            status = fold_part(query, arena, pane, budget)
        if status == ARENA_WAIT or (pane.also != NULL and status == ARENA_OK):
            query.fold_from = pane.start
            return False
        budget[0] -= budget[0] > 0
        i += 1
    return True


cdef bint fold_slice(Query *query, Arena *arena) noexcept nogil:
    """One slice. False: there is nothing to fold any more."""
    cdef uint32_t budget = SLICE
    if not query.unfolded:
        return False
    while query.fold_group < query.groups:
        if not fold_set(query, arena, &query.sets[query.fold_group], &budget):
            return True
        query.fold_group += 1
        query.fold_from = INT64_MIN
    query.unfolded = False
    return False


cdef void rest(Query *query, Arena *arena) noexcept nogil:
    """No window is open here: what firing keeps from one to the next goes back to the arena."""
    if query.counters.open_panes:
        return
    query.rolling_of = NULL
    query.rolling.until = INT64_MIN
    table_destroy(&query.rolling.older, arena)
    table_destroy(&query.rolling.newer, arena)
    sides_release(query, arena)
    dense_release(query, arena)
