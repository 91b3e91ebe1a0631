"""See ranking.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.table cimport FS_REAL, ROWS_MASK, Ranking, Side

cdef extern from "flexstream_abi.h" nogil:
    int64_t fs_rank_of(uint64_t value, int real) noexcept
    uint64_t fs_middle(int64_t lower, int64_t upper, int real) noexcept

cdef enum:
    HALVED_EVERY = 3          # passes, of which the last goes by the range of values


cdef inline int64_t order_of(const Side *side, const uint64_t *value) noexcept nogil:
    return fs_rank_of(value[side.layout.key_words], side.flags & FS_REAL)


cdef void ranking_begin(Side *side, uint64_t *entry) noexcept nogil:
    """The median of the values that are chained to the key's entry; the chain is taken off it."""
    cdef Ranking *ranking = &side.ranking
    cdef uint64_t **head = <uint64_t **> (entry + side.slot + 1)
    ranking.entry = entry
    ranking.chain = head[0]
    ranking.at = head[0]
    ranking.counted = False
    ranking.rank = 0
    ranking.least = INT64_MAX
    ranking.greatest = INT64_MIN
    ranking.passes = 0
    head[0] = NULL


cdef void begin_pass(Side *side) noexcept nogil:
    cdef Ranking *ranking = &side.ranking
    ranking.at = ranking.chain
    ranking.below = NULL
    ranking.above = NULL
    ranking.rows_below = 0
    ranking.rows_equal = 0
    ranking.least_above = INT64_MAX
    ranking.passes += 1
    if ranking.passes % HALVED_EVERY:
        ranking.pivot = order_of(side, ranking.chain)
    else:
        ranking.pivot = ranking.least + <int64_t> ((<uint64_t> ranking.greatest - <uint64_t> ranking.least) >> 1)


cdef void count_rows(Side *side, uint32_t *budget) noexcept nogil:
    """How many rows there are, and between which values; `rank` counts them up to the end."""
    cdef Ranking *ranking = &side.ranking
    cdef int64_t order
    while ranking.at != NULL and budget[0]:
        order = order_of(side, ranking.at)
        ranking.rank += ranking.at[0] & ROWS_MASK
        ranking.least = min(ranking.least, order)
        ranking.greatest = max(ranking.greatest, order)
        ranking.at = link_of(side, ranking.at)[0]
        budget[0] -= 1
    if ranking.at == NULL:
        ranking.counted = True
        ranking.even = ranking.rank % 2 == 0
        ranking.rank = (ranking.rank - 1) // 2
        begin_pass(side)


cdef void cut_chain(Side *side, uint32_t *budget) noexcept nogil:
    """The values of this pass, each to its side of the pivot."""
    cdef Ranking *ranking = &side.ranking
    cdef uint64_t *value
    cdef int64_t order
    while ranking.at != NULL and budget[0]:
        value = ranking.at
        ranking.at = link_of(side, value)[0]
        order = order_of(side, value)
        if order < ranking.pivot:
            link_of(side, value)[0] = ranking.below
            ranking.below = value
            ranking.rows_below += value[0] & ROWS_MASK
        elif order > ranking.pivot:
            link_of(side, value)[0] = ranking.above
            ranking.above = value
            ranking.least_above = min(ranking.least_above, order)
        else:
            ranking.rows_equal += value[0] & ROWS_MASK
        budget[0] -= 1


cdef bint end_pass(Side *side) noexcept nogil:
    """True: the pivot is the lower of the middle values, and the median is said."""
    cdef Ranking *ranking = &side.ranking
    cdef int64_t upper = ranking.pivot
    if ranking.rank < ranking.rows_below:
        ranking.chain = ranking.below
        ranking.greatest = ranking.pivot - 1
        if ranking.rows_equal:
            ranking.following = ranking.pivot
        elif ranking.above != NULL:
            ranking.following = ranking.least_above
        return False
    if ranking.rank >= ranking.rows_below + ranking.rows_equal:
        ranking.rank -= ranking.rows_below + ranking.rows_equal
        ranking.chain = ranking.above
        ranking.least = ranking.least_above
        return False
    if ranking.even and ranking.rank + 1 == ranking.rows_below + ranking.rows_equal:
        upper = ranking.least_above if ranking.above != NULL else ranking.following
    ranking.entry[side.slot] = fs_middle(ranking.pivot, upper, side.flags & FS_REAL)
    ranking.entry = NULL
    return True


cdef bint ranking_slice(Side *side, uint32_t *budget) noexcept nogil:
    """Go on as far as the budget goes, a value each. True: the key's entry has its median."""
    cdef Ranking *ranking = &side.ranking
    if not ranking.counted:
        count_rows(side, budget)
    while ranking.counted:
        cut_chain(side, budget)
        if ranking.at != NULL:
            return False
        if end_pass(side):
            return True
        begin_pass(side)
    return False
