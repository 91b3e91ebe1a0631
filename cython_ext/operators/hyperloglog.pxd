"""How many different values a HyperLogLog sketch has seen: merging and estimating. Adding is in flexstream_abi.h.

The estimator is Ertl's (New cardinality estimation algorithms for HyperLogLog sketches, 2017, algorithm 6): without
tables and without a seam between small and large counts. Its relative standard error is 1.04 / sqrt(1024), 3.3%.
"""

from libc.math cimport sqrt
from libc.stdint cimport uint32_t
from libc.string cimport memset

cdef extern from "flexstream_abi.h" nogil:
    enum:
        FS_SKETCH_BITS
        FS_SKETCH_BYTES


cdef inline void sketch_merge(unsigned char *into, const unsigned char *other) noexcept nogil:
    cdef uint32_t i
    for i in range(<uint32_t> FS_SKETCH_BYTES):
        into[i] = other[i] if other[i] > into[i] else into[i]


cdef inline double sketch_sigma(double x) noexcept nogil:
    """For the registers that saw nothing. Assumes: x < 1."""
    cdef double y = 1.0
    cdef double z = x
    cdef double before = -1.0
    while z != before:
        x *= x
        before = z
        z += x * y
        y += y
    return z


cdef inline double sketch_tau(double x) noexcept nogil:
    """For the registers that saw all that a hash can have."""
    cdef double y = 1.0
    cdef double z = 1.0 - x
    cdef double before = -1.0
    if x == 0.0 or x == 1.0:
        return 0.0
    while z != before:
        x = sqrt(x)
        before = z
        y *= 0.5
        z -= (1.0 - x) * (1.0 - x) * y
    return z / 3.0


cdef inline double sketch_estimate(const unsigned char *sketch) noexcept nogil:
    cdef uint32_t seen[66 - FS_SKETCH_BITS]     # registers by rank, 0 to 65 - FS_SKETCH_BITS
    cdef uint32_t i
    cdef int k
    cdef double m = FS_SKETCH_BYTES
    cdef double z
    memset(seen, 0, sizeof(seen))
    for i in range(<uint32_t> FS_SKETCH_BYTES):
        seen[sketch[i]] += 1
    if seen[0] == FS_SKETCH_BYTES:
        return 0.0
    z = m * sketch_tau((m - seen[65 - FS_SKETCH_BITS]) / m)
    for k in range(64 - FS_SKETCH_BITS, 0, -1):
        z = 0.5 * (z + seen[k])
    z += m * sketch_sigma(seen[0] / m)
    return 0.7213475204444817 * m * m / z       # 1 / (2 ln 2)
