"""See merging.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus
from flexstream.cython_ext.operators.table cimport (
    DIRTY_BIT, FS_INVERTIBLE, ROWS_MASK, USED_BIT, Layout, Table, entry_merge, fs_facts_of, table_find,
    table_locate, table_reserve,
)

cdef extern from "fold_calls.h" nogil:
    int fs_fold_take_out(uint32_t fold, uint64_t *slot, const uint64_t *source) noexcept


cdef inline uint64_t *find_short(const Table *table, const Layout *layout, uint64_t key) noexcept nogil:
    """The entry of a one-word key. NULL: it is not there."""
    cdef uint64_t at = (key * table.multiplier) >> table.shift
    cdef uint64_t *entry = <uint64_t *> (table.entries + at * layout.stride)
    while entry[0] != 0:
        if entry[1] == key:
            return entry
        at = (at + 1) & (table.capacity - 1)
        entry = <uint64_t *> (table.entries + at * layout.stride)
    return NULL


cdef inline ArenaStatus merge_one(Table *into, const Layout *layout, const uint64_t *entry, Arena *arena,
                                  int *problem) noexcept nogil:
    cdef uint64_t *found = NULL
    cdef unsigned char *located
    cdef ArenaStatus status
    if layout.key_words == 1:
        found = find_short(into, layout, entry[1])
    if found == NULL:
        status = table_locate(into, layout, <const int64_t *> (entry + 1), NULL, 1, &located, arena)
        if status != ARENA_OK and (status != ARENA_FULL or located == NULL):
            return status
        found = <uint64_t *> located
    if not found[0] & ROWS_MASK:            # the first for this key: as it is
        memcpy(found, entry, layout.stride)
        found[0] = entry[0] | USED_BIT
    elif layout.stride == 8 * (1 + layout.key_words):       # nothing but a row count
        found[0] += entry[0] & ROWS_MASK
        found[0] |= entry[0] & DIRTY_BIT
    elif entry_merge(layout, <unsigned char *> found, <const unsigned char *> entry):
        problem[0] = 1
    return ARENA_OK


cdef ArenaStatus table_merge(Table *into, const Layout *layout, const Table *source, uint64_t *cursor,
                             uint32_t *budget, Arena *arena, int *problem) noexcept nogil:
    """The source's entries from `cursor` on, about `budget` of them; both say how far it came.

    ARENA_WAIT, ARENA_FULL: there was no room for the entry at the cursor; all before it are merged.
    """
    cdef uint32_t positions[SCAN]
    cdef uint32_t n, i
    cdef uint64_t end
    cdef ArenaStatus status
    if into.used == 0 and into.limit < source.used:
        # Grown step by step it would get keys in the order of their homes: heaps in a table that is too small for all.
        if table_reserve(into, layout, source.used, arena) == ARENA_WAIT:
            return ARENA_WAIT
    while cursor[0] < source.capacity and budget[0]:
        end = cursor[0] + SCAN if cursor[0] + SCAN < source.capacity else source.capacity
        n = positions_in_use(layout, source, cursor[0], end, positions)
        for i in range(n):
            status = merge_one(into, layout, <const uint64_t *> (source.entries + <uint64_t> positions[i] * layout.stride),
                               arena, problem)
            if status != ARENA_OK:
                cursor[0] = positions[i]
                return status
        cursor[0] = end
        budget[0] = budget[0] - n if budget[0] > n else 0
    return ARENA_OK


cdef bint layout_invertible(const Layout *layout) noexcept nogil:
    """Can a partial be taken out of a sum again, exactly?"""
    cdef uint32_t a
    for a in range(layout.n_aggregates):
        if not fs_facts_of(layout.aggregates[a].fold).flags & FS_INVERTIBLE:
            return False
    return True


cdef bint take_out_one(Table *sum_, const Layout *layout, const uint64_t *entry) noexcept nogil:
    cdef uint64_t *found
    cdef uint32_t a, slot
    if layout.key_words == 1:
        found = find_short(sum_, layout, entry[1])
    else:
        found = <uint64_t *> table_find(sum_, layout, <const int64_t *> (entry + 1))
    if found == NULL:
        return False
    found[0] -= entry[0] & ROWS_MASK
    for a in range(layout.n_aggregates):
        slot = layout.aggregates[a].slot
        if fs_fold_take_out(layout.aggregates[a].fold, found + slot, entry + slot):
            return False
    return True


cdef bint table_take_out(Table *sum_, const Layout *layout, const Table *source, uint64_t *cursor,
                         uint32_t *budget) noexcept nogil:
    """The opposite of table_merge, for layouts that are invertible: an entry without rows stays behind for a key
    that has none left. False: what is left of a sum has no value by itself; `sum_` is of no use any more.
    """
    cdef uint32_t positions[SCAN]
    cdef uint32_t n, i
    cdef uint64_t end
    while cursor[0] < source.capacity and budget[0]:
        end = cursor[0] + SCAN if cursor[0] + SCAN < source.capacity else source.capacity
        n = positions_in_use(layout, source, cursor[0], end, positions)
        for i in range(n):
            if not take_out_one(sum_, layout, <const uint64_t *> (source.entries + <uint64_t> positions[i] * layout.stride)):
                return False
        cursor[0] = end
        budget[0] = budget[0] - n if budget[0] > n else 0
    return True
