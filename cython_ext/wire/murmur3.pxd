"""Key -> group: Spark's Murmur3 (x86_32, seed 42) over the key fields of a packed row.

Everything here is a pure function of its arguments: no state, no allocation, no GIL. A KeySpec is written
once, by KeyHasher.__cinit__, and read by any number of threads after that; it holds no pointer, so copy it
by value and keep the copy as long as you like.

Reference: murmur3.h for the hash itself, catalyst's HashExpression (Spark 4) for what is hashed of a field.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "murmur3.h" nogil:
    enum:
        MURMUR3_SEED
    uint32_t hash_int "fs_murmur_int"(uint32_t value, uint32_t seed) noexcept
    uint32_t hash_long "fs_murmur_long"(uint64_t value, uint32_t seed) noexcept
    uint32_t hash_bytes "fs_murmur_bytes"(const unsigned char *data, uint32_t size, uint32_t seed) noexcept
    uint32_t trimmed_size "fs_trimmed"(const unsigned char *data, uint32_t size) noexcept

cdef extern from "scatter.h" nogil:       # the half that finds groups
    enum:
        SCATTER_MAX_BLOCK
    ctypedef struct Modulus:
        pass
    ctypedef void (*scatter_hash_fn)(const unsigned char *, size_t, size_t, uint32_t *) noexcept
    Modulus scatter_modulus(uint32_t groups) noexcept
    scatter_hash_fn scatter_hash_for() noexcept
    void scatter_groups(const Modulus *m, const uint32_t *hashes, size_t n, uint16_t *ids) noexcept

cpdef enum:
    MAX_KEY_FIELDS = 16

cdef enum:
    KEY_INT = 0          # i8 i16 i32 u8 u16 bool: extended to a 32-bit int
    KEY_LONG = 1         # i64, and u32 (which is non-negative as a long)
    KEY_TIMESTAMP = 2    # i64 * multiplier, floor divided by divisor: microseconds, then as a long
    KEY_F32 = 3          # bits, with -0.0 as 0.0 and one NaN
    KEY_F64 = 4
    KEY_BYTES = 5        # up to the last non-NUL byte

ctypedef struct KeyField:
    uint32_t kind
    uint32_t offset
    uint32_t size
    uint32_t is_signed
    int64_t multiplier   # timestamps only; one of multiplier and divisor is 1
    int64_t divisor

ctypedef struct KeySpec:
    uint32_t n
    uint32_t end         # one past the last byte that any field reads: a row must have this many
    KeyField fields[MAX_KEY_FIELDS]

ctypedef struct Grouping:  # a key and G: written once, by grouping_of
    KeySpec key
    bint key_is_long       # one 8-byte integer: hashed some rows at a time
    scatter_hash_fn hash_longs
    Modulus modulus


cdef inline uint32_t _load_int(const KeyField *field, const unsigned char *at) noexcept nogil:
    cdef uint32_t word
    cdef uint16_t half
    if field.size == 4:
        memcpy(&word, at, 4)
        return word
    if field.size == 2:
        memcpy(&half, at, 2)
        return <uint32_t> <int32_t> <int16_t> half if field.is_signed else <uint32_t> half
    return <uint32_t> <int32_t> <int8_t> at[0] if field.is_signed else <uint32_t> at[0]


cdef inline uint64_t to_microseconds(const KeyField *field, int64_t value) noexcept nogil:
    """Floor, as Spark casts; multiplication wraps (seconds past the year 292,000 have no microseconds)."""
    cdef int64_t quotient
    if field.divisor == 1:
        return <uint64_t> value * <uint64_t> field.multiplier
    quotient = value // field.divisor      # C division truncates
    if quotient * field.divisor > value:
        quotient -= 1
    return <uint64_t> quotient


cdef inline uint32_t _hash_field(const KeyField *field, const unsigned char *row, uint32_t seed) noexcept nogil:
    cdef const unsigned char *at = row + field.offset
    cdef uint32_t word
    cdef uint64_t long_word
    if field.kind == KEY_LONG:
        if field.size == 8:
            memcpy(&long_word, at, 8)
        else:
            memcpy(&word, at, 4)
            long_word = word
        return hash_long(long_word, seed)
    if field.kind == KEY_INT:
        return hash_int(_load_int(field, at), seed)
    if field.kind == KEY_BYTES:
        return hash_bytes(at, trimmed_size(at, field.size), seed)
    if field.kind == KEY_TIMESTAMP:
        memcpy(&long_word, at, 8)
        return hash_long(to_microseconds(field, <int64_t> long_word), seed)
    if field.kind == KEY_F64:
        memcpy(&long_word, at, 8)
        if long_word == <uint64_t> 1 << 63:
            long_word = 0
        elif (long_word << 1) > <uint64_t> 0xFFE0000000000000:
            long_word = 0x7FF8000000000000
        return hash_long(long_word, seed)
    memcpy(&word, at, 4)
    if word == <uint32_t> 1 << 31:
        word = 0
    elif (word << 1) > <uint32_t> 0xFF000000:
        word = 0x7FC00000
    return hash_int(word, seed)


cdef inline uint32_t key_hash(const KeySpec *spec, const unsigned char *row) noexcept nogil:
    """Assumes: row has spec.end readable bytes. Each field's hash is the next one's seed."""
    cdef uint32_t h = MURMUR3_SEED
    cdef uint32_t i
    for i in range(spec.n):
        h = _hash_field(&spec.fields[i], row, h)
    return h


cdef inline uint16_t group_of_hash(uint32_t h, uint32_t groups) noexcept nogil:
    """pmod of the hash as a signed int. Assumes: 1 <= groups <= 65535."""
    cdef int64_t r = <int64_t> <int32_t> h % <int64_t> groups
    return <uint16_t> (r + groups if r < 0 else r)


cdef class KeyHasher:
    # Immutable after __cinit__.
    cdef KeySpec spec


cdef Grouping grouping_of(const KeySpec *key, uint32_t groups) noexcept nogil
cdef void groups_of(const Grouping *grouping, const unsigned char *rows, size_t row_bytes, size_t n,
                    uint16_t *ids) noexcept nogil
