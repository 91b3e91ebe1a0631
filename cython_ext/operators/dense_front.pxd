"""Dense fronts: entries by key - base in front of a pane's table, for queries whose keys are integers of a small range.

An array belongs to one span of event time and is shared by the panes of all groups there: a key has one group, so no
two panes use one place. What a pane has in it is listed in `touched`, `table.reserved` of them; the pane's table has
room for as many, so that moving them there (dense_settle) needs no memory and cannot fail. Whoever looks at a table,
to fire, merge, move or store it, settles its pane first; then a partial is the same, whatever variant made it.
All of it belongs to the worker's thread, but for `plan`, which Python stores (release) and never frees before the query.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef struct DensePlan:            # immutable
    uint64_t base
    uint64_t range


cdef struct DenseArray:
    uint64_t *entries             # all zero but for what panes have touched
    uint64_t bytes
    uint64_t base
    uint64_t range
    int64_t start                 # of the panes that use it
    uint32_t users
    DenseArray *next


cdef struct Front:
    DenseArray *array
    uint32_t *touched
    uint32_t capacity


cdef struct Dense:
    uint64_t plan                 # DensePlan *, or 0
    DenseArray *arrays            # in use
    DenseArray *spare
    uint32_t n_arrays             # of both
