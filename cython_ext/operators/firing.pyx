"""The firing: panes into result rows, in slices. A window that got late rows fires again, as a revision."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_WAIT, ArenaStatus
from flexstream.cython_ext.operators.dense_pane cimport dense_settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_load_relaxed, fs_store_relaxed
from flexstream.cython_ext.operators.merging cimport SCAN, positions_in_use, table_merge
from flexstream.cython_ext.operators.edges cimport edge_row
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_MORE, STEP_WAIT, Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport (
    PHASE_CLEAN, PHASE_EMIT, PHASE_EMIT_NEWER, PHASE_EMIT_UNMERGED, PHASE_FLIP, PHASE_MERGE, PHASE_NONE, PHASE_RETIRE,
    Pane, PaneSet, Rolling,
)
from flexstream.cython_ext.operators.panes cimport closed_until, drop_panes, next_due, next_part, pane_position
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


cdef uint32_t count_firing(Operator *op, PaneSet *panes, int64_t end) noexcept nogil:
    """How often the window has fired before; counts this firing in all of its panes."""
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, end))
    cdef uint32_t last = pane_position(panes, end)
    cdef uint32_t before = 0
    cdef uint32_t k
    cdef Pane *pane
    for k in range(i, last):
        pane = panes.panes[k]
        if pane.fired[window_number(&op.windower, pane.start, end)] > before:
            before = pane.fired[window_number(&op.windower, pane.start, end)]
    for k in range(i, last):
        pane = panes.panes[k]
        pane.fired[window_number(&op.windower, pane.start, end)] = before + 1
    return before


cdef bint next_revision(Operator *op, PaneSet *panes, int64_t *end) noexcept nogil:
    """The earliest fired window after `revised_until` that holds a dirty pane and may still change."""
    cdef int64_t floor = max(closed_until(op, panes), panes.revised_until)
    cdef int64_t after
    cdef uint32_t i
    after = end_after(&op.windower, floor)
    i = pane_position(panes, max(panes.dirty_from, open_from(&op.windower, floor)))
    while i < panes.n and panes.panes[i].start <= panes.dirty_to:
        if panes.panes[i].dirty:
            end[0] = max(first_end(&op.windower, panes.panes[i].start), after)
            return end[0] <= panes.fired_until
        i += 1
    return False


cdef void begin_cleaning(PaneSet *panes) noexcept nogil:
    panes.merge_next = pane_position(panes, panes.dirty_from)
    panes.merge_part = panes.panes[panes.merge_next] if panes.merge_next < panes.n else NULL
    panes.cursor = 0
    panes.phase = PHASE_CLEAN


cdef Step clean_slice(Operator *op, PaneSet *panes) noexcept nogil:
    cdef uint32_t budget = SLICE
    cdef Table *table
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start <= panes.dirty_to:
        if panes.panes[panes.merge_next].dirty:
            table = &panes.merge_part.table
            while panes.cursor < table.capacity and budget:
                (<uint64_t *> (table.entries + panes.cursor * op.layout.stride))[0] &= ~DIRTY_BIT
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


cdef void give_up_merging(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    """There is no memory for it: parts are looked up in each other, key by key, which needs none."""
    if not panes.revising:
        rolling_release(op, context.arena, panes)
    go_to_pane(panes, window_start(&op.windower, panes.firing_end))
    while is_in_window(panes):
        dense_settle(op, context.arena, panes.panes[panes.merge_next])
        panes.merge_next += 1
    panes.unmerged = True
    after_merging(op, panes)


cdef Step begin_window(Operator *op, Context *context, PaneSet *panes, int64_t end, bint revising) noexcept nogil:
    cdef int64_t start = window_start(&op.windower, end)
    cdef uint32_t first = pane_position(panes, start)
    cdef ArenaStatus status
    cdef bint single = (first + 1 >= panes.n or panes.panes[first + 1].start >= end) and panes.panes[first].also == NULL
    panes.revising = revising
    panes.firing_end = end
    panes.unmerged = False
    panes.emitted = 0
    if not single:
        status = rolling_begin(op, context, panes, start)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if op.ordered:
            fs_store_relaxed(&op.failed, 2)      # rows of a group were taken by two workers at once
    panes.revision = count_firing(op, panes, end) if revises(&op.windower) else 0
    if single:
        dense_settle(op, context.arena, panes.panes[first])
        panes.source = &panes.panes[first].table
        panes.cursor = 0
        panes.phase = PHASE_EMIT
        if op.n_sides:
            sides_of_one(op, panes)
    elif status == ARENA_FULL:
        give_up_merging(op, context, panes)
    else:
        go_to_pane(panes, max(start, rolling_in_use(op, panes).until))
        panes.phase = PHASE_MERGE
    return STEP_DONE


cdef inline void after_merging(Operator *op, PaneSet *panes) noexcept nogil:
    """Entries are merged, or cannot be (`panes.unmerged`)."""
    cdef Rolling *rolling = rolling_in_use(op, panes)
    go_to_pane(panes, window_start(&op.windower, panes.firing_end))
    if panes.unmerged:
        panes.phase = PHASE_EMIT_UNMERGED
    else:
        panes.phase = PHASE_EMIT
        panes.source = &rolling.older
        if is_stacked(op, panes) and rolling.begin == rolling.middle:
            panes.source = &rolling.newer
    if op.n_sides:
        sides_begin(op, panes)


cdef Step merge_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil:
    cdef Rolling *rolling = rolling_in_use(op, panes)
    cdef Table *into = &rolling.newer if is_stacked(op, panes) else &rolling.older
    cdef Table *table
    cdef ArenaStatus status
    cdef uint32_t budget = SLICE
    cdef int problem = 0
    while is_in_window(panes):
        if panes.cursor == 0:
            dense_settle(op, context.arena, panes.panes[panes.merge_next])
        table = &panes.merge_part.table
        status = table_merge(into, &op.layout, table, &panes.cursor, &budget, context.arena, &problem)
        if problem:
            fs_store_relaxed(&op.failed, 1)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:
            give_up_merging(op, context, panes)
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
    after_merging(op, panes)
    return STEP_DONE


cdef Step emit_entry(Operator *op, Context *context, PaneSet *panes, uint32_t group,
                     const unsigned char *entry) noexcept nogil:
    """One result row. STEP_WAIT: the reader is behind, and nothing was written."""
    cdef unsigned char *out = edge_row(op, context)
    cdef int64_t start = window_start(&op.windower, panes.firing_end)
    cdef uint32_t key_bytes = op.layout.key_bytes
    if out == NULL:
        return STEP_WAIT
    memcpy(out, &start, 8)
    memcpy(out + 8, &panes.firing_end, 8)
    memcpy(out + 16, entry + 8, key_bytes)
    entry_results(&op.layout, entry, out + 16 + key_bytes)
    out += 16 + key_bytes + 8 * op.layout.n_aggregates
    memcpy(out, &group, 4)
    memcpy(out + 4, &panes.revision, 4)
    return STEP_DONE


cdef inline bint is_due(const PaneSet *panes, const unsigned char *entry) noexcept nogil:
    cdef uint64_t first = (<const uint64_t *> entry)[0]
    return (first & ROWS_MASK) != 0 and (not panes.revising or (first & DIRTY_BIT) != 0)


cdef void window_fired(Operator *op, PaneSet *panes) noexcept nogil:
    fs_count(&op.counters.windows_fired, 1)
    if panes.revising:
        panes.revised_until = panes.firing_end
    else:
        panes.fired_until = panes.firing_end
    panes.phase = PHASE_NONE


cdef const unsigned char *with_newer(Operator *op, PaneSet *panes, Rolling *rolling, const unsigned char *entry,
                                     unsigned char *merged) noexcept nogil:
    """What both tables have for the key of an entry of the one at hand; NULL: the other one has said it."""
    cdef const unsigned char *found
    cdef Table *other = &rolling.older if panes.phase == PHASE_EMIT_NEWER else &rolling.newer
    found = table_find(other, &op.layout, <const int64_t *> (entry + 8))
    if found == NULL or not (<const uint64_t *> found)[0] & ROWS_MASK:
        return entry
    if panes.phase == PHASE_EMIT_NEWER:
        return NULL
    memcpy(merged, entry, op.layout.stride)
    if entry_merge(&op.layout, merged, found):
        fs_store_relaxed(&op.failed, 1)
    return merged


cdef Step emit_slice(Operator *op, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    cdef uint64_t merged[MAX_ENTRY_WORDS]
    cdef uint32_t positions[SCAN]
    cdef Rolling *rolling = rolling_in_use(op, panes)
    cdef bint in_two = rolling != NULL and is_stacked(op, panes) and (panes.source == &rolling.older
                                                                        or panes.phase == PHASE_EMIT_NEWER)
    cdef uint32_t n, i
    cdef uint64_t end
    cdef uint64_t stop = panes.cursor + SLICE
    cdef const unsigned char *entry
    while panes.cursor < panes.source.capacity and not op.failed:
        if panes.cursor >= stop:
            return STEP_MORE
        end = panes.cursor + SCAN if panes.cursor + SCAN < panes.source.capacity else panes.source.capacity
        n = positions_in_use(&op.layout, panes.source, panes.cursor, end, positions)
        for i in range(n):
            entry = panes.source.entries + <uint64_t> positions[i] * op.layout.stride
            if in_two:
                entry = with_newer(op, panes, rolling, entry, <unsigned char *> merged)
            if entry != NULL and is_due(panes, entry) and emit_entry(op, context, panes, group, entry) == STEP_WAIT:
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
    window_fired(op, panes)
    return STEP_DONE


cdef bint merge_key(Operator *op, PaneSet *panes, const unsigned char *entry, unsigned char *into) noexcept nogil:
    """Entry and what later parts of the window have for its key, in `into`. False: an earlier part has the key."""
    cdef uint32_t i = pane_position(panes, window_start(&op.windower, panes.firing_end))
    cdef unsigned char *found
    cdef Pane *part
    cdef bint behind = False
    memcpy(into, entry, op.layout.stride)
    while i < panes.n and panes.panes[i].start < panes.firing_end:
        part = panes.panes[i]
        while part != NULL:
            if part == panes.merge_part:
                behind = True
            else:
                found = table_find(&part.table, &op.layout, <const int64_t *> (entry + 8))
                if found != NULL and (<uint64_t *> found)[0] & ROWS_MASK:
                    if not behind:
                        return False
                    if entry_merge(&op.layout, into, found):
                        fs_store_relaxed(&op.failed, 1)
            part = part.also
        i += 1
    sides_of_window(op, into)
    return True


cdef Step emit_unmerged_slice(Operator *op, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    """Part by part, key by key: slower than a merged table, and needs no memory."""
    cdef uint64_t merged[MAX_ENTRY_WORDS]
    cdef unsigned char *entry
    cdef uint32_t budget = SLICE
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end and not op.failed:
        panes.source = &panes.merge_part.table
        while panes.cursor < panes.source.capacity:
            entry = panes.source.entries + panes.cursor * op.layout.stride
            if (<uint64_t *> entry)[0] & ROWS_MASK and merge_key(op, panes, entry, <unsigned char *> merged) \
                    and is_due(panes, <unsigned char *> merged) \
                    and emit_entry(op, context, panes, group, <unsigned char *> merged) == STEP_WAIT:
                return STEP_WAIT
            panes.cursor += 1
            budget -= 1
            if budget == 0:
                return STEP_MORE
        next_part(panes)
    window_fired(op, panes)
    return STEP_DONE


cdef void pass_until(const Operator *op, PaneSet *panes, int64_t moment) noexcept nogil:
    """Windows that end at or before the moment have fired, or have nothing to fire: rows that have no other are late."""
    if moment == INT64_MIN:
        return
    panes.fired_until = max(panes.fired_until, last_end_until(&op.windower, moment))
    if moment > panes.watermark:
        panes.watermark = moment
    panes.late_before = open_from(&op.windower, closed_until(op, panes))


cdef bint drop_passed(Operator *op, Context *context, PaneSet *panes, int64_t moment) noexcept nogil:
    """Forget panes that no window after the moment needs, and no revision. False: there are more of them."""
    cdef int64_t needed = needed_from(&op.windower, moment)
    cdef uint32_t n = 0
    while n < panes.n and n < DROP_SLICE and panes.panes[n].start < needed:
        n += 1
    if n:
        drop_panes(op, context.arena, panes, n)
    return n < DROP_SLICE


cdef bint settle(Operator *op, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """Everything due has fired: forget what no window needs, and set the bound for late rows. False: call it again.

    INT64_MAX is the end of the stream. It closes what fired and nothing else, however often it is said: a later session
    may go on with later windows.
    """
    if watermark == INT64_MAX:
        watermark = panes.fired_until
        if watermark > op.ended_until:
            fs_store_relaxed(<uint64_t *> &op.ended_until, <uint64_t> watermark)
    pass_until(op, panes, watermark)
    if panes.watermark != INT64_MIN and not drop_passed(op, context, panes, panes.watermark):
        return False
    if panes.n == 0:
        rolling_release(op, context.arena, panes)
    return True


cdef void close_until(Operator *op, int64_t end) noexcept nogil:
    """Nobody is left who sends, and windows up to `end` have fired somewhere: they are closed in every group.

    Groups of other workers too: one of them may be adopted here, from a worker that has not heard of it. A group that
    still has such a window to fire is left alone.
    """
    cdef uint32_t g
    cdef int64_t due
    for g in range(op.groups):
        if not next_due(op, &op.sets[g], INT64_MAX, &due) or due > end:
            pass_until(op, &op.sets[g], end)


cdef Step fire_next(Operator *op, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """No window is firing: begin the next one, or settle what was left behind."""
    cdef int64_t end = 0
    cdef bint due
    if panes.dirty:
        if next_revision(op, panes, &end):
            return begin_window(op, context, panes, end, True)
        begin_cleaning(panes)
        return STEP_MORE
    due = next_due(op, panes, watermark, &end)
    if not due and not op.keeps:
        rolling_forget(op, context.arena, panes)     # rows may come between this firing and the next
    if rolling_begin_retiring(op, context.arena, panes):
        return STEP_MORE
    if due:
        rolling_compact(op, context, panes)
        drop_passed(op, context, panes, panes.fired_until)
        return begin_window(op, context, panes, end, False)
    return STEP_DONE if settle(op, context, panes, watermark) else STEP_MORE


cdef Step fire_windows(Operator *op, Context *context, uint32_t group, int64_t watermark) noexcept nogil:
    """One slice of firing what is due in the group at the watermark; INT64_MAX is the end of the stream.

    Call it again until STEP_DONE before the group gets another row or watermark.
    """
    cdef PaneSet *panes = &op.sets[group]
    cdef Step step
    if fs_load_relaxed(&op.cancelled):
        return STEP_DONE
    if panes.phase == PHASE_NONE:
        step = fire_next(op, context, panes, watermark)
        return STEP_MORE if step == STEP_DONE and panes.phase != PHASE_NONE else step
    if panes.phase == PHASE_MERGE:
        step = merge_slice(op, context, panes)
    elif is_of_sides(panes.phase):
        step = sides_slice(op, context, panes)
    elif panes.phase == PHASE_EMIT or panes.phase == PHASE_EMIT_NEWER:
        step = emit_slice(op, context, panes, group)
    elif panes.phase == PHASE_EMIT_UNMERGED:
        step = emit_unmerged_slice(op, context, panes, group)
    elif panes.phase == PHASE_RETIRE:
        step = rolling_retire_slice(op, context, panes, SLICE)
    elif panes.phase == PHASE_FLIP:
        step = rolling_flip_slice(op, context, panes, SLICE)
    else:
        step = clean_slice(op, panes)
    return STEP_WAIT if step == STEP_WAIT else STEP_MORE
