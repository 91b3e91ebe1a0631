"""Key -> group, bit-exact with Spark's `pmod(hash(key), G)`."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

import numpy as np

_INT_KINDS = {"i8": True, "i16": True, "i32": True, "u8": False, "u16": False, "bool": False}
_TO_MICROSECONDS = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}


cdef class KeyHasher:
    """The key of a stream, compiled for hashing. `KeyHasher(stream)`; C code reads `.spec`."""

    def __cinit__(self, stream):
        cdef KeyField *out
        key_fields = [stream.schema.field(name) for name in stream.key]
        if not 1 <= len(key_fields) <= MAX_KEY_FIELDS:
            raise ValueError(f"a key has 1 to {MAX_KEY_FIELDS} fields, not {len(key_fields)}")
        memset(&self.spec, 0, sizeof(KeySpec))
        for i, field in enumerate(key_fields):
            out = &self.spec.fields[i]
            out.offset = field.offset
            out.size = field.size
            out.multiplier = out.divisor = 1
            if field.kind in _INT_KINDS:
                out.kind = KEY_INT
                out.is_signed = _INT_KINDS[field.kind]
            elif field.kind in ("i64", "u32"):
                out.kind = KEY_LONG
            elif field.kind == "timestamp":
                out.kind = KEY_TIMESTAMP
                out.multiplier, out.divisor = _TO_MICROSECONDS[field.unit]
            elif field.kind in ("f32", "f64"):
                out.kind = KEY_F32 if field.kind == "f32" else KEY_F64
            elif field.kind == "bytes":
                out.kind = KEY_BYTES
            else:
                raise ValueError(f"a {field.kind} field cannot be a key")
            self.spec.end = max(self.spec.end, <uint32_t> (out.offset + out.size))
        self.spec.n = len(key_fields)


SEED = MURMUR3_SEED


cdef Grouping grouping_of(const KeySpec *key, uint32_t groups) noexcept nogil:
    cdef Grouping grouping
    grouping.key = key[0]
    grouping.key_is_long = key.n == 1 and key.fields[0].kind == KEY_LONG and key.fields[0].size == 8
    grouping.hash_longs = scatter_hash_for()
    grouping.modulus = scatter_modulus(groups)
    return grouping


cdef void _hash_keys(const KeySpec *spec, const unsigned char *row, uint64_t n, uint64_t stride,
                     uint32_t *out) noexcept nogil:
    cdef uint64_t i
    for i in range(n):
        out[i] = key_hash(spec, row + i * stride)


cdef void groups_of(const Grouping *grouping, const unsigned char *rows, size_t row_bytes, size_t n,
                    uint16_t *ids) noexcept nogil:
    """The group of each row. A run that the cache holds is hashed, then reduced: two simple loops beat a mixed one."""
    cdef uint32_t run[SCATTER_MAX_BLOCK]
    cdef size_t done = 0
    cdef size_t size
    while done < n:
        size = SCATTER_MAX_BLOCK if n - done > SCATTER_MAX_BLOCK else n - done
        if grouping.key_is_long:
            grouping.hash_longs(rows + done * row_bytes + grouping.key.fields[0].offset, row_bytes, size, run)
        else:
            _hash_keys(&grouping.key, rows + done * row_bytes, size, row_bytes, run)
        scatter_groups(&grouping.modulus, run, size, ids + done)
        done += size


cdef int _check(Py_ssize_t have, Py_ssize_t n, Py_ssize_t row_bytes, KeyHasher key) except -1:
    if n < 0 or row_bytes <= 0 or n > have // row_bytes:
        raise ValueError(f"{n} rows of {row_bytes} bytes do not fit a buffer of {have} bytes")
    if key.spec.end > <size_t> row_bytes:
        raise ValueError(f"the key ends at byte {key.spec.end}, past a row of {row_bytes} bytes")
    return 0


def group_ids(rows, Py_ssize_t n, Py_ssize_t row_bytes, KeyHasher key_spec not None, groups):
    """The group of each of `n` packed rows, as a uint16 array. Releases the GIL.

    `rows` is anything with a C-contiguous buffer. Raises ValueError when it is shorter than n rows.
    """
    if not 1 <= groups <= 65535:
        raise ValueError(f"groups must be 1 to 65535, not {groups}")
    cdef Grouping grouping = grouping_of(&key_spec.spec, groups)
    cdef Py_buffer source, target
    PyObject_GetBuffer(rows, &source, PyBUF_SIMPLE)
    try:
        _check(source.len, n, row_bytes, key_spec)
        out = np.empty(n, dtype=np.uint16)
        if n == 0:
            return out
        PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
        with nogil:
            groups_of(&grouping, <const unsigned char *> source.buf, row_bytes, n, <uint16_t *> target.buf)
        PyBuffer_Release(&target)
        return out
    finally:
        PyBuffer_Release(&source)


def hashes(rows, Py_ssize_t n, Py_ssize_t row_bytes, KeyHasher key_spec not None):
    """Spark's `hash(key...)` of each row, as an int32 array: for tests and for comparing with Spark."""
    cdef Py_buffer source, target
    PyObject_GetBuffer(rows, &source, PyBUF_SIMPLE)
    try:
        _check(source.len, n, row_bytes, key_spec)
        out = np.empty(n, dtype=np.int32)
        if n == 0:
            return out
        PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
        with nogil:
            _hash_keys(&key_spec.spec, <const unsigned char *> source.buf, n, row_bytes, <uint32_t *> target.buf)
        PyBuffer_Release(&target)
        return out
    finally:
        PyBuffer_Release(&source)
