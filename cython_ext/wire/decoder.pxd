"""The frame decoder: bytes of one connection in, rows and events out. Pure: no I/O, no clock, no allocation.

A worker receives into its one hot block; the decoder reads frames in place, so rows are never copied. What cannot
be read yet (part of a header, part of a row, with CRC part of a frame) is `carry`: the worker puts it in front of
the next bytes. All fields belong to the worker that serves the connection.

Guarantees: every whole row is delivered exactly once, in order, however the bytes were cut; after DECODE_FAULT the
decoder delivers nothing more; nothing outside [bytes, bytes + n) is read.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.wire.murmur3 cimport KeySpec

cdef enum:
    HEADER_BYTES = 32
    FRAME_MAGIC = 0x5346
    FRAME_VERSION = 1
    FLAG_CRC = 1

cdef enum FrameType:
    FRAME_HELLO = 1
    FRAME_DATA = 2
    FRAME_WATERMARK = 3
    FRAME_MARKER = 4
    FRAME_BARRIER = 5
    FRAME_ACK = 6
    FRAME_EOS = 7
    FRAME_ERROR = 8

cdef enum Fault:                  # the numeric codes of ERROR frames (docs/protocol.md)
    FAULT_NONE = 0
    FAULT_MAGIC = 1
    FAULT_VERSION = 2
    FAULT_TYPE = 3
    FAULT_LENGTH = 4
    FAULT_CRC = 5
    FAULT_GROUP = 6
    FAULT_NO_SESSION = 10
    FAULT_SEQUENCE = 12
    FAULT_SHUTTING_DOWN = 16
    FAULT_ROW_COUNT = 18
    FAULT_FENCED = 19

cdef enum Decoded:
    DECODE_NEED = 0               # nothing more in these bytes; the rest is carry
    DECODE_ROWS = 1
    DECODE_WATERMARK = 2
    DECODE_MARKER = 3
    DECODE_BARRIER = 4
    DECODE_EOS = 5
    DECODE_FAULT = 6


cdef struct Decoder:
    # set once
    uint32_t row_bytes
    uint32_t group
    uint32_t groups
    uint32_t crc                  # every frame carries a CRC and is applied only when it is right
    uint32_t frame_bytes          # payload cap with CRC
    uint32_t max_frame_bytes      # payload cap without
    KeySpec key
    # moving
    uint64_t frame_left           # payload bytes of the current DATA frame that were not delivered yet
    uint64_t skip_left            # of these, bytes of rows that were received before (replay)
    uint64_t next_row             # row sequence wanted next
    uint32_t check_group          # the next row delivered is a frame's first
    uint32_t ended                # EOS was seen
    uint32_t fault
    uint64_t frames
    # the event
    const unsigned char *rows
    uint64_t n_rows
    uint64_t value


cdef Decoded decoder_next(Decoder *decoder, const unsigned char *bytes_, uint64_t n, uint64_t *at) noexcept nogil
