"""Builds the native graph of a query from its lowered plan: one operator, fed by one input."""

from libc.stdint cimport INT64_MAX, INT64_MIN, UINT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from flexstream.cython_ext.memory.allocator cimport Allocator
from flexstream.cython_ext.memory.blocks cimport output_bytes, output_destroy, output_init
from flexstream.cython_ext.operators.dense_front cimport DensePlan
from flexstream.cython_ext.includes.native cimport fs_load_relaxed, fs_store_release
from flexstream.cython_ext.operators.merging cimport layout_invertible
from flexstream.cython_ext.operators.firing cimport fire_windows
from flexstream.cython_ext.operators.graph cimport (
    EDGE_RESULTS, FS_BUCKETS, FS_PREDICATES, Input, InputCounters, Operator, fs_profile,
)
from flexstream.cython_ext.operators.pane cimport PaneSet
from flexstream.cython_ext.operators.panes cimport operator_init
from flexstream.cython_ext.operators.table cimport (
    FS_ORDERED, FS_RANKED, FS_SIDE, KEY_RAW, MAX_SIDES, USED_BIT, Layout, Side, fs_facts_of,
)
from flexstream.cython_ext.expressions.program cimport (
    BAD_CAST, BAD_DIVISION, BAD_OVERFLOW, program_build, program_free,
)
from flexstream.cython_ext.operators.rolling cimport KEPT_PANES, STACKED_PANES
from flexstream.cython_ext.operators.compiled_variant cimport variant_kernel
from flexstream.cython_ext.operators.windower cimport (
    end_after, first_end, follows, last_end, open_from, panes_of_window,
)

cdef extern from "fold_calls.h" nogil:
    int fs_fold_empty(uint32_t fold, uint64_t *slot) noexcept

RESULT_BLOCK_ROWS = 384
BLOCKS_PER_CHUNK = 4
FAILURES = {
    1: "an integer sum passed the range of int64",
    2: "rows of a group were taken by two workers at once, and order_hash needs them in one order; please report it",
}


cdef check_fold(fold):
    """Raises ValueError: there is no such fold, or it keeps more or less than that."""
    if fs_facts_of(fold.fold) == NULL:
        raise ValueError(f"there is no fold {fold.fold}")
    if fs_facts_of(fold.fold).slots != fold.slots:
        raise ValueError(f"fold {fold.fold} keeps {fs_facts_of(fold.fold).slots} slots, not {fold.slots}")


cdef build_layout(Layout *layout, lowered):
    cdef uint32_t at = 0
    cdef uint32_t slot
    layout.n_key_fields = len(lowered.key)
    for i, (offset, size, form) in enumerate(lowered.key):
        layout.key[i].offset = offset
        layout.key[i].size = size
        layout.key[i].form = form
        layout.key[i].at = at
        at += size
    layout.key_bytes = at
    layout.key_words = (at + 7) // 8
    layout.simple_key = len(lowered.key) == 1 and at == 8 and layout.key[0].form == KEY_RAW
    slot = 1 + layout.key_words
    layout.empty[0] = USED_BIT
    layout.n_aggregates = len(lowered.folds)
    for i, fold in enumerate(lowered.folds):
        check_fold(fold)
        layout.aggregates[i].fold = fold.fold
        layout.aggregates[i].register_ = fold.register
        layout.aggregates[i].by = fold.by
        layout.aggregates[i].slot = slot if fold.slots else 0
        fs_fold_empty(fold.fold, layout.empty + slot)
        slot += fold.slots
    layout.stride = slot * 8


cdef build_sides(Operator *op, lowered):
    """Tables of (key, one more word) beside the panes' own, for the aggregates that need one (side_tables.pxd)."""
    cdef uint32_t n = 0
    cdef Side *side
    chosen = [i for i, fold in enumerate(lowered.folds) if fs_facts_of(fold.fold).flags & FS_SIDE]
    if len(chosen) > <int> MAX_SIDES:
        raise ValueError(f"the query needs {len(chosen)} side tables, more than {<int> MAX_SIDES}")
    op.sides = <Side *> calloc(len(chosen) + 1, sizeof(Side))
    if op.sides == NULL:
        raise MemoryError("no memory for a query's side tables")
    for i in chosen:
        side = &op.sides[n]
        side.fold = lowered.folds[i].fold
        side.flags = fs_facts_of(side.fold).flags
        side.register_ = lowered.folds[i].register
        side.slot = op.layout.aggregates[<int> i].slot
        side.layout.key_words = op.layout.key_words + 1
        side.layout.key_bytes = 8 * side.layout.key_words
        side.layout.stride = 8 * (1 + side.layout.key_words)
        side.layout.empty[0] = USED_BIT
        if side.flags & (FS_ORDERED | FS_RANKED):       # the session's hash, or the next value of the key
            side.layout.stride += 8
        if side.flags & FS_ORDERED:
            op.ordered = True
        n += 1
    op.n_sides = n


cdef class QueryState:
    """`bound` and `lowered` say what to run; `max_chunks` is the cap on unread output."""

    def __cinit__(self, int query_id, bound, lowered, int groups, Allocator allocator, *, int max_chunks=64):
        self.op = <Operator *> calloc(1, sizeof(Operator))
        self.input = <Input *> calloc(1, sizeof(Input))
        if self.op == NULL or self.input == NULL:
            raise MemoryError("no memory for a query")
        self.bound = bound
        self.plans = []
        self.build_operator(query_id, lowered, groups)
        self.build_input(lowered)
        self.build_edge(allocator, max_chunks)

    cdef build_operator(self, int query_id, lowered, int groups):
        cdef Operator *op = self.op
        windower = self.bound.windower
        op.id = query_id
        op.groups = groups
        op.fire = fire_windows
        op.windower.size = windower.size
        op.windower.slide = windower.slide
        op.windower.pane = windower.pane
        op.windower.lateness = windower.lateness
        op.ended_until = INT64_MIN
        build_layout(&op.layout, lowered)
        build_sides(op, lowered)
        panes = panes_of_window(&op.windower)
        op.invertible = op.n_sides == 0 and layout_invertible(&op.layout)
        op.stacked = op.n_sides == 0 and not op.invertible and panes > STACKED_PANES
        op.keeps = (op.invertible or op.stacked) and panes > KEPT_PANES
        op.sets = <PaneSet *> calloc(groups, sizeof(PaneSet))
        if op.sets == NULL:
            raise MemoryError("no memory for a query's panes")
        operator_init(op)

    cdef build_input(self, lowered):
        cdef Input *input = self.input
        cdef uint32_t g
        source = self.bound.query.stream
        input.op = self.op
        input.port = self.op.n_inputs
        input.row_bytes = source.schema.row_bytes
        input.time_offset = source.time_field.offset
        input.kernel = variant_kernel
        input.counters.rows_before = UINT64_MAX
        self.program = program_build(lowered.instructions, lowered.registers, source.schema.row_bytes)
        input.program = self.program
        input.profile = <fs_profile *> calloc(1, sizeof(fs_profile))
        input.watermark = <int64_t *> calloc(self.op.groups, 8)
        if input.profile == NULL or input.watermark == NULL:
            raise MemoryError("no memory for a query's input")
        for g in range(self.op.groups):
            input.watermark[g] = INT64_MIN
        self.op.inputs[self.op.n_inputs] = input
        self.op.n_inputs += 1

    cdef build_edge(self, Allocator allocator, int max_chunks):
        cdef Operator *op = self.op
        result_bytes = 16 + op.layout.key_bytes + 8 * op.layout.n_aggregates + 8
        op.out.kind = EDGE_RESULTS
        if not output_init(&op.out.results, result_bytes, RESULT_BLOCK_ROWS, BLOCKS_PER_CHUNK, max_chunks,
                           allocator.wake_fd):
            raise MemoryError("no memory for a query's results")

    def __dealloc__(self):
        if self.op != NULL:
            output_destroy(&self.op.out.results)
            free(self.op.sets)
            free(self.op.sides)
            free(self.op)
        if self.input != NULL:
            free(self.input.profile)
            free(self.input.watermark)
            free(self.input)
        while self.plans:
            free(<void *> <size_t> self.plans.pop())
        program_free(self.program)

    def counters(self):
        cdef InputCounters *rows = &self.input.counters
        cdef Operator *op = self.op
        return {
            "rows": fs_load_relaxed(&rows.rows),
            "filtered": fs_load_relaxed(&rows.filtered),
            "late": fs_load_relaxed(&rows.late),
            "rejected": {
                "overflow": fs_load_relaxed(&rows.no_value[<int> BAD_OVERFLOW]),
                "division_by_zero": fs_load_relaxed(&rows.no_value[<int> BAD_DIVISION]),
                "cast": fs_load_relaxed(&rows.no_value[<int> BAD_CAST]),
                "time_range": fs_load_relaxed(&rows.time_range),
                "future": fs_load_relaxed(&rows.future),
                "state_full": fs_load_relaxed(&rows.state_full),
                "query_failed": fs_load_relaxed(&rows.after_failure),
            },
            "windows_fired": fs_load_relaxed(&op.counters.windows_fired),
            "results": fs_load_relaxed(&op.out.rows),
            "compiled_rows": fs_load_relaxed(&rows.compiled_rows),
            "outside": fs_load_relaxed(&rows.outside),
            "fresh_keys": fs_load_relaxed(&rows.fresh_keys),
            "timed_rows": fs_load_relaxed(&rows.timed_rows),
            "timed_ns": fs_load_relaxed(&rows.timed_ns),
            "open_windows": fs_load_relaxed(&op.counters.open_panes),
        }

    def accepted(self, received):
        """Of `received` rows of the stream on its worker, those that came after the query; none before it has come."""
        cdef uint64_t before = fs_load_relaxed(&self.input.counters.rows_before)
        return 0 if before == UINT64_MAX else received - before

    def cancel(self):
        """It fires nothing and takes no row from here on, whatever it is in the middle of; DROP_QUERY follows."""
        fs_store_release(&self.op.cancelled, 1)

    def restore(self, ends):
        """{group: the end of the last window that fired before a restart}. Before a worker has the query.

        What fired has fired: rows that have no later window are late.
        """
        cdef PaneSet *panes
        for group, end in ends.items():
            panes = &self.op.sets[<uint32_t> group]
            panes.watermark = panes.fired_until = panes.restored_until = end
            panes.late_before = open_from(&self.op.windower, panes.restored_until)

    def use_variant(self, size_t function):
        """Run the compiled variant from the next batch on; 0: the generic one. The code must stay loaded."""
        fs_store_release(&self.input.variant, function)

    def use_range(self, int64_t base, uint64_t size):
        """Panes that fill from now on have a dense array for keys from `base` to `base + size - 1`; 0: none."""
        cdef DensePlan *plan = NULL
        if size:
            if size > <uint64_t> 1 << 31:
                raise ValueError(f"a dense range of {size} keys is too large")
            plan = <DensePlan *> calloc(1, sizeof(DensePlan))
            if plan == NULL:
                raise MemoryError("no memory for a dense range")
            plan.base = <uint64_t> base
            plan.range = size
            self.plans.append(<size_t> plan)        # workers may read an older one at any time
        fs_store_release(&self.op.dense.plan, <size_t> plan)

    def clear_profile(self):
        """Before an instrumented variant runs; not while one does."""
        memset(self.input.profile, 0, sizeof(fs_profile))
        self.input.profile.least = INT64_MAX
        self.input.profile.most = INT64_MIN

    def profile(self):
        """What the instrumented variant has counted so far."""
        cdef fs_profile *profile = self.input.profile
        cdef int i
        return {
            "rows": fs_load_relaxed(&profile.rows),
            "passed": [fs_load_relaxed(&profile.passed[i]) for i in range(<int> FS_PREDICATES)],
            "keys": fs_load_relaxed(&profile.keys),
            "least": <int64_t> fs_load_relaxed(<uint64_t *> &profile.least),
            "most": <int64_t> fs_load_relaxed(<uint64_t *> &profile.most),
            "buckets": [fs_load_relaxed(&profile.bucket[i]) for i in range(<int> FS_BUCKETS)],
        }

    @property
    def output_bytes(self):
        """Memory for results on their way to the log. It is not part of the bound on window state."""
        return output_bytes(&self.op.out.results)

    @property
    def ordered(self):
        """Whether it needs a group's rows in the order of arrival."""
        return self.op.ordered

    @property
    def failed(self):
        """Why the query stopped, or None."""
        return FAILURES.get(fs_load_relaxed(&self.op.failed))

    @property
    def ended_until(self):
        """The last end of a window that fired when the stream had ended; None: there was none."""
        cdef int64_t end = <int64_t> fs_load_relaxed(<uint64_t *> &self.op.ended_until)
        return None if end == INT64_MIN else end

    def open_runs(self):
        """{group: [(first end, last end), ...]}: all windows that have rows and have not fired, in runs of windows that
        follow each other. Only when the worker has ended.
        """
        cdef PaneSet *panes
        cdef uint32_t g, i
        cdef int64_t first, last, low, high
        found = {}
        for g in range(self.op.groups):
            panes = &self.op.sets[g]
            runs = []
            low = high = INT64_MIN
            for i in range(panes.n):
                first = max(first_end(&self.op.windower, panes.panes[i].start),
                            end_after(&self.op.windower, panes.fired_until))
                last = last_end(&self.op.windower, panes.panes[i].start)
                if first > last:
                    continue
                if high == INT64_MIN or not follows(&self.op.windower, first, high):
                    if high != INT64_MIN:
                        runs.append((low, high))
                    low = first
                high = last
            if high != INT64_MIN:
                runs.append((low, high))
                found[g] = runs
        return found
