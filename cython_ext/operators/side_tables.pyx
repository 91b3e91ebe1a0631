"""See side_tables.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_MORE, STEP_WAIT, Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport (
    PHASE_CHAIN, PHASE_EMIT, PHASE_EMIT_UNMERGED, PHASE_RANK, PHASE_SIDES, PHASE_SIDES_FORGET, Pane, PaneSet,
)
from flexstream.cython_ext.operators.panes cimport next_part, pane_position
from flexstream.cython_ext.operators.ranking cimport chain_value, is_chained, ranking_begin, ranking_slice
from flexstream.cython_ext.operators.table cimport (
    DIRTY_BIT, FS_COUNTED, FS_ORDERED, FS_RANKED, FS_REAL, MAX_KEY_WORDS, ROWS_MASK, Side, Table, fs_facts_of, table_clear,
    table_destroy, table_find, table_init, table_locate,
)
from flexstream.cython_ext.operators.windower cimport pane_of, window_start
from flexstream.cython_ext.expressions.program cimport BATCH, Scratch

cdef extern from "flexstream_abi.h" nogil:
    uint64_t fs_word_of(uint64_t value, int real) noexcept

cdef extern from "fold_calls.h" nogil:
    void fs_fold_beside(uint32_t fold, uint64_t *slot, uint64_t *entry, uint64_t *behind, uint64_t value) noexcept
    void fs_fold_value(uint32_t fold, uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) noexcept

cdef enum:
    FIRST_CAPACITY = 16
    SLICE = 4096              # slots looked at between two quiescent points


cdef inline bint is_order(const Side *side) noexcept nogil:
    return side.flags & FS_ORDERED != 0


cdef inline bint is_ranked(const Side *side) noexcept nogil:
    return side.flags & FS_RANKED != 0


cdef inline bint counts_values(const Side *side) noexcept nogil:
    """Whether it says something of a part's values that a window of several parts says anew."""
    return not side.flags & (FS_ORDERED | FS_RANKED)


cdef inline uint32_t part_slots(const Side *side) noexcept nogil:
    """Of one that counts values: what it says of a part. As many are behind them, for the window."""
    return fs_facts_of(side.fold).slots // 2


cdef inline uint64_t rows_of(const unsigned char *entry) noexcept nogil:
    return (<const uint64_t *> entry)[0] & ROWS_MASK


cdef inline uint64_t word_in(const Side *side, const unsigned char *entry) noexcept nogil:
    """The value that a side entry is of."""
    return (<const uint64_t *> entry)[side.layout.key_words]


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
            fs_fold_beside(side.fold, slot, entry, entry + 1 + side.layout.key_words, value_of(side, values + i))


# A window of several parts


cdef void first_part(Operator *op, PaneSet *panes) noexcept nogil:
    panes.merge_next = pane_position(panes, window_start(&op.windower, panes.firing_end))
    panes.merge_part = panes.panes[panes.merge_next]
    panes.cursor = 0


cdef inline bint is_in_window(const PaneSet *panes) noexcept nogil:
    return panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end


cdef inline void forget_entry(Operator *op, uint64_t *entry, bint of_window) noexcept nogil:
    cdef const Side *side
    cdef uint32_t d, at, w
    for d in range(op.n_sides):
        side = &op.sides[d]
        if counts_values(side):
            at = side.slot + (part_slots(side) if of_window else 0)
            for w in range(part_slots(side)):
                entry[at + w] = 0


cdef void forget_counts(Operator *op, Table *table) noexcept nogil:
    """What the entries say of the values of their part."""
    cdef uint64_t k
    for k in range(table.capacity):
        forget_entry(op, <uint64_t *> (table.entries + k * op.layout.stride), False)


cdef Step forget_slice(Operator *op, PaneSet *panes) noexcept nogil:
    """What is said of the values of the window: in the merged entries, or in the parts', where that has its own place."""
    cdef uint32_t budget = SLICE
    cdef Table *table
    while is_in_window(panes):
        table = &panes.merge_part.table if panes.unmerged else panes.source
        while panes.cursor < table.capacity:
            if budget == 0:
                return STEP_MORE
            forget_entry(op, <uint64_t *> (table.entries + panes.cursor * op.layout.stride), panes.unmerged)
            panes.cursor += 1
            budget -= 1
        if not panes.unmerged:
            break
        next_part(panes)
    panes.phase = PHASE_SIDES
    panes.side = 0
    first_part(op, panes)
    return STEP_DONE


cdef void begin_counting(Operator *op, PaneSet *panes, bint with_memory) noexcept nogil:
    cdef uint32_t d
    panes.phase = PHASE_SIDES_FORGET
    panes.side_merge = with_memory
    first_part(op, panes)
    for d in range(op.n_sides):
        if op.sides[d].merged.entries != NULL:
            table_clear(&op.sides[d].merged)


cdef void sides_begin(Operator *op, PaneSet *panes) noexcept nogil:
    """Behind the merging of entries, into `panes.source`, or instead of it: `panes.unmerged`."""
    begin_counting(op, panes, True)


cdef void sides_of_one(Operator *op, PaneSet *panes) noexcept nogil:
    """A window of one part, `panes.source`: its entries say what there is to say, but for the order of values."""
    rank_from(op, panes, 0)


cdef uint64_t rows_in_window(Operator *op, PaneSet *panes, const unsigned char *entry) noexcept nogil:
    """How many rows the value has in this part and those behind it; 0: a part before has it."""
    cdef const Side *side = &op.sides[panes.side]
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, panes.firing_end))
    cdef const unsigned char *found
    cdef uint64_t rows = 0
    cdef Pane *part
    while i < panes.n and panes.panes[i].start < panes.firing_end:
        part = panes.panes[i]
        while part != NULL:
            if part == panes.merge_part:
                rows = rows_of(entry)
                if not side.flags & FS_COUNTED:
                    return rows
            elif part.sides[panes.side].entries != NULL:
                found = table_find(&part.sides[panes.side], &side.layout, <const int64_t *> (entry + 8))
                if found != NULL and rows_of(found):
                    if rows == 0:
                        return 0
                    rows += rows_of(found)
            part = part.also
        i += 1
    return rows


cdef unsigned char *entry_of_key(Operator *op, PaneSet *panes, const unsigned char *value) noexcept nogil:
    """Of the key of a side entry: the merged one, or that of the first part that has the key."""
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, panes.firing_end))
    cdef unsigned char *found
    cdef Pane *part
    if not panes.unmerged:
        return table_find(panes.source, &op.layout, <const int64_t *> (value + 8))
    while True:
        part = panes.panes[i]
        while part != NULL:
            found = table_find(&part.table, &op.layout, <const int64_t *> (value + 8))
            if found != NULL and rows_of(found):
                return found
            part = part.also
        i += 1


cdef inline bint says_more(const Side *side, uint64_t before) noexcept nogil:
    """Whether rows of a value that has had some before change what is said of the key."""
    return before == 0 or side.flags & FS_COUNTED != 0


cdef void count_value(Operator *op, PaneSet *panes, const unsigned char *entry, uint64_t before,
                      uint64_t rows) noexcept nogil:
    cdef const Side *side = &op.sides[panes.side]
    cdef uint64_t *slot
    if rows and says_more(side, before):
        slot = <uint64_t *> entry_of_key(op, panes, entry) + side.slot
        fs_fold_value(side.fold, slot + (part_slots(side) if panes.unmerged else 0), before, rows, word_in(side, entry))


cdef ArenaStatus merge_value(Operator *op, Context *context, PaneSet *panes, const unsigned char *entry,
                             uint64_t *before) noexcept nogil:
    """Into the table of the window's values, where it had some rows before."""
    cdef Side *side = &op.sides[panes.side]
    cdef unsigned char *found = NULL
    cdef ArenaStatus status
    if side.merged.entries == NULL:
        status = table_init(&side.merged, &side.layout, FIRST_CAPACITY, context.arena)
        if status != ARENA_OK:
            return status
    status = table_locate(&side.merged, &side.layout, <const int64_t *> (entry + 8), NULL, 1, &found, context.arena)
    if found == NULL:
        return status
    before[0] = rows_of(found)
    (<uint64_t *> found)[0] += rows_of(entry)
    return ARENA_OK


cdef Step count_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    """Count the window's values, each once."""
    cdef uint32_t budget = SLICE
    cdef const unsigned char *entry
    cdef ArenaStatus status
    cdef Table *table
    cdef uint64_t before = 0
    while panes.side < op.n_sides:
        while counts_values(&op.sides[panes.side]) and is_in_window(panes):
            table = &panes.merge_part.sides[panes.side]
            while panes.cursor < table.capacity:
                if budget == 0:
                    return STEP_MORE
                entry = table.entries + panes.cursor * op.sides[panes.side].layout.stride
                if rows_of(entry) and not panes.side_merge:
                    count_value(op, panes, entry, 0, rows_in_window(op, panes, entry))
                elif rows_of(entry):
                    status = merge_value(op, context, panes, entry, &before)
                    if status == ARENA_WAIT:
                        return STEP_WAIT
                    if status == ARENA_FULL:            # from the beginning, without memory
                        begin_counting(op, panes, False)
                        return STEP_MORE
                    count_value(op, panes, entry, before, rows_of(entry))
                panes.cursor += 1
                budget -= 1
            next_part(panes)
        panes.side += 1
        first_part(op, panes)
    rank_from(op, panes, 0)
    return STEP_DONE


cdef void rank_from(Operator *op, PaneSet *panes, uint32_t d) noexcept nogil:
    """The next phase: side table d or one behind it is to be ranked, or none is."""
    while d < op.n_sides and not is_ranked(&op.sides[d]):
        d += 1
    first_part(op, panes)
    panes.side = d
    if d < op.n_sides:
        panes.phase = PHASE_CHAIN
    else:
        panes.phase = PHASE_EMIT_UNMERGED if panes.unmerged else PHASE_EMIT


cdef Step chain_slice(Operator *op, PaneSet *panes) noexcept nogil:
    """The window's values to the entries of their keys. Those of a key that is not to be said again stay where they are."""
    cdef uint32_t budget = SLICE
    cdef const Side *side = &op.sides[panes.side]
    cdef unsigned char *value
    cdef uint64_t *entry
    cdef Table *table
    while is_in_window(panes):
        table = &panes.merge_part.sides[panes.side]
        while panes.cursor < table.capacity:
            if budget == 0:
                return STEP_MORE
            value = table.entries + panes.cursor * side.layout.stride
            if rows_of(value):
                entry = <uint64_t *> entry_of_key(op, panes, value)
                if not panes.revising or panes.unmerged or entry[0] & DIRTY_BIT:
                    chain_value(side, entry, <uint64_t *> value)
            panes.cursor += 1
            budget -= 1
        next_part(panes)
    first_part(op, panes)
    panes.phase = PHASE_RANK
    return STEP_DONE


cdef Step rank_slice(Operator *op, PaneSet *panes) noexcept nogil:
    """The middle of every chain."""
    cdef uint32_t budget = SLICE
    cdef Side *side = &op.sides[panes.side]
    cdef uint64_t *entry
    cdef Table *table
    if side.ranking.entry != NULL and not ranking_slice(side, &budget):
        return STEP_MORE
    while is_in_window(panes):
        table = &panes.merge_part.table if panes.unmerged else panes.source
        while panes.cursor < table.capacity:
            if budget == 0:
                return STEP_MORE
            entry = <uint64_t *> (table.entries + panes.cursor * op.layout.stride)
            panes.cursor += 1
            budget -= 1
            if is_chained(side, entry):
                ranking_begin(side, entry)
                if not ranking_slice(side, &budget):
                    return STEP_MORE
        if not panes.unmerged:
            break
        next_part(panes)
    rank_from(op, panes, panes.side + 1)
    return STEP_DONE


cdef Step sides_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    """What the window says of its values, into the entries of their keys. STEP_DONE: the next phase is set."""
    if panes.phase == PHASE_SIDES_FORGET:
        return forget_slice(op, panes)
    if panes.phase == PHASE_SIDES:
        return count_slice(op, context, panes)
    if panes.phase == PHASE_CHAIN:
        return chain_slice(op, panes)
    return rank_slice(op, panes)


cdef void sides_of_window(const Operator *op, unsigned char *entry) noexcept nogil:
    """An entry of the first part that has its key, as what the window says: counted without memory."""
    cdef const Side *side
    cdef uint64_t *slot
    cdef uint32_t d, w
    for d in range(op.n_sides):
        side = &op.sides[d]
        if counts_values(side):
            slot = <uint64_t *> entry + side.slot
            for w in range(part_slots(side)):
                slot[w] = slot[part_slots(side) + w]


# A part of a pane becomes one with it


cdef uint64_t sides_slots(const Operator *op, const Pane *pane) noexcept nogil:
    cdef uint64_t n = 0
    cdef uint32_t d
    for d in range(op.n_sides):
        n += pane.sides[d].capacity
    return n


cdef ArenaStatus fold_value(Operator *op, Arena *arena, Pane *pane, uint32_t d, unsigned char *entry) noexcept nogil:
    """It counts for its key. The part is left without it."""
    cdef Side *side = &op.sides[d]
    cdef Table *into = &pane.sides[d]
    cdef unsigned char *found = NULL
    cdef unsigned char *of_key
    cdef uint64_t before
    cdef ArenaStatus status = ARENA_OK
    if into.entries == NULL:
        status = table_init(into, &side.layout, FIRST_CAPACITY, arena)
    if status == ARENA_OK:
        status = table_locate(into, &side.layout, <const int64_t *> (entry + 8), NULL, 1, &found, arena)
    if found == NULL:
        return status
    before = rows_of(found)
    if counts_values(side) and says_more(side, before):
        of_key = table_find(&pane.table, &op.layout, <const int64_t *> (entry + 8))
        if of_key != NULL:
            fs_fold_value(side.fold, <uint64_t *> of_key + side.slot, before, rows_of(entry), word_in(side, entry))
    (<uint64_t *> found)[0] += rows_of(entry)
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
