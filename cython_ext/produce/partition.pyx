"""Rows in any order -> rows by group: a counting sort that copies each row once, without the GIL."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t

import numpy as np

from flexstream.cython_ext.produce.scatter cimport Cursor, scatter_for
from flexstream.cython_ext.wire.murmur3 cimport Grouping, KeyHasher, grouping_of, groups_of


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
    cursors_array = np.zeros(2 * groups, np.uintp)
    cdef uint16_t[::1] ids = ids_array
    cdef unsigned char[::1] out = out_array
    cdef uint64_t[::1] offsets = offsets_array
    cdef size_t[::1] cursors_memory = cursors_array
    cdef Cursor *cursors = <Cursor *> &cursors_memory[0]
    cdef Grouping grouping = grouping_of(&hasher.spec, groups)
    with nogil:
        groups_of(&grouping, &rows[0], row_bytes, n, &ids[0])
        for i in range(n):
            offsets[ids[i] + 1] += 1
        for i in range(groups):
            offsets[i + 1] += offsets[i]
            cursors[i].at = &out[0] + offsets[i] * row_bytes
            cursors[i].end = &out[0] + offsets[i + 1] * row_bytes
        scatter_for(row_bytes)(cursors, &ids[0], &rows[0], row_bytes, n)
    return out_array, offsets_array
