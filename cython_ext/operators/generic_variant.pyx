"""The generic variant: rows of one group, a batch at a time, through the program into panes."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport ARENA_FULL, ARENA_OK, ARENA_WAIT, ArenaStatus
from flexstream.cython_ext.operators.dense_pane cimport dense_settle_all
from flexstream.cython_ext.includes.native cimport FS_TIME_LIMIT, fs_count, fs_i64, fs_store_relaxed
from flexstream.cython_ext.operators.late_marks cimport mark_late
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_WAIT, Context, Input, Operator, Step
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.panes cimport mark_dirty, pane_get, pane_position
from flexstream.cython_ext.operators.table cimport DIRTY_BIT, Origin, pack_keys, table_apply, table_locate
from flexstream.cython_ext.expressions.program cimport BATCH, Scratch, drop_bad, program_run
from flexstream.cython_ext.operators.rolling cimport rolling_forget
from flexstream.cython_ext.operators.side_tables cimport sides_apply, sides_locate
from flexstream.cython_ext.operators.windower cimport first_end, pane_end, pane_of, revises


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


cdef uint32_t drop_homeless(Scratch *scratch, uint32_t m, uint32_t n_registers, uint32_t n_sides) noexcept nogil:
    """Drop rows for which there was no room (entry NULL)."""
    cdef uint32_t i, d
    cdef uint32_t out = 0
    for i in range(m):
        scratch.bad[i] = scratch.entry[i] == NULL
        if not scratch.bad[i]:
            scratch.entry[out] = scratch.entry[i]
            for d in range(n_sides):
                scratch.side[d * BATCH + out] = scratch.side[d * BATCH + i]
            out += 1
    return drop_bad(scratch, m, n_registers)


cdef ArenaStatus locate_across_panes(Operator *op, Context *context, PaneSet *panes, uint32_t m) noexcept nogil:
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
        start = pane_of(&op.windower, scratch.time[scratch.todo[0]])
        n = 0
        kept = 0
        for i in range(left):
            if start <= scratch.time[scratch.todo[i]] < pane_end(&op.windower, start):
                scratch.which[n] = scratch.todo[i]
                n += 1
            else:
                scratch.todo[kept] = scratch.todo[i]
                kept += 1
        left = kept
        status = pane_get(op, context, panes, start, &pane)
        if status == ARENA_OK:
            status = table_locate(&pane.table, &op.layout, scratch.keys, scratch.which, n, scratch.entry,
                                  context.arena)
        elif status == ARENA_FULL:
            for i in range(n):
                scratch.entry[scratch.which[i]] = NULL
        if status == ARENA_WAIT:
            return ARENA_WAIT
        if status == ARENA_FULL:
            worst = ARENA_FULL
    return worst


cdef ArenaStatus locate(Operator *op, Context *context, PaneSet *panes, uint32_t m, int64_t earliest,
                        int64_t latest) noexcept nogil:
    cdef Scratch *scratch = context.scratch
    cdef Pane *pane = panes.recent
    cdef int64_t start
    cdef ArenaStatus status
    cdef uint32_t i
    if pane == NULL or earliest < pane.start or latest >= pane_end(&op.windower, pane.start):
        start = pane_of(&op.windower, earliest)
        if latest >= pane_end(&op.windower, start):
            return locate_across_panes(op, context, panes, m)
        status = pane_get(op, context, panes, start, &pane)
        if status == ARENA_FULL:
            for i in range(m):
                scratch.entry[i] = NULL
        if status != ARENA_OK:
            return status
    return table_locate(&pane.table, &op.layout, scratch.keys, NULL, m, scratch.entry, context.arena)


cdef void mark_revisions(Operator *op, PaneSet *panes, Scratch *scratch, uint32_t m) noexcept nogil:
    """Entries that changed after a window of theirs had fired."""
    cdef uint32_t i
    cdef int64_t start
    for i in range(m):
        start = pane_of(&op.windower, scratch.time[i])
        if first_end(&op.windower, start) <= panes.fired_until:
            (<uint64_t *> scratch.entry[i])[0] |= DIRTY_BIT
            mark_dirty(panes, panes.panes[pane_position(panes, start)])


cdef Step generic_kernel(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil:
    """One batch of one group. STEP_WAIT: nothing was counted or marked; call again with the same rows.

    Assumes: n <= BATCH.
    """
    cdef Operator *op = input.op
    cdef Scratch *scratch = context.scratch
    cdef uint32_t n_registers = input.program.n_registers
    cdef uint32_t m, passed, n_late, i, in_time, homed
    cdef uint32_t n_future = 0
    cdef int64_t earliest = INT64_MAX
    cdef int64_t latest = INT64_MIN
    cdef int64_t t
    cdef ArenaStatus status, beside
    cdef Origin origin
    cdef const unsigned char *times = rows + input.time_offset
    if op.failed:
        fs_count(&input.counters.rows, n)
        fs_count(&input.counters.after_failure, n)
        return STEP_DONE
    m = program_run(input.program, rows, n, scratch)
    passed = m
    for i in range(m):
        t = fs_i64(times + <size_t> scratch.selected[i] * input.row_bytes)
        scratch.time[i] = t
        earliest = t if t < earliest else earliest
        latest = t if t > latest else latest
    if m and (earliest < -FS_TIME_LIMIT or latest > context.latest):
        for i in range(m):
            scratch.bad[i] = not -FS_TIME_LIMIT <= scratch.time[i] <= context.latest
            n_future += context.latest < scratch.time[i] <= FS_TIME_LIMIT
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
        if earliest < panes.rolled_until:
            rolling_forget(op, context.arena, panes)
        pack_keys(&op.layout, rows, input.row_bytes, scratch.selected, m, scratch.keys)
        status = locate(op, context, panes, m, earliest, latest)
        if status == ARENA_FULL and dense_settle_all(op, context.arena, panes):
            status = locate(op, context, panes, m, earliest, latest)     # keys that only a front had are there now
        if status != ARENA_WAIT and op.n_sides:
            beside = sides_locate(op, context, panes, m)
            status = status if beside == ARENA_OK else beside
        if status == ARENA_WAIT:
            return STEP_WAIT
        if status == ARENA_FULL:
            homed = drop_homeless(scratch, m, n_registers, op.n_sides)
        origin.time = scratch.time
        origin.selected = scratch.selected
        origin.session = context.session
        origin.sequence = context.sequence + context.batch_from + context.late_from
        if table_apply(&op.layout, scratch.registers, BATCH, homed, scratch.entry, &origin):
            fs_store_relaxed(&op.failed, 1)
        if op.n_sides:
            sides_apply(op, context, homed)
        if revises(&op.windower) and earliest < panes.fired_until:
            mark_revisions(op, panes, scratch, homed)
    if n_late:
        mark_late(context.marks, input.late_slot, panes.watermark, context.batch_from + context.late_from, scratch.late,
                  n_late)
        fs_count(&input.counters.late, n_late)
    fs_count(&input.counters.rows, n)
    fs_count(&input.counters.filtered, n - passed - scratch.bad_total)
    if scratch.bad_total:
        for i in range(1, 4):
            fs_count(&input.counters.no_value[i], scratch.bad_by_reason[i])
    fs_count(&input.counters.time_range, passed - in_time - n_future)
    fs_count(&input.counters.future, n_future)
    fs_count(&input.counters.state_full, m - homed)
    return STEP_DONE
