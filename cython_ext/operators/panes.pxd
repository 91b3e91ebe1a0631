"""A query's state on one worker: panes per group, the kernel that fills them, the firing that empties them.

All of it belongs to the worker's thread, but for the counters, which others may read at any time, `failed`, which
the worker writes, and the outputs' rings (blocks.pxd). How time is cut into panes and windows: windower.pxd.

Invariants:
- every pane of a set is one that an unfired window, or a window within its allowed lateness, still needs;
- a window whose end is at or before `fired_until` has fired, and fires again only as a revision;
- between the passing of a watermark and the end of the firing that it causes, no row is processed;
- a pane with `also` is the sum of its parts; only the first part takes rows.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.memory.blocks cimport Output
from flexstream.cython_ext.operators.dense_front cimport Dense, Front
from flexstream.cython_ext.operators.table cimport Layout, Side, Table
from flexstream.cython_ext.operators.windower cimport Windower, final_until, revises, windows_of_pane
from flexstream.cython_ext.expressions.program cimport Program, Scratch
from flexstream.cython_ext.memory.ring cimport Ring

cdef extern from "flexstream_abi.h" nogil:
    enum:
        FS_PREDICATES
        FS_BUCKETS
    ctypedef struct fs_profile:
        uint64_t rows
        uint64_t passed[FS_PREDICATES]
        uint64_t keys
        int64_t least
        int64_t most
        uint64_t bucket[FS_BUCKETS]

cdef enum Step:
    STEP_DONE = 0
    STEP_MORE = 1             # a slice is done; there is more to do
    STEP_WAIT = 2             # memory or a free block is needed first

cdef enum Phase:
    PHASE_NONE = 0
    PHASE_MERGE = 1           # panes that the window has and the one before it had not
    PHASE_SIDES = 2           # side tables of a window with several parts
    PHASE_EMIT = 3
    PHASE_EMIT_NEWER = 4      # keys that only `Rolling.newer` has
    PHASE_EMIT_UNMERGED = 5   # there was no memory to merge in
    PHASE_RETIRE = 6          # out of what was merged goes what no later window has
    PHASE_FLIP = 7            # `older` is used up: made anew of all panes that are left
    PHASE_CLEAN = 8           # revisions are out: entries are not dirty any more
    PHASE_SIDES_FORGET = 9    # before PHASE_SIDES: what parts say of their values, the window says anew
    PHASE_CHAIN = 10          # behind it: values to the keys that are to be ranked
    PHASE_RANK = 11           # their medians


cdef struct Pane:
    int64_t start
    Table table               # where rows go
    Front *front              # NULL, or a dense array before the table: dense_settle before you look at the table
    bint dirty
    Pane *also                # partials of the same pane that came from other workers; folded into it, or merged when it fires
    uint64_t folded           # of a part: how much of its table is in its pane's by now (folding.pxd)
    Table *sides              # [query.n_sides], without memory until they are used
    uint32_t *fired           # how often each of its windows has, by end; only with allowed lateness
    unsigned char *before     # NULL, or entries of `Rolling.older` as they were before the pane was added to it
    uint32_t n_before
    uint32_t before_room


cdef struct Rolling:          # the panes of a window, merged, to go on with when the next one fires (rolling.pxd)
    Table older
    Table newer
    int64_t begin             # panes that start at or after it and before `until` are in
    int64_t middle            # before it: in `older`; from it on: in `newer`
    int64_t until             # INT64_MIN: nothing is
    uint64_t live             # keys that the last window had


cdef struct PaneSet:
    Pane **panes              # by start
    uint32_t n
    uint32_t capacity         # of `room`
    Pane **room               # where `panes` has its memory; free places are before and behind it
    Pane *recent
    Pane *previous            # the one in use before `recent`
    uint32_t usual_keys       # of the pane that was dropped last
    int64_t watermark         # never goes back; rows are judged by it
    int64_t late_before       # event times below are late
    int64_t fired_until
    int64_t restored_until    # windows up to here fired before a restart: they have no state, and never change
    bint dirty                # some pane got a late row that fired windows must hear of
    int64_t dirty_from        # starts of the first and the last of them
    int64_t dirty_to
    Rolling *rolling          # NULL, or its own (Query.keeps)
    int64_t rolled_until      # rows before it go to panes that are merged there; INT64_MIN: none
    # the firing in progress
    int phase
    bint revising
    int64_t firing_end
    int64_t revised_until
    uint32_t revision
    uint32_t merge_next
    Pane *merge_part          # of the pane at merge_next
    bint unmerged             # PHASE_EMIT_UNMERGED comes next, not PHASE_EMIT
    uint32_t side             # the side tables under way
    bint side_merge           # they are merged; else looked up in each other, which needs no memory
    uint64_t cursor
    uint64_t emitted          # keys of the window so far
    Table *source


cdef struct Counters:
    uint64_t rows
    uint64_t filtered
    uint64_t late
    uint64_t no_value[4]      # rejected: an expression has no value for the row, by program.Bad
    uint64_t time_range       # rejected: event time out of range
    uint64_t future           # rejected: event time too far ahead of the clock
    uint64_t state_full       # rejected: no room for a new key or pane
    uint64_t after_failure    # rejected: the query had failed
    uint64_t windows_fired
    uint64_t results
    uint64_t open_panes
    uint64_t compiled_rows    # of `rows`, those that the compiled variant finished
    uint64_t outside          # of these, with a key outside of the dense range
    uint64_t fresh_keys       # keys that compiled code found new to their pane
    uint64_t timed_rows       # of these, in batches that were timed
    uint64_t timed_ns
    uint64_t rows_before      # rows of the stream that the worker had had when the query came; UINT64_MAX: it has not come


cdef struct Context:          # what a worker lends to kernels
    Arena *arena
    Scratch *scratch
    Ring *out
    uint64_t session          # of the batch's rows, and the sequence of the first: what `first` and `last` go by
    uint64_t sequence
    int64_t latest            # of the batch's stream: later event times are rejected
    uint32_t batch_from       # where in the batch the rows given to query.kernel begin
    uint32_t late_from        # and where in these the rows given to the generic variant begin
    uint32_t done             # rows that a kernel finished before STEP_WAIT
    bint unfolded             # some query has parts to fold


ctypedef Step (*Kernel)(Query *query, Context *context, PaneSet *panes, const unsigned char *rows,
                        uint32_t n) noexcept nogil


cdef struct Query:
    uint32_t id
    uint32_t groups
    uint32_t row_bytes
    uint32_t time_offset
    Windower windower         # its unit is that of the stream's time field, like that of all times here
    int64_t ended_until       # the last end of a window that fired when the stream had ended; others may read it
    Kernel kernel
    const Program *program
    Layout layout
    uint32_t n_sides
    Side *sides
    bint ordered              # needs rows in the order of arrival: never split, and a new owner waits for the old one
    PaneSet *sets             # one per group
    Output results
    Output late
    bint invertible           # what was merged can be taken out again
    bint stacked              # or is merged in two tables
    bint keeps                # a window has so many panes that each group keeps its own Rolling between firings
    Rolling rolling           # of one group at a time: nobody fires while another's windows do
    PaneSet *rolling_of       # NULL, or which; forgotten when all that was due has fired
    bint unfolded             # some pane has parts (folding.pxd); the folding goes on here:
    uint32_t fold_group
    int64_t fold_from
    Counters counters
    uint64_t failed           # 0, or why the query stopped
    uint64_t cancelled        # Python sets it, ahead of DROP_QUERY: what it has to say, nobody wants to know any more
    Dense dense
    uint64_t batches          # that compiled code was given
    uint64_t passing          # of 1024 rows lately, those that filters let pass
    fs_profile *profile       # what an instrumented variant counts into; Python owns it
    uint64_t variant          # the compiled variant's function, or 0; Python stores it (release), the worker loads it


cdef inline uint64_t pane_bytes(const Query *query) noexcept nogil:
    """Of a Pane, with its side tables and the counts of its windows behind it."""
    cdef uint64_t windows = windows_of_pane(&query.windower) if revises(&query.windower) else 0
    return sizeof(Pane) + query.n_sides * sizeof(Table) + windows * sizeof(uint32_t)


cdef inline int64_t closed_until(const Query *query, const PaneSet *panes) noexcept nogil:
    """Windows that end at or before this never change any more: beyond their lateness, or fired before a restart."""
    return max(final_until(&query.windower, panes.watermark), panes.restored_until)


cdef inline void next_part(PaneSet *panes) noexcept nogil:
    panes.cursor = 0
    panes.merge_part = panes.merge_part.also
    if panes.merge_part == NULL:
        panes.merge_next += 1
        if panes.merge_next < panes.n:
            panes.merge_part = panes.panes[panes.merge_next]


cdef inline void mark_dirty(PaneSet *panes, Pane *pane) noexcept nogil:
    """Windows of the pane that have fired are to hear of it."""
    pane.dirty = True
    if not panes.dirty or pane.start < panes.dirty_from:
        panes.dirty_from = pane.start
    if not panes.dirty or pane.start > panes.dirty_to:
        panes.dirty_to = pane.start
    panes.dirty = True


cdef void query_init(Query *query) noexcept nogil
cdef void query_release(Query *query, Arena *arena) noexcept nogil
cdef uint32_t pane_position(const PaneSet *panes, int64_t start) noexcept nogil
cdef ArenaStatus pane_get(Query *query, Context *context, PaneSet *panes, int64_t start, Pane **out) noexcept nogil
cdef void list_skip(PaneSet *panes, uint32_t n) noexcept nogil
cdef void list_release(Arena *arena, PaneSet *panes) noexcept nogil
cdef void before_release(const Query *query, Arena *arena, Pane *pane) noexcept nogil
cdef void drop_pane(Query *query, Arena *arena, Pane *pane) noexcept nogil
cdef void drop_panes(Query *query, Arena *arena, PaneSet *panes, uint32_t n) noexcept nogil
cdef void pane_absorb(Query *query, Context *context, Pane *pane, Pane *other) noexcept nogil
cdef bint panes_absorb(Query *query, Context *context, PaneSet *panes, PaneSet *others,
                       bint theirs_first) noexcept nogil
cdef void panes_reset(PaneSet *panes) noexcept nogil
cdef bint next_due(Query *query, PaneSet *panes, int64_t watermark, int64_t *end) noexcept nogil
cdef bint hand_over(Output *output, Context *context, uint32_t kind, Query *query) noexcept nogil
cdef bint query_flush(Query *query, Context *context) noexcept nogil
cdef bint query_has_late_room(Query *query, Context *context, uint32_t n) noexcept nogil
