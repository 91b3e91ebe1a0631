"""Key -> group, bit-exact with Spark's `pmod(hash(key), G)`."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

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


cdef enum:
    HASH_RUN = 1024

ctypedef struct Modulus:
    # pmod without a division (Lemire, Kaser, Kurz 2019, "Faster remainder by direct computation").
    uint32_t groups
    uint32_t mask            # groups - 1 when a power of two, else 0
    uint32_t bias            # 2**31 mod groups
    uint64_t reciprocal      # ceil(2**64 / groups), wraps to 0 for groups == 1 (then mask is used)

cdef extern from *:
    """
    static inline unsigned fs_fastmod(unsigned a, unsigned long long m, unsigned d) {
        unsigned long long low = m * a;
        return (unsigned)(((unsigned __int128)low * d) >> 64);
    }
    """
    uint32_t fs_fastmod(uint32_t a, uint64_t m, uint32_t d) noexcept nogil


cdef inline uint16_t _pmod(uint32_t h, const Modulus *m) noexcept nogil:
    # h as a signed int is (h ^ 2**31) - 2**31, and both parts are non-negative.
    cdef uint32_t r = fs_fastmod(h ^ (<uint32_t> 1 << 31), m.reciprocal, m.groups)
    return <uint16_t> (r - m.bias if r >= m.bias else r + m.groups - m.bias)


cdef void _hash_longs(const unsigned char *at, uint64_t n, uint64_t stride, uint32_t *out) noexcept nogil:
    # The common case, one i64 key: no dispatch in the loop, so that the compiler vectorises it.
    cdef uint64_t i, value
    for i in range(n):
        memcpy(&value, at + i * stride, 8)
        out[i] = hash_long(value, MURMUR3_SEED)


cdef void _hash_keys(const KeySpec *spec, const unsigned char *row, uint64_t n, uint64_t stride,
                     uint32_t *out) noexcept nogil:
    cdef uint64_t i
    for i in range(n):
        out[i] = key_hash(spec, row + i * stride)


cdef void _groups_of(const KeySpec *spec, const unsigned char *rows, uint64_t n, uint64_t stride,
                     const Modulus *m, uint16_t *out) noexcept nogil:
    # Hash a cache-sized run of rows, then take the remainders: two simple loops beat one mixed one.
    cdef uint32_t run[HASH_RUN]
    cdef uint64_t done = 0
    cdef uint64_t i, size
    cdef bint is_long = spec.n == 1 and spec.fields[0].kind == KEY_LONG and spec.fields[0].size == 8
    while done < n:
        size = min(n - done, <uint64_t> HASH_RUN)
        if is_long:
            _hash_longs(rows + done * stride + spec.fields[0].offset, size, stride, run)
        else:
            _hash_keys(spec, rows + done * stride, size, stride, run)
        if m.mask or m.groups == 1:
            for i in range(size):
                out[done + i] = <uint16_t> (run[i] & m.mask)
        else:
            for i in range(size):
                out[done + i] = _pmod(run[i], m)
        done += size


cdef Modulus _modulus(uint32_t groups) noexcept:
    cdef Modulus m
    m.groups = groups
    m.mask = groups - 1 if groups & (groups - 1) == 0 else 0
    m.bias = (<uint32_t> 1 << 31) % groups
    m.reciprocal = <uint64_t> 0xFFFFFFFFFFFFFFFF // groups + 1
    return m


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
    cdef Modulus m = _modulus(groups)
    cdef Py_buffer source, target
    PyObject_GetBuffer(rows, &source, PyBUF_SIMPLE)
    try:
        _check(source.len, n, row_bytes, key_spec)
        out = np.empty(n, dtype=np.uint16)
        if n == 0:
            return out
        PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
        with nogil:
            _groups_of(&key_spec.spec, <const unsigned char *> source.buf, n, row_bytes, &m,
                       <uint16_t *> target.buf)
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
