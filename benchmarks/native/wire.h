/* The frame header of docs/protocol.md, for the benchmark programs. Little-endian hosts only. */
#ifndef FLEXSTREAM_BENCH_WIRE_H
#define FLEXSTREAM_BENCH_WIRE_H

#include <stdint.h>

enum { HELLO = 1, DATA = 2, WATERMARK = 3, MARKER = 4, BARRIER = 5, ACK = 6, EOS = 7, ERROR = 8 };
enum { MAGIC = 0x5346, VERSION = 1, FLAG_CRC = 1, CONTROL_GROUP = 0xFFFF, HEADER_BYTES = 32 };

struct __attribute__((packed)) header {
    uint16_t magic;
    uint8_t version, type;
    uint16_t flags, group;
    uint32_t payload_bytes, crc32c;
    uint64_t value, sequence;
};

_Static_assert(sizeof(struct header) == HEADER_BYTES, "the header is 32 bytes");

static inline struct header make_header(uint8_t type, uint16_t group, uint32_t payload, uint64_t value, uint64_t seq)
{
    return (struct header){MAGIC, VERSION, type, 0, group, payload, 0, value, seq};
}

#endif
