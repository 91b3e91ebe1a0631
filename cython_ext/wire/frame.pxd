"""Frames as bytes: what frame.h declares, and their CRC. Pure functions."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy

from flexstream.cython_ext.wire.crc32c cimport crc32c_update

cdef extern from "frame.h" nogil:
    enum:
        FRAME_MAGIC
        FRAME_VERSION
        HEADER_BYTES
        FLAG_CRC
        CONTROL_GROUP
        STAGE_GROUP
    enum FrameType "fs_frame_type":
        FRAME_HELLO
        FRAME_DATA
        FRAME_WATERMARK
        FRAME_MARKER
        FRAME_BARRIER
        FRAME_ACK
        FRAME_EOS
        FRAME_ERROR
        FRAME_STAGE
        FRAME_LANES
    enum Fault "fs_fault":        # those that native code finds
        FAULT_NONE
        FAULT_BAD_MAGIC
        FAULT_BAD_VERSION
        FAULT_BAD_TYPE
        FAULT_BAD_LENGTH
        FAULT_BAD_CRC
        FAULT_WRONG_GROUP
        FAULT_NO_SESSION
        FAULT_SEQUENCE_GAP
        FAULT_SHUTTING_DOWN
        FAULT_BAD_ROW_COUNT
        FAULT_FENCED
    ctypedef struct Header "fs_header":
        uint16_t magic
        uint8_t version
        uint8_t type
        uint16_t flags
        uint16_t group
        uint32_t payload_bytes
        uint32_t crc32c
        uint64_t value
        uint64_t sequence
    Header header_of "fs_header_of"(uint8_t kind, uint16_t group, uint32_t payload_bytes, uint64_t value,
                                    uint64_t sequence) noexcept


cdef inline uint32_t frame_crc(const unsigned char *frame, size_t n) noexcept nogil:
    """CRC32C over the header with its CRC field zero, and the payload behind it: `n` bytes in all."""
    cdef Header header
    cdef uint32_t crc
    memcpy(&header, frame, HEADER_BYTES)
    header.crc32c = 0
    crc = crc32c_update(0, <const unsigned char *> &header, HEADER_BYTES)
    return crc32c_update(crc, frame + HEADER_BYTES, n - HEADER_BYTES)
