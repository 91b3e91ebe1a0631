"""The frame decoder: bytes of one connection in, rows and events out. Pure: no I/O, no clock, no allocation.

A worker receives into its one hot block; the decoder reads frames in place, so rows are never copied. What cannot
be read yet (part of a header, part of a row, with CRC part of a frame) is `carry`: the worker puts it in front of
the next bytes. All fields belong to the worker that serves the connection.

Guarantees: every whole row is delivered exactly once, in order, however the bytes were cut; after DECODE_FAULT the
decoder delivers nothing more; nothing outside [bytes, bytes + n) is read.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.wire.frame cimport (
    FAULT_BAD_CRC, FAULT_BAD_LENGTH, FAULT_BAD_MAGIC, FAULT_BAD_ROW_COUNT, FAULT_BAD_TYPE, FAULT_BAD_VERSION,
    FAULT_FENCED, FAULT_NO_SESSION, FAULT_NONE, FAULT_SEQUENCE_GAP, FAULT_SHUTTING_DOWN, FAULT_WRONG_GROUP, FLAG_CRC,
    FRAME_BARRIER, FRAME_DATA, FRAME_EOS, FRAME_MAGIC, FRAME_MARKER, FRAME_VERSION, FRAME_WATERMARK, HEADER_BYTES, Fault,
    Header, frame_crc,
)
from flexstream.cython_ext.wire.murmur3 cimport KeySpec

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
