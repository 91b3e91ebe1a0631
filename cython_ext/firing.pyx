"""The firing: panes into result rows, in slices. A window that got late rows fires again, as a revision."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove

from flexstream.cython_ext.arena cimport ARENA_OK, ARENA_WAIT, ArenaStatus, arena_alloc, arena_release
from flexstream.cython_ext.blocks cimport Block, block_rows, output_block
from flexstream.cython_ext.includes.native cimport FS_TIME_LIMIT, fs_count, fs_store_relaxed
from flexstream.cython_ext.messages cimport RESULT_BLOCK
from flexstream.cython_ext.panes cimport (
    PHASE_EMIT, PHASE_MERGE, PHASE_NONE, STEP_DONE, STEP_MORE, STEP_WAIT, Context, PaneSet, Query, Revision,
    Step, drop_panes, end_after, first_end, floor_to, hand_over, last_end, next_due, pane_position,
)
from flexstream.cython_ext.partial cimport (
    DIRTY_BIT, ROWS_MASK, Table, entry_merge, entry_results, table_clear, table_init, table_locate,
)

cdef enum:
    FIRST_CAPACITY = 16
    SLICE = 4096              # entries merged between two quiescent points


cdef ArenaStatus count_firing(Context *context, PaneSet *panes, int64_t end, uint32_t *revision) noexcept nogil:
    """How often the window has fired before, and once more."""
    cdef uint32_t i = panes.n_revisions
    cdef void *memory
    cdef uint32_t capacity
    cdef ArenaStatus status
    while i > 0 and panes.revisions[i - 1].end > end:
        i -= 1
    if i > 0 and panes.revisions[i - 1].end == end:
        revision[0] = <uint32_t> panes.revisions[i - 1].fired
        panes.revisions[i - 1].fired += 1
        return ARENA_OK
    if panes.n_revisions == panes.revisions_capacity:
        capacity = panes.revisions_capacity * 2 if panes.revisions_capacity else 16
        status = arena_alloc(context.arena, capacity * sizeof(Revision), &memory)
        if status != ARENA_OK:
            return status
        if panes.revisions != NULL:
            memcpy(memory, panes.revisions, panes.n_revisions * sizeof(Revision))
            arena_release(context.arena, panes.revisions, panes.revisions_capacity * sizeof(Revision))
        panes.revisions = <Revision *> memory
        panes.revisions_capacity = capacity
    memmove(panes.revisions + i + 1, panes.revisions + i, (panes.n_revisions - i) * sizeof(Revision))
    panes.revisions[i].end = end
    panes.revisions[i].fired = 1
    panes.n_revisions += 1
    revision[0] = 0
    return ARENA_OK


cdef bint next_revision(Query *query, PaneSet *panes, int64_t *end) noexcept nogil:
    """The earliest fired window after `revised_until` that holds a dirty pane and may still change."""
    cdef uint32_t i
    cdef int64_t candidate, after
    cdef int64_t floor = panes.revised_until
    cdef bint found = False
    if panes.watermark > INT64_MIN + query.lateness and panes.watermark - query.lateness > floor:
        floor = panes.watermark - query.lateness
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
    for i in range(panes.n):
        if panes.panes[i].dirty:
            panes.panes[i].dirty = False
            for k in range(panes.panes[i].table.capacity):
                entry = <uint64_t *> (panes.panes[i].table.entries + k * query.layout.stride)
                entry[0] &= ~DIRTY_BIT
    panes.dirty = False
    panes.revised_until = INT64_MIN


cdef Step begin_window(Query *query, Context *context, PaneSet *panes, int64_t end, bint revising) noexcept nogil:
    cdef uint32_t first = pane_position(panes, end - query.size)
    cdef ArenaStatus status
    if query.merged.entries == NULL and query.pane < query.size:
        status = table_init(&query.merged, &query.layout, FIRST_CAPACITY, context.arena)
        if status != ARENA_OK:
            return STEP_WAIT
    panes.revision = 0
    if query.lateness > 0 and count_firing(context, panes, end, &panes.revision) != ARENA_OK:
        return STEP_WAIT
    panes.firing_end = end
    panes.revising = revising
    panes.cursor = 0
    if first + 1 >= panes.n or panes.panes[first + 1].start >= end:
        panes.source = &panes.panes[first].table
        panes.phase = PHASE_EMIT
    else:
        table_clear(&query.merged)
        panes.source = &query.merged
        panes.merge_next = first
        panes.phase = PHASE_MERGE
    return STEP_DONE


cdef Step merge_slice(Query *query, Context *context, PaneSet *panes) noexcept nogil:
    cdef Table *table
    cdef unsigned char *entry
    cdef unsigned char *into
    cdef ArenaStatus status
    cdef uint32_t budget = SLICE
    while panes.merge_next < panes.n and panes.panes[panes.merge_next].start < panes.firing_end:
        table = &panes.panes[panes.merge_next].table
        while panes.cursor < table.capacity:
            entry = table.entries + panes.cursor * query.layout.stride
            if (<uint64_t *> entry)[0] & ROWS_MASK:
                status = table_locate(&query.merged, &query.layout, <int64_t *> (entry + 8), NULL, 1, &into,
                                      context.arena)
                if status == ARENA_WAIT:
                    return STEP_WAIT
                if into == NULL:
                    fs_store_relaxed(&query.failed, 2)
                elif entry_merge(&query.layout, into, entry):
                    fs_store_relaxed(&query.failed, 1)
                budget -= 1
            panes.cursor += 1
            if budget == 0:
                return STEP_MORE
        panes.cursor = 0
        panes.merge_next += 1
    panes.phase = PHASE_EMIT
    panes.cursor = 0
    return STEP_DONE


cdef Step emit_slice(Query *query, Context *context, PaneSet *panes, uint32_t group) noexcept nogil:
    cdef unsigned char *entry
    cdef unsigned char *out
    cdef Block *block
    cdef uint64_t first
    cdef int64_t start = panes.firing_end - query.size
    cdef uint32_t key_bytes = query.layout.key_bytes
    cdef uint32_t emitted = 0
    while panes.cursor < panes.source.capacity and not query.failed:
        entry = panes.source.entries + panes.cursor * query.layout.stride
        first = (<uint64_t *> entry)[0]
        if first & ROWS_MASK and (not panes.revising or first & DIRTY_BIT):
            block = output_block(&query.results)
            if block == NULL:
                fs_count(&query.counters.results, emitted)
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
            emitted += 1
            if block.rows == block.capacity and not hand_over(&query.results, context, RESULT_BLOCK, query):
                block.rows -= 1         # the reader is behind: this row is written again
                fs_count(&query.counters.results, emitted - 1)
                return STEP_WAIT
        panes.cursor += 1
    fs_count(&query.counters.results, emitted)
    fs_count(&query.counters.windows_fired, 1)
    if panes.revising:
        panes.revised_until = panes.firing_end
    else:
        panes.fired_until = panes.firing_end
    panes.phase = PHASE_NONE
    return STEP_DONE


cdef void settle(Query *query, Context *context, PaneSet *panes, int64_t watermark) noexcept nogil:
    """Everything due has fired: forget what no window needs, and set the bound for late rows."""
    cdef uint32_t n = 0
    cdef int64_t passed = watermark
    if watermark == INT64_MAX:
        # End of stream: what fired is closed, but a later session may go on with later windows.
        passed = panes.fired_until
    elif watermark > -FS_TIME_LIMIT and end_after(query, watermark) - query.slide > panes.fired_until:
        panes.fired_until = end_after(query, watermark) - query.slide
    if passed > panes.watermark:
        panes.watermark = passed
    if panes.watermark <= -FS_TIME_LIMIT:
        return
    panes.late_before = floor_to(panes.watermark - query.size - query.lateness, query.slide) + query.slide
    while n < panes.n and last_end(query, panes.panes[n].start) <= panes.watermark - query.lateness:
        n += 1
    if n:
        drop_panes(query, context.arena, panes, n)
    n = 0
    while n < panes.n_revisions and panes.revisions[n].end <= panes.watermark - query.lateness:
        n += 1
    if n:
        panes.n_revisions -= n
        memmove(panes.revisions, panes.revisions + n, panes.n_revisions * sizeof(Revision))


cdef Step query_fire(Query *query, Context *context, uint32_t group, int64_t watermark) noexcept nogil:
    """One slice of firing what is due in the group at the watermark; INT64_MAX is the end of the stream.

    Call it again until STEP_DONE before the group gets another row or watermark.
    """
    cdef PaneSet *panes = &query.sets[group]
    cdef int64_t end = 0
    if panes.phase == PHASE_MERGE:
        return_step = merge_slice(query, context, panes)
        return return_step if return_step != STEP_DONE else STEP_MORE
    if panes.phase == PHASE_EMIT:
        return_step = emit_slice(query, context, panes, group)
        return return_step if return_step != STEP_DONE else STEP_MORE
    if panes.dirty:
        if next_revision(query, panes, &end):
            return_step = begin_window(query, context, panes, end, True)
            return return_step if return_step != STEP_DONE else STEP_MORE
        clear_dirty(query, panes)
    if next_due(query, panes, watermark, &end):
        return_step = begin_window(query, context, panes, end, False)
        return return_step if return_step != STEP_DONE else STEP_MORE
    settle(query, context, panes, watermark)
    return STEP_DONE
