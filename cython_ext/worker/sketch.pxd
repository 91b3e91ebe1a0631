"""The heaviest keys of every group, from a sample of the rows: Space-Saving (Metwally and others, 2005).

A group has COUNTERS counters. A sampled key that has one is counted; another takes over the smallest, with that count
as its error: so `count - error` rows of the sample are surely the key's, and a key with more than 1/COUNTERS of the
rows is surely there. Counts are halved now and then, so that they speak of the recent past.

The worker's thread is the only writer; anybody may read. Words are stored relaxed; `version` is odd while the words
of a counter change hands, so a reader never pairs one key with the count of another.
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.wire.murmur3 cimport KeySpec

cdef enum:
    COUNTERS = 16
    HASHES = 2                    # a sketch, in words: version, rows sampled, COUNTERS hashes,
    COUNTS = HASHES + COUNTERS    # as many counts,
    ERRORS = COUNTS + COUNTERS    # errors,
    KEYS = ERRORS + COUNTERS      # and keys of `key_words`
    AGE_AT = 512                  # sampled rows of a group at which counts are halved
    SAMPLE_SHIFT = 21             # one row in 1024: gaps of 1 to 2048, at random; 0.1 ns per row


cdef struct Sketches:             # of one stream on one worker
    KeySpec key
    uint32_t groups
    uint32_t key_bytes
    uint32_t key_words
    uint32_t sketch_words
    uint64_t until                # rows before the next sampled one
    uint32_t random
    uint64_t *words               # [groups * sketch_words]
    unsigned char *key_room       # [key_bytes, whole words] the key of the row at hand


cdef void sample_rows(Sketches *sketches, uint32_t group, const unsigned char *rows, uint64_t n,
                      uint64_t row_bytes) noexcept nogil


cdef inline void sketch_rows(Sketches *sketches, uint32_t group, const unsigned char *rows, uint64_t n,
                             uint64_t row_bytes) noexcept nogil:
    """Behind each batch, while its rows are in the cache."""
    if sketches.until >= n:
        sketches.until -= n
    else:
        sample_rows(sketches, group, rows, n, row_bytes)


cdef class KeySketch:
    cdef Sketches sketches
    cdef object _key_dtype
    cdef object _names
