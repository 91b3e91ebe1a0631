"""Columns -> packed rows, a block of rows at a time so that they stay in the cache. Without the GIL.

A column is a tuple that says where its values lie and what becomes of them:

    ("copy", offset, size, buffer, start, width)         values of `width` bytes each, zeros up to `size`
    ("divide", offset, buffer, start, divisor)           int64; each must be a multiple of the divisor
    ("text", offset, size, ends, start, values)          int32 offsets into `values`: at most `size` bytes each
    ("pick", offset, size, indices, start, table)        int32 indices of entries of `size` bytes each

`offset` and `size` are the field's in the row, `start` is in bytes. Nothing outside the buffers is read, whatever they
hold.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cdef enum:
    COPY = 0
    DIVIDE = 1
    TEXT = 2
    PICK = 3
    BLOCK_BYTES = 16384

cdef struct Column:
    int kind
    size_t offset
    size_t size
    size_t width
    int64_t divisor
    const unsigned char *source        # where the value of row 0 lies; offsets and indices alike
    const unsigned char *values        # what offsets and indices point into
    size_t value_bytes


cdef inline bint divide(const unsigned char *source, unsigned char *out, size_t row_bytes, size_t n,
                        int64_t divisor) noexcept nogil:
    cdef size_t i
    cdef int64_t value, whole
    cdef int64_t wrong = 0
    for i in range(n):
        memcpy(&value, source + 8 * i, 8)
        whole = value // divisor
        wrong |= whole * divisor - value
        memcpy(out + i * row_bytes, &whole, 8)
    return wrong == 0


cdef void copy(const unsigned char *source, unsigned char *out, size_t row_bytes, size_t n, size_t size,
               size_t width) noexcept nogil:
    cdef size_t i
    if width == 8:
        for i in range(n):
            memcpy(out + i * row_bytes, source + i * 8, 8)
    elif width == 4:
        for i in range(n):
            memcpy(out + i * row_bytes, source + i * 4, 4)
    else:
        for i in range(n):
            memcpy(out + i * row_bytes, source + i * width, width)
    if width < size:
        for i in range(n):
            memset(out + i * row_bytes + width, 0, size - width)


cdef bint short_text(const Column *column, const unsigned char *ends, int32_t start, unsigned char *out,
                     size_t row_bytes, size_t n) noexcept nogil:
    """Fields of 8 bytes: one load and one store each, what is too much cut off between them."""
    cdef size_t i, length
    cdef int32_t end
    cdef uint64_t value
    for i in range(n):
        memcpy(&end, ends + 4 * (i + 1), 4)
        if end < start or <size_t> end > column.value_bytes:
            return False
        length = <size_t> (end - start)
        if length > 8:
            return False
        value = 0
        if <size_t> start + 8 > column.value_bytes:
            memcpy(&value, column.values + start, length)
        elif length > 0:
            memcpy(&value, column.values + start, 8)
            value &= ~<uint64_t> 0 >> (64 - 8 * length)  # the first byte is the lowest: x86 and ARM
        memcpy(out + i * row_bytes, &value, 8)
        start = end
    return True


cdef bint text(const Column *column, size_t first, unsigned char *out, size_t row_bytes, size_t n) noexcept nogil:
    cdef size_t i, length
    cdef size_t size = column.size
    cdef int32_t start, end
    cdef const unsigned char *ends = column.source + 4 * first
    memcpy(&start, ends, 4)
    if start < 0:
        return False
    if size == 8:
        return short_text(column, ends, start, out, row_bytes, n)
    for i in range(n):
        memcpy(&end, ends + 4 * (i + 1), 4)
        if end < start or <size_t> end > column.value_bytes:
            return False
        length = <size_t> (end - start)
        if length > size:
            return False
        memcpy(out + i * row_bytes, column.values + start, length)
        if length < size:
            memset(out + i * row_bytes + length, 0, size - length)
        start = end
    return True


cdef bint pick(const Column *column, size_t first, unsigned char *out, size_t row_bytes, size_t n) noexcept nogil:
    cdef size_t i
    cdef size_t size = column.size
    cdef size_t count = column.value_bytes // size
    cdef int32_t index
    for i in range(n):
        memcpy(&index, column.source + 4 * (first + i), 4)
        if index < 0 or <size_t> index >= count:
            return False
        if size == 8:
            memcpy(out + i * row_bytes, column.values + 8 * <size_t> index, 8)
        else:
            memcpy(out + i * row_bytes, column.values + size * <size_t> index, size)
    return True


cdef bint put(const Column *column, size_t first, unsigned char *out, size_t row_bytes, size_t n) noexcept nogil:
    if column.kind == COPY:
        copy(column.source + first * column.width, out, row_bytes, n, column.size, column.width)
        return True
    if column.kind == TEXT:
        return text(column, first, out, row_bytes, n)
    if column.kind == PICK:
        return pick(column, first, out, row_bytes, n)
    if column.divisor == 1000:  # a constant is a multiplication to the compiler
        return divide(column.source + 8 * first, out, row_bytes, n, 1000)
    return divide(column.source + 8 * first, out, row_bytes, n, column.divisor)


cdef class _Views:
    """Buffers that are held while their columns are used."""

    cdef Py_buffer *views
    cdef size_t used

    def __cinit__(self, size_t most):
        self.views = <Py_buffer *> calloc(most, sizeof(Py_buffer))
        self.used = 0
        if self.views == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.used):
            PyBuffer_Release(&self.views[i])
        free(self.views)

    cdef Py_buffer *hold(self, data, int flags) except NULL:
        PyObject_GetBuffer(data, &self.views[self.used], flags)
        self.used += 1
        return &self.views[self.used - 1]


def pack_columns(out, size_t row_bytes, columns, size_t first=0):
    """Fill `out`, which is of whole rows, from row `first` of the columns. Returns the number of the column that does not fit its field, or -1: all do.

    Raises ValueError for a buffer that is too short.
    """
    cdef _Views held = _Views(1 + 2 * len(columns))
    cdef Py_buffer *rows = held.hold(out, PyBUF_SIMPLE | PyBUF_WRITABLE)
    cdef size_t n = <size_t> rows.len // row_bytes
    cdef size_t count = len(columns)
    cdef Column *found = <Column *> calloc(count, sizeof(Column))
    cdef size_t i, at, block, step
    cdef Py_ssize_t wrong = -1
    if found == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            _read(&found[i], columns[i], first + n, row_bytes, held)
        step = BLOCK_BYTES // row_bytes if row_bytes < BLOCK_BYTES else 1
        with nogil:
            at = 0
            while at < n and wrong < 0:
                block = step if n - at > step else n - at
                for i in range(count):
                    if not put(&found[i], first + at, <unsigned char *> rows.buf + at * row_bytes + found[i].offset,
                               row_bytes, block):
                        wrong = <Py_ssize_t> i
                        break
                at += block
    finally:
        free(found)
    return wrong


cdef int _read(Column *column, tuple said, size_t n, size_t row_bytes, _Views held) except -1:
    kind = said[0]
    cdef Py_buffer *source
    cdef Py_buffer *values
    cdef size_t start, needed
    column.offset = said[1]
    if kind == "divide":
        _, _, data, start, column.divisor = said
        column.kind, column.size, needed = DIVIDE, 8, 8 * n
        if column.divisor < 1:
            raise ValueError("a divisor below 1")
    elif kind == "copy":
        _, _, column.size, data, start, column.width = said
        column.kind, needed = COPY, column.width * n
        if column.width > column.size:
            raise ValueError("a value wider than its field")
    else:
        column.kind = TEXT if kind == "text" else PICK
        _, _, column.size, data, start, table = said
        needed = 4 * (n + 1) if kind == "text" else 4 * n
        values = held.hold(table, PyBUF_SIMPLE)
        column.values, column.value_bytes = <const unsigned char *> values.buf, <size_t> values.len
    if column.size < 1 or column.offset + column.size > row_bytes:
        raise ValueError("a field outside the row")
    source = held.hold(data, PyBUF_SIMPLE)
    if start + needed > <size_t> source.len and n > 0:
        raise ValueError(f"a column of {source.len} bytes is too short for {n} rows")
    column.source = <const unsigned char *> source.buf + start
    return 0
