"""A pane, and the panes of one group: what windowed state looks like in memory.

All of it belongs to the thread of the worker that has the group. Who keeps and fires it: graph.pxd. How time is cut into
panes and windows: windower.pxd.

Invariants:
- every pane of a set is one that an unfired window, or a window within its allowed lateness, still needs;
- a window whose end is at or before `fired_until` has fired, and fires again only as a revision;
- between the passing of a watermark and the end of the firing that it causes, no row is processed;
- a pane with `also` is the sum of its parts; only the first part takes rows.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.dense_front cimport Front
from flexstream.cython_ext.operators.table cimport Table

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
    Table *sides              # [operator.n_sides], without memory until they are used
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
    Rolling *rolling          # NULL, or its own (Operator.keeps)
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
