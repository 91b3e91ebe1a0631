"""The middle of a key's values, without sorting them: what `median` asks for when a window fires.

A value is an entry of a side table: [rows][key words, value][next]. All that a key has in its window are chained through
`next`, in whatever tables and parts they are, so that a window of several parts needs no memory either. A value that
several of them have is there several times, which is as good. The chain is cut in two by a pivot, values below it and
above it, again and again, and what cannot hold the middle is left behind: about three times the length of the chain in
all. Every third pivot is the middle between the least and the greatest value, so that no order of values, however chosen,
costs more than three passes for each of a value's bits. It stops after any value and goes on there.

A chain is good while nothing but the firing looks at the tables. It is made anew each time.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.table cimport Ranking, Side


cdef inline uint64_t **link_of(const Side *side, uint64_t *value) noexcept nogil:
    """Where a side entry has the next of its chain."""
    return <uint64_t **> (value + 1 + side.layout.key_words)


cdef inline void chain_value(const Side *side, uint64_t *entry, uint64_t *value) noexcept nogil:
    """`entry` is the key's."""
    cdef uint64_t **head = <uint64_t **> (entry + side.slot + 1)
    link_of(side, value)[0] = head[0]
    head[0] = value


cdef inline bint is_chained(const Side *side, const uint64_t *entry) noexcept nogil:
    return entry[side.slot + 1] != 0


cdef void ranking_begin(Side *side, uint64_t *entry) noexcept nogil
cdef bint ranking_slice(Side *side, uint32_t *budget) noexcept nogil
