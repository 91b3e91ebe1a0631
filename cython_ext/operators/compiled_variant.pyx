"""See compiled_variant.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.dense_pane cimport dense_front
from flexstream.cython_ext.operators.dense_front cimport Front
from flexstream.cython_ext.includes.native cimport (
    FS_TIME_LIMIT, fs_count, fs_load_acquire, fs_store_relaxed, fs_thread_cpu_ns,
)
from flexstream.cython_ext.operators.generic_variant cimport generic_kernel
from flexstream.cython_ext.operators.graph cimport (
    FS_BUCKETS, FS_PREDICATES, STEP_DONE, STEP_WAIT, Context, Input, Operator, Step,
)
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.table cimport Table
from flexstream.cython_ext.operators.windower cimport first_end, pane_end, revises

MAX_PREDICATES = FS_PREDICATES      # of a query that an instrumented variant counts
PROFILE_BUCKETS = FS_BUCKETS
ABI_BATCH = FS_ABI_BATCH
ABI_SIDES = FS_SIDES

cdef enum:
    GENERIC_ROWS = 64         # given to the generic variant at a stop: new keys and panes come in bunches
    TIMED_EVERY = 32          # of that many batches the clock is read for one
    TELLING = 256             # rows that say how many pass


cdef inline void show_pane(Operator *op, Context *context, PaneSet *panes, Pane *pane,
                           fs_pane_view *view) noexcept nogil:
    """A pane that rows may simply be added to. The generic variant marks one whose window has fired, and knows what to
    forget when rows come for one that was merged."""
    cdef Front *front
    cdef int64_t end
    view.start = 0
    view.span = 0
    view.range = 0
    if pane == NULL or pane.start < panes.rolled_until:
        return
    if revises(&op.windower) and first_end(&op.windower, pane.start) <= panes.fired_until:
        return
    view.start = pane.start if pane.start > -FS_TIME_LIMIT else -FS_TIME_LIMIT
    end = pane_end(&op.windower, pane.start)
    if end > context.latest + 1:       # later times are rejected, which the generic variant does
        end = context.latest + 1
    if end <= view.start:
        return
    view.span = <uint64_t> (end - view.start)
    view.entries = pane.table.entries
    view.mask = pane.table.capacity - 1
    view.shift = pane.table.shift
    view.limit = pane.table.limit
    view.multiplier = pane.table.multiplier
    view.reach = pane.table.reach
    view.used = &pane.table.used
    view.reserved = &pane.table.reserved
    front = dense_front(op, context, pane)
    if front != NULL:
        view.dense = front.array.entries
        view.base = front.array.base
        view.range = front.array.range
        view.touched = front.touched
        view.touched_limit = front.capacity


cdef inline void show_sides(const Operator *op, Pane *pane, fs_side_view *view) noexcept nogil:
    cdef const Table *table
    cdef uint32_t d
    if pane == NULL:
        return
    for d in range(op.n_sides):
        table = &pane.sides[d]
        view[d].entries = table.entries
        view[d].mask = table.capacity - 1
        view[d].shift = table.shift
        view[d].limit = table.limit
        view[d].multiplier = table.multiplier
        view[d].reach = table.reach
        view[d].used = &pane.sides[d].used


cdef inline uint32_t run_batch(Input *input, fs_variant run, const unsigned char *rows, uint32_t n,
                               fs_view *view) noexcept nogil:
    """The compiled variant over a batch, timed now and then."""
    cdef uint64_t started
    cdef uint32_t some
    input.batches += 1
    if input.batches % TIMED_EVERY:
        return run(rows, n, view)
    started = fs_thread_cpu_ns()     # not the wall clock: who waits for the core is not slow
    some = run(rows, n, view)
    fs_count(&input.counters.timed_ns, fs_thread_cpu_ns() - started)
    fs_count(&input.counters.timed_rows, some)
    return some


cdef Step variant_kernel(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil:
    """The compiled variant as far as it goes, the generic one for what it leaves, in row order.

    STEP_WAIT: `context.done` rows were finished; call again with the rest.
    """
    cdef Operator *op = input.op
    cdef fs_variant run = <fs_variant> <void *> fs_load_acquire(&input.variant)
    cdef fs_view view
    cdef uint32_t done = 0
    cdef uint32_t some
    context.done = 0
    if run == NULL or op.failed:
        return generic_kernel(input, context, panes, rows, n)
    view.overflow = 0
    view.empty = op.layout.empty
    view.profile = input.profile
    view.session = context.session
    while True:
        show_pane(op, context, panes, panes.recent, &view.pane[0])
        show_pane(op, context, panes, panes.previous, &view.pane[1])
        if op.n_sides:
            show_sides(op, panes.recent, view.side[0])
            show_sides(op, panes.previous, view.side[1])
        view.passing = input.passing
        view.sequence = context.sequence + context.batch_from + done
        some = run_batch(input, run, rows + <uint64_t> done * input.row_bytes, n - done, &view)
        if some:
            fs_count(&input.counters.rows, some)
            fs_count(&input.counters.filtered, view.filtered)
            fs_count(&input.counters.compiled_rows, some)
            fs_count(&input.counters.outside, view.outside)
            fs_count(&input.counters.fresh_keys, view.fresh)
            if view.overflow:
                fs_store_relaxed(&op.failed, 1)
        if some >= TELLING:
            input.passing = 1024 * (some - view.filtered) // some
        done += some
        if done == n:
            return STEP_DONE
        some = GENERIC_ROWS if n - done > GENERIC_ROWS else n - done
        context.late_from = done
        if generic_kernel(input, context, panes, rows + <uint64_t> done * input.row_bytes, some) == STEP_WAIT:
            context.late_from = 0
            context.done = done
            return STEP_WAIT
        context.late_from = 0
        done += some
        if done == n:
            return STEP_DONE


def abi_version():
    return FS_ABI_VERSION
