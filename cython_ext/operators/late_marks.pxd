"""Which rows of the batch under way are late, and for which queries of their stream.

While a batch runs through a stream's queries, each only marks the rows that it finds late. After the last of them every
marked row is written once, for all that marked it (late_output.pxd). Marks stay while the batch has to wait, and nobody
marks a row twice: a kernel marks rows when it finishes them.

A query's mark is a bit: the slot that it has in its stream on this worker, from ADD_QUERY to DROP_QUERY. All of it
belongs to the worker's thread.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.expressions.program cimport BATCH

cdef enum:
    MARK_BITS = 64


cdef struct LateMarks:
    bint any                  # some row has a mark
    bint mixed                # queries that marked rows do not have one watermark
    int64_t common            # else this is it
    int64_t watermark[MARK_BITS]  # [slot] of the queries that marked rows
    uint64_t mask[BATCH]      # [row of the batch]


cdef struct LateRow:          # what is behind a row's fields in the late output
    int64_t watermark
    uint64_t mask             # bits of slots
    uint32_t word             # which: with more queries than bits a row is written for each word that has some
    uint32_t group


cdef inline void mark_late(LateMarks *marks, uint32_t slot, int64_t watermark, uint32_t base, const uint32_t *rows,
                           uint32_t n) noexcept nogil:
    """Rows base + rows[0], ... of the batch are late for the query in the slot."""
    cdef uint32_t i
    if not marks.any:
        marks.any = True
        marks.mixed = False
        marks.common = watermark
    elif watermark != marks.common:
        marks.mixed = True
    marks.watermark[slot] = watermark
    for i in range(n):
        marks.mask[base + rows[i]] |= <uint64_t> 1 << slot


cdef inline uint64_t same_watermark(const LateMarks *marks, uint64_t mask, int64_t *watermark) noexcept nogil:
    """Of the slots in the mask, which is not 0, those that have the watermark of the first."""
    cdef uint64_t found = 0
    cdef uint32_t slot
    if not marks.mixed:
        watermark[0] = marks.common
        return mask
    for slot in range(MARK_BITS):
        if mask >> slot & 1:
            if found == 0:
                watermark[0] = marks.watermark[slot]
            if marks.watermark[slot] == watermark[0]:
                found |= <uint64_t> 1 << slot
    return found
