"""Side tables: state whose size grows with the rows of a key, for `distinct`, `mode`, `median` and `order_hash`.

Compiled variants look up (key, value) by the same code (fs_find_beside), and leave room to be made here.

Each such aggregate has a table in every pane, of (key, value) or (key, session number), beside the pane's own table;
it moves, is dropped and is counted with the pane. An entry counts its rows in its first word; without rows it is not
there, as in the pane's table. What the aggregate says of one part of a pane is kept up in the key's own entry, by the
functions of its fold (folds.h), so that a window of one part fires as it is:
- distinct: [values in this part][values in the window, while it is counted without memory]
- mode: [the value that most rows have, and how many, in this part][the same in the window, counted without memory]
- order_hash: [sum of the sessions' hashes]; its side entries have a word more, the session's hash.
A window of several parts counts each value once: side tables are merged into one, and where there is no memory for
that, every value is looked for in the parts before. order_hash never has several parts (Operator.ordered).

- median: [the median of the window that fires][the key's values, chained]; its side entries have a word more, the next of
the chain. It needs the order of values, so nothing is kept up: a firing chains each key's values, of all parts, and looks
for the middle of each chain (ranking.pxd), without memory.
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport PHASE_RANK, PHASE_SIDES, PHASE_SIDES_FORGET, Pane, PaneSet
from flexstream.cython_ext.operators.table cimport Table


cdef inline bint is_of_sides(int phase) noexcept nogil:
    return phase == PHASE_SIDES or PHASE_SIDES_FORGET <= phase <= PHASE_RANK


cdef ArenaStatus sides_locate(Operator *op, Context *context, PaneSet *panes, uint32_t m) noexcept nogil
cdef void sides_apply(Operator *op, Context *context, uint32_t m) noexcept nogil
cdef void sides_begin(Operator *op, PaneSet *panes) noexcept nogil
cdef void sides_of_one(Operator *op, PaneSet *panes) noexcept nogil
cdef Step sides_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil
cdef void sides_of_window(const Operator *op, unsigned char *entry) noexcept nogil
cdef void forget_counts(Operator *op, Table *table) noexcept nogil
cdef uint64_t sides_slots(const Operator *op, const Pane *pane) noexcept nogil
cdef ArenaStatus sides_fold(Operator *op, Arena *arena, Pane *pane, Pane *part, uint64_t *at,
                            uint32_t *budget) noexcept nogil
cdef void sides_drop(const Operator *op, Arena *arena, Pane *pane) noexcept nogil
cdef void sides_release(Operator *op, Arena *arena) noexcept nogil
