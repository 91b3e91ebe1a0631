"""See hash_order.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memmove

from flexstream.cython_ext.operators.table cimport MAX_ENTRY_WORDS, Layout, fs_hash_words

cdef extern from "flexstream_abi.h" nogil:
    const uint64_t FS_GOLDEN

cdef enum:
    SHIFTS_PER_ENTRY = 8      # insertion moves no more than that, on average, before a heap takes over


cdef uint64_t home_hash(const Layout *layout, const uint64_t *entry) noexcept nogil:
    if layout.key_words == 1:
        return entry[1] * FS_GOLDEN
    return fs_hash_words(entry + 1, <int> layout.key_words, FS_GOLDEN)


cdef bint comes_before(const Layout *layout, const uint64_t *a, const uint64_t *b) noexcept nogil:
    """False also for the same key."""
    cdef uint64_t first = home_hash(layout, a)
    cdef uint64_t second = home_hash(layout, b)
    cdef uint32_t w
    if first != second:
        return first < second
    for w in range(1, 1 + layout.key_words):
        if a[w] != b[w]:
            return a[w] < b[w]
    return False


cdef inline uint64_t *entry_at(const Layout *layout, unsigned char *entries, uint64_t i) noexcept nogil:
    return <uint64_t *> (entries + i * layout.stride)


cdef bint insert_all(const Layout *layout, unsigned char *entries, uint64_t n) noexcept nogil:
    """False: they are too far from their places; some are in order."""
    cdef uint64_t lifted[MAX_ENTRY_WORDS]
    cdef uint64_t shifts = 0
    cdef uint64_t i, j
    for i in range(1, n):
        if not comes_before(layout, entry_at(layout, entries, i), entry_at(layout, entries, i - 1)):
            continue
        memcpy(lifted, entry_at(layout, entries, i), layout.stride)
        j = i
        while j > 0 and comes_before(layout, lifted, entry_at(layout, entries, j - 1)):
            j -= 1
            shifts += 1
            if shifts > SHIFTS_PER_ENTRY * n:
                return False
        memmove(entry_at(layout, entries, j + 1), entry_at(layout, entries, j), (i - j) * layout.stride)
        memcpy(entry_at(layout, entries, j), lifted, layout.stride)
    return True


cdef void sift(const Layout *layout, unsigned char *entries, uint64_t hole, uint64_t n,
               const uint64_t *lifted) noexcept nogil:
    """The lifted entry into the heap of n, from the hole downwards."""
    cdef uint64_t child
    while 2 * hole + 1 < n:
        child = 2 * hole + 1
        if child + 1 < n and comes_before(layout, entry_at(layout, entries, child), entry_at(layout, entries, child + 1)):
            child += 1
        if not comes_before(layout, lifted, entry_at(layout, entries, child)):
            break
        memcpy(entry_at(layout, entries, hole), entry_at(layout, entries, child), layout.stride)
        hole = child
    memcpy(entry_at(layout, entries, hole), lifted, layout.stride)


cdef void heap_sort(const Layout *layout, unsigned char *entries, uint64_t n) noexcept nogil:
    cdef uint64_t lifted[MAX_ENTRY_WORDS]
    cdef uint64_t i = n // 2
    while i > 0:
        i -= 1
        memcpy(lifted, entry_at(layout, entries, i), layout.stride)
        sift(layout, entries, i, n, lifted)
    i = n
    while i > 1:
        i -= 1
        memcpy(lifted, entry_at(layout, entries, i), layout.stride)
        memcpy(entry_at(layout, entries, i), entries, layout.stride)
        sift(layout, entries, 0, i, lifted)


cdef void sort_entries(const Layout *layout, unsigned char *entries, uint64_t n) noexcept nogil:
    if not insert_all(layout, entries, n):
        heap_sort(layout, entries, n)
