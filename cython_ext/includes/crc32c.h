/* CRC32C (Castagnoli, reflected polynomial 0x82f63b78), the checksum of iSCSI and of our frames.
 *
 * The crc32 instruction has a latency of 3 cycles and a throughput of 1: one chain uses a third of the
 * unit. So three neighbouring pieces of the buffer are summed at once, and the three sums are joined
 * with a table that appends a fixed number of zero bytes to a CRC (M. Adler's method).
 *
 * Guarantees: crc32c_update(crc32c_update(0, a), b) == crc32c_update(0, a || b). Never allocates.
 * Assumes: crc32c_init() ran once before, on one thread (module import does it).
 */
#ifndef FLEXSTREAM_CRC32C_H
#define FLEXSTREAM_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CRC32C_POLY 0x82f63b78u
#define CRC32C_LONG 2048  /* bytes per chain: a 32 KiB frame is five rounds */
#define CRC32C_SHORT 256

static uint32_t crc32c_table[8][256];      /* slicing by 8: the portable way */
static uint32_t crc32c_skip_long[4][256];  /* append CRC32C_LONG zero bytes */
static uint32_t crc32c_skip_short[4][256];

static uint32_t crc32c_apply(const uint32_t *matrix, uint32_t vector) {
    uint32_t sum = 0;
    for (; vector; vector >>= 1, matrix++)
        if (vector & 1) sum ^= *matrix;
    return sum;
}

/* The operator that appends `bytes` zero bytes (a power of two), by squaring the one for one zero bit. */
static void crc32c_make_skip(uint32_t table[4][256], size_t bytes) {
    uint32_t one[32], two[32];
    one[0] = CRC32C_POLY;
    for (int i = 1; i < 32; i++) one[i] = 1u << (i - 1);
    for (size_t bits = 1; bits < bytes * 8; bits *= 2) {
        for (int i = 0; i < 32; i++) two[i] = crc32c_apply(one, one[i]);
        memcpy(one, two, sizeof one);
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 0; k < 4; k++) table[k][n] = crc32c_apply(one, n << (8 * k));
}

static void crc32c_init(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ CRC32C_POLY : c >> 1;
        crc32c_table[0][n] = c;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++)
            crc32c_table[k][n] = crc32c_table[0][crc32c_table[k - 1][n] & 255] ^ (crc32c_table[k - 1][n] >> 8);
    crc32c_make_skip(crc32c_skip_long, CRC32C_LONG);
    crc32c_make_skip(crc32c_skip_short, CRC32C_SHORT);
}

static inline uint64_t crc32c_load(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n) {
    uint32_t c = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low = c ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        c = crc32c_table[7][low & 255] ^ crc32c_table[6][(low >> 8) & 255] ^ crc32c_table[5][(low >> 16) & 255] ^
            crc32c_table[4][low >> 24] ^ crc32c_table[3][p[4]] ^ crc32c_table[2][p[5]] ^ crc32c_table[1][p[6]] ^
            crc32c_table[0][p[7]];
    }
    for (; n; n--, p++) c = crc32c_table[0][(c ^ *p) & 255] ^ (c >> 8);
    return ~c;
}

#ifdef __SSE4_2__
#include <nmmintrin.h>

static inline uint32_t crc32c_skip(const uint32_t table[4][256], uint32_t c) {
    return table[0][c & 255] ^ table[1][(c >> 8) & 255] ^ table[2][(c >> 16) & 255] ^ table[3][c >> 24];
}

static inline uint64_t crc32c_three(uint64_t c0, const unsigned char *p, size_t piece, const uint32_t skip[4][256]) {
    uint64_t c1 = 0, c2 = 0;
    for (const unsigned char *end = p + piece; p < end; p += 8) {
        c0 = _mm_crc32_u64(c0, crc32c_load(p));
        c1 = _mm_crc32_u64(c1, crc32c_load(p + piece));
        c2 = _mm_crc32_u64(c2, crc32c_load(p + 2 * piece));
    }
    c0 = crc32c_skip(skip, (uint32_t)c0) ^ c1;
    return crc32c_skip(skip, (uint32_t)c0) ^ c2;
}

static uint32_t crc32c_native(uint32_t crc, const unsigned char *p, size_t n) {
    uint64_t c = (uint32_t)~crc;
    for (; n && ((uintptr_t)p & 7); n--, p++) c = _mm_crc32_u8((uint32_t)c, *p);
    for (; n >= 3 * CRC32C_LONG; n -= 3 * CRC32C_LONG, p += 3 * CRC32C_LONG)
        c = crc32c_three(c, p, CRC32C_LONG, crc32c_skip_long);
    for (; n >= 3 * CRC32C_SHORT; n -= 3 * CRC32C_SHORT, p += 3 * CRC32C_SHORT)
        c = crc32c_three(c, p, CRC32C_SHORT, crc32c_skip_short);
    for (; n >= 8; n -= 8, p += 8) c = _mm_crc32_u64(c, crc32c_load(p));
    for (; n; n--, p++) c = _mm_crc32_u8((uint32_t)c, *p);
    return ~(uint32_t)c;
}
#define CRC32C_HARDWARE 1
#else
#define crc32c_native crc32c_portable
#define CRC32C_HARDWARE 0
#endif

#endif
