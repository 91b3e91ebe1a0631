"""CRC32C. Any thread, no state, no allocation."""

from libc.stdint cimport uint32_t

# Continues a finished CRC `crc` (0 to start) over n bytes.
cdef uint32_t crc32c_update(uint32_t crc, const unsigned char *p, size_t n) noexcept nogil
