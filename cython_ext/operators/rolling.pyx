"""See rolling.pxd."""

from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.memory.arena cimport (
    ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus, arena_alloc, arena_release,
)
from flexstream.cython_ext.includes.native cimport fs_store_relaxed
from flexstream.cython_ext.operators.merging cimport table_take_out
from flexstream.cython_ext.operators.graph cimport STEP_MORE, STEP_WAIT, Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport PHASE_FLIP, PHASE_NONE, PHASE_RETIRE, Pane, PaneSet, Rolling
from flexstream.cython_ext.operators.panes cimport before_release, next_part, pane_position
from flexstream.cython_ext.operators.table cimport (
    ROWS_MASK, USED_BIT, Table, entry_merge, table_add, table_clear, table_destroy, table_find, table_init,
    table_locate,
)
from flexstream.cython_ext.operators.windower cimport open_from

cdef enum:
    FIRST_CAPACITY = 16
    DEAD_KEYS = 64            # more of them than that, and than live ones: the table is made anew


cdef inline bint has_rows(const unsigned char *entry) noexcept nogil:
    return entry != NULL and ((<const uint64_t *> entry)[0] & ROWS_MASK) != 0


cdef inline bint rolls(const Operator *op) noexcept nogil:
    return op.invertible or op.stacked


# Life


cdef void empty_rolling(Rolling *rolling) noexcept nogil:
    rolling.until = INT64_MIN
    rolling.live = 0
    if rolling.older.used:
        table_clear(&rolling.older)
    if rolling.newer.used:
        table_clear(&rolling.newer)


cdef Rolling *rolling_of(Operator *op, PaneSet *panes) noexcept nogil:
    """The one that has panes of this group; NULL: none has."""
    cdef Rolling *rolling = panes.rolling
    if not op.keeps:
        rolling = &op.rolling if op.rolling_of == panes else NULL
    return rolling if rolling != NULL and rolling.until != INT64_MIN else NULL


cdef void forget_before(Operator *op, Arena *arena, PaneSet *panes, Rolling *rolling) noexcept nogil:
    """What the panes of `older` keep is of no use any more."""
    cdef uint32_t i
    if op.stacked:
        i = pane_position(panes, rolling.begin)
        while i < panes.n and panes.panes[i].start < rolling.middle:
            before_release(op, arena, panes.panes[i])
            i += 1


cdef void rolling_forget(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil:
    """The next window is merged from its panes."""
    cdef Rolling *rolling = rolling_of(op, panes)
    panes.rolled_until = INT64_MIN
    if rolling == NULL:
        return
    forget_before(op, arena, panes, rolling)
    empty_rolling(rolling)


cdef void rolling_release(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil:
    """Forget it, and give its memory back."""
    rolling_forget(op, arena, panes)
    if op.rolling_of == panes:
        op.rolling_of = NULL
    if panes.rolling != NULL:
        table_destroy(&panes.rolling.older, arena)
        table_destroy(&panes.rolling.newer, arena)
        arena_release(arena, panes.rolling, sizeof(Rolling))
        panes.rolling = NULL


cdef ArenaStatus have_tables(Operator *op, Context *context, PaneSet *panes, Rolling *rolling) noexcept nogil:
    cdef ArenaStatus status = ARENA_OK
    if rolling.older.entries == NULL:
        status = table_init(&rolling.older, &op.layout, FIRST_CAPACITY, context.arena)
    if status == ARENA_OK and rolling.newer.entries == NULL and is_stacked(op, panes):
        status = table_init(&rolling.newer, &op.layout, FIRST_CAPACITY, context.arena)
    return status


cdef ArenaStatus rolling_begin(Operator *op, Context *context, PaneSet *panes, int64_t start) noexcept nogil:
    """Ready for the window that starts there: with the panes of the one before it, or empty."""
    cdef Rolling *rolling
    cdef void *memory
    cdef ArenaStatus status
    if op.keeps and not panes.revising and panes.rolling == NULL:
        status = arena_alloc(context.arena, sizeof(Rolling), &memory)
        if status != ARENA_OK:
            return status
        memset(memory, 0, sizeof(Rolling))
        panes.rolling = <Rolling *> memory
        panes.rolling.until = INT64_MIN
    rolling = rolling_in_use(op, panes)
    status = have_tables(op, context, panes, rolling)
    if status != ARENA_OK:
        return status
    if rolling == &op.rolling and (op.rolling_of != panes or panes.revising or not rolls(op)):
        empty_rolling(rolling)
        op.rolling_of = NULL if panes.revising else panes
    if rolling.until == INT64_MIN:
        rolling.begin = start
        rolling.middle = start
        rolling.until = start
    return ARENA_OK


# Panes come out


cdef bint rolling_begin_retiring(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil:
    """Whether panes are in it that no window has which has not fired. True: the phase is set."""
    cdef Rolling *rolling = rolling_of(op, panes)
    cdef int64_t keep = open_from(&op.windower, panes.fired_until)
    cdef uint32_t kept
    panes.revising = False
    if rolling == NULL or not rolls(op) or rolling.begin >= keep:
        return False
    if keep >= rolling.until:       # all of them go; panes behind `until` are not in it, whatever windows they had
        rolling_forget(op, arena, panes)
        return False
    panes.cursor = 0
    if not is_stacked(op, panes) or keep <= rolling.middle:
        panes.merge_next = pane_position(panes, rolling.begin)
        panes.merge_part = panes.panes[panes.merge_next] if panes.merge_next < panes.n else NULL
        panes.phase = PHASE_RETIRE
        return True
    kept = pane_position(panes, rolling.until)
    if kept == pane_position(panes, keep):      # all of them go
        rolling_forget(op, arena, panes)
        return False
    forget_before(op, arena, panes, rolling)
    table_clear(&rolling.older)
    table_clear(&rolling.newer)
    rolling.begin = keep
    rolling.middle = rolling.until
    panes.merge_next = kept - 1
    panes.merge_part = panes.panes[kept - 1]
    panes.phase = PHASE_FLIP
    return True


cdef bint put_back(Operator *op, Arena *arena, Rolling *rolling, Pane *pane, uint64_t *cursor,
                   uint32_t *budget) noexcept nogil:
    """`older` without the pane, which is the first in it. False: the budget is used up before."""
    cdef const unsigned char *kept
    cdef unsigned char *entry
    while cursor[0] < pane.n_before:
        if budget[0] == 0:
            return False
        kept = pane.before + cursor[0] * op.layout.stride
        entry = table_find(&rolling.older, &op.layout, <const int64_t *> (kept + 8))
        memcpy(entry, kept, op.layout.stride)
        cursor[0] += 1
        budget[0] -= 1
    before_release(op, arena, pane)
    return True


cdef Step rolling_retire_slice(Operator *op, Context *context, PaneSet *panes, uint32_t budget) noexcept nogil:
    cdef Rolling *rolling = rolling_of(op, panes)
    cdef int64_t keep = open_from(&op.windower, panes.fired_until)
    cdef Pane *pane
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < keep \
            and panes.panes[panes.merge_next].start < rolling.until:
        if budget == 0:
            return STEP_MORE
        pane = panes.panes[panes.merge_next]
        budget -= 1
        if op.invertible:
            if not table_take_out(&rolling.older, &op.layout, &panes.merge_part.table, &panes.cursor, &budget):
                rolling_forget(op, context.arena, panes)     # what is left of a sum has no value by itself
                break
            if panes.cursor < panes.merge_part.table.capacity:
                return STEP_MORE
            next_part(panes)
        else:
            if not put_back(op, context.arena, rolling, pane, &panes.cursor, &budget):
                return STEP_MORE
            panes.cursor = 0
            panes.merge_next += 1
    rolling.begin = keep
    panes.phase = PHASE_NONE
    return STEP_MORE


cdef void rolling_compact(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    """Keys whose rows were all taken out stay behind without any: make room, when there are many."""
    cdef Rolling *rolling = rolling_of(op, panes)
    cdef Table fresh
    cdef uint32_t capacity = FIRST_CAPACITY
    cdef uint64_t k
    cdef const unsigned char *entry
    cdef unsigned char *into
    if rolling == NULL or not op.invertible or rolling.older.used < DEAD_KEYS + 2 * rolling.live:
        return
    while capacity < 4 * rolling.live:
        capacity *= 2
    if table_init(&fresh, &op.layout, capacity, context.arena) != ARENA_OK:
        return                                  # another time
    for k in range(rolling.older.capacity):
        entry = rolling.older.entries + k * op.layout.stride
        if has_rows(entry):
            into = table_add(&fresh, &op.layout, <const int64_t *> (entry + 8))
            if into == NULL:                    # more than the last window had: it was not worth it
                table_destroy(&fresh, context.arena)
                return
            memcpy(into, entry, op.layout.stride)
    table_destroy(&rolling.older, context.arena)
    rolling.older = fresh


# The two stacks


cdef ArenaStatus room_for_before(Operator *op, Context *context, Pane *pane) noexcept nogil:
    cdef Pane *part = pane
    cdef uint64_t keys = 0
    cdef void *memory
    cdef ArenaStatus status
    while part != NULL:
        keys += part.table.used
        part = part.also
    status = arena_alloc(context.arena, keys * op.layout.stride, &memory)
    if status == ARENA_OK:
        pane.before = <unsigned char *> memory
        pane.before_room = <uint32_t> keys
        pane.n_before = 0
    return status


cdef bint is_in_earlier_part(Operator *op, Pane *pane, const Pane *part, const unsigned char *entry) noexcept nogil:
    while pane != part:
        if has_rows(table_find(&pane.table, &op.layout, <const int64_t *> (entry + 8))):
            return True
        pane = pane.also
    return False


cdef ArenaStatus push(Operator *op, Context *context, Rolling *rolling, Pane *pane, Pane *part,
                      const unsigned char *entry) noexcept nogil:
    """An entry of the pane goes into `older`; the pane keeps what was there."""
    cdef unsigned char *into = table_find(&rolling.older, &op.layout, <const int64_t *> (entry + 8))
    cdef ArenaStatus status
    if into == NULL:
        status = table_locate(&rolling.older, &op.layout, <const int64_t *> (entry + 8), NULL, 1, &into,
                              context.arena)
        if into == NULL or status == ARENA_WAIT:
            return status
    if not is_in_earlier_part(op, pane, part, entry):
        memcpy(pane.before + <uint64_t> pane.n_before * op.layout.stride, into, op.layout.stride)
        pane.n_before += 1
    if not has_rows(into):
        memcpy(into, entry, op.layout.stride)
        (<uint64_t *> into)[0] |= USED_BIT
    elif entry_merge(&op.layout, into, entry):
        fs_store_relaxed(&op.failed, 1)
    return ARENA_OK


cdef ArenaStatus push_part(Operator *op, Context *context, Rolling *rolling, Pane *pane, PaneSet *panes,
                           uint32_t *budget) noexcept nogil:
    """The entries of `panes.merge_part` from the cursor on, as far as the budget goes."""
    cdef Table *table = &panes.merge_part.table
    cdef const unsigned char *entry
    cdef ArenaStatus status
    while panes.cursor < table.capacity and budget[0]:
        entry = table.entries + panes.cursor * op.layout.stride
        if has_rows(entry):
            status = push(op, context, rolling, pane, panes.merge_part, entry)
            if status != ARENA_OK:
                return status
        panes.cursor += 1
        budget[0] -= 1
    return ARENA_OK


cdef Step rolling_flip_slice(Operator *op, Context *context, PaneSet *panes, uint32_t budget) noexcept nogil:
    """The panes that are left, the last first, into `older`."""
    cdef Rolling *rolling = panes.rolling if op.keeps else &op.rolling
    cdef ArenaStatus status = ARENA_OK
    cdef Pane *pane
    while True:
        pane = panes.panes[panes.merge_next]
        if pane.before == NULL:
            status = room_for_before(op, context, pane)
        if status == ARENA_OK:
            status = push_part(op, context, rolling, pane, panes, &budget)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:                # windows are merged from their panes, then
            rolling_forget(op, context.arena, panes)
            break
        if budget == 0 and panes.cursor < panes.merge_part.table.capacity:
            return STEP_MORE
        panes.cursor = 0
        panes.merge_part = panes.merge_part.also
        if panes.merge_part == NULL:
            if panes.merge_next == 0 or panes.panes[panes.merge_next - 1].start < rolling.begin:
                break
            panes.merge_next -= 1
            panes.merge_part = panes.panes[panes.merge_next]
        if budget == 0:
            return STEP_MORE
    panes.phase = PHASE_NONE
    return STEP_MORE
