/* Partition kernels of the producer: packed rows -> group ids -> copies into one cursor per group.
 *
 * A block of rows small enough for the L1 cache is first hashed (a loop without branches, which the compiler
 * vectorises), then copied: one 16-byte load and store per 16 bytes of row, the last pair overlapping, so that
 * no byte past a row is read or written.
 *
 * Guarantees: no allocation, no calls, no writes outside [at, end) of a cursor.
 * Assumes: end - at is a multiple of row_bytes for every cursor; row_bytes >= 8 (a row has a timestamp).
 */
#ifndef FLEXSTREAM_SCATTER_H
#define FLEXSTREAM_SCATTER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "murmur3.h"
#include "window_times.h"

#define SCATTER_BLOCK_BYTES 16384
#define SCATTER_MAX_BLOCK 1024

typedef struct {
    unsigned char *at, *end; /* equal: no room, or no open frame */
} Cursor;

typedef struct {
    uint32_t groups, mask; /* mask: groups - 1 for a power of two, else 0 */
    uint32_t bias;         /* 2^31 mod groups: pmod is of the hash as a signed int */
    uint64_t reciprocal;   /* ceil(2^64 / groups); 0 for one group, which has a mask */
} Modulus; /* pmod without a division (Lemire, Kaser, Kurz 2019, "Faster remainder by direct computation") */

static inline Modulus scatter_modulus(uint32_t groups) {
    Modulus m = {groups, groups & (groups - 1) ? 0 : groups - 1, (1u << 31) % groups, UINT64_MAX / groups + 1};
    return m;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define SCATTER_AVX2 1 /* compiled beside the portable code and chosen at run time */
#define SCATTER_TARGET __attribute__((target("avx2")))
static inline int scatter_has_avx2(void) { return __builtin_cpu_supports("avx2"); }
#else
#define SCATTER_AVX2 0
#define SCATTER_TARGET
static inline int scatter_has_avx2(void) { return 0; }
#endif
#define SCATTER_INLINE static inline __attribute__((always_inline))

/* fs_murmur_long of one 8-byte integer per row, some lanes at a time. */
SCATTER_INLINE void scatter_hash_body(const unsigned char *key, size_t stride, size_t n, uint32_t *hash) {
    uint32_t low[SCATTER_MAX_BLOCK], high[SCATTER_MAX_BLOCK];
    for (size_t i = 0; i < n; i++, key += stride) {
        memcpy(&low[i], key, 4);
        memcpy(&high[i], key + 4, 4);
    }
    for (size_t i = 0; i < n; i++) {
        hash[i] = fs_mixed(fs_mix(fs_mix(MURMUR3_SEED, low[i]), high[i]), 8);
    }
}

typedef void (*scatter_hash_fn)(const unsigned char *, size_t, size_t, uint32_t *);

static void scatter_hash_sse(const unsigned char *key, size_t stride, size_t n, uint32_t *hash) {
    scatter_hash_body(key, stride, n, hash);
}

SCATTER_TARGET static void scatter_hash_avx2(const unsigned char *key, size_t stride, size_t n, uint32_t *hash) {
    scatter_hash_body(key, stride, n, hash);
}

static inline scatter_hash_fn scatter_hash_for(void) {
    return scatter_has_avx2() ? scatter_hash_avx2 : scatter_hash_sse;
}

static void scatter_groups(const Modulus *m, const uint32_t *hash, size_t n, uint16_t *group) {
    if (m->mask || m->groups == 1) {
        for (size_t i = 0; i < n; i++) group[i] = (uint16_t)(hash[i] & m->mask);
        return;
    }
    for (size_t i = 0; i < n; i++) { /* the hash as a signed int is (h ^ 2^31) - 2^31 */
        uint64_t low = m->reciprocal * (hash[i] ^ 1u << 31);
        uint32_t r = (uint32_t)(((unsigned __int128)low * m->groups) >> 64);
        group[i] = (uint16_t)(r >= m->bias ? r - m->bias : r + m->groups - m->bias);
    }
}

/* The largest event time, without those beyond the limit: the engine refuses such rows, and one of them must not push the
 * watermark to the end of time. */
static int64_t scatter_max_time(const unsigned char *time, size_t stride, size_t n, int64_t most, int64_t latest) {
    uint64_t width = (uint64_t)latest + FS_TIME_LIMIT;
    for (size_t i = 0; i < n; i++, time += stride) {
        int64_t t;
        memcpy(&t, time, 8);
        t = (uint64_t)t + FS_TIME_LIMIT <= width ? t : INT64_MIN;
        most = t > most ? t : most;
    }
    return most;
}

typedef uint64_t scatter_16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t scatter_32 __attribute__((vector_size(32), aligned(1), may_alias));

/* The line that this cursor's next row ends in is wanted many rows later: ask for it now, for writing. With more
 * groups than the L1 cache has room for, this hides a miss per row. (PREFETCHW is a no-op where it does not exist.) */
static inline void scatter_expect(const unsigned char *to) {
#ifdef __x86_64__
    __asm__ volatile("prefetchw %0" : : "m"(*to));
#else
    __builtin_prefetch(to, 1);
#endif
}

/* Rows 0..n-1 go to their groups' cursors; stops at a row whose cursor has no room. Returns the rows copied. */
#define SCATTER_BODY(COPY)                                                                            \
    for (size_t i = 0; i < n; i++, row += row_bytes) {                                                \
        Cursor *cursor = &cursors[group[i]];                                                          \
        unsigned char *to = cursor->at;                                                               \
        __builtin_prefetch(row + SCATTER_BLOCK_BYTES); /* the next block, which is hashed soon */     \
        if (__builtin_expect(to == cursor->end, 0)) return i;                                         \
        COPY;                                                                                         \
        cursor->at = to + row_bytes;                                                                  \
        scatter_expect(to + 2 * row_bytes);                                                           \
    }                                                                                                 \
    return n;

typedef size_t (*scatter_fn)(Cursor *, const uint16_t *, const unsigned char *, size_t, size_t);

/* K whole words of W bytes and one that ends where the row ends: for rows of K * W + 1 to (K + 1) * W bytes. */
#define SCATTER_SIZED(W, K, TARGET)                                                                   \
    TARGET static size_t scatter_##W##_##K(Cursor *cursors, const uint16_t *group, const unsigned char *row, \
                                           size_t row_bytes, size_t n) {                              \
        SCATTER_BODY({                                                                                \
            _Pragma("GCC unroll 16") for (int k = 0; k < K; k++)                                      \
                *(scatter_##W *)(to + W * k) = *(const scatter_##W *)(row + W * k);                   \
            *(scatter_##W *)(to + row_bytes - W) = *(const scatter_##W *)(row + row_bytes - W);       \
        })                                                                                            \
    }

SCATTER_SIZED(16, 0, ) SCATTER_SIZED(16, 1, ) SCATTER_SIZED(16, 2, ) SCATTER_SIZED(16, 3, )
SCATTER_SIZED(16, 4, ) SCATTER_SIZED(16, 5, ) SCATTER_SIZED(16, 6, ) SCATTER_SIZED(16, 7, )
SCATTER_SIZED(16, 8, ) SCATTER_SIZED(16, 9, ) SCATTER_SIZED(16, 10, ) SCATTER_SIZED(16, 11, )
#if SCATTER_AVX2
SCATTER_SIZED(32, 1, SCATTER_TARGET) SCATTER_SIZED(32, 2, SCATTER_TARGET) SCATTER_SIZED(32, 3, SCATTER_TARGET)
SCATTER_SIZED(32, 4, SCATTER_TARGET) SCATTER_SIZED(32, 5, SCATTER_TARGET)
#endif

static size_t scatter_tiny(Cursor *cursors, const uint16_t *group, const unsigned char *row, size_t row_bytes,
                           size_t n) { /* 8 to 15 bytes */
    SCATTER_BODY({
        memcpy(to, row, 8);
        memcpy(to + row_bytes - 8, row + row_bytes - 8, 8);
    })
}

static size_t scatter_any(Cursor *cursors, const uint16_t *group, const unsigned char *row, size_t row_bytes,
                          size_t n) {
    SCATTER_BODY(memcpy(to, row, row_bytes))
}

static inline scatter_fn scatter_for(size_t row_bytes) {
    static const scatter_fn by16[] = {scatter_16_0, scatter_16_1, scatter_16_2, scatter_16_3, scatter_16_4,  scatter_16_5,
                                      scatter_16_6, scatter_16_7, scatter_16_8, scatter_16_9, scatter_16_10, scatter_16_11};
    size_t k = (row_bytes - 1) / 16;
    if (row_bytes < 16) return row_bytes < 8 ? scatter_any : scatter_tiny;
#if SCATTER_AVX2
    static const scatter_fn by32[] = {NULL, scatter_32_1, scatter_32_2, scatter_32_3, scatter_32_4, scatter_32_5};
    if (scatter_has_avx2() && row_bytes > 32 && (row_bytes - 1) / 32 < sizeof by32 / sizeof *by32)
        return by32[(row_bytes - 1) / 32];
#endif
    return k < sizeof by16 / sizeof *by16 ? by16[k] : scatter_any;
}

static inline size_t scatter_block_rows(size_t row_bytes) {
    size_t rows = SCATTER_BLOCK_BYTES / row_bytes;
    return rows < 16 ? 16 : rows > SCATTER_MAX_BLOCK ? SCATTER_MAX_BLOCK : rows;
}

#endif
