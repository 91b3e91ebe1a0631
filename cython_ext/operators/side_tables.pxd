"""Side tables: state whose size grows with the rows of a key, for `distinct` and `order_hash`.

Compiled variants look up (key, value) by the same code for `distinct` (fs_find_beside), and leave room to be made here.

Each such aggregate has a table in every pane, of (key, value) or (key, session number), beside the pane's own table;
it moves, is dropped and is counted with the pane. An entry without rows is not there, as in the pane's table. What the
aggregate says of one part of a pane is kept up in the key's own entry, so that a window of one part fires as it is:
- distinct: [values in this part][values in the window, while it is counted without memory]
- order_hash: [sum of the sessions' hashes]; its side entries have a slot each, the session's hash.
A window of several parts counts each value once: side tables are merged into one, and where there is no memory for
that, every value is looked for in the parts before. order_hash never has several parts (Operator.ordered).
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.operators.graph cimport Context, Operator, Step
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.table cimport Table

cdef ArenaStatus sides_locate(Operator *op, Context *context, PaneSet *panes, uint32_t m) noexcept nogil
cdef void sides_apply(Operator *op, Context *context, uint32_t m) noexcept nogil
cdef void sides_begin(Operator *op, PaneSet *panes) noexcept nogil
cdef Step sides_slice(Operator *op, Context *context, PaneSet *panes) noexcept nogil
cdef void sides_of_window(const Operator *op, unsigned char *entry) noexcept nogil
cdef void forget_counts(Operator *op, Table *table, uint32_t at) noexcept nogil
cdef uint64_t sides_slots(const Operator *op, const Pane *pane) noexcept nogil
cdef ArenaStatus sides_fold(Operator *op, Arena *arena, Pane *pane, Pane *part, uint64_t *at,
                            uint32_t *budget) noexcept nogil
cdef void sides_drop(const Operator *op, Arena *arena, Pane *pane) noexcept nogil
cdef void sides_release(Operator *op, Arena *arena) noexcept nogil
