"""The firing: panes into result rows, in slices. A window that got late rows fires again, as a revision."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, ArenaStatus
from flexstream.cython_ext.blocks cimport Block, block_rows, output_block
from flexstream.cython_ext.dense cimport dense_settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_minus, fs_store_relaxed
from flexstream.cython_ext.merging cimport SCAN, positions_in_use, table_merge, table_take_out
from flexstream.cython_ext.messages cimport RESULT_BLOCK
from flexstream.cython_ext.panes cimport (
    PHASE_EMIT, PHASE_EMIT_UNMERGED, PHASE_MERGE, PHASE_NONE, PHASE_SIDES, PHASE_TAKE_OUT, STEP_DONE, STEP_MORE, STEP_WAIT,
    Context, Pane, PaneSet, Query, Step, closed_until, drop_panes, end_after, first_end, hand_over, last_end, next_due,
    next_part, open_from, pane_position,
)
from flexstream.cython_ext.partial cimport (
    DIRTY_BIT, MAX_ENTRY_WORDS, ROWS_MASK, Table, entry_merge, entry_results, table_clear, table_find, table_init,
)
from flexstream.cython_ext.sides cimport sides_begin, sides_of_window, sides_slice

cdef enum:
    FIRST_CAPACITY = 16
    SLICE = 4096              # entries merged between two quiescent points


cdef uint32_t count_firing(Query *query, PaneSet *panes, int64_t end) noexcept nogil:
    """How often the window has fired before; counts this firing in all of its panes."""
    cdef uint32_t i = pane_position(panes, end - query.size)
    cdef uint32_t last = pane_position(panes, end)
    cdef uint32_t before = 0
    cdef uint32_t k
    cdef Pane *pane
    for k in range(i, last):
        pane = panes.panes[k]
        if pane.fired[(end - first_end(query, pane.start)) // query.slide] > before:
            before = pane.fired[(end - first_end(query, pane.start)) // query.slide]
    for k in range(i, last):
        pane = panes.panes[k]
        pane.fired[(end - first_end(query, pane.start)) // query.slide] = before + 1
    return before


cdef bint next_revision(Query *query, PaneSet *panes, int64_t *end) noexcept nogil:
    """The earliest fired window after `revised_until` that holds a dirty pane and may still change."""
    cdef uint32_t i
    cdef int64_t candidate, after
    cdef int64_t floor = closed_until(query, panes)
    cdef bint found = False
    if panes.revised_until > floor:
        floor = panes.revised_until
    for i in range(panes.n):
        if panes.panes[i].dirty:
            candidate = first_end(query, panes.panes[i].start)
            after = end_after(query, floor)
            if candidate < after:
                candidate = after
            if candidate <= last_end(query, panes.panes[i].start) and candidate <= panes.fired_until \
                    and (not found or candidate < end[0]):
                end[0] = candidate
                found = True
    return found


cdef void clear_dirty(Query *query, PaneSet *panes) noexcept nogil:
    cdef uint32_t i
    cdef uint64_t k
    cdef uint64_t *entry
    cdef Pane *part
    for i in range(panes.n):
        if panes.panes[i].dirty:
            panes.panes[i].dirty = False
            part = panes.panes[i]
            while part != NULL:
                for k in range(part.table.capacity):
                    entry = <uint64_t *> (part.table.entries + k * query.layout.stride)
                    entry[0] &= ~DIRTY_BIT
                part = part.also
    panes.dirty = False
    panes.revised_until = INT64_MIN


cdef void begin_merge(Query *query, PaneSet *panes) noexcept nogil:
    """All of the window's panes, into an empty table."""
    table_clear(&query.merged)
    query.merged_of = NULL
    panes.merge_next = pane_position(panes, panes.firing_end - query.size)
    panes.merge_part = panes.panes[panes.merge_next]
    panes.cursor = 0
    panes.phase = PHASE_MERGE


cdef Step begin_window(Query *query, Context *context, PaneSet *panes, int64_t end, bint revising) noexcept nogil:
    cdef uint32_t first = pane_position(panes, end - query.size)
    cdef ArenaStatus status
    cdef bint single = (first + 1 >= panes.n or panes.panes[first + 1].start >= end) and panes.panes[first].also == NULL
    cdef bint merging = not single
    if merging and query.merged.entries == NULL:
        status = table_init(&query.merged, &query.layout, FIRST_CAPACITY, context.arena)
        if status == ARENA_WAIT:
            return STEP_WAIT
        merging = status == ARENA_OK
    panes.revision = count_firing(query, panes, end) if query.lateness > 0 else 0
    panes.firing_end = end
    panes.revising = revising
    panes.cursor = 0
    panes.merge_next = first
    panes.merge_part = panes.panes[first]
    panes.unmerged = False
    if query.ordered and not single:
        fs_store_relaxed(&query.failed, 2)      # rows of a group were taken by two workers at once
    while first < panes.n and panes.panes[first].start < end:
        dense_settle(query, context.arena, panes.panes[first])
        first += 1
    first = panes.merge_next
    if single:
        panes.source = &panes.panes[first].table
        panes.phase = PHASE_EMIT
    elif merging:
        panes.source = &query.merged
        if query.merged_of == panes and query.merged_end == end - query.slide and query.invertible and not revising:
            panes.merge_next = pane_position(panes, query.merged_end - query.size)
            panes.merge_part = panes.panes[panes.merge_next]
            panes.phase = PHASE_TAKE_OUT
            query.merged_of = NULL              # until it is this window
        else:
            begin_merge(query, panes)
    else:
        panes.source = &panes.panes[first].table
        panes.unmerged = True
        after_merging(query, panes)
    return STEP_DONE


cdef inline void after_merging(Query *query, PaneSet *panes) noexcept nogil:
    """Entries are merged, or cannot be (`panes.unmerged`)."""
    panes.merge_next = pane_position(panes, panes.firing_end - query.size)
    panes.merge_part = panes.panes[panes.merge_next]
    panes.cursor = 0
    panes.phase = PHASE_EMIT_UNMERGED if panes.unmerged else PHASE_EMIT
    if query.n_sides:
        panes.phase = PHASE_SIDES
        sides_begin(query, panes)


cdef Step take_out_slice(Query *query, PaneSet *panes) noexcept nogil:
    """Windows that fire one after the other share most of their panes: out with the oldest, then in with the newest."""
    cdef uint32_t budget = SLICE
    cdef uint32_t kept = pane_position(panes, panes.firing_end - query.size)
    while panes.merge_next < kept:
        if not table_take_out(&query.merged, &query.layout, &panes.merge_part.table, &panes.cursor, &budget):
            begin_merge(query, panes)
            return STEP_MORE
        if panes.cursor < panes.merge_part.table.capacity:
            return STEP_MORE
        next_part(panes)
    panes.merge_next = pane_position(panes, query.merged_end)
    panes.merge_part = panes.panes[panes.merge_next] if panes.merge_next < panes.n else NULL
    panes.cursor = 0
    panes.phase = PHASE_MERGE
    return STEP_MORE


cdef Step merge_slice(Query *query, Context *context, PaneSet *panes) noexcept nogil:
    cdef Table *table
    cdef ArenaStatus status
    cdef uint32_t budget = SLICE
    cdef int problem = 0
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end:
        table = &panes.merge_part.table
        status = table_merge(&query.merged, &query.layout, table, &panes.cursor, &budget, context.arena, &problem)
        if problem:
            fs_store_relaxed(&query.failed, 1)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:            # no room to merge: key by key, which needs none
            panes.unmerged = True
            after_merging(query, panes)
            return STEP_MORE
        if panes.cursor < table.capacity:
            return STEP_MORE
        next_part(panes)
        if budget == 0:
            return STEP_MORE
    query.merged_of = panes
    query.merged_end = panes.firing_end
    after_merging(query, panes)
    return STEP_DONE


cdef Step emit_entry(Query *query, Context *context, PaneSet *panes, uint32_t group,
                     const unsigned char *entry) noexcept nogil:
    """One result row. STEP_WAIT: the reader is behind, and nothing was written."""
    cdef Block *block = output_block(&query.results)
    cdef unsigned char *out
    cdef int64_t start = panes.firing_end - query.size
    cdef uint32_t key_bytes = query.layout.key_bytes
    if block != NULL and block.rows == block.capacity:
        if not hand_over(&query.results, context, RESULT_BLOCK, query):
            return STEP_WAIT
        block = output_block(&query.results)
    if block == NULL:
        return STEP_WAIT
    out = block_rows(block) + <size_t> block.rows * block.row_bytes
    memcpy(out, &start, 8)
    memcpy(out + 8, &panes.firing_end, 8)
    memcpy(out + 16, entry + 8, key_bytes)
    entry_results(&query.layout, entry, out + 16 + key_bytes)
    out += 16 + key_bytes + 8 * query.layout.n_aggregates
    memcpy(out, &group, 4)
    memcpy(out + 4, &panes.revision, 4)
    block.rows += 1
    fs_count(&query.counters.results, 1)
    return STEP_DONE


cdef inline bint is_due(const PaneSet *panes, const unsigned char *entry) noexcept nogil:
    cdef uint64_t first = (<const uint64_t *> entry)[0]
    return (first & ROWS_MASK) != 0 and (not panes.revising or (first & DIRTY_BIT) != 0)


cdef void window_fired(Query *query, PaneSet *panes) noexcept nogil:
    fs_count(&query.counters.windows_fired, 1)
    if panes.revising:
        panes.revised_until = panes.firing_end
    else:
        panes.fired_until = panes.firing_end
    panes.phase = PHASE_NONE


cdef Step emit_slice(Query *query, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    cdef uint32_t positions[SCAN]
    cdef uint32_t n, i
    cdef uint64_t end
    cdef unsigned char *entry
    while panes.cursor < panes.source.capacity and not query.failed:
        end = panes.cursor + SCAN if panes.cursor + SCAN < panes.source.capacity else panes.source.capacity
        n = positions_in_use(&query.layout, panes.source, panes.cursor, end, positions)
        for i in range(n):
            entry = panes.source.entries + <uint64_t> positions[i] * query.layout.stride
            if is_due(panes, entry) and emit_entry(query, context, panes, group, entry) == STEP_WAIT:
                panes.cursor = positions[i]
                return STEP_WAIT
        panes.cursor = end
    window_fired(query, panes)
    return STEP_DONE


cdef bint merge_key(Query *query, PaneSet *panes, const unsigned char *entry, unsigned char *into) noexcept nogil:
    """Entry and what later parts of the window have for its key, in `into`. False: an earlier part has the key."""
    cdef uint32_t i = pane_position(panes, panes.firing_end - query.size)
    cdef unsigned char *found
    cdef Pane *part
    cdef bint behind = False
    memcpy(into, entry, query.layout.stride)
    while i < panes.n and panes.panes[i].start < panes.firing_end:
        part = panes.panes[i]
        while part != NULL:
            if part == panes.merge_part:
                behind = True
            else:
                found = table_find(&part.table, &query.layout, <const int64_t *> (entry + 8))
                if found != NULL and (<uint64_t *> found)[0] & ROWS_MASK:
                    if not behind:
                        return False
                    if entry_merge(&query.layout, into, found):
                        fs_store_relaxed(&query.failed, 1)
            part = part.also
        i += 1
    sides_of_window(query, into)
    return True


cdef Step emit_unmerged_slice(Query *query, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    """Part by part, key by key: slower than a merged table, and needs no memory."""
    cdef uint64_t merged[MAX_ENTRY_WORDS]
    cdef unsigned char *entry
    cdef uint32_t budget = SLICE
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end and not query.failed:
        panes.source = &panes.merge_part.table
        while panes.cursor < panes.source.capacity:
            entry = panes.source.entries + panes.cursor * query.layout.stride
            if (<uint64_t *> entry)[0] & ROWS_MASK and merge_key(query, panes, entry, <unsigned char *> merged) \
                    and is_due(panes, <unsigned char *> merged) \
                    and emit_entry(query, context, panes, group, <unsigned char *> merged) == STEP_WAIT:
                return STEP_WAIT
            panes.cursor += 1
            budget -= 1
            if budget == 0:
                return STEP_MORE
        next_part(panes)
    window_fired(query, panes)
    return STEP_DONE


cdef void pass_until(const Query *query, PaneSet *panes, int64_t moment) noexcept nogil:
    """Windows that end at or before the moment have fired, or have nothing to fire: rows that have no other are late."""
    cdef int64_t last = fs_minus(end_after(query, moment), query.slide)
    if moment == INT64_MIN:
        return
    if last > panes.fired_until:
        panes.fired_until = last
    if moment > panes.watermark:
        panes.watermark = moment
    panes.late_before = open_from(query, closed_until(query, panes))


cdef void settle(Query *query, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """Everything due has fired: forget what no window needs, and set the bound for late rows.

    INT64_MAX is the end of the stream. It closes what fired and nothing else, however often it is said: a later session
    may go on with later windows.
    """
    cdef uint32_t n = 0
    if watermark == INT64_MAX:
        watermark = panes.fired_until
        if watermark > query.ended_until:
            fs_store_relaxed(<uint64_t *> &query.ended_until, <uint64_t> watermark)
    pass_until(query, panes, watermark)
    if panes.watermark == INT64_MIN:
        return
    while n < panes.n and last_end(query, panes.panes[n].start) <= fs_minus(panes.watermark, query.lateness):
        n += 1
    if n:
        drop_panes(query, context.arena, panes, n)


cdef void close_until(Query *query, int64_t end) noexcept nogil:
    """Nobody is left who sends, and windows up to `end` have fired somewhere: they are closed in every group.

    Groups of other workers too: one of them may be adopted here, from a worker that has not heard of it. A group that
    still has such a window to fire is left alone.
    """
    cdef uint32_t g
    cdef int64_t due
    for g in range(query.groups):
        if not next_due(query, &query.sets[g], INT64_MAX, &due) or due > end:
            pass_until(query, &query.sets[g], end)


cdef Step query_fire(Query *query, Context *context, uint32_t group, int64_t watermark) noexcept nogil:
    """One slice of firing what is due in the group at the watermark; INT64_MAX is the end of the stream.

    Call it again until STEP_DONE before the group gets another row or watermark.
    """
    cdef PaneSet *panes = &query.sets[group]
    cdef int64_t end = 0
    cdef Step step
    if panes.phase == PHASE_TAKE_OUT:
        step = take_out_slice(query, panes)
    elif panes.phase == PHASE_MERGE:
        step = merge_slice(query, context, panes)
    elif panes.phase == PHASE_EMIT:
        step = emit_slice(query, context, panes, group)
    elif panes.phase == PHASE_SIDES:
        step = sides_slice(query, context, panes)
    elif panes.phase == PHASE_EMIT_UNMERGED:
        step = emit_unmerged_slice(query, context, panes, group)
    elif panes.dirty and next_revision(query, panes, &end):
        step = begin_window(query, context, panes, end, True)
    else:
        if panes.dirty:
            clear_dirty(query, panes)
        if not next_due(query, panes, watermark, &end):
            settle(query, context, panes, watermark)
            query.merged_of = NULL              # rows may come between this firing and the next
            return STEP_DONE
        step = begin_window(query, context, panes, end, False)
    return STEP_WAIT if step == STEP_WAIT else STEP_MORE
