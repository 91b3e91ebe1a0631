/* A frame on the wire (docs/protocol.md): its header, its types, and the codes of ERROR frames. All native code has them
 * from here; flexstream/wire/frames.py has the same for Python without native code, and a test compares the two.
 *
 * Assumes: a little-endian host. The header has no padding, and may be read in place from any address. */
#ifndef FLEXSTREAM_FRAME_H
#define FLEXSTREAM_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_MAGIC = 0x5346, /* the bytes "FS" */
    FRAME_VERSION = 1,
    HEADER_BYTES = 32,
    FLAG_CRC = 1,
    CONTROL_GROUP = 0xFFFF,
    STAGE_GROUP = 0xFFFE
};

enum fs_frame_type {
    FRAME_HELLO = 1,
    FRAME_DATA = 2,
    FRAME_WATERMARK = 3,
    FRAME_MARKER = 4,
    FRAME_BARRIER = 5,
    FRAME_ACK = 6,
    FRAME_EOS = 7,
    FRAME_ERROR = 8,
    FRAME_STAGE = 9,
    FRAME_LANES = 10
};

enum fs_fault { /* the value of an ERROR frame */
    FAULT_NONE = 0,
    FAULT_BAD_MAGIC = 1,
    FAULT_BAD_VERSION = 2,
    FAULT_BAD_TYPE = 3,
    FAULT_BAD_LENGTH = 4,
    FAULT_BAD_CRC = 5,
    FAULT_WRONG_GROUP = 6,
    FAULT_UNKNOWN_STREAM = 7,
    FAULT_SCHEMA_MISMATCH = 8,
    FAULT_BAD_TOKEN = 9,
    FAULT_NO_SESSION = 10,
    FAULT_STALE_EPOCH = 11,
    FAULT_SEQUENCE_GAP = 12,
    FAULT_BAD_HELLO = 13,
    FAULT_HELLO_TIMEOUT = 14,
    FAULT_TOO_MANY_PENDING = 15,
    FAULT_SHUTTING_DOWN = 16,
    FAULT_TOO_MANY_SESSIONS = 17,
    FAULT_BAD_ROW_COUNT = 18,
    FAULT_FENCED = 19,
    FAULT_REJECTED = 20
};

typedef struct __attribute__((packed, may_alias)) {
    uint16_t magic;
    uint8_t version, type;
    uint16_t flags, group;
    uint32_t payload_bytes, crc32c;
    uint64_t value, sequence;
} fs_header;

_Static_assert(sizeof(fs_header) == HEADER_BYTES, "a header has 32 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");

static inline fs_header fs_header_of(uint8_t type, uint16_t group, uint32_t payload_bytes, uint64_t value,
                                     uint64_t sequence) {
    return (fs_header){FRAME_MAGIC, FRAME_VERSION, type, 0, group, payload_bytes, 0, value, sequence};
}

#endif
