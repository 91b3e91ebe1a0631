"""Rows in any order -> rows by group: a counting sort that copies each row once, without the GIL."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from flexstream.cython_ext.wire.murmur3 cimport KeyHasher, KeySpec, group_of_hash, key_hash


cdef void scatter(const unsigned char *rows, uint64_t n, uint64_t row_bytes, const uint16_t *ids,
                  uint64_t *next_at, unsigned char *out) noexcept nogil:
    cdef uint64_t i
    for i in range(n):
        memcpy(out + next_at[ids[i]] * row_bytes, rows + i * row_bytes, row_bytes)
        next_at[ids[i]] += 1


def by_group(const unsigned char[::1] rows, uint64_t row_bytes, KeyHasher hasher, uint32_t groups):
    """(sorted rows as a uint8 array, offsets): the rows of group g are offsets[g] to offsets[g + 1].

    Stable: rows of a group keep their order.
    """
    cdef uint64_t n = rows.shape[0] // row_bytes
    cdef uint64_t i
    ids_array = np.empty(n, np.uint16)
    out_array = np.empty(n * row_bytes, np.uint8)
    offsets_array = np.zeros(groups + 1, np.uint64)
    if n == 0:
        return out_array, offsets_array
    cursor_array = np.zeros(groups, np.uint64)
    cdef uint16_t[::1] ids = ids_array
    cdef unsigned char[::1] out = out_array
    cdef uint64_t[::1] offsets = offsets_array
    cdef uint64_t[::1] cursor = cursor_array
    cdef KeySpec spec = hasher.spec
    with nogil:
        for i in range(n):
            ids[i] = group_of_hash(key_hash(&spec, &rows[i * row_bytes]), groups)
            offsets[ids[i] + 1] += 1
        for i in range(groups):
            offsets[i + 1] += offsets[i]
            cursor[i] = offsets[i]
        scatter(&rows[0], n, row_bytes, &ids[0], &cursor[0], &out[0])
    return out_array, offsets_array
