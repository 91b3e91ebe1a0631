/* Spark's Murmur3 (x86, 32 bits): of keys, and of what `hash` is asked for. All native code has it from here, generated
 * code too. Reference: org.apache.spark.unsafe.hash.Murmur3_x86_32 (Spark 4). */
#ifndef FLEXSTREAM_MURMUR3_H
#define FLEXSTREAM_MURMUR3_H

#include <stdint.h>
#include <string.h>

#define MURMUR3_SEED 42

static inline uint32_t fs_mix(uint32_t h, uint32_t k) {
    k *= 0xcc9e2d51u;
    h ^= (k << 15 | k >> 17) * 0x1b873593u;
    return (h << 13 | h >> 19) * 5 + 0xe6546b64u;
}
static inline uint32_t fs_mixed(uint32_t h, uint32_t bytes) {
    h ^= bytes;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}
static inline uint32_t fs_murmur_int(uint32_t value, uint32_t seed) { return fs_mixed(fs_mix(seed, value), 4); }
static inline uint32_t fs_murmur_long(uint64_t value, uint32_t seed) {
    return fs_mixed(fs_mix(fs_mix(seed, (uint32_t)value), (uint32_t)(value >> 32)), 8);
}
/* Not the textbook tail: Spark mixes each of the last n % 4 bytes as a sign-extended int. */
static inline uint32_t fs_murmur_bytes(const unsigned char *p, uint32_t n, uint32_t seed) {
    uint32_t h = seed, i = 0, word;
    for (; i + 4 <= n; i += 4) {
        memcpy(&word, p + i, 4);
        h = fs_mix(h, word);
    }
    for (; i < n; i++) h = fs_mix(h, (uint32_t)(int32_t)(int8_t)p[i]);
    return fs_mixed(h, n);
}
/* A field's bytes without their padding. */
static inline uint32_t fs_trimmed(const unsigned char *p, uint32_t n) {
    while (n > 0 && !p[n - 1]) n--;
    return n;
}

#endif
