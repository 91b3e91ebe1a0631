"""Instructions of the generic variant beyond arithmetic (SELECT and what follows it in program.pxd).

Times are taken apart with the code that compiled variants have; hashes are those of the keys.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.expressions.program cimport (
    BAD_CAST, BATCH, DAY, DAY_OF_WEEK, DAY_OF_YEAR, FIT, FLOOR, FLOORMOD, HASH_BYTES, HASH_F32, HASH_F64, HASH_INT,
    HASH_LONG, I_TO_F32, Instr, MONTH, ROUND_F32, SELECT, Scratch, YEAR,
)
from flexstream.cython_ext.wire.murmur3 cimport hash_bytes, hash_int, hash_long, trimmed_size


cdef extern from "flexstream_abi.h" nogil:
    int64_t fs_floor(int64_t a, int64_t b) noexcept
    int64_t fs_floormod(int64_t a, int64_t b) noexcept
    int64_t fs_year(int64_t days) noexcept
    int64_t fs_month(int64_t days) noexcept
    int64_t fs_day(int64_t days) noexcept
    int64_t fs_day_of_week(int64_t days) noexcept
    int64_t fs_day_of_year(int64_t days) noexcept
    bint fs_is_zero(const unsigned char *p, uint32_t n) noexcept


cdef inline void select_or_fit(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const int64_t *a = scratch.registers + instr.a * BATCH
    cdef const int64_t *b = scratch.registers + instr.b * BATCH
    cdef const int64_t *c = scratch.registers + instr.size * BATCH
    cdef int64_t most, least
    cdef uint32_t i
    if instr.op == SELECT:                  # bits, of integers and of doubles alike
        for i in range(m):
            dst[i] = b[i] if a[i] else c[i]
        return
    most = INT64_MAX >> (64 - instr.size if instr.b else 63 - instr.size)
    least = -most - 1 if instr.b else 0
    for i in range(m):
        dst[i] = a[i]
        if (a[i] < least or a[i] > most) and not scratch.bad[i]:
            scratch.bad[i] = BAD_CAST
            scratch.n_bad += 1


cdef inline void take_apart(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef double *real = <double *> dst
    cdef const int64_t *a = scratch.registers + instr.a * BATCH
    cdef const double *from_real = <const double *> a
    cdef uint32_t i
    if instr.op == FLOOR:
        for i in range(m):
            dst[i] = fs_floor(a[i], instr.imm)
    elif instr.op == FLOORMOD:
        for i in range(m):
            dst[i] = fs_floormod(a[i], instr.imm)
    elif instr.op == YEAR:
        for i in range(m):
            dst[i] = fs_year(a[i])
    elif instr.op == MONTH:
        for i in range(m):
            dst[i] = fs_month(a[i])
    elif instr.op == DAY:
        for i in range(m):
            dst[i] = fs_day(a[i])
    elif instr.op == DAY_OF_WEEK:
        for i in range(m):
            dst[i] = fs_day_of_week(a[i])
    elif instr.op == DAY_OF_YEAR:
        for i in range(m):
            dst[i] = fs_day_of_year(a[i])
    elif instr.op == ROUND_F32:
        for i in range(m):
            real[i] = <float> from_real[i]
    else:                                   # at once: through a double it would be rounded twice
        for i in range(m):
            real[i] = <float> a[i]


cdef inline uint32_t hash_real(double value, bint is_float, uint32_t seed) noexcept nogil:
    """One zero, one NaN, as for keys."""
    cdef float narrow
    cdef uint32_t word = 0x7FC00000
    cdef uint64_t long_word = 0x7FF8000000000000
    if value == 0.0:
        value = 0.0
    if is_float:
        if value == value:
            narrow = <float> value
            memcpy(&word, &narrow, 4)
        return hash_int(word, seed)
    if value == value:
        memcpy(&long_word, &value, 8)
    return hash_long(long_word, seed)


cdef inline void hash_values(const Instr *instr, const unsigned char *rows, uint32_t row_bytes, uint32_t m,
                             Scratch *scratch) noexcept nogil:
    """Hashes are signed 32-bit numbers, as Spark's."""
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const int64_t *a = scratch.registers + instr.a * BATCH
    cdef const double *real = <const double *> a
    cdef const int64_t *seed = scratch.registers + instr.b * BATCH
    cdef const unsigned char *at
    cdef uint32_t i
    if instr.op == HASH_LONG:
        for i in range(m):
            dst[i] = <int32_t> hash_long(<uint64_t> a[i], <uint32_t> seed[i])
    elif instr.op == HASH_INT:
        for i in range(m):
            dst[i] = <int32_t> hash_int(<uint32_t> a[i], <uint32_t> seed[i])
    elif instr.op == HASH_BYTES:
        for i in range(m):
            at = instr.bytes if instr.bytes else rows + instr.offset + scratch.selected[i] * <size_t> row_bytes
            dst[i] = <int32_t> hash_bytes(at, trimmed_size(at, instr.size), <uint32_t> seed[i])
    else:
        for i in range(m):
            dst[i] = <int32_t> hash_real(real[i], instr.op == HASH_F32, <uint32_t> seed[i])


cdef inline void run_call(const Instr *instr, const unsigned char *rows, uint32_t row_bytes, uint32_t m,
                          Scratch *scratch) noexcept nogil:
    if instr.op <= FIT:
        select_or_fit(instr, m, scratch)
    elif instr.op <= DAY_OF_YEAR:
        take_apart(instr, m, scratch)
    else:
        hash_values(instr, rows, row_bytes, m, scratch)
