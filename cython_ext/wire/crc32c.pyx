"""CRC32C of frames: the SSE4.2 instruction on three chains, or tables where the processor has none."""

from libc.stdint cimport uint32_t


cdef extern from "crc32c.h" nogil:
    const bint CRC32C_HARDWARE
    void crc32c_init() noexcept
    uint32_t crc32c_native(uint32_t crc, const unsigned char *p, size_t n) noexcept
    uint32_t c_portable "crc32c_portable"(uint32_t crc, const unsigned char *p, size_t n) noexcept


cdef uint32_t crc32c_update(uint32_t crc, const unsigned char *p, size_t n) noexcept nogil:
    return crc32c_native(crc, p, n)


def crc32c(const unsigned char[::1] data not None, uint32_t value=0) -> int:
    """CRC32C of `data`, continuing from `value` (the CRC of what came before). Releases the GIL."""
    cdef uint32_t result
    cdef size_t n = <size_t> data.shape[0]
    if n == 0:
        return value
    cdef const unsigned char *p = &data[0]
    with nogil:
        result = crc32c_native(value, p, n)
    return result


def crc32c_portable(const unsigned char[::1] data not None, uint32_t value=0) -> int:
    """The same by tables; exists so that tests can compare the two."""
    if data.shape[0] == 0:
        return value
    return c_portable(value, &data[0], <size_t> data.shape[0])


HARDWARE = bool(CRC32C_HARDWARE)
crc32c_init()
