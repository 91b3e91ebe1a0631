"""The balancer's solver: which groups should change their worker, by the objective of `nic/balance/balancer.py`.

One `Solver` belongs to one thread at a time; it owns its scratch memory, allocated once in `__cinit__` and freed in
`__dealloc__`. Guarantees: `solve_problem` neither allocates nor takes the GIL, ends after a bounded number of
evaluations, gives the same answer for the same input and seed, and never a placement worse than the one given
(groups on inactive workers apart: those leave whatever it costs, as far as the cap on moves allows).
Assumes: weights are finite and not negative, workers are in range, at least one worker is active.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t

cdef struct State:
    double *excess                # per worker: load minus target
    int32_t *place                # per movable group, in the order of `Problem.group`: its worker
    int moved                     # groups away from an active start: what beta counts
    int evacuated                 # groups away from an inactive start
    int least                     # the active worker with the least excess
    double squares                # sum of excess^2


cdef struct Problem:
    int workers
    int movable                   # how many groups may move; they are kept heaviest first, ties by number
    int32_t *group                # their numbers
    double *weight                # their weights
    int32_t *start                # where they are
    double *penalty               # beta, or 0 for a group that has to leave an inactive worker
    uint8_t *active               # per worker
    double *excess                # of the start, groups that may not move included
    double beta
    int max_moves
    long budget                   # evaluations after which no new step begins
    long evaluations
    int tries
    uint32_t random
    State now
    State best


cdef class Solver:
    cdef readonly int groups
    cdef readonly int workers
    cdef Problem problem


cdef void solve_problem(Problem *p) noexcept nogil
