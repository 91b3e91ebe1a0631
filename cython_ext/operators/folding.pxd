"""Parts of panes, folded into one, so that a group that is split or moved again and again does not keep a partial of each.

A part that came from another worker is linked to its pane at once (panes_absorb); its entries then go to the pane's own
table in slices, one at each turn of the worker's loop, when nothing fires. An entry that went over is left without rows,
which is not being there: so at any time the pane is the sum of its parts, and whoever fires, moves or lends it need not
know how far the folding is. Side tables follow the entries; a window of several parts counts its values anew when it fires,
so what a key's entry says of them matters only when the pane is one again. Nothing is folded when memory is at its cap.
"""

from libc.stdint cimport uint32_t

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.operators.graph cimport Operator
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet

cdef bint fold_slice(Operator *op, Arena *arena) noexcept nogil
cdef void rest(Operator *op, Arena *arena) noexcept nogil
