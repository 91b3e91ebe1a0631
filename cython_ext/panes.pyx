"""See panes.pxd. The firing is in firing.pxi's place below the kernel: one state, two directions."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from flexstream.cython_ext.arena cimport (
    ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus, arena_alloc, arena_release,
)
from flexstream.cython_ext.blocks cimport Block, Output, block_rows, output_block
from flexstream.cython_ext.includes.native cimport fs_count, fs_i64, fs_store_relaxed
from flexstream.cython_ext.messages cimport LATE_BLOCK, RESULT_BLOCK
from flexstream.cython_ext.partial cimport (
    DIRTY_BIT, ROWS_MASK, Table, entry_merge, entry_results, pack_keys, table_apply, table_clear, table_destroy,
    table_init, table_locate,
)
from flexstream.cython_ext.program cimport BATCH, Scratch, drop_bad, program_run
from flexstream.cython_ext.ring cimport Message, ring_push

cdef int64_t TIME_LIMIT = <int64_t> 1 << 62     # event times beyond it would overflow the window arithmetic

cdef enum:
    FIRST_CAPACITY = 16
    SLICE = 4096              # entries merged between two quiescent points


cdef inline int64_t floor_to(int64_t value, int64_t step) noexcept nogil:
    cdef int64_t rest = value % step
    return value - rest - (step if rest < 0 else 0)


cdef inline int64_t first_end(const Query *query, int64_t pane_start) noexcept nogil:
    """The end of the earliest window that holds the pane."""
    return -floor_to(-(pane_start + query.pane - query.size), query.slide) + query.size


cdef inline int64_t last_end(const Query *query, int64_t pane_start) noexcept nogil:
    return floor_to(pane_start, query.slide) + query.size


cdef inline int64_t end_after(const Query *query, int64_t moment) noexcept nogil:
    """The earliest window end later than `moment`."""
    if moment < -TIME_LIMIT:
        return INT64_MIN
    return floor_to(moment - query.size, query.slide) + query.slide + query.size


cdef void query_init(Query *query) noexcept nogil:
    cdef uint32_t g
    for g in range(query.groups):
        memset(&query.sets[g], 0, sizeof(PaneSet))
        query.sets[g].watermark = INT64_MIN
        query.sets[g].late_before = INT64_MIN
        query.sets[g].fired_until = INT64_MIN
        query.sets[g].revised_until = INT64_MIN


# Panes


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


cdef ArenaStatus pane_get(Query *query, Context *context, PaneSet *panes, int64_t start, Pane **out) noexcept nogil:
    cdef uint32_t at = pane_position(panes, start)
    cdef ArenaStatus status
    cdef void *memory
    cdef Pane *pane
    cdef uint32_t capacity
    if at < panes.n and panes.panes[at].start == start:
        out[0] = panes.panes[at]
        panes.recent = out[0]
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
    status = arena_alloc(context.arena, sizeof(Pane), &memory)
    if status != ARENA_OK:
        return status
    pane = <Pane *> memory
    memset(pane, 0, sizeof(Pane))
    pane.start = start
    status = table_init(&pane.table, &query.layout, FIRST_CAPACITY, context.arena)
    if status != ARENA_OK:
        arena_release(context.arena, pane, sizeof(Pane))
        return status
    memmove(panes.panes + at + 1, panes.panes + at, (panes.n - at) * sizeof(Pane *))
    panes.panes[at] = pane
    panes.n += 1
    panes.recent = pane
    fs_count(&query.counters.open_panes, 1)
    out[0] = pane
    return ARENA_OK


cdef void drop_panes(Query *query, Arena *arena, PaneSet *panes, uint32_t n) noexcept nogil:
    """Free the n oldest panes."""
    cdef uint32_t i
    for i in range(n):
        table_destroy(&panes.panes[i].table, arena)
        arena_release(arena, panes.panes[i], sizeof(Pane))
    panes.n -= n
    memmove(panes.panes, panes.panes + n, panes.n * sizeof(Pane *))
    panes.recent = NULL
    fs_count(&query.counters.open_panes, -<uint64_t> n)


cdef void query_release(Query *query, Arena *arena) noexcept nogil:
    """Give all state back to the arena: the query is being cancelled."""
    cdef uint32_t g
    cdef PaneSet *panes
    for g in range(query.groups):
        panes = &query.sets[g]
        if panes.panes != NULL:
            drop_panes(query, arena, panes, panes.n)
            arena_release(arena, panes.panes, panes.capacity * sizeof(Pane *))
        if panes.revisions != NULL:
            arena_release(arena, panes.revisions, panes.revisions_capacity * sizeof(Revision))
        memset(panes, 0, sizeof(PaneSet))
    if query.merged.entries != NULL:
        table_destroy(&query.merged, arena)


# The kernel: rows of one group into panes


cdef bint query_has_late_room(Query *query, Context *context, uint32_t n) noexcept nogil:
    """Room for n late rows in one block, so that a kernel never stops half-way."""
    cdef Block *block = output_block(&query.late)
    if block != NULL and block.capacity - block.rows < n:
        if not hand_over(&query.late, context, LATE_BLOCK, query):
            return False
        block = output_block(&query.late)
    return block != NULL


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


cdef void write_late(Query *query, Context *context, const unsigned char *rows, uint32_t n_late,
                     int64_t watermark) noexcept nogil:
    cdef Scratch *scratch = context.scratch
    cdef Block *block = query.late.open
    cdef unsigned char *out = block_rows(block) + <size_t> block.rows * block.row_bytes
    cdef uint32_t i
    for i in range(n_late):
        memcpy(out, rows + <size_t> scratch.late[i] * query.row_bytes, query.row_bytes)
        memcpy(out + query.row_bytes, &watermark, 8)
        out += block.row_bytes
        scratch.late_votes[scratch.late[i]] += 1
    block.rows += n_late
    context.late_any = True


cdef uint32_t split_late(PaneSet *panes, Scratch *scratch, uint32_t m, uint32_t n_registers,
                         uint32_t *n_late) noexcept nogil:
    cdef uint32_t i
    cdef uint32_t found = 0
    for i in range(m):
        if scratch.time[i] < panes.late_before:
            scratch.late[found] = scratch.selected[i]
            scratch.bad[i] = 1
            found += 1
    n_late[0] = found
    return drop_bad(scratch, m, n_registers)


cdef uint32_t drop_homeless(Scratch *scratch, uint32_t m, uint32_t n_registers) noexcept nogil:
    """Drop rows for which there was no room (entry NULL)."""
    cdef uint32_t i
    cdef uint32_t out = 0
    for i in range(m):
        scratch.bad[i] = scratch.entry[i] == NULL
        if not scratch.bad[i]:
            scratch.entry[out] = scratch.entry[i]
            out += 1
    return drop_bad(scratch, m, n_registers)


cdef ArenaStatus locate_across_panes(Query *query, Context *context, PaneSet *panes, uint32_t m) noexcept nogil:
    """Entries for rows that fall in several panes: one pass for each pane that the batch touches."""
    cdef Scratch *scratch = context.scratch
    cdef ArenaStatus status
    cdef ArenaStatus worst = ARENA_OK
    cdef uint32_t left = m
    cdef uint32_t n, kept, i
    cdef int64_t start
    cdef Pane *pane
    for i in range(m):
        scratch.todo[i] = i
    while left:
        start = floor_to(scratch.time[scratch.todo[0]], query.pane)
        n = 0
        kept = 0
        for i in range(left):
            if start <= scratch.time[scratch.todo[i]] < start + query.pane:
                scratch.which[n] = scratch.todo[i]
                n += 1
            else:
                scratch.todo[kept] = scratch.todo[i]
                kept += 1
        left = kept
        status = pane_get(query, context, panes, start, &pane)
        if status == ARENA_OK:
            status = table_locate(&pane.table, &query.layout, scratch.keys, scratch.which, n, scratch.entry,
                                  context.arena)
        elif status == ARENA_FULL:
            for i in range(n):
                scratch.entry[scratch.which[i]] = NULL
        if status == ARENA_WAIT:
            return ARENA_WAIT
        if status == ARENA_FULL:
            worst = ARENA_FULL
    return worst


cdef ArenaStatus locate(Query *query, Context *context, PaneSet *panes, uint32_t m, int64_t earliest,
                        int64_t latest) noexcept nogil:
    cdef Scratch *scratch = context.scratch
    cdef Pane *pane = panes.recent
    cdef int64_t start
    cdef ArenaStatus status
    cdef uint32_t i
    if pane == NULL or earliest < pane.start or latest >= pane.start + query.pane:
        start = floor_to(earliest, query.pane)
        if latest >= start + query.pane:
            return locate_across_panes(query, context, panes, m)
        status = pane_get(query, context, panes, start, &pane)
        if status == ARENA_FULL:
            for i in range(m):
                scratch.entry[i] = NULL
        if status != ARENA_OK:
            return status
    return table_locate(&pane.table, &query.layout, scratch.keys, NULL, m, scratch.entry, context.arena)


cdef void mark_revisions(Query *query, PaneSet *panes, Scratch *scratch, uint32_t m) noexcept nogil:
    """Entries that changed after a window of theirs had fired."""
    cdef uint32_t i
    cdef int64_t start
    for i in range(m):
        start = floor_to(scratch.time[i], query.pane)
        if first_end(query, start) <= panes.fired_until:
            (<uint64_t *> scratch.entry[i])[0] |= DIRTY_BIT
            panes.panes[pane_position(panes, start)].dirty = True
            panes.dirty = True


cdef Step generic_kernel(Query *query, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil:
    """One batch of one group. STEP_WAIT: nothing was counted; call again with the same rows.

    Assumes: n <= BATCH, and the late output's open block has room for n rows.
    """
    cdef Scratch *scratch = context.scratch
    cdef uint32_t n_registers = query.program.n_registers
    cdef uint32_t m, passed, n_late, i, in_time, homed
    cdef int64_t earliest = INT64_MAX
    cdef int64_t latest = INT64_MIN
    cdef int64_t t
    cdef ArenaStatus status
    cdef const unsigned char *times = rows + query.time_offset
    if query.failed:
        fs_count(&query.counters.rows, n)
        fs_count(&query.counters.after_failure, n)
        return STEP_DONE
    m = program_run(query.program, rows, n, scratch)
    passed = m
    for i in range(m):
        t = fs_i64(times + <size_t> scratch.selected[i] * query.row_bytes)
        scratch.time[i] = t
        earliest = t if t < earliest else earliest
        latest = t if t > latest else latest
    if m and (earliest < -TIME_LIMIT or latest > TIME_LIMIT):
        for i in range(m):
            scratch.bad[i] = not -TIME_LIMIT <= scratch.time[i] <= TIME_LIMIT
        m = drop_bad(scratch, m, n_registers)
    in_time = m
    n_late = 0
    if m and earliest < panes.late_before:
        m = split_late(panes, scratch, m, n_registers, &n_late)
    if in_time != passed or n_late:
        earliest = INT64_MAX
        latest = INT64_MIN
        for i in range(m):
            earliest = scratch.time[i] if scratch.time[i] < earliest else earliest
            latest = scratch.time[i] if scratch.time[i] > latest else latest
    homed = m
    if m:
        pack_keys(&query.layout, rows, query.row_bytes, scratch.selected, m, scratch.keys)
        status = locate(query, context, panes, m, earliest, latest)
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:
            homed = drop_homeless(scratch, m, n_registers)
        if table_apply(&query.layout, scratch.registers, BATCH, homed, scratch.entry):
            fs_store_relaxed(&query.failed, 1)
        if query.lateness > 0 and earliest < panes.fired_until:
            mark_revisions(query, panes, scratch, homed)
    if n_late:
        write_late(query, context, rows, n_late, panes.watermark)
        fs_count(&query.counters.late, n_late)
    fs_count(&query.counters.rows, n)
    fs_count(&query.counters.filtered, n - passed - scratch.bad_total)
    fs_count(&query.counters.no_value, scratch.bad_total)
    fs_count(&query.counters.bad_time, passed - in_time)
    fs_count(&query.counters.state_full, m - homed)
    return STEP_DONE


# The firing: panes into result rows


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


cdef int64_t first_open_end(Query *query, PaneSet *panes) noexcept nogil:
    """The end of the first window that has rows and has not fired; INT64_MAX: none."""
    cdef int64_t end
    if next_due(query, panes, INT64_MAX, &end):
        return end
    return INT64_MAX


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
    elif watermark > -TIME_LIMIT and end_after(query, watermark) - query.slide > panes.fired_until:
        panes.fired_until = end_after(query, watermark) - query.slide
    if passed > panes.watermark:
        panes.watermark = passed
    if panes.watermark <= -TIME_LIMIT:
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
