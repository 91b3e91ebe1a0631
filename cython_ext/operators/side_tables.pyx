"""See side_tables.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_MORE, STEP_WAIT, Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport PHASE_EMIT, PHASE_EMIT_UNMERGED, Pane, PaneSet
from flexstream.cython_ext.operators.panes cimport next_part, pane_position
from flexstream.cython_ext.operators.table cimport (
    FS_ORDERED, FS_REAL, MAX_KEY_WORDS, ROWS_MASK, Side, Table, table_clear, table_destroy, table_find, table_init,
    table_locate,
)
from flexstream.cython_ext.operators.windower cimport pane_of, window_start
from flexstream.cython_ext.expressions.program cimport BATCH, Scratch

cdef extern from "flexstream_abi.h" nogil:
    uint64_t fs_word_of(uint64_t value, int real) noexcept
    void fs_distinct_beside(uint64_t *slot, uint64_t *entry) noexcept
    void fs_order_beside(uint64_t *slot, uint64_t *entry, uint64_t *hash, uint64_t value) noexcept

cdef enum:
    FIRST_CAPACITY = 16
    SLICE = 4096              # slots looked at between two quiescent points


cdef inline bint is_order(const Side *side) noexcept nogil:
    return side.flags & FS_ORDERED != 0


cdef inline uint64_t value_of(const Side *side, const int64_t *value) noexcept nogil:
    return fs_word_of(<uint64_t> value[0], side.flags & FS_REAL)


# Rows


cdef ArenaStatus locate_in(Operator *op, Context *context, PaneSet *panes, uint32_t number,
                           uint32_t m) noexcept nogil:
    cdef Scratch *scratch = context.scratch
    cdef Side *side = &op.sides[number]
    cdef uint32_t words = op.layout.key_words
    cdef const int64_t *values = scratch.registers + side.register_ * BATCH
    cdef unsigned char **entry = scratch.side + number * BATCH
    cdef int64_t key[MAX_KEY_WORDS + 1]
    cdef ArenaStatus status
    cdef ArenaStatus worst = ARENA_OK
    cdef Pane *pane = NULL
    cdef Table *table
    cdef uint32_t capacity
    cdef uint64_t multiplier
    cdef uint32_t i = 0
    cdef int64_t start
    while i < m:
        if scratch.entry[i] == NULL:
            i += 1
            continue
        start = pane_of(&op.windower, scratch.time[i])
        if pane == NULL or pane.start != start:
            pane = panes.panes[pane_position(panes, start)]
        table = &pane.sides[number]
        status = ARENA_OK
        entry[i] = NULL
        if table.entries == NULL:
            status = table_init(table, &side.layout, FIRST_CAPACITY, context.arena)
        if status == ARENA_OK:
            memcpy(key, scratch.keys + i * words, words * 8)
            key[words] = <int64_t> (context.session if is_order(side) else value_of(side, values + i))
            capacity = table.capacity
            multiplier = table.multiplier
            status = table_locate(table, &side.layout, key, NULL, 1, &entry[i], context.arena)
            if table.capacity != capacity or table.multiplier != multiplier:
                i = 0               # entries moved: what was located so far is located again
                continue
        if status == ARENA_WAIT:
            return ARENA_WAIT
        if entry[i] == NULL:
            scratch.entry[i] = NULL
            worst = ARENA_FULL
        i += 1
    return worst


cdef ArenaStatus sides_locate(Operator *op, Context *context, PaneSet *panes, uint32_t m) noexcept nogil:
    """Side entries of m rows whose entries are located. Like table_locate it has no effect on rows already counted.

    ARENA_FULL: rows for which there was no room have no entry any more either.
    """
    cdef ArenaStatus status
    cdef ArenaStatus worst = ARENA_OK
    cdef uint32_t d
    for d in range(op.n_sides):
        status = locate_in(op, context, panes, d, m)
        if status == ARENA_WAIT:
            return ARENA_WAIT
        if status == ARENA_FULL:
            worst = ARENA_FULL
    return worst


cdef void sides_apply(Operator *op, Context *context, uint32_t m) noexcept nogil:
    cdef Scratch *scratch = context.scratch
    cdef Side *side
    cdef const int64_t *values
    cdef uint64_t *entry
    cdef uint64_t *slot
    cdef uint32_t d, i
    for d in range(op.n_sides):
        side = &op.sides[d]
        values = scratch.registers + side.register_ * BATCH
        for i in range(m):
            entry = <uint64_t *> scratch.side[d * BATCH + i]
            slot = <uint64_t *> scratch.entry[i] + side.slot
            if is_order(side):
                fs_order_beside(slot, entry, entry + 1 + side.layout.key_words, value_of(side, values + i))
            else:
                fs_distinct_beside(slot, entry)


# A window of several parts


cdef void first_part(Operator *op, PaneSet *panes) noexcept nogil:
    panes.merge_next = pane_position(panes, window_start(&op.windower, panes.firing_end))
    panes.merge_part = panes.panes[panes.merge_next]
    panes.cursor = 0


cdef void forget_counts(Operator *op, Table *table, uint32_t at) noexcept nogil:
    """Slot `at` of every distinct becomes 0."""
    cdef uint64_t k
    cdef uint32_t d
    for k in range(table.capacity):
        for d in range(op.n_sides):
            if not is_order(&op.sides[d]):
                (<uint64_t *> (table.entries + k * op.layout.stride))[op.sides[d].slot + at] = 0


cdef void sides_begin(Operator *op, PaneSet *panes) noexcept nogil:
    """Behind the merging of entries, or instead of it: `panes.unmerged`."""
    cdef uint32_t d
    panes.side = 0
    panes.side_merge = True
    first_part(op, panes)
    if panes.unmerged:
        while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end:
            forget_counts(op, &panes.merge_part.table, 1)
            next_part(panes)
        first_part(op, panes)
    else:
        forget_counts(op, &op.rolling.older, 0)
    for d in range(op.n_sides):
        if op.sides[d].merged.entries != NULL:
            table_clear(&op.sides[d].merged)


cdef bint seen_before(Operator *op, PaneSet *panes, const unsigned char *entry) noexcept nogil:
    """Whether a part before this one has the value."""
    cdef const Side *side = &op.sides[panes.side]
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, panes.firing_end))
    cdef const unsigned char *found
    cdef Pane *part
    while True:
        part = panes.panes[i]
        while part != NULL:
            if part == panes.merge_part:
                return False
            if part.sides[panes.side].entries != NULL:
                found = table_find(&part.sides[panes.side], &side.layout, <const int64_t *> (entry + 8))
                if found != NULL and (<const uint64_t *> found)[0] & ROWS_MASK:
                    return True
            part = part.also
        i += 1


cdef void count_value(Operator *op, PaneSet *panes, const unsigned char *entry) noexcept nogil:
    """One more for the key: in its merged entry, or in that of the first part that has the key."""
    cdef const Side *side = &op.sides[panes.side]
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, panes.firing_end))
    cdef unsigned char *found
    cdef Pane *part
    if not panes.unmerged:
        found = table_find(&op.rolling.older, &op.layout, <const int64_t *> (entry + 8))
        (<uint64_t *> found)[side.slot] += 1
        return
    while True:
        part = panes.panes[i]
        while part != NULL:
            found = table_find(&part.table, &op.layout, <const int64_t *> (entry + 8))
            if found != NULL and (<uint64_t *> found)[0] & ROWS_MASK:
                (<uint64_t *> found)[side.slot + 1] += 1
                return
            part = part.also
        i += 1


cdef ArenaStatus is_new(Operator *op, Context *context, PaneSet *panes, const unsigned char *entry,
                        bint *fresh) noexcept nogil:
    cdef Side *side = &op.sides[panes.side]
    cdef unsigned char *found = NULL
    cdef ArenaStatus status
    if not panes.side_merge:
        fresh[0] = not seen_before(op, panes, entry)
        return ARENA_OK
    if side.merged.entries == NULL:
        status = table_init(&side.merged, &side.layout, FIRST_CAPACITY, context.arena)
        if status != ARENA_OK:
            return status
    status = table_locate(&side.merged, &side.layout, <const int64_t *> (entry + 8), NULL, 1, &found, context.arena)
    if found == NULL:
        return status
    fresh[0] = not (<uint64_t *> found)[0] & ROWS_MASK
    (<uint64_t *> found)[0] |= 1
    return ARENA_OK


cdef Step sides_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    """Count the window's values, each once. STEP_DONE: the next phase is set."""
    cdef uint32_t budget = SLICE
    cdef const unsigned char *entry
    cdef ArenaStatus status
    cdef Table *table
    cdef bint fresh = False
    while panes.side < op.n_sides:
        while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end:
            table = &panes.merge_part.sides[panes.side]
            while panes.cursor < table.capacity:
                entry = table.entries + panes.cursor * op.sides[panes.side].layout.stride
                if (<const uint64_t *> entry)[0] & ROWS_MASK:
                    status = is_new(op, context, panes, entry, &fresh)
                    if status == ARENA_WAIT:
                        return STEP_WAIT
                    if status == ARENA_FULL:            # from the beginning, without memory
                        sides_begin(op, panes)
                        panes.side_merge = False
                        return STEP_MORE
                    if fresh:
                        count_value(op, panes, entry)
                panes.cursor += 1
                budget -= 1
                if budget == 0:
                    return STEP_MORE
            next_part(panes)
        panes.side += 1
        first_part(op, panes)
    panes.phase = PHASE_EMIT_UNMERGED if panes.unmerged else PHASE_EMIT
    return STEP_DONE


cdef void sides_of_window(const Operator *op, unsigned char *entry) noexcept nogil:
    """An entry of the first part that has its key, as what the window says: counted without memory."""
    cdef uint32_t d
    for d in range(op.n_sides):
        if not is_order(&op.sides[d]):
            (<uint64_t *> entry)[op.sides[d].slot] = (<uint64_t *> entry)[op.sides[d].slot + 1]


# A part of a pane becomes one with it


cdef uint64_t sides_slots(const Operator *op, const Pane *pane) noexcept nogil:
    cdef uint64_t n = 0
    cdef uint32_t d
    for d in range(op.n_sides):
        n += pane.sides[d].capacity
    return n


cdef ArenaStatus fold_value(Operator *op, Arena *arena, Pane *pane, uint32_t d, unsigned char *entry) noexcept nogil:
    """One that the pane has not had yet counts for its key. The part is left without it."""
    cdef Side *side = &op.sides[d]
    cdef Table *into = &pane.sides[d]
    cdef unsigned char *found = NULL
    cdef unsigned char *of_key
    cdef ArenaStatus status = ARENA_OK
    if into.entries == NULL:
        status = table_init(into, &side.layout, FIRST_CAPACITY, arena)
    if status == ARENA_OK:
        status = table_locate(into, &side.layout, <const int64_t *> (entry + 8), NULL, 1, &found, arena)
    if found == NULL:
        return status
    if not (<uint64_t *> found)[0] & ROWS_MASK:
        of_key = table_find(&pane.table, &op.layout, <const int64_t *> (entry + 8))
        if of_key != NULL:
            (<uint64_t *> of_key)[side.slot] += 1
    (<uint64_t *> found)[0] += (<uint64_t *> entry)[0] & ROWS_MASK
    (<uint64_t *> entry)[0] &= ~ROWS_MASK
    return ARENA_OK


cdef ArenaStatus sides_fold(Operator *op, Arena *arena, Pane *pane, Pane *part, uint64_t *at,
                            uint32_t *budget) noexcept nogil:
    """The part's values from slot `at` of its side tables on, as far as the budget goes, into the pane's.

    Assumes: the part's keys are in the pane's table, and those that came from there count no value of the part yet.
    """
    cdef uint64_t begin = 0
    cdef Table *table
    cdef unsigned char *entry
    cdef ArenaStatus status
    cdef uint32_t d
    for d in range(op.n_sides):
        table = &part.sides[d]
        while at[0] < begin + table.capacity:
            if budget[0] == 0:
                return ARENA_OK
            entry = table.entries + (at[0] - begin) * op.sides[d].layout.stride
            if (<uint64_t *> entry)[0] & ROWS_MASK:
                status = fold_value(op, arena, pane, d, entry)
                if status != ARENA_OK:
                    return status
            at[0] += 1
            budget[0] -= 1
        begin += table.capacity
    return ARENA_OK


# Memory


cdef void sides_drop(const Operator *op, Arena *arena, Pane *pane) noexcept nogil:
    cdef uint32_t d
    for d in range(op.n_sides):
        table_destroy(&pane.sides[d], arena)


cdef void sides_release(Operator *op, Arena *arena) noexcept nogil:
    cdef uint32_t d
    for d in range(op.n_sides):
        table_destroy(&op.sides[d].merged, arena)
