"""Panes: where they are, how they come and go. See panes.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, Arena, ArenaStatus, arena_alloc, arena_release
from flexstream.cython_ext.memory.blocks cimport Output
from flexstream.cython_ext.operators.dense_pane cimport dense_release, dense_settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_store_relaxed
from flexstream.cython_ext.memory.messages cimport RESULT_BLOCK
from flexstream.cython_ext.operators.table cimport (
    ROWS_MASK, Table, entry_merge, keys_within, table_destroy, table_init, table_locate, table_room,
)
from flexstream.cython_ext.memory.ring cimport Message, ring_push
from flexstream.cython_ext.operators.rolling cimport rolling_forget, rolling_release
from flexstream.cython_ext.operators.side_tables cimport sides_drop, sides_release
from flexstream.cython_ext.operators.windower cimport end_after, first_end, is_one_pane, open_from

cdef enum:
    FIRST_CAPACITY = 16
    WIDE = 512                # bytes of an entry; so large ones begin with fewer
    FIRST_WIDE = 4
    MOST_EXPECTED = 1 << 16
    FOLD_AT_ONCE = 64         # a part with so few keys is not worth a link
    MOST_PARTS = 4            # of a pane, before more are taken, where they can be folded


cdef void panes_reset(PaneSet *panes) noexcept nogil:
    memset(panes, 0, sizeof(PaneSet))
    panes.watermark = INT64_MIN
    panes.late_before = INT64_MIN
    panes.fired_until = INT64_MIN
    panes.restored_until = INT64_MIN
    panes.revised_until = INT64_MIN
    panes.rolled_until = INT64_MIN


cdef void query_init(Query *query) noexcept nogil:
    cdef uint32_t g
    for g in range(query.groups):
        panes_reset(&query.sets[g])


cdef uint32_t pane_position(const PaneSet *panes, int64_t start) noexcept nogil:
    """Of the first pane that starts at or after `start`."""
    cdef uint32_t low = 0
    cdef uint32_t high = panes.n
    cdef uint32_t middle
    while low < high:
        middle = (low + high) // 2
        if panes.panes[middle].start < start:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline void use_pane(PaneSet *panes, Pane *pane) noexcept nogil:
    if pane != panes.recent:
        panes.previous = panes.recent
        panes.recent = pane


cdef inline uint32_t least_capacity(const Query *query) noexcept nogil:
    return FIRST_WIDE if query.layout.stride > WIDE else FIRST_CAPACITY


cdef uint32_t expected_capacity(const Query *query, const PaneSet *panes) noexcept nogil:
    """As many keys as the pane before it has now: growing step by step would cost more than the memory."""
    cdef uint32_t capacity = least_capacity(query)
    cdef uint32_t keys = panes.usual_keys
    if panes.recent != NULL and panes.recent.table.used + panes.recent.table.reserved > keys:
        keys = panes.recent.table.used + panes.recent.table.reserved
    while keys_within(capacity, capacity * query.layout.stride, is_one_pane(&query.windower)) < keys \
            and capacity < MOST_EXPECTED:
        capacity *= 2
    return capacity


# The list of panes: a row of pointers with free places before and behind it, so that panes come and go at either end
# for the price of one.


cdef ArenaStatus list_grow(Context *context, PaneSet *panes, bint in_front) noexcept nogil:
    """Free places, all of them on one side."""
    cdef uint32_t capacity = panes.capacity * 2 if panes.capacity else 16
    cdef void *memory
    cdef Pane **first
    cdef ArenaStatus status = arena_alloc(context.arena, capacity * sizeof(Pane *), &memory)
    if status != ARENA_OK:
        return status
    first = <Pane **> memory + (capacity - panes.n if in_front else 0)
    if panes.n:
        memcpy(first, panes.panes, panes.n * sizeof(Pane *))
    list_release(context.arena, panes)
    panes.room = <Pane **> memory
    panes.panes = first
    panes.capacity = capacity
    return ARENA_OK


cdef ArenaStatus list_gap(Context *context, PaneSet *panes, bint in_front) noexcept nogil:
    """A free place on that side: by moving all, if many others are free, so that it is rarely needed; else by growing."""
    cdef uint32_t free_places = panes.capacity - panes.n
    cdef uint32_t before = <uint32_t> (panes.panes - panes.room) if panes.room != NULL else 0
    cdef Pane **to
    if before if in_front else free_places - before:
        return ARENA_OK
    if free_places == 0 or free_places < panes.capacity // 4:
        return list_grow(context, panes, in_front)
    to = panes.room + ((free_places + 1) // 2 if in_front else 0)
    memmove(to, panes.panes, panes.n * sizeof(Pane *))
    panes.panes = to
    return ARENA_OK


cdef void list_insert(PaneSet *panes, uint32_t at, Pane *pane, bint in_front) noexcept nogil:
    """Assumes: there is a free place on that side."""
    if in_front:
        memmove(panes.panes - 1, panes.panes, at * sizeof(Pane *))
        panes.panes -= 1
    else:
        memmove(panes.panes + at + 1, panes.panes + at, (panes.n - at) * sizeof(Pane *))
    panes.panes[at] = pane
    panes.n += 1


cdef void list_skip(PaneSet *panes, uint32_t n) noexcept nogil:
    """The first n are not in it any more."""
    panes.panes += n
    panes.n -= n


cdef void list_release(Arena *arena, PaneSet *panes) noexcept nogil:
    if panes.room != NULL:
        arena_release(arena, panes.room, panes.capacity * sizeof(Pane *))
    panes.room = NULL
    panes.panes = NULL
    panes.capacity = 0


# Panes come and go


cdef ArenaStatus pane_get(Query *query, Context *context, PaneSet *panes, int64_t start, Pane **out) noexcept nogil:
    cdef uint32_t at = pane_position(panes, start)
    cdef bint in_front = at < panes.n // 2
    cdef ArenaStatus status
    cdef void *memory
    cdef Pane *pane
    if at < panes.n and panes.panes[at].start == start:
        out[0] = panes.panes[at]
        use_pane(panes, out[0])
        return ARENA_OK
    status = list_gap(context, panes, in_front)
    if status != ARENA_OK:
        return status
    status = arena_alloc(context.arena, pane_bytes(query), &memory)
    if status != ARENA_OK:
        return status
    pane = <Pane *> memory
    memset(pane, 0, pane_bytes(query))
    pane.start = start
    pane.sides = <Table *> (<unsigned char *> memory + sizeof(Pane))
    pane.fired = <uint32_t *> (pane.sides + query.n_sides)
    status = table_init(&pane.table, &query.layout, expected_capacity(query, panes), context.arena, is_one_pane(&query.windower))
    if status == ARENA_FULL:
        status = table_init(&pane.table, &query.layout, least_capacity(query), context.arena)
    if status != ARENA_OK:
        arena_release(context.arena, pane, pane_bytes(query))
        return status
    list_insert(panes, at, pane, in_front)
    use_pane(panes, pane)
    fs_count(&query.counters.open_panes, 1)
    out[0] = pane
    return ARENA_OK


cdef void before_release(const Query *query, Arena *arena, Pane *pane) noexcept nogil:
    if pane.before != NULL:
        arena_release(arena, pane.before, <uint64_t> pane.before_room * query.layout.stride)
    pane.before = NULL


cdef void drop_pane(Query *query, Arena *arena, Pane *pane) noexcept nogil:
    cdef Pane *following
    while pane != NULL:
        following = pane.also
        table_destroy(&pane.table, arena)
        sides_drop(query, arena, pane)
        before_release(query, arena, pane)
        arena_release(arena, pane, pane_bytes(query))
        pane = following


cdef void drop_panes(Query *query, Arena *arena, PaneSet *panes, uint32_t n) noexcept nogil:
    """Free the n oldest panes."""
    cdef uint32_t i
    for i in range(n):
        if panes.panes[i] == panes.recent:
            panes.recent = NULL
        if panes.panes[i] == panes.previous:
            panes.previous = NULL
        dense_settle(query, arena, panes.panes[i])
        panes.usual_keys = panes.panes[i].table.used
        drop_pane(query, arena, panes.panes[i])
    list_skip(panes, n)
    fs_count(&query.counters.open_panes, -<uint64_t> n)


cdef void pane_absorb(Query *query, Context *context, Pane *pane, Pane *other) noexcept nogil:
    """`other` becomes a part of `pane`: folded in when it is small, linked when it is not."""
    cdef uint64_t k
    cdef unsigned char *entry
    cdef unsigned char *into
    cdef Pane *last = other
    pane.dirty = pane.dirty or other.dirty
    if other.also == NULL and query.n_sides == 0 and other.table.used <= FOLD_AT_ONCE \
            and table_room(&pane.table) >= other.table.used:
        for k in range(other.table.capacity):
            entry = other.table.entries + k * query.layout.stride
            if (<uint64_t *> entry)[0] & ROWS_MASK:
                table_locate(&pane.table, &query.layout, <int64_t *> (entry + 8), NULL, 1, &into, context.arena)
                if entry_merge(&query.layout, into, entry):
                    fs_store_relaxed(&query.failed, 1)
        drop_pane(query, context.arena, other)
        return
    while last.also != NULL:
        last = last.also
    last.also = pane.also
    pane.also = other


cdef uint32_t parts_of(const Pane *pane) noexcept nogil:
    cdef uint32_t n = 0
    while pane != NULL:
        n += 1
        pane = pane.also
    return n


cdef bint piled_up(const Query *query, const PaneSet *panes, const PaneSet *others) noexcept nogil:
    """Whether some pane would have too many parts. Not when they cannot be folded: then nothing is under way."""
    cdef uint32_t i, at
    if not query.unfolded:
        return False
    for i in range(others.n):
        at = pane_position(panes, others.panes[i].start)
        if at < panes.n and panes.panes[at].start == others.panes[i].start \
                and panes.panes[at].also != NULL and parts_of(panes.panes[at]) >= MOST_PARTS:
            return True
    return False


cdef bint panes_absorb(Query *query, Context *context, PaneSet *panes, PaneSet *others,
                       bint theirs_first) noexcept nogil:
    """Take the panes of another worker by pointer. False: no memory yet, or parts must be folded first; nothing changed.

    Where both have a pane, one becomes a part of the other: the first is the one of whoever has fired its windows.
    Of `others` only the list is read, which is empty afterwards.
    """
    cdef Pane **merged
    cdef void *memory
    cdef uint32_t n = 0
    cdef uint32_t capacity = 16
    cdef uint32_t mine = 0
    cdef uint32_t theirs = 0
    if others.n == 0:
        list_release(context.arena, others)
        return True
    if piled_up(query, panes, others):
        return False
    while capacity < panes.n + others.n:
        capacity *= 2
    if arena_alloc(context.arena, capacity * sizeof(Pane *), &memory) != ARENA_OK:
        return False
    if others.panes[0].start < panes.rolled_until:
        rolling_forget(query, context.arena, panes)
    merged = <Pane **> memory
    while mine < panes.n or theirs < others.n:
        if mine == panes.n or (theirs < others.n and others.panes[theirs].start < panes.panes[mine].start):
            merged[n] = others.panes[theirs]
            theirs += 1
        elif theirs == others.n or panes.panes[mine].start < others.panes[theirs].start:
            merged[n] = panes.panes[mine]
            mine += 1
        else:
            merged[n] = others.panes[theirs] if theirs_first else panes.panes[mine]
            dense_settle(query, context.arena, panes.panes[mine])
            pane_absorb(query, context, merged[n], panes.panes[mine] if theirs_first else others.panes[theirs])
            mine += 1
            theirs += 1
            fs_count(&query.counters.open_panes, -<uint64_t> 1)
        if merged[n].dirty:
            mark_dirty(panes, merged[n])
        if merged[n].also != NULL and not query.ordered:
            query.unfolded = True
            query.fold_group = 0
            query.fold_from = INT64_MIN
            context.unfolded = True
        n += 1
    fs_count(&query.counters.open_panes, others.n)
    list_release(context.arena, others)
    others.n = 0
    list_release(context.arena, panes)
    panes.room = merged
    panes.panes = merged
    panes.n = n
    panes.capacity = capacity
    panes.recent = NULL
    panes.previous = NULL
    return True


cdef void query_release(Query *query, Arena *arena) noexcept nogil:
    """Give all state back to the arena: the query is being cancelled."""
    cdef uint32_t g
    cdef PaneSet *panes
    for g in range(query.groups):
        panes = &query.sets[g]
        rolling_release(query, arena, panes)
        if panes.room != NULL:
            drop_panes(query, arena, panes, panes.n)
            list_release(arena, panes)
        memset(panes, 0, sizeof(PaneSet))
    dense_release(query, arena)
    sides_release(query, arena)
    table_destroy(&query.rolling.older, arena)
    table_destroy(&query.rolling.newer, arena)


cdef bint next_due(Query *query, PaneSet *panes, int64_t watermark, int64_t *end) noexcept nogil:
    """The earliest window that has not fired, holds a pane, and ends at or before the watermark."""
    cdef uint32_t i = pane_position(panes, open_from(&query.windower, panes.fired_until))
    cdef int64_t after = end_after(&query.windower, panes.fired_until)
    if i == panes.n:
        return False
    end[0] = first_end(&query.windower, panes.panes[i].start)
    if end[0] < after:
        end[0] = after
    return end[0] <= watermark


# Output


cdef bint hand_over(Output *output, Context *context, uint32_t kind, uint64_t tag) noexcept nogil:
    """Send the open block to the reader. False: the out ring is full, nothing happened."""
    cdef Message message
    if output.open == NULL or output.open.rows == 0:
        return True
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.ptr = output.open
    message.tag = tag
    if not ring_push(context.out, &message):
        return False
    output.open = NULL
    return True


cdef bint query_flush(Query *query, Context *context) noexcept nogil:
    """Hand over the results in the open block. False: the reader is behind."""
    return hand_over(&query.results, context, RESULT_BLOCK, query.id)
