"""Builds the native state of a query from its lowered plan."""

from libc.math cimport INFINITY, NAN
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from flexstream.cython_ext.allocator cimport Allocator
from flexstream.cython_ext.blocks cimport output_destroy, output_init
from flexstream.cython_ext.includes.native cimport fs_load_relaxed, fs_store_release
from flexstream.cython_ext.panes cimport PaneSet, Query, first_open_end, query_init
from flexstream.cython_ext.partial cimport (
    FOLD_MAX_F, FOLD_MAX_I, FOLD_MIN_F, FOLD_MIN_I, KEY_RAW, USED_BIT, Layout,
)
from flexstream.cython_ext.program cimport BAD_CAST, BAD_DIVISION, BAD_OVERFLOW, BATCH, program_build, program_free
from flexstream.cython_ext.variant cimport variant_kernel

RESULT_BLOCK_ROWS = 384
BLOCKS_PER_CHUNK = 4
FAILURES = {1: "an integer sum passed the range of int64"}


cdef build_layout(Layout *layout, lowered):
    cdef uint32_t at = 0
    cdef uint32_t slot
    cdef double start
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
        layout.aggregates[i].fold = fold.fold
        layout.aggregates[i].register_ = fold.register
        layout.aggregates[i].slot = slot if fold.slots else 0
        if fold.fold == FOLD_MIN_I:
            layout.empty[slot] = <uint64_t> INT64_MAX
        elif fold.fold == FOLD_MAX_I:
            layout.empty[slot] = <uint64_t> INT64_MIN
        elif fold.fold == FOLD_MIN_F:
            start = NAN         # the greatest, so that any value replaces it
            memcpy(&layout.empty[slot], &start, 8)
        elif fold.fold == FOLD_MAX_F:
            start = -INFINITY
            memcpy(&layout.empty[slot], &start, 8)
        slot += fold.slots
    layout.stride = slot * 8


cdef class QueryState:
    """`bound` and `lowered` say what to run; `max_chunks` is the cap on unread output."""

    def __cinit__(self, int query_id, bound, lowered, int groups, Allocator allocator, *, int max_chunks=64,
                  int batch_bytes=65536):
        cdef Query *query = <Query *> calloc(1, sizeof(Query))
        if query == NULL:
            raise MemoryError("no memory for a query")
        self.query = query
        self.bound = bound
        stream = bound.query.stream
        self.program = program_build(lowered.instructions, lowered.registers, stream.schema.row_bytes)
        query.id = query_id
        query.groups = groups
        query.row_bytes = stream.schema.row_bytes
        query.time_offset = stream.time_field.offset
        query.size = bound.size
        query.slide = bound.slide
        query.pane = bound.pane
        query.lateness = bound.allowed_lateness
        query.disorder = stream.max_disorder
        query.kernel = variant_kernel
        query.program = self.program
        build_layout(&query.layout, lowered)
        query.sets = <PaneSet *> calloc(groups, sizeof(PaneSet))
        if query.sets == NULL:
            raise MemoryError("no memory for a query's panes")
        query_init(query)
        result_bytes = 16 + query.layout.key_bytes + 8 * query.layout.n_aggregates + 8
        late_rows = max(8, min(<int> BATCH, batch_bytes // <int> query.row_bytes))
        if not output_init(&query.results, result_bytes, RESULT_BLOCK_ROWS, BLOCKS_PER_CHUNK, max_chunks,
                           allocator.wake_fd):
            raise MemoryError("no memory for a query's results")
        if not output_init(&query.late, query.row_bytes + 8, late_rows, BLOCKS_PER_CHUNK, max_chunks,
                           allocator.wake_fd):
            raise MemoryError("no memory for a query's late rows")

    def __dealloc__(self):
        if self.query != NULL:
            output_destroy(&self.query.results)
            output_destroy(&self.query.late)
            free(self.query.sets)
            free(self.query)
        program_free(self.program)

    def counters(self):
        cdef Query *query = self.query
        return {
            "rows": fs_load_relaxed(&query.counters.rows),
            "filtered": fs_load_relaxed(&query.counters.filtered),
            "late": fs_load_relaxed(&query.counters.late),
            "rejected": {
                "overflow": fs_load_relaxed(&query.counters.no_value[<int> BAD_OVERFLOW]),
                "division_by_zero": fs_load_relaxed(&query.counters.no_value[<int> BAD_DIVISION]),
                "cast": fs_load_relaxed(&query.counters.no_value[<int> BAD_CAST]),
                "time_range": fs_load_relaxed(&query.counters.time_range),
                "state_full": fs_load_relaxed(&query.counters.state_full),
                "query_failed": fs_load_relaxed(&query.counters.after_failure),
            },
            "windows_fired": fs_load_relaxed(&query.counters.windows_fired),
            "results": fs_load_relaxed(&query.counters.results),
            "compiled_rows": fs_load_relaxed(&query.counters.compiled_rows),
            "open_windows": fs_load_relaxed(&query.counters.open_panes),
        }

    def use_variant(self, size_t function):
        """Run the compiled variant from the next batch on; 0: the generic one. The code must stay loaded."""
        fs_store_release(&self.query.variant, function)

    @property
    def failed(self):
        """Why the query stopped, or None."""
        return FAILURES.get(fs_load_relaxed(&self.query.failed))

    def open_ends(self):
        """{group: end of its first window that has rows and has not fired}. Only when the worker has ended."""
        cdef uint32_t g
        cdef int64_t end
        found = {}
        for g in range(self.query.groups):
            end = first_open_end(self.query, &self.query.sets[g])
            if end != INT64_MAX:
                found[g] = end
        return found
