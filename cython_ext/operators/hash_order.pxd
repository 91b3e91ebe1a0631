"""Entries in a row of memory, in the order of their keys' hash by the golden ratio, then of the keys: that of images.

A table read slot by slot nearly is (insertion puts it right); one with another multiplier, or a dense front, is in no order
at all (a heap does, whose cost no choice of keys can change). Neither needs memory.
"""

from libc.stdint cimport uint64_t

from flexstream.cython_ext.operators.table cimport Layout

cdef bint comes_before(const Layout *layout, const uint64_t *a, const uint64_t *b) noexcept nogil
cdef uint64_t home_hash(const Layout *layout, const uint64_t *entry) noexcept nogil
cdef void sort_entries(const Layout *layout, unsigned char *entries, uint64_t n) noexcept nogil
