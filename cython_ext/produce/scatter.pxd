"""Rows to the cursors of their groups: the copying half of scatter.h, which says what is guaranteed."""

from libc.stdint cimport int64_t, uint16_t

cdef extern from "scatter.h" nogil:
    ctypedef struct Cursor:
        unsigned char *at
        unsigned char *end
    ctypedef size_t (*scatter_fn)(Cursor *, const uint16_t *, const unsigned char *, size_t, size_t) noexcept
    scatter_fn scatter_for(size_t row_bytes) noexcept
    size_t scatter_block_rows(size_t row_bytes) noexcept
    int64_t scatter_max_time(const unsigned char *time, size_t stride, size_t n, int64_t most, int64_t latest) noexcept
