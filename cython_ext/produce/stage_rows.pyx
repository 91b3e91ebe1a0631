"""Rows of a stage by group: scattered into chunks as they come, one copy each, without the GIL."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from flexstream.cython_ext.produce.scatter cimport Cursor, scatter_block_rows, scatter_fn, scatter_for
from flexstream.cython_ext.wire.crc32c cimport crc32c_update
from flexstream.cython_ext.wire.murmur3 cimport Grouping, KeyHasher, grouping_of, groups_of

cdef enum:
    NO_CHUNK = 0xFFFFFFFF


cdef class StageRows:
    """A pool of chunks. `put` rows until it is full, send `parts`, `reset`. For one thread.

    A group takes one chunk after the other, so its rows keep their order. Assumes chunks >= groups.
    """

    cdef Grouping grouping
    cdef scatter_fn scatter
    cdef uint32_t groups
    cdef uint32_t chunks
    cdef uint32_t used
    cdef size_t row_bytes
    cdef size_t chunk_bytes
    cdef size_t block_rows
    cdef unsigned char *pool
    cdef Cursor *cursors
    cdef uint32_t *chunk_group       # group of each used chunk
    cdef uint32_t *chunk_of          # chunk that a group fills
    cdef uint16_t *ids
    cdef readonly uint64_t rows

    def __cinit__(self, KeyHasher key not None, *, uint32_t groups, size_t row_bytes, size_t block_bytes,
                  size_t chunk_bytes):
        cdef size_t chunk_rows = chunk_bytes // row_bytes if chunk_bytes > row_bytes else 1
        self.grouping = grouping_of(&key.spec, groups)
        self.scatter = scatter_for(row_bytes)
        self.block_rows = scatter_block_rows(row_bytes)
        self.groups = groups
        self.row_bytes = row_bytes
        self.chunk_bytes = chunk_rows * row_bytes
        self.chunks = <uint32_t> (block_bytes // self.chunk_bytes) if block_bytes > self.chunk_bytes else 1
        self.pool = <unsigned char *> malloc(self.chunks * self.chunk_bytes)
        self.cursors = <Cursor *> calloc(groups, sizeof(Cursor))
        self.chunk_group = <uint32_t *> calloc(self.chunks, sizeof(uint32_t))
        self.chunk_of = <uint32_t *> calloc(groups, sizeof(uint32_t))
        self.ids = <uint16_t *> malloc(self.block_rows * sizeof(uint16_t))
        if (self.pool == NULL or self.cursors == NULL or self.chunk_group == NULL or self.chunk_of == NULL
                or self.ids == NULL):
            raise MemoryError("no memory for a block of staged rows")
        self.reset()

    def __dealloc__(self):
        free(self.pool)
        free(self.cursors)
        free(self.chunk_group)
        free(self.chunk_of)
        free(self.ids)

    def reset(self):
        """Forget the rows; what `parts` gave must not be used any more."""
        cdef uint32_t g
        self.used = 0
        self.rows = 0
        for g in range(self.groups):
            self.cursors[g].at = NULL
            self.cursors[g].end = NULL
            self.chunk_of[g] = NO_CHUNK

    cdef bint open_chunk(self, uint32_t group) noexcept nogil:
        if self.used == self.chunks:
            return False
        self.chunk_of[group] = self.used
        self.chunk_group[self.used] = group
        self.cursors[group].at = self.pool + self.used * self.chunk_bytes
        self.cursors[group].end = self.cursors[group].at + self.chunk_bytes
        self.used += 1
        return True

    cdef size_t scatter_rows(self, const unsigned char *rows, size_t n) noexcept nogil:
        cdef size_t at = 0, block, done
        cdef const unsigned char *row
        while at < n:
            block = self.block_rows if n - at > self.block_rows else n - at
            row = rows + at * self.row_bytes
            groups_of(&self.grouping, row, self.row_bytes, block, self.ids)
            done = 0
            while True:
                done += self.scatter(self.cursors, self.ids + done, row + done * self.row_bytes, self.row_bytes,
                                     block - done)
                if done == block:
                    break
                if not self.open_chunk(self.ids[done]):
                    return at + done
            at += block
        return at

    def put(self, rows, size_t start=0):
        """Rows `start` and after into their groups' chunks; returns the number of the first that had no room."""
        cdef Py_buffer view
        cdef size_t n, taken
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
        try:
            n = <size_t> view.len // self.row_bytes
            if <size_t> view.len != n * self.row_bytes or start > n:
                raise ValueError(f"{view.len} bytes are not whole rows of {self.row_bytes} bytes")
            with nogil:
                taken = self.scatter_rows(<const unsigned char *> view.buf + start * self.row_bytes, n - start)
            self.rows += taken
        finally:
            PyBuffer_Release(&view)
        return start + taken

    cdef size_t chunk_fill(self, uint32_t chunk) noexcept nogil:
        cdef uint32_t group = self.chunk_group[chunk]
        if self.chunk_of[group] == chunk:
            return self.cursors[group].at - (self.pool + chunk * self.chunk_bytes)
        return self.chunk_bytes

    def parts(self, uint32_t crc, bint memory):
        """(groups, rows of each, memory, CRC32C of it continued from `crc`): a chunk is a part.

        Neighbours that are full are one piece of memory. Without `memory` only the first two are filled in.
        """
        cdef uint32_t chunk
        cdef size_t fill
        cdef size_t start = 0, n = 0
        groups, counts, pieces = [], [], []
        for chunk in range(self.used):
            fill = self.chunk_fill(chunk)
            groups.append(self.chunk_group[chunk])
            counts.append(fill // self.row_bytes)
            n += fill
            if not memory:
                continue
            if fill < self.chunk_bytes or chunk == self.used - 1:
                pieces.append(<const unsigned char[:n]> (self.pool + start))
                with nogil:
                    crc = crc32c_update(crc, self.pool + start, n)
                start = (chunk + 1) * self.chunk_bytes
                n = 0
        return groups, counts, pieces, crc


def time_span(const unsigned char[::1] rows not None, size_t row_bytes, size_t offset, int64_t first, int64_t last):
    """(least, largest) of the event times from `first` to `last`; None when there are none."""
    cdef size_t n = <size_t> rows.shape[0] // row_bytes
    cdef size_t i
    cdef int64_t time
    cdef int64_t least = INT64_MAX
    cdef int64_t most = INT64_MIN
    cdef const unsigned char *at
    if n == 0:
        return None
    at = &rows[0] + offset
    with nogil:
        for i in range(n):
            memcpy(&time, at + i * row_bytes, 8)
            if first <= time <= last:
                least = time if time < least else least
                most = time if time > most else most
    return None if most == INT64_MIN else (least, most)
