"""See sketch.pxd."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_fence, fs_load_acquire, fs_load_relaxed, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.wire.murmur3 cimport KeyHasher, key_hash

import numpy as np


cdef bint same_key(const uint64_t *words, const uint64_t *key, uint32_t n) noexcept nogil:
    cdef uint32_t i
    for i in range(n):
        if fs_load_relaxed(&words[i]) != key[i]:
            return False
    return True


cdef void take_over(Sketches *sketches, uint64_t *sketch, uint32_t counter, uint64_t hashed) noexcept nogil:
    """The key at hand gets the counter. Stores are releases: none is seen before the odd version."""
    cdef const uint64_t *key = <const uint64_t *> sketches.key_room
    cdef uint64_t *words = sketch + KEYS + <size_t> counter * sketches.key_words
    cdef uint64_t version = fs_load_relaxed(&sketch[0])
    cdef uint64_t count = fs_load_relaxed(&sketch[COUNTS + counter])
    cdef uint32_t i
    fs_store_relaxed(&sketch[0], version + 1)
    fs_store_release(&sketch[HASHES + counter], hashed)
    fs_store_release(&sketch[COUNTS + counter], count + 1)
    fs_store_release(&sketch[ERRORS + counter], count)
    for i in range(sketches.key_words):
        fs_store_release(&words[i], key[i])
    fs_store_release(&sketch[0], version + 2)


cdef void grow_old(uint64_t *sketch) noexcept nogil:
    cdef uint64_t version = fs_load_relaxed(&sketch[0])
    cdef uint32_t i
    fs_store_relaxed(&sketch[0], version + 1)
    fs_store_release(&sketch[1], fs_load_relaxed(&sketch[1]) // 2)
    for i in range(<uint32_t> COUNTS, <uint32_t> KEYS):
        fs_store_release(&sketch[i], fs_load_relaxed(&sketch[i]) // 2)
    fs_store_release(&sketch[0], version + 2)


cdef void add_row(Sketches *sketches, uint32_t group, const unsigned char *row) noexcept nogil:
    cdef uint64_t *sketch = sketches.words + <size_t> group * sketches.sketch_words
    cdef uint64_t hashed = key_hash(&sketches.key, row) | (<uint64_t> 1 << 32)
    cdef uint64_t least = <uint64_t> -1
    cdef uint64_t count
    cdef uint32_t smallest = 0
    cdef size_t at = 0
    cdef uint32_t i
    for i in range(sketches.key.n):
        memcpy(sketches.key_room + at, row + sketches.key.fields[i].offset, sketches.key.fields[i].size)
        at += sketches.key.fields[i].size
    fs_count(&sketch[1], 1)
    for i in range(<uint32_t> COUNTERS):
        if fs_load_relaxed(&sketch[HASHES + i]) == hashed and same_key(
                sketch + KEYS + <size_t> i * sketches.key_words, <const uint64_t *> sketches.key_room,
                sketches.key_words):
            fs_count(&sketch[COUNTS + i], 1)
            break
    else:
        for i in range(<uint32_t> COUNTERS):
            count = fs_load_relaxed(&sketch[COUNTS + i])
            if count < least:
                least = count
                smallest = i
        take_over(sketches, sketch, smallest, hashed)
    if fs_load_relaxed(&sketch[1]) >= AGE_AT:
        grow_old(sketch)


cdef void sample_rows(Sketches *sketches, uint32_t group, const unsigned char *rows, uint64_t n,
                      uint64_t row_bytes) noexcept nogil:
    cdef uint64_t at = sketches.until
    while at < n:
        add_row(sketches, group, rows + at * row_bytes)
        sketches.random = sketches.random * <uint32_t> 1664525 + <uint32_t> 1013904223
        at += 1 + (sketches.random >> SAMPLE_SHIFT)
    sketches.until = at - n


cdef class KeySketch:
    """The sketches of a stream's groups on one worker. `add` is for tests: the worker's thread is the writer."""

    def __cinit__(self, stream, uint32_t groups, uint32_t seed=1):
        cdef KeyHasher hasher = stream.key_hasher
        self.sketches.key = hasher.spec
        self.sketches.groups = groups
        self.sketches.random = seed * <uint32_t> 2654435761
        self.sketches.key_bytes = sum(stream.schema.field(name).size for name in stream.key)
        self.sketches.key_words = (self.sketches.key_bytes + 7) // 8
        self.sketches.sketch_words = KEYS + COUNTERS * self.sketches.key_words
        # Touched only where rows are sampled: untouched pages of a large calloc take no memory.
        self.sketches.words = <uint64_t *> calloc(<size_t> groups * self.sketches.sketch_words, 8)
        self.sketches.key_room = <unsigned char *> calloc(self.sketches.key_words, 8)
        if self.sketches.words == NULL or self.sketches.key_room == NULL:
            raise MemoryError(f"no memory for the key sketches of {groups} groups")
        self._names = tuple(stream.key)
        self._key_dtype = np.dtype([(name, stream.schema.dtype[name]) for name in stream.key])

    def __dealloc__(self):
        free(self.sketches.words)
        free(self.sketches.key_room)

    def add(self, uint32_t group, bytes rows, uint64_t row_bytes):
        if group >= self.sketches.groups or self.sketches.key.end > row_bytes:
            raise ValueError("no such group, or rows without the key")
        sketch_rows(&self.sketches, group, <const unsigned char *> PyBytes_AS_STRING(rows), len(rows) // row_bytes,
                    row_bytes)

    def read(self, uint32_t group):
        """(rows sampled, [(key, at least so many of them)]), heaviest first. A key of several fields is a tuple."""
        cdef uint64_t *sketch
        cdef uint64_t version
        cdef uint32_t i
        if group >= self.sketches.groups:
            raise ValueError(f"group {group}: there are {self.sketches.groups}")
        sketch = self.sketches.words + <size_t> group * self.sketches.sketch_words
        cdef bytes copy = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> self.sketches.sketch_words * 8)
        cdef uint64_t *words = <uint64_t *> PyBytes_AS_STRING(copy)
        while True:
            version = fs_load_acquire(&sketch[0])
            for i in range(1, self.sketches.sketch_words):
                words[i] = fs_load_relaxed(&sketch[i])
            fs_fence()
            if version % 2 == 0 and fs_load_relaxed(&sketch[0]) == version:
                break
        found = []
        for i in range(<uint32_t> COUNTERS):
            count, error = words[COUNTS + i], words[ERRORS + i]
            if count > error:
                start = (KEYS + i * self.sketches.key_words) * 8
                found.append((self._value(copy[start:start + self.sketches.key_bytes]), count - error))
        found.sort(key=lambda item: -item[1])
        return words[1], found

    def _value(self, data):
        values = np.frombuffer(data, self._key_dtype)[0].tolist()
        return values[0] if len(self._names) == 1 else values
