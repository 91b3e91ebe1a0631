"""Panes: where they are, how they come and go. See panes.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from flexstream.cython_ext.arena cimport ARENA_FULL, ARENA_OK, Arena, ArenaStatus, arena_alloc, arena_release
from flexstream.cython_ext.blocks cimport Block, Output, output_block
from flexstream.cython_ext.dense cimport dense_release, dense_settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_store_relaxed
from flexstream.cython_ext.messages cimport LATE_BLOCK, RESULT_BLOCK
from flexstream.cython_ext.partial cimport (
    ROWS_MASK, Table, entry_merge, keys_within, table_destroy, table_init, table_locate, table_room,
)
from flexstream.cython_ext.ring cimport Message, ring_push
from flexstream.cython_ext.sides cimport sides_drop, sides_release

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


cdef inline bint is_window(const Query *query) noexcept nogil:
    """Whether a pane is a whole window: it takes many rows and is looked through once, not again and again."""
    return query.pane == query.size


cdef uint32_t expected_capacity(const Query *query, const PaneSet *panes) noexcept nogil:
    """As many keys as the pane before it has now: growing step by step would cost more than the memory."""
    cdef uint32_t capacity = least_capacity(query)
    cdef uint32_t keys = panes.usual_keys
    if panes.recent != NULL and panes.recent.table.used + panes.recent.table.reserved > keys:
        keys = panes.recent.table.used + panes.recent.table.reserved
    while keys_within(capacity, capacity * query.layout.stride, is_window(query)) < keys \
            and capacity < MOST_EXPECTED:
        capacity *= 2
    return capacity


cdef ArenaStatus pane_get(Query *query, Context *context, PaneSet *panes, int64_t start, Pane **out) noexcept nogil:
    cdef uint32_t at = pane_position(panes, start)
    cdef ArenaStatus status
    cdef void *memory
    cdef Pane *pane
    cdef uint32_t capacity
    if at < panes.n and panes.panes[at].start == start:
        out[0] = panes.panes[at]
        use_pane(panes, out[0])
        return ARENA_OK
    if panes.n == panes.capacity:
        capacity = panes.capacity * 2 if panes.capacity else 16
        status = arena_alloc(context.arena, capacity * sizeof(Pane *), &memory)
        if status != ARENA_OK:
            return status
        if panes.panes != NULL:
            memcpy(memory, panes.panes, panes.n * sizeof(Pane *))
            arena_release(context.arena, panes.panes, panes.capacity * sizeof(Pane *))
        panes.panes = <Pane **> memory
        panes.capacity = capacity
    status = arena_alloc(context.arena, pane_bytes(query), &memory)
    if status != ARENA_OK:
        return status
    pane = <Pane *> memory
    memset(pane, 0, pane_bytes(query))
    pane.start = start
    pane.sides = <Table *> (<unsigned char *> memory + sizeof(Pane))
    pane.fired = <uint32_t *> (pane.sides + query.n_sides)
    status = table_init(&pane.table, &query.layout, expected_capacity(query, panes), context.arena, is_window(query))
    if status == ARENA_FULL:
        status = table_init(&pane.table, &query.layout, least_capacity(query), context.arena)
    if status != ARENA_OK:
        arena_release(context.arena, pane, pane_bytes(query))
        return status
    memmove(panes.panes + at + 1, panes.panes + at, (panes.n - at) * sizeof(Pane *))
    panes.panes[at] = pane
    panes.n += 1
    use_pane(panes, pane)
    fs_count(&query.counters.open_panes, 1)
    out[0] = pane
    return ARENA_OK


cdef void drop_pane(Query *query, Arena *arena, Pane *pane) noexcept nogil:
    cdef Pane *following
    while pane != NULL:
        following = pane.also
        table_destroy(&pane.table, arena)
        sides_drop(query, arena, pane)
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
    panes.n -= n
    memmove(panes.panes, panes.panes + n, panes.n * sizeof(Pane *))
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


cdef bint piled_up(const Query *query, const PaneSet *panes, Pane **others, uint32_t n_others) noexcept nogil:
    """Whether some pane would have too many parts. Not when they cannot be folded: then nothing is under way."""
    cdef uint32_t i, at
    if not query.unfolded:
        return False
    for i in range(n_others):
        at = pane_position(panes, others[i].start)
        if at < panes.n and panes.panes[at].start == others[i].start \
                and panes.panes[at].also != NULL and parts_of(panes.panes[at]) >= MOST_PARTS:
            return True
    return False


cdef bint panes_absorb(Query *query, Context *context, PaneSet *panes, Pane **others, uint32_t n_others,
                       uint32_t others_capacity, bint theirs_first) noexcept nogil:
    """Take the panes of another worker by pointer. False: no memory yet, or parts must be folded first; nothing changed.

    Where both have a pane, one becomes a part of the other: the first is the one of whoever has fired its windows.
    """
    cdef Pane **merged
    cdef void *memory
    cdef uint32_t n = 0
    cdef uint32_t capacity = 16
    cdef uint32_t mine = 0
    cdef uint32_t theirs = 0
    if n_others == 0:
        if others != NULL:
            arena_release(context.arena, others, others_capacity * sizeof(Pane *))
        return True
    if piled_up(query, panes, others, n_others):
        return False
    while capacity < panes.n + n_others:
        capacity *= 2
    if arena_alloc(context.arena, capacity * sizeof(Pane *), &memory) != ARENA_OK:
        return False
    merged = <Pane **> memory
    while mine < panes.n or theirs < n_others:
        if mine == panes.n or (theirs < n_others and others[theirs].start < panes.panes[mine].start):
            merged[n] = others[theirs]
            theirs += 1
        elif theirs == n_others or panes.panes[mine].start < others[theirs].start:
            merged[n] = panes.panes[mine]
            mine += 1
        else:
            merged[n] = others[theirs] if theirs_first else panes.panes[mine]
            dense_settle(query, context.arena, panes.panes[mine])
            pane_absorb(query, context, merged[n], panes.panes[mine] if theirs_first else others[theirs])
            mine += 1
            theirs += 1
            fs_count(&query.counters.open_panes, -<uint64_t> 1)
        panes.dirty = panes.dirty or merged[n].dirty
        if merged[n].also != NULL and query.n_sides == 0:
            query.unfolded = True
            query.fold_group = 0
            query.fold_from = INT64_MIN
            context.unfolded = True
        n += 1
    if panes.panes != NULL:
        arena_release(context.arena, panes.panes, panes.capacity * sizeof(Pane *))
    arena_release(context.arena, others, others_capacity * sizeof(Pane *))
    fs_count(&query.counters.open_panes, n_others)
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
        if panes.panes != NULL:
            drop_panes(query, arena, panes, panes.n)
            arena_release(arena, panes.panes, panes.capacity * sizeof(Pane *))
        memset(panes, 0, sizeof(PaneSet))
    dense_release(query, arena)
    sides_release(query, arena)
    if query.merged.entries != NULL:
        table_destroy(&query.merged, arena)


cdef bint next_due(Query *query, PaneSet *panes, int64_t watermark, int64_t *end) noexcept nogil:
    """The earliest window that has not fired, holds a pane, and ends at or before the watermark."""
    cdef uint32_t i
    cdef int64_t candidate
    cdef int64_t after = end_after(query, panes.fired_until)
    for i in range(panes.n):
        candidate = first_end(query, panes.panes[i].start)
        if candidate < after:
            candidate = after
        if candidate <= last_end(query, panes.panes[i].start):
            end[0] = candidate
            return candidate <= watermark
    return False


# Output


cdef bint hand_over(Output *output, Context *context, uint32_t kind, Query *query) noexcept nogil:
    """Send the open block to the reader. False: the out ring is full, nothing happened."""
    cdef Message message
    if output.open == NULL or output.open.rows == 0:
        return True
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.ptr = output.open
    message.tag = query.id
    if not ring_push(context.out, &message):
        return False
    output.open = NULL
    return True


cdef bint query_flush(Query *query, Context *context) noexcept nogil:
    """Hand over what is in the open blocks. False: the reader is behind."""
    return (hand_over(&query.results, context, RESULT_BLOCK, query)
            and hand_over(&query.late, context, LATE_BLOCK, query))


cdef bint query_has_late_room(Query *query, Context *context, uint32_t n) noexcept nogil:
    """Room for n late rows in one block, so that a kernel never stops half-way."""
    cdef Block *block = output_block(&query.late)
    if block != NULL and block.capacity - block.rows < n:
        if not hand_over(&query.late, context, LATE_BLOCK, query):
            return False
        block = output_block(&query.late)
    return block != NULL
