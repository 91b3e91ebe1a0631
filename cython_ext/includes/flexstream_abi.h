/* What a compiled variant and the engine agree on. Generated code includes this header, which brings the
 * folds (folds.h) and the hash of keys (murmur3.h), and nothing else.
 *
 * A variant takes the rows of one batch of one group in order. It applies each row to the panes in its view and
 * stops at the first row that it cannot finish: a pane that is not there yet, a full table, a late row, an expression
 * without a value. The engine gives that row to the generic variant and calls again behind it. So a variant has no
 * slow path, allocates nothing, and cannot lose a row. */
#ifndef FLEXSTREAM_ABI_H
#define FLEXSTREAM_ABI_H

#include <stdint.h>
#include <string.h>

#include "murmur3.h"

#define FS_ABI_VERSION 8
#define FS_ABI_BATCH 1024
#define FS_GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define FS_USED (UINT64_C(1) << 63)
#define FS_PREDICATES 32
#define FS_BUCKETS 256
#define FS_SIDES 4
#define FS_ROWS ((UINT64_C(1) << 62) - 1) /* of an entry's first word: the rows that it counts */
#define FS_CACHED (UINT64_C(64) << 10) /* a table larger than this is prefetched: groups take turns in the cache */
#define FS_RARE(condition) __builtin_expect(!!(condition), 0)

/* A pane's state has two places. The table holds entries by hash. The dense array, which the panes of all groups of
 * one span of time share, holds them by key - base, without the key: it is a front whose entries the engine moves to
 * the table before anybody else looks at the pane. Room for them in the table is reserved when they are first used. */
typedef struct {
    int64_t start;          /* event time */
    uint64_t span;          /* 0: no pane */
    unsigned char *entries; /* [used bit, dirty bit, row count][key words][aggregate slots], all 8-byte words */
    uint64_t mask;          /* capacity - 1 */
    uint32_t shift;         /* 64 - log2(capacity) */
    uint32_t limit;         /* keys that the table may hold, with those reserved */
    uint64_t multiplier;    /* the table's own: who sends keys that all begin at one place makes it draw another */
    uint64_t reach;         /* slots from a key's home to its entry, at most; further: the engine changes the multiplier */
    uint32_t *used;         /* keys that it holds */
    uint32_t *reserved;     /* keys that only the dense array holds: the length of `touched` */
    uint64_t *dense;        /* [used bit, row count][aggregate slots] */
    uint64_t base, range;   /* key - base < range has a place in it; range 0: there is none */
    uint32_t *touched;      /* key - base of the entries in use */
    uint64_t touched_limit;
} fs_pane_view;

/* A table of a pane beside its own (side_tables.pxd): of (key, one more word), both in the key's place. */
typedef struct {
    unsigned char *entries; /* NULL: it has no memory yet */
    uint64_t mask, multiplier, reach;
    uint32_t shift, limit;
    uint32_t *used;
} fs_side_view;

/* What an instrumented variant counts, over a sample of the rows. */
typedef struct {
    uint64_t rows;
    uint64_t passed[FS_PREDICATES]; /* each predicate on its own */
    uint64_t keys;                  /* rows that passed all */
    int64_t least, most;            /* their keys, when they are integers */
    uint64_t bucket[FS_BUCKETS];    /* their keys by hash */
} fs_profile;

typedef struct {
    fs_pane_view pane[2]; /* the pane in use, and the one before it */
    const uint64_t *empty; /* an entry before its first row */
    uint64_t passing;     /* of 1024 rows lately, those that the filters let pass */
    uint64_t filtered;    /* out: rows among those finished that a filter dropped */
    uint64_t overflow;    /* out: not 0 when an integer sum has no value any more */
    uint64_t outside;     /* out: rows whose key has no place in the dense array that is there */
    uint64_t fresh;       /* out: keys that were new to their pane */
    fs_profile *profile;
    uint64_t session;     /* number of the session that the rows are of */
    uint64_t sequence;    /* of the first row, within session and group */
    fs_side_view side[2][FS_SIDES]; /* of either pane */
} fs_view;

/* How many rows were finished, from the first on. n <= FS_ABI_BATCH. */
typedef uint32_t (*fs_variant)(const unsigned char *rows, uint32_t n, fs_view *view);

static inline int8_t fs_get_i8(const unsigned char *p) { return (int8_t)*p; }
static inline uint8_t fs_get_u8(const unsigned char *p) { return *p; }
static inline uint8_t fs_get_bool(const unsigned char *p) { return *p != 0; }
static inline int16_t fs_get_i16(const unsigned char *p) { int16_t v; memcpy(&v, p, 2); return v; }
static inline uint16_t fs_get_u16(const unsigned char *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline int32_t fs_get_i32(const unsigned char *p) { int32_t v; memcpy(&v, p, 4); return v; }
static inline uint32_t fs_get_u32(const unsigned char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline int64_t fs_get_i64(const unsigned char *p) { int64_t v; memcpy(&v, p, 8); return v; }
static inline uint64_t fs_get_u64(const unsigned char *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline float fs_get_f32(const unsigned char *p) { float v; memcpy(&v, p, 4); return v; }
static inline double fs_get_f64(const unsigned char *p) { double v; memcpy(&v, p, 8); return v; }
static inline double fs_real(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }

/* Key words: -0.0 and 0.0 are one key, and so are all NaNs. */
static inline void fs_key_f32(void *to, const unsigned char *p) {
    float v = fs_get_f32(p);
    v = v == 0 ? 0 : v != v ? __builtin_nanf("") : v;
    memcpy(to, &v, 4);
}
static inline void fs_key_f64(void *to, const unsigned char *p) {
    double v = fs_get_f64(p);
    v = v == 0 ? 0 : v != v ? __builtin_nan("") : v;
    memcpy(to, &v, 8);
}
/* Folded products: with the low halves alone some keys would be one for every multiplier (top bits only go up). */
__extension__ typedef unsigned __int128 fs_u128;
static inline uint64_t fs_hash_words(const uint64_t *key, int words, uint64_t multiplier) {
    uint64_t h = multiplier;
    for (int w = 0; w < words; w++) {
        fs_u128 product = (fs_u128)(h ^ key[w]) * multiplier;
        h = (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    return h;
}

/* The entry of (key, one more word), `words` in all, with `behind` more. NULL: the engine has to make room for it. */
static inline __attribute__((always_inline)) uint64_t *fs_find_beside(const fs_side_view *side, const uint64_t *key,
                                                                      const int words, const int behind) {
    if (__builtin_expect(!side->entries, 0)) return 0;
    const uint64_t home = fs_hash_words(key, words, side->multiplier) >> side->shift;
    const size_t stride = 8 * (size_t)(1 + words + behind);
    uint64_t at = home, *entry = (uint64_t *)(side->entries + at * stride);
    while (entry[0] && memcmp(entry + 1, key, 8 * (size_t)words) != 0) {
        at = (at + 1) & side->mask;
        entry = (uint64_t *)(side->entries + at * stride);
    }
    if (entry[0]) return entry;
    if (*side->used >= side->limit || ((at - home) & side->mask) > side->reach) return 0;
    ++*side->used;
    entry[0] = FS_USED;
    memcpy(entry + 1, key, 8 * (size_t)words);
    return entry;
}

static inline void fs_note_key(fs_profile *profile, int64_t value, uint64_t hash) {
    profile->keys += 1;
    profile->bucket[hash >> 56] += 1;
    if (value < profile->least) profile->least = value;
    if (value > profile->most) profile->most = value;
}

/* As in Spark: NaN equals NaN and is greater than any other value. */
static inline int64_t fs_eq(double a, double b) { return a == b || (a != a && b != b); }
static inline int64_t fs_lt(double a, double b) { return a < b || (b != b && a == a); }

/* Division and remainder towards minus infinity. b > 0. */
static inline int64_t fs_floor(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static inline int64_t fs_floormod(int64_t a, int64_t b) { return a % b < 0 ? a % b + b : a % b; }

/* Days since 1970 in the proleptic Gregorian calendar (Hinnant, "chrono-compatible low-level date algorithms"): years
 * that begin in March, in cycles of 400. Assumes: days of a timestamp, so that sums do not overflow. */
typedef struct {
    int64_t year;
    int day, month; /* the day of the year that began in March, its month: 0, 10 and 11 are March, January, February */
} fs_march;
static inline fs_march fs_march_of(int64_t days) {
    int64_t cycle = fs_floor(days + 719468, 146097);
    int day = (int)(days + 719468 - cycle * 146097);
    int year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    day -= 365 * year + year / 4 - year / 100;
    return (fs_march){cycle * 400 + year, day, (5 * day + 2) / 153};
}
static inline int64_t fs_year(int64_t days) {
    fs_march at = fs_march_of(days);
    return at.year + (at.month >= 10);
}
static inline int64_t fs_month(int64_t days) {
    int month = fs_march_of(days).month;
    return month < 10 ? month + 3 : month - 9;
}
static inline int64_t fs_day(int64_t days) {
    fs_march at = fs_march_of(days);
    return at.day - (153 * at.month + 2) / 5 + 1;
}
static inline int64_t fs_day_of_week(int64_t days) { return fs_floormod(days + 4, 7) + 1; } /* 1: Sunday */
static inline int64_t fs_day_of_year(int64_t days) {
    fs_march at = fs_march_of(days);
    int leap = at.year % 4 == 0 && (at.year % 100 != 0 || at.year % 400 == 0);
    return at.month < 10 ? at.day + 60 + leap : at.day - 305;
}

/* Hashes are signed 32-bit numbers. */
static inline int64_t fs_hash_int(int64_t v, int64_t seed) {
    return (int32_t)fs_murmur_int((uint32_t)v, (uint32_t)seed);
}
static inline int64_t fs_hash_long(int64_t v, int64_t seed) {
    return (int32_t)fs_murmur_long((uint64_t)v, (uint32_t)seed);
}
static inline int64_t fs_hash_f32(double v, int64_t seed) {
    float narrow = v == 0 ? 0 : v != v ? __builtin_nanf("") : (float)v;
    int32_t bits;
    memcpy(&bits, &narrow, 4);
    return fs_hash_int(bits, seed);
}
static inline int64_t fs_hash_f64(double v, int64_t seed) {
    int64_t bits;
    v = v == 0 ? 0 : v != v ? __builtin_nan("") : v;
    memcpy(&bits, &v, 8);
    return fs_hash_long(bits, seed);
}
static inline int64_t fs_hash_bytes(const unsigned char *p, uint32_t n, int64_t seed) {
    return (int32_t)fs_murmur_bytes(p, fs_trimmed(p, n), (uint32_t)seed);
}
static inline int fs_is_zero(const unsigned char *p, uint32_t n) {
    unsigned char any = 0;
    for (uint32_t i = 0; i < n; i++) any |= p[i];
    return !any;
}

static inline uint64_t fs_bits(double v) { uint64_t bits; memcpy(&bits, &v, 8); return bits; }
/* Equal values have equal bits: -0.0 and 0.0 are one value, and so are all NaNs. */
static inline uint64_t fs_value_bits(double v) { return fs_bits(v == 0 ? 0 : v != v ? __builtin_nan("") : v); }
/* The finaliser of splitmix64: one to one, and every bit of the value moves every bit of the hash. */
static inline uint64_t fs_hash_value(uint64_t bits) {
    uint64_t h = bits + FS_GOLDEN;
    h = (h ^ h >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    h = (h ^ h >> 27) * UINT64_C(0x94D049BB133111EB);
    return h ^ h >> 31;
}

#include "folds.h"

#endif
