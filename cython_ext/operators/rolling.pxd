"""Sliding windows share most of their panes. A Rolling is a window's panes, merged, kept for the next window: the newest
panes go in, the oldest come out, and a firing costs what changes, not what the window holds.

What can be taken out again exactly (counts, integer sums) is in one table, `older`. Anything else is in two, like a queue
made of two stacks: new panes are merged into `newer`; when the oldest of these has to go, `older` is made anew of all that
are left, the last pane first, and each pane keeps the entries of `older` as they were before it was added (`Pane.before`).
So the oldest pane comes out by putting these back. Each pane is merged twice and put back once, however long the windows
are; what panes keep is no more than what they hold.

A pane that is in a Rolling must not change: rows that come for one (`PaneSet.rolled_until`) make it forgotten, and so does
another worker's part of one. Windows of few panes use one Rolling of the query in turns, forgotten after each firing;
windows of many have one for each group (Operator.keeps). Windows with side tables, those of a handful of panes that cannot be
taken out again, and revisions are merged anew each time.

All of it belongs to the worker. Where a function returns an ArenaStatus, nothing has changed unless it is ARENA_OK.
"""

from libc.stdint cimport int64_t, uint32_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport PaneSet, Rolling

cdef enum:
    STACKED_PANES = 8         # windows of fewer are merged anew each time: that is cheaper than two stacks
    KEPT_PANES = 16           # windows of more keep what was merged between firings


cdef inline bint is_stacked(const Operator *op, const PaneSet *panes) noexcept nogil:
    """Whether the window that fires is merged in two tables."""
    return op.stacked and not panes.revising


cdef inline Rolling *rolling_in_use(Operator *op, PaneSet *panes) noexcept nogil:
    """Where the window that fires is merged."""
    return &op.rolling if panes.revising or not op.keeps else panes.rolling


cdef ArenaStatus rolling_begin(Operator *op, Context *context, PaneSet *panes, int64_t start) noexcept nogil
cdef bint rolling_begin_retiring(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil
cdef Step rolling_retire_slice(Operator *op, Context *context, PaneSet *panes, uint32_t budget) noexcept nogil
cdef Step rolling_flip_slice(Operator *op, Context *context, PaneSet *panes, uint32_t budget) noexcept nogil
cdef void rolling_compact(Operator *op, Context *context, PaneSet *panes) noexcept nogil
cdef void rolling_forget(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil
cdef void rolling_release(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil
