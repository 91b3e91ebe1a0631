"""The firing: panes into result rows, in slices. A window that got late rows fires again, as a revision."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_WAIT, ArenaStatus
from flexstream.cython_ext.memory.blocks cimport Block, block_rows, output_block
from flexstream.cython_ext.operators.dense_pane cimport dense_settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_load_relaxed, fs_store_relaxed
from flexstream.cython_ext.operators.merging cimport SCAN, positions_in_use, table_merge
from flexstream.cython_ext.memory.messages cimport RESULT_BLOCK
from flexstream.cython_ext.operators.panes cimport (
    PHASE_CLEAN, PHASE_EMIT, PHASE_EMIT_NEWER, PHASE_EMIT_UNMERGED, PHASE_FLIP, PHASE_MERGE, PHASE_NONE, PHASE_RETIRE,
    STEP_DONE, STEP_MORE, STEP_WAIT, Context, Pane, PaneSet, Query, Rolling, Step, closed_until,
    drop_panes, hand_over, next_due, next_part, pane_position,
)
from flexstream.cython_ext.operators.table cimport (
    DIRTY_BIT, MAX_ENTRY_WORDS, ROWS_MASK, Table, entry_merge, entry_results, table_find,
)
from flexstream.cython_ext.operators.rolling cimport (
    is_stacked, rolling_begin, rolling_begin_retiring, rolling_compact, rolling_flip_slice, rolling_forget,
    rolling_in_use, rolling_release, rolling_retire_slice,
)
from flexstream.cython_ext.operators.side_tables cimport (
    is_of_sides, sides_begin, sides_of_one, sides_of_window, sides_slice,
)
from flexstream.cython_ext.operators.windower cimport (
    end_after, first_end, last_end_until, needed_from, open_from, revises, window_number, window_start,
)

cdef enum:
    SLICE = 4096              # entries merged, moved or looked at between two quiescent points
    DROP_SLICE = 256          # panes dropped


cdef uint32_t count_firing(Query *query, PaneSet *panes, int64_t end) noexcept nogil:
    """How often the window has fired before; counts this firing in all of its panes."""
    cdef uint32_t i = pane_position(panes, window_start(&query.windower, end))
    cdef uint32_t last = pane_position(panes, end)
    cdef uint32_t before = 0
    cdef uint32_t k
    cdef Pane *pane
    for k in range(i, last):
        pane = panes.panes[k]
        if pane.fired[window_number(&query.windower, pane.start, end)] > before:
            before = pane.fired[window_number(&query.windower, pane.start, end)]
    for k in range(i, last):
        pane = panes.panes[k]
        pane.fired[window_number(&query.windower, pane.start, end)] = before + 1
    return before


cdef bint next_revision(Query *query, PaneSet *panes, int64_t *end) noexcept nogil:
    """The earliest fired window after `revised_until` that holds a dirty pane and may still change."""
    cdef int64_t floor = max(closed_until(query, panes), panes.revised_until)
    cdef int64_t after
    cdef uint32_t i
    after = end_after(&query.windower, floor)
    i = pane_position(panes, max(panes.dirty_from, open_from(&query.windower, floor)))
    while i < panes.n and panes.panes[i].start <= panes.dirty_to:
        if panes.panes[i].dirty:
            end[0] = max(first_end(&query.windower, panes.panes[i].start), after)
            return end[0] <= panes.fired_until
        i += 1
    return False


cdef void begin_cleaning(PaneSet *panes) noexcept nogil:
    panes.merge_next = pane_position(panes, panes.dirty_from)
    panes.merge_part = panes.panes[panes.merge_next] if panes.merge_next < panes.n else NULL
    panes.cursor = 0
    panes.phase = PHASE_CLEAN


cdef Step clean_slice(Query *query, PaneSet *panes) noexcept nogil:
    cdef uint32_t budget = SLICE
    cdef Table *table
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start <= panes.dirty_to:
        if panes.panes[panes.merge_next].dirty:
            table = &panes.merge_part.table
            while panes.cursor < table.capacity and budget:
                (<uint64_t *> (table.entries + panes.cursor * query.layout.stride))[0] &= ~DIRTY_BIT
                panes.cursor += 1
                budget -= 1
            if panes.cursor < table.capacity:
                return STEP_MORE
            if panes.merge_part.also == NULL:
                panes.panes[panes.merge_next].dirty = False
            next_part(panes)
        else:
            panes.merge_part = NULL
            panes.merge_next += 1
            if panes.merge_next < panes.n:
                panes.merge_part = panes.panes[panes.merge_next]
        budget = budget - 1 if budget else 0
        if budget == 0:
            return STEP_MORE
    panes.dirty = False
    panes.revised_until = INT64_MIN
    panes.phase = PHASE_NONE
    return STEP_MORE


cdef inline void go_to_pane(PaneSet *panes, int64_t start) noexcept nogil:
    """The next to be merged or looked through is the first that starts there or later."""
    panes.merge_next = pane_position(panes, start)
    panes.merge_part = panes.panes[panes.merge_next] if panes.merge_next < panes.n else NULL
    panes.cursor = 0


cdef inline bint is_in_window(const PaneSet *panes) noexcept nogil:
    return panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end


cdef void give_up_merging(Query *query, Context *context, PaneSet *panes) noexcept nogil:
    """There is no memory for it: parts are looked up in each other, key by key, which needs none."""
    if not panes.revising:
        rolling_release(query, context.arena, panes)
    go_to_pane(panes, window_start(&query.windower, panes.firing_end))
    while is_in_window(panes):
        dense_settle(query, context.arena, panes.panes[panes.merge_next])
        panes.merge_next += 1
    panes.unmerged = True
    after_merging(query, panes)


cdef Step begin_window(Query *query, Context *context, PaneSet *panes, int64_t end, bint revising) noexcept nogil:
    cdef int64_t start = window_start(&query.windower, end)
    cdef uint32_t first = pane_position(panes, start)
    cdef ArenaStatus status
    cdef bint single = (first + 1 >= panes.n or panes.panes[first + 1].start >= end) and panes.panes[first].also == NULL
    panes.revising = revising
    panes.firing_end = end
    panes.unmerged = False
    panes.emitted = 0
    if not single:
        status = rolling_begin(query, context, panes, start)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if query.ordered:
            fs_store_relaxed(&query.failed, 2)      # rows of a group were taken by two workers at once
    panes.revision = count_firing(query, panes, end) if revises(&query.windower) else 0
    if single:
        dense_settle(query, context.arena, panes.panes[first])
        panes.source = &panes.panes[first].table
        panes.cursor = 0
        panes.phase = PHASE_EMIT
        if query.n_sides:
            sides_of_one(query, panes)
    elif status == ARENA_FULL:
        give_up_merging(query, context, panes)
    else:
        go_to_pane(panes, max(start, rolling_in_use(query, panes).until))
        panes.phase = PHASE_MERGE
    return STEP_DONE


cdef inline void after_merging(Query *query, PaneSet *panes) noexcept nogil:
    """Entries are merged, or cannot be (`panes.unmerged`)."""
    cdef Rolling *rolling = rolling_in_use(query, panes)
    go_to_pane(panes, window_start(&query.windower, panes.firing_end))
    if panes.unmerged:
        panes.phase = PHASE_EMIT_UNMERGED
    else:
        panes.phase = PHASE_EMIT
        panes.source = &rolling.older
        if is_stacked(query, panes) and rolling.begin == rolling.middle:
            panes.source = &rolling.newer
    if query.n_sides:
        sides_begin(query, panes)


cdef Step merge_slice(Query *query, Context *context, PaneSet *panes) noexcept nogil:
    cdef Rolling *rolling = rolling_in_use(query, panes)
    cdef Table *into = &rolling.newer if is_stacked(query, panes) else &rolling.older
    cdef Table *table
    cdef ArenaStatus status
    cdef uint32_t budget = SLICE
    cdef int problem = 0
    while is_in_window(panes):
        if panes.cursor == 0:
            dense_settle(query, context.arena, panes.panes[panes.merge_next])
        table = &panes.merge_part.table
        status = table_merge(into, &query.layout, table, &panes.cursor, &budget, context.arena, &problem)
        if problem:
            fs_store_relaxed(&query.failed, 1)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:
            give_up_merging(query, context, panes)
            return STEP_MORE
        if panes.cursor < table.capacity:
            return STEP_MORE
        next_part(panes)
        budget = budget - 1 if budget else 0
        if budget == 0:
            return STEP_MORE
    rolling.until = panes.firing_end
    if rolling == panes.rolling:
        panes.rolled_until = rolling.until
    after_merging(query, panes)
    return STEP_DONE


cdef Step emit_entry(Query *query, Context *context, PaneSet *panes, uint32_t group,
                     const unsigned char *entry) noexcept nogil:
    """One result row. STEP_WAIT: the reader is behind, and nothing was written."""
    cdef Block *block = output_block(&query.results)
    cdef unsigned char *out
    cdef int64_t start = window_start(&query.windower, panes.firing_end)
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


cdef const unsigned char *with_newer(Query *query, PaneSet *panes, Rolling *rolling, const unsigned char *entry,
                                     unsigned char *merged) noexcept nogil:
    """What both tables have for the key of an entry of the one at hand; NULL: the other one has said it."""
    cdef const unsigned char *found
    cdef Table *other = &rolling.older if panes.phase == PHASE_EMIT_NEWER else &rolling.newer
    found = table_find(other, &query.layout, <const int64_t *> (entry + 8))
    if found == NULL or not (<const uint64_t *> found)[0] & ROWS_MASK:
        return entry
    if panes.phase == PHASE_EMIT_NEWER:
        return NULL
    memcpy(merged, entry, query.layout.stride)
    if entry_merge(&query.layout, merged, found):
        fs_store_relaxed(&query.failed, 1)
    return merged


cdef Step emit_slice(Query *query, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    cdef uint64_t merged[MAX_ENTRY_WORDS]
    cdef uint32_t positions[SCAN]
    cdef Rolling *rolling = rolling_in_use(query, panes)
    cdef bint in_two = rolling != NULL and is_stacked(query, panes) and (panes.source == &rolling.older
                                                                        or panes.phase == PHASE_EMIT_NEWER)
    cdef uint32_t n, i
    cdef uint64_t end
    cdef uint64_t stop = panes.cursor + SLICE
    cdef const unsigned char *entry
    while panes.cursor < panes.source.capacity and not query.failed:
        if panes.cursor >= stop:
            return STEP_MORE
        end = panes.cursor + SCAN if panes.cursor + SCAN < panes.source.capacity else panes.source.capacity
        n = positions_in_use(&query.layout, panes.source, panes.cursor, end, positions)
        for i in range(n):
            entry = panes.source.entries + <uint64_t> positions[i] * query.layout.stride
            if in_two:
                entry = with_newer(query, panes, rolling, entry, <unsigned char *> merged)
            if entry != NULL and is_due(panes, entry) and emit_entry(query, context, panes, group, entry) == STEP_WAIT:
                panes.cursor = positions[i]
                return STEP_WAIT
        panes.cursor = end
        panes.emitted += n
    if in_two and panes.phase == PHASE_EMIT:
        panes.source = &rolling.newer
        panes.cursor = 0
        panes.phase = PHASE_EMIT_NEWER
        return STEP_MORE
    if rolling != NULL and panes.source == &rolling.older:
        rolling.live = panes.emitted
    window_fired(query, panes)
    return STEP_DONE


cdef bint merge_key(Query *query, PaneSet *panes, const unsigned char *entry, unsigned char *into) noexcept nogil:
    """Entry and what later parts of the window have for its key, in `into`. False: an earlier part has the key."""
    cdef uint32_t i = pane_position(panes, window_start(&query.windower, panes.firing_end))
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
    if moment == INT64_MIN:
        return
    panes.fired_until = max(panes.fired_until, last_end_until(&query.windower, moment))
    if moment > panes.watermark:
        panes.watermark = moment
    panes.late_before = open_from(&query.windower, closed_until(query, panes))


cdef bint drop_passed(Query *query, Context *context, PaneSet *panes, int64_t moment) noexcept nogil:
    """Forget panes that no window after the moment needs, and no revision. False: there are more of them."""
    cdef int64_t needed = needed_from(&query.windower, moment)
    cdef uint32_t n = 0
    while n < panes.n and n < DROP_SLICE and panes.panes[n].start < needed:
        n += 1
    if n:
        drop_panes(query, context.arena, panes, n)
    return n < DROP_SLICE


cdef bint settle(Query *query, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """Everything due has fired: forget what no window needs, and set the bound for late rows. False: call it again.

    INT64_MAX is the end of the stream. It closes what fired and nothing else, however often it is said: a later session
    may go on with later windows.
    """
    if watermark == INT64_MAX:
        watermark = panes.fired_until
        if watermark > query.ended_until:
            fs_store_relaxed(<uint64_t *> &query.ended_until, <uint64_t> watermark)
    pass_until(query, panes, watermark)
    if panes.watermark != INT64_MIN and not drop_passed(query, context, panes, panes.watermark):
        return False
    if panes.n == 0:
        rolling_release(query, context.arena, panes)
    return True


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


cdef Step fire_next(Query *query, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """No window is firing: begin the next one, or settle what was left behind."""
    cdef int64_t end = 0
    cdef bint due
    if panes.dirty:
        if next_revision(query, panes, &end):
            return begin_window(query, context, panes, end, True)
        begin_cleaning(panes)
        return STEP_MORE
    due = next_due(query, panes, watermark, &end)
    if not due and not query.keeps:
        rolling_forget(query, context.arena, panes)     # rows may come between this firing and the next
    if rolling_begin_retiring(query, context.arena, panes):
        return STEP_MORE
    if due:
        rolling_compact(query, context, panes)
        drop_passed(query, context, panes, panes.fired_until)
        return begin_window(query, context, panes, end, False)
    return STEP_DONE if settle(query, context, panes, watermark) else STEP_MORE


cdef Step query_fire(Query *query, Context *context, uint32_t group, int64_t watermark) noexcept nogil:
    """One slice of firing what is due in the group at the watermark; INT64_MAX is the end of the stream.

    Call it again until STEP_DONE before the group gets another row or watermark.
    """
    cdef PaneSet *panes = &query.sets[group]
    cdef Step step
    if fs_load_relaxed(&query.cancelled):
        return STEP_DONE
    if panes.phase == PHASE_NONE:
        step = fire_next(query, context, panes, watermark)
        return STEP_MORE if step == STEP_DONE and panes.phase != PHASE_NONE else step
    if panes.phase == PHASE_MERGE:
        step = merge_slice(query, context, panes)
    elif is_of_sides(panes.phase):
        step = sides_slice(query, context, panes)
    elif panes.phase == PHASE_EMIT or panes.phase == PHASE_EMIT_NEWER:
        step = emit_slice(query, context, panes, group)
    elif panes.phase == PHASE_EMIT_UNMERGED:
        step = emit_unmerged_slice(query, context, panes, group)
    elif panes.phase == PHASE_RETIRE:
        step = rolling_retire_slice(query, context, panes, SLICE)
    elif panes.phase == PHASE_FLIP:
        step = rolling_flip_slice(query, context, panes, SLICE)
    else:
        step = clean_slice(query, panes)
    return STEP_WAIT if step == STEP_WAIT else STEP_MORE
