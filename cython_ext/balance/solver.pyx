"""The balancer's solver; the contract is in solver.pxd, the objective in nic/balance/balancer.py."""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef enum:
    MAX_TRIES = 6          # fills with a growing slack; usually the second or third is the worse one that ends it
    MAX_PASSES = 12        # of local improvement after a fill or a kick
    KICKS = 12             # sizes of kicks in turn: leaving a near tie can take half of a small problem turned round

cdef double EPSILON = 1e-9  # an improvement smaller than this is rounding


cdef class Solver:
    """Scratch memory for one size of problem; `solve` may be called any number of times."""

    def __cinit__(self, int groups, int workers):
        if groups < 1 or workers < 1:
            raise ValueError(f"a solver needs at least one group and one worker, not {groups} and {workers}")
        self.groups = groups
        self.workers = workers
        self.problem.workers = workers
        self.problem.group = <int32_t *> calloc(groups, sizeof(int32_t))
        self.problem.weight = <double *> calloc(groups, sizeof(double))
        self.problem.start = <int32_t *> calloc(groups, sizeof(int32_t))
        self.problem.penalty = <double *> calloc(groups, sizeof(double))
        self.problem.active = <uint8_t *> calloc(workers, 1)
        self.problem.excess = <double *> calloc(workers, sizeof(double))
        self.problem.now.excess = <double *> calloc(workers, sizeof(double))
        self.problem.now.place = <int32_t *> calloc(groups, sizeof(int32_t))
        self.problem.best.excess = <double *> calloc(workers, sizeof(double))
        self.problem.best.place = <int32_t *> calloc(groups, sizeof(int32_t))
        if (self.problem.group == NULL or self.problem.weight == NULL or self.problem.start == NULL
                or self.problem.penalty == NULL or self.problem.active == NULL or self.problem.excess == NULL
                or self.problem.now.excess == NULL or self.problem.now.place == NULL
                or self.problem.best.excess == NULL or self.problem.best.place == NULL):
            raise MemoryError(f"no memory for a solver of {groups} groups and {workers} workers")

    def __dealloc__(self):
        free(self.problem.group)
        free(self.problem.weight)
        free(self.problem.start)
        free(self.problem.penalty)
        free(self.problem.active)
        free(self.problem.excess)
        free(self.problem.now.excess)
        free(self.problem.now.place)
        free(self.problem.best.excess)
        free(self.problem.best.place)

    @property
    def evaluations(self) -> int:
        """Candidate moves and swaps that the last call looked at."""
        return self.problem.evaluations

    @property
    def tries(self) -> int:
        return self.problem.tries

    def solve(self, const double[::1] weight not None, const int32_t[::1] placement not None,
              const uint8_t[::1] fixed not None, const uint8_t[::1] active not None,
              const double[::1] excess not None, int32_t[::1] result not None,
              *, double beta, int max_moves, long budget, uint32_t seed) -> float:
        """Write the new placement to `result`; returns its objective (squares + beta * moved). Releases the GIL.

        `excess` is each worker's load minus its target at the start, `fixed` the groups that must stay, `budget`
        about how many candidates may be looked at. Errors: ValueError when sizes or workers do not fit.
        """
        cdef Problem *p = &self.problem
        cdef int group, at, count = 0, busy = 0
        if (weight.shape[0] != self.groups or placement.shape[0] != self.groups or fixed.shape[0] != self.groups
                or result.shape[0] != self.groups or active.shape[0] != self.workers
                or excess.shape[0] != self.workers):
            raise ValueError(f"arrays do not fit a solver of {self.groups} groups and {self.workers} workers")
        for at in range(self.workers):
            busy += active[at] != 0
        if busy == 0:
            raise ValueError("a solver needs at least one active worker")
        for group in range(self.groups):
            if placement[group] < 0 or placement[group] >= self.workers:
                raise ValueError(f"group {group} is on worker {placement[group]}; there are {self.workers}")
            if not fixed[group]:
                p.group[count] = group
                p.weight[count] = weight[group]
                count += 1
        p.movable = count
        memcpy(p.active, &active[0], self.workers)
        memcpy(p.excess, &excess[0], self.workers * sizeof(double))
        memcpy(&result[0], &placement[0], self.groups * sizeof(int32_t))
        p.beta = beta
        p.max_moves = max_moves
        p.budget = budget
        p.random = seed * <uint32_t> 2654435761 + 1
        with nogil:
            sort_groups(p)
            for at in range(count):
                p.start[at] = placement[p.group[at]]
                p.penalty[at] = beta if p.active[p.start[at]] else 0.0
            solve_problem(p)
        for at in range(count):
            result[p.group[at]] = p.best.place[at]
        return cost(p, &p.best)


cdef void solve_problem(Problem *p) noexcept nogil:
    """Fills with more and more slack until one is worse; then kicks for as long as the budget lasts."""
    cdef int attempt, at, strength = 0
    cdef double slack = 0.0, mean = 0.0
    p.evaluations = 0
    p.tries = 0
    for at in range(p.movable):
        mean += p.weight[at]
    if p.movable > 0:
        mean /= p.movable
    restart(p)
    copy(p, &p.best, &p.now)
    for attempt in range(MAX_TRIES):
        if attempt > 0:
            restart(p)
        fill(p, slack)
        polish(p)
        p.tries += 1
        if cost(p, &p.now) < cost(p, &p.best) - EPSILON:
            copy(p, &p.best, &p.now)
        elif attempt > 0:
            break
        if p.evaluations >= p.budget:
            break
        slack = slack * 2.0 + mean * 0.5
    # Only small problems get here with a budget left: kicks are cheap there, and land near the optimum.
    while p.movable > 1 and p.workers > 1 and p.evaluations < p.budget:
        copy(p, &p.now, &p.best)
        kick(p, 2 + strength % KICKS)
        strength += 1
        polish(p)
        p.tries += 1
        if cost(p, &p.now) < cost(p, &p.best) - EPSILON:
            copy(p, &p.best, &p.now)


cdef inline double cost(Problem *p, const State *state) noexcept nogil:
    return state.squares + p.beta * state.moved


cdef inline void copy(Problem *p, State *target, const State *source) noexcept nogil:
    memcpy(target.place, source.place, p.movable * sizeof(int32_t))
    memcpy(target.excess, source.excess, p.workers * sizeof(double))
    target.moved = source.moved
    target.evacuated = source.evacuated
    target.least = source.least
    target.squares = source.squares


cdef void sort_groups(Problem *p) noexcept nogil:
    """Heaviest first, ties by number. Shell's sort: in place, and quick at this size."""
    cdef int gap = 1, at, back, group
    cdef double weight
    while gap < p.movable // 3:
        gap = gap * 3 + 1
    while gap > 0:
        for at in range(gap, p.movable):
            group = p.group[at]
            weight = p.weight[at]
            back = at
            while back >= gap and (p.weight[back - gap] < weight
                                   or (p.weight[back - gap] == weight and p.group[back - gap] > group)):
                p.weight[back] = p.weight[back - gap]
                p.group[back] = p.group[back - gap]
                back -= gap
            p.weight[back] = weight
            p.group[back] = group
        gap //= 3


cdef void restart(Problem *p) noexcept nogil:
    """Back to the start; then each group of an inactive worker, heaviest first, to the least loaded active one."""
    cdef int worker, at
    memcpy(p.now.place, p.start, p.movable * sizeof(int32_t))
    memcpy(p.now.excess, p.excess, p.workers * sizeof(double))
    p.now.moved = 0
    p.now.evacuated = 0
    p.now.squares = 0.0
    for worker in range(p.workers):
        p.now.squares += p.now.excess[worker] * p.now.excess[worker]
    find_least(p)
    for at in range(p.movable):
        if not p.active[p.now.place[at]] and may_leave(p, 1):
            relocate(p, at, p.now.least)


cdef inline void find_least(Problem *p) noexcept nogil:
    """Without branches on the numbers: which worker is the least is different every time."""
    cdef int worker, least = 0
    cdef double value = 1e300, candidate
    cdef bint smaller
    for worker in range(p.workers):
        candidate = p.now.excess[worker] if p.active[worker] else 1e301
        smaller = candidate < value
        least = worker if smaller else least
        value = candidate if smaller else value
    p.now.least = least


cdef inline void relocate(Problem *p, int at, int worker) noexcept nogil:
    cdef int source = p.now.place[at], start = p.start[at]
    cdef double weight = p.weight[at]
    cdef int change = (worker != start) - (source != start)
    p.now.squares += 2.0 * weight * (weight + p.now.excess[worker] - p.now.excess[source])
    p.now.excess[source] -= weight
    p.now.excess[worker] += weight
    p.now.place[at] = worker
    if p.active[start]:
        p.now.moved += change
    else:
        p.now.evacuated += change
    if worker == p.now.least:
        find_least(p)
    elif p.now.excess[source] < p.now.excess[p.now.least] and p.active[source]:
        p.now.least = source


cdef inline int departure(Problem *p, int at, int worker) noexcept nogil:
    """By how much the number of groups away from their start changes when this one goes to the worker."""
    return (worker != p.start[at]) - (p.now.place[at] != p.start[at])


cdef inline bint may_leave(Problem *p, int change) noexcept nogil:
    return change <= 0 or p.now.moved + p.now.evacuated + change <= p.max_moves


cdef void fill(Problem *p, double slack) noexcept nogil:
    """RSS++'s step: the heaviest groups of overloaded workers go to the least loaded one, unless either side would
    then be out by more than `slack` the other way."""
    cdef int at, source, target
    cdef double weight, gain
    for at in range(p.movable):
        source = p.now.place[at]
        target = p.now.least
        weight = p.weight[at]
        if p.now.excess[source] <= 0.0 or weight <= 0.0 or target == source or not p.active[source]:
            continue
        p.evaluations += 1
        if weight > p.now.excess[source] + slack or p.now.excess[target] + weight > slack:
            continue
        gain = (2.0 * weight * (p.now.excess[source] - p.now.excess[target] - weight)
                - p.penalty[at] * departure(p, at, target))
        if gain > EPSILON and may_leave(p, departure(p, at, target)):
            relocate(p, at, target)


cdef bint improve_by_moves(Problem *p) noexcept nogil:
    """One pass over all groups: each goes to the least loaded worker, or home, when that is better."""
    cdef int at, source, target, choice, change
    cdef double weight, gain, best_gain
    cdef bint improved = False
    for at in range(p.movable):
        source = p.now.place[at]
        if not p.active[source]:
            continue
        weight = p.weight[at]
        choice = -1
        best_gain = EPSILON
        target = p.now.least
        p.evaluations += 1
        if target != source:
            change = departure(p, at, target)
            gain = (2.0 * weight * (p.now.excess[source] - p.now.excess[target] - weight)
                    - p.penalty[at] * change)
            if gain > best_gain and may_leave(p, change):
                best_gain = gain
                choice = target
        target = p.start[at]
        if target != source and p.active[target]:
            gain = 2.0 * weight * (p.now.excess[source] - p.now.excess[target] - weight) + p.penalty[at]
            if gain > best_gain:
                choice = target
        if choice >= 0:
            relocate(p, at, choice)
            improved = True
    return improved


cdef bint improve_by_swaps(Problem *p) noexcept nogil:
    """One pass over pairs: a group of a fuller worker changes places with a lighter one of an emptier worker.

    Lighter groups come later, so the difference in weight only grows along the inner loop, and past the difference
    to the least loaded worker no swap can gain.
    """
    cdef int at, other, source, target, start, away, change, choice
    cdef double weight, penalty, difference, gain, best_gain, from_excess, reach
    cdef bint improved = False
    for at in range(p.movable):
        if p.evaluations >= p.budget:
            break
        source = p.now.place[at]
        if not p.active[source]:
            continue
        weight = p.weight[at]
        penalty = p.penalty[at]
        start = p.start[at]
        away = source != start
        from_excess = p.now.excess[source]
        reach = from_excess - p.now.excess[p.now.least]
        choice = -1
        best_gain = EPSILON
        other = at + 1
        while other < p.movable:
            difference = weight - p.weight[other]
            if difference >= reach and difference > 0.0:
                break
            # Arithmetic instead of branches up to here: which pairs gain is a coin toss that no predictor wins.
            target = p.now.place[other]
            gain = (2.0 * difference * (from_excess - p.now.excess[target] - difference)
                    - penalty * ((target != start) - away) - p.penalty[other] * departure(p, other, source))
            if gain > best_gain and p.active[target]:
                change = (target != start) - away + departure(p, other, source)
                if may_leave(p, change):
                    best_gain = gain
                    choice = other
            other += 1
        p.evaluations += other - at
        if choice >= 0:
            target = p.now.place[choice]
            relocate(p, at, target)
            relocate(p, choice, source)
            improved = True
    return improved


cdef void polish(Problem *p) noexcept nogil:
    cdef int done
    cdef bint moved, swapped
    for done in range(MAX_PASSES):
        moved = improve_by_moves(p)
        swapped = improve_by_swaps(p)
        if (not moved and not swapped) or p.evaluations >= p.budget:
            break


cdef inline uint32_t draw(Problem *p, int below) noexcept nogil:
    p.random = p.random * <uint32_t> 1664525 + <uint32_t> 1013904223
    return (p.random >> 8) % <uint32_t> below


cdef void kick(Problem *p, int strength) noexcept nogil:
    """Some groups go somewhere at random: the way out of a local optimum."""
    cdef int done, at, worker
    for done in range(strength):
        at = draw(p, p.movable)
        worker = (p.now.place[at] + 1 + draw(p, p.workers - 1)) % p.workers
        if (p.active[worker] and p.active[p.now.place[at]]
                and may_leave(p, departure(p, at, worker))):
            relocate(p, at, worker)
