/* The folds: what an aggregate keeps of a key's rows, in 8-byte slots of the key's entry, once for all variants.
 *
 * Each has four functions, whose names begin with its own:
 *   empty   slots before the first row; they are 0 when it is called
 *   update  a row into the slots. Not 0: the slots have no value any more, which fails the query
 *   merge   another partial of the same key into the slots; the same. Any order of rows and merges gives the same result,
 *           but for the last bits of reals
 *   finish  what the slots say of so many rows: 8 bytes of a result
 * and, if it is FS_INVERTIBLE, take_out, which undoes a merge. Compiled variants call them by name, the generic one by
 * number (fold_calls.h). What an FS_SIDE fold does with a row is not in update but in
 *   beside  a row into the slots, its entry in the side table and the words behind that entry's key
 *   value   so many rows of a value that had some before into the slots: when side tables are merged
 * and side_tables.pyx looks after the rest; its merge has nothing to do, because who merges parts counts values anew. */
#ifndef FLEXSTREAM_FOLDS_H
#define FLEXSTREAM_FOLDS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "flexstream_abi.h"

enum fs_fold_flags {
    FS_SIDE = 1,       /* has a table beside the entries (side_tables.pxd) */
    FS_ORDERED = 2,    /* needs rows in the order of arrival: a group's rows have one partial at a time */
    FS_INVERTIBLE = 4, /* a partial can be taken out of a sum again, exactly */
    FS_ORIGIN = 8,     /* goes by where rows come from: event time, session, sequence */
    FS_REAL = 16,      /* the value is a double, whose bits are made those of its equals before it is looked up */
    FS_MASKS = 32,     /* a row that a filter dropped can be folded as nothing */
    FS_OVERFLOWS = 64, /* update and merge may say that there is no value any more */
    FS_COUNTED = 128,  /* how often a value came counts, not only that it came */
    FS_RANKED = 256    /* goes by the order of a key's values: a firing puts it right (ranking.pxd) */
};

/* name, number, slots, flags, in three lists: folds with a take_out, folds with a table beside the entries, all others.
 * Numbers stay: a fold that goes leaves a gap. */
#define FS_INVERTIBLE_FOLDS(X)                              \
    X(count, 0, 0, FS_INVERTIBLE | FS_MASKS)                \
    X(sum_i, 1, 1, FS_INVERTIBLE | FS_MASKS | FS_OVERFLOWS)
#define FS_PLAIN_FOLDS(X)                \
    X(sum_f, 2, 2, 0)                    \
    X(min_i, 3, 1, FS_MASKS)             \
    X(max_i, 4, 1, FS_MASKS)             \
    X(min_f, 5, 1, 0)                    \
    X(max_f, 6, 1, 0)                    \
    X(avg, 7, 2, 0)                      \
    X(stddev, 8, 4, 0)                   \
    X(first, 9, 4, FS_ORIGIN | FS_MASKS) \
    X(last, 10, 4, FS_ORIGIN | FS_MASKS) \
    X(approx_i, 11, 128, FS_MASKS)       \
    X(approx_f, 12, 128, FS_REAL)        \
    X(variance, 17, 4, 0)                \
    X(min_by_ii, 18, 2, FS_MASKS)        \
    X(min_by_if, 19, 2, FS_MASKS)        \
    X(min_by_fi, 20, 2, FS_MASKS)        \
    X(min_by_ff, 21, 2, FS_MASKS)        \
    X(max_by_ii, 22, 2, FS_MASKS)        \
    X(max_by_if, 23, 2, FS_MASKS)        \
    X(max_by_fi, 24, 2, FS_MASKS)        \
    X(max_by_ff, 25, 2, FS_MASKS)
#define FS_SIDE_FOLDS(X)                              \
    X(distinct_i, 13, 2, FS_SIDE)                     \
    X(distinct_f, 14, 2, FS_SIDE | FS_REAL)           \
    X(order_i, 15, 1, FS_SIDE | FS_ORDERED)           \
    X(order_f, 16, 1, FS_SIDE | FS_ORDERED | FS_REAL) \
    X(mode_i, 26, 4, FS_SIDE | FS_COUNTED)            \
    X(mode_f, 27, 4, FS_SIDE | FS_COUNTED | FS_REAL)  \
    X(median_i, 28, 2, FS_SIDE | FS_RANKED)           \
    X(median_f, 29, 2, FS_SIDE | FS_RANKED | FS_REAL)
#define FS_FOLDS(X) FS_INVERTIBLE_FOLDS(X) FS_PLAIN_FOLDS(X) FS_SIDE_FOLDS(X)

/* A fold in the wrong list would be called by nobody, and nobody would hear of it. */
#define FS_TAKES_OUT(name, number, slots, flags) \
    _Static_assert(((flags) & (FS_INVERTIBLE | FS_SIDE)) == FS_INVERTIBLE, #name " is not FS_INVERTIBLE");
#define FS_IS_PLAIN(name, number, slots, flags) \
    _Static_assert(!((flags) & (FS_INVERTIBLE | FS_SIDE)), #name " is in the wrong list");
#define FS_HAS_SIDE(name, number, slots, flags) \
    _Static_assert(((flags) & (FS_INVERTIBLE | FS_SIDE)) == FS_SIDE, #name " is not FS_SIDE");
FS_INVERTIBLE_FOLDS(FS_TAKES_OUT)
FS_PLAIN_FOLDS(FS_IS_PLAIN)
FS_SIDE_FOLDS(FS_HAS_SIDE)
#undef FS_TAKES_OUT
#undef FS_IS_PLAIN
#undef FS_HAS_SIDE

#define FS_FOLD_NUMBER(name, number, slots, flags) FS_FOLD_##name = number,
#define FS_FOLD_PLACE(name, number, slots, flags) [number] = 0,
enum fs_fold { FS_FOLDS(FS_FOLD_NUMBER) FS_FOLDS_END = sizeof((char[]){FS_FOLDS(FS_FOLD_PLACE)}) };
#undef FS_FOLD_NUMBER
#undef FS_FOLD_PLACE

typedef struct {
    const char *name;
    uint32_t slots, flags;
} fs_fold_facts;

/* NULL: there is no such fold. */
static inline const fs_fold_facts *fs_facts_of(uint32_t fold) {
#define FS_FOLD_FACTS(name, number, slots, flags) [number] = {#name, slots, flags},
    static const fs_fold_facts facts[] = {FS_FOLDS(FS_FOLD_FACTS)};
#undef FS_FOLD_FACTS
    return fold < FS_FOLDS_END && facts[fold].name ? &facts[fold] : NULL;
}

#define FS_FOLD static inline __attribute__((always_inline))
#define FS_SKETCH_BITS 10 /* of a hash, that choose the sketch's register */
#define FS_SKETCH_BYTES (1 << FS_SKETCH_BITS)
#define FS_NULL_BITS UINT64_C(0x7FF8F1E257EA0001) /* null among doubles: a NaN that arithmetic never makes */

/* What a fold is told of a row. Compilers see through it: what a fold does not read is not worked out. */
typedef struct {
    uint64_t value;             /* of the argument, as the bits of a register */
    uint64_t by;                /* of what decides, for folds that go by another value than their own */
    int64_t keep;               /* 0: a filter dropped the row. For folds that are FS_MASKS; 1 for all others */
    int64_t time;               /* where it comes from. For folds that are FS_ORIGIN */
    uint64_t session, sequence;
} fs_row;
typedef double fs_real_slot __attribute__((may_alias));

#define FS_BEGINS_WITH_ZERO(name) \
    FS_FOLD void fs_##name##_empty(uint64_t *slot) { (void)slot; }
#define FS_SAYS_ITS_SLOT(name) \
    FS_FOLD uint64_t fs_##name##_finish(const uint64_t *slot, uint64_t rows) { return (void)rows, slot[0]; }
/* A fold that keeps what another one keeps, and says something else of it. */
#define FS_KEEPS_WHAT(name, other) \
    FS_FOLD void fs_##name##_empty(uint64_t *slot) { fs_##other##_empty(slot); } \
    FS_FOLD int fs_##name##_update(uint64_t *slot, fs_row row) { return fs_##other##_update(slot, row); } \
    FS_FOLD int fs_##name##_merge(uint64_t *slot, const uint64_t *from) { return fs_##other##_merge(slot, from); }

/* The number of rows is in the entry's first word. */
FS_BEGINS_WITH_ZERO(count)
FS_FOLD int fs_count_update(uint64_t *slot, fs_row row) { return (void)slot, (void)row, 0; }
FS_FOLD int fs_count_merge(uint64_t *slot, const uint64_t *from) { return (void)slot, (void)from, 0; }
FS_FOLD int fs_count_take_out(uint64_t *slot, const uint64_t *from) { return (void)slot, (void)from, 0; }
FS_FOLD uint64_t fs_count_finish(const uint64_t *slot, uint64_t rows) { return (void)slot, rows; }

FS_BEGINS_WITH_ZERO(sum_i)
FS_FOLD int fs_sum_i_update(uint64_t *slot, fs_row row) {
    return __builtin_add_overflow(*(int64_t *)slot, row.keep ? (int64_t)row.value : 0, (int64_t *)slot);
}
FS_FOLD int fs_sum_i_merge(uint64_t *slot, const uint64_t *from) {
    return __builtin_add_overflow(*(int64_t *)slot, *(const int64_t *)from, (int64_t *)slot);
}
FS_FOLD int fs_sum_i_take_out(uint64_t *slot, const uint64_t *from) {
    return __builtin_sub_overflow(*(int64_t *)slot, *(const int64_t *)from, (int64_t *)slot);
}
FS_SAYS_ITS_SLOT(sum_i)

/* Neumaier's sum in two slots: value, compensation. */
FS_FOLD void fs_add_real(fs_real_slot *slot, double v) {
    double total = slot[0] + v, held = slot[0];
    slot[1] += __builtin_fabs(held) >= __builtin_fabs(v) ? (held - total) + v : (v - total) + held;
    slot[0] = total;
}
FS_FOLD double fs_sum_of(const uint64_t *slot) {
    const fs_real_slot *real = (const fs_real_slot *)slot;
    double total = real[0] + real[1];
    return total != total && real[0] == real[0] ? real[0] : total; /* past infinity the compensation is no number */
}
FS_BEGINS_WITH_ZERO(sum_f)
FS_FOLD int fs_sum_f_update(uint64_t *slot, fs_row row) {
    return fs_add_real((fs_real_slot *)slot, fs_real(row.value)), 0;
}
FS_FOLD int fs_sum_f_merge(uint64_t *slot, const uint64_t *from) {
    fs_add_real((fs_real_slot *)slot, fs_real(from[0]));
    ((fs_real_slot *)slot)[1] += fs_real(from[1]);
    return 0;
}
FS_FOLD uint64_t fs_sum_f_finish(const uint64_t *slot, uint64_t rows) { return (void)rows, fs_bits(fs_sum_of(slot)); }

FS_KEEPS_WHAT(avg, sum_f)
FS_FOLD uint64_t fs_avg_finish(const uint64_t *slot, uint64_t rows) { return fs_bits(fs_sum_of(slot) / (double)rows); }

FS_FOLD void fs_min_i_empty(uint64_t *slot) { slot[0] = (uint64_t)INT64_MAX; }
FS_FOLD int fs_min_i_update(uint64_t *slot, fs_row row) {
    int64_t v = (int64_t)row.value;
    if (row.keep & (v < *(int64_t *)slot)) *(int64_t *)slot = v;
    return 0;
}
FS_FOLD int fs_min_i_merge(uint64_t *slot, const uint64_t *from) {
    return fs_min_i_update(slot, (fs_row){.value = from[0], .keep = 1});
}
FS_SAYS_ITS_SLOT(min_i)

FS_FOLD void fs_max_i_empty(uint64_t *slot) { slot[0] = (uint64_t)INT64_MIN; }
FS_FOLD int fs_max_i_update(uint64_t *slot, fs_row row) {
    int64_t v = (int64_t)row.value;
    if (row.keep & (v > *(int64_t *)slot)) *(int64_t *)slot = v;
    return 0;
}
FS_FOLD int fs_max_i_merge(uint64_t *slot, const uint64_t *from) {
    return fs_max_i_update(slot, (fs_row){.value = from[0], .keep = 1});
}
FS_SAYS_ITS_SLOT(max_i)

/* NaN is the greatest, as in Spark: any value replaces it as the least. */
FS_FOLD void fs_min_f_empty(uint64_t *slot) { slot[0] = fs_bits(__builtin_nan("")); }
FS_FOLD int fs_min_f_update(uint64_t *slot, fs_row row) {
    double v = fs_real(row.value);
    if (fs_lt(v, *(fs_real_slot *)slot)) *(fs_real_slot *)slot = v;
    return 0;
}
FS_FOLD int fs_min_f_merge(uint64_t *slot, const uint64_t *from) {
    return fs_min_f_update(slot, (fs_row){.value = from[0]});
}
FS_SAYS_ITS_SLOT(min_f)

FS_FOLD void fs_max_f_empty(uint64_t *slot) { slot[0] = fs_bits(-__builtin_inf()); }
FS_FOLD int fs_max_f_update(uint64_t *slot, fs_row row) {
    double v = fs_real(row.value);
    if (fs_lt(*(fs_real_slot *)slot, v)) *(fs_real_slot *)slot = v;
    return 0;
}
FS_FOLD int fs_max_f_merge(uint64_t *slot, const uint64_t *from) {
    return fs_max_f_update(slot, (fs_row){.value = from[0]});
}
FS_SAYS_ITS_SLOT(max_f)

/* Four slots: rows, the mean as a sum of two doubles (far from zero one would not hold it), M2. */
FS_FOLD void fs_move_mean(fs_real_slot *slot, double step) {
    double low = slot[2] + step, high = slot[1] + low;
    slot[2] = low - (high - slot[1]);
    slot[1] = high;
}
FS_BEGINS_WITH_ZERO(stddev)
FS_FOLD int fs_stddev_update(uint64_t *slots, fs_row row) { /* Welford */
    fs_real_slot *slot = (fs_real_slot *)slots;
    double v = fs_real(row.value), delta = (v - slot[1]) - slot[2];
    slot[0] += 1;
    fs_move_mean(slot, delta / slot[0]);
    slot[3] += delta * ((v - slot[1]) - slot[2]);
    return 0;
}
FS_FOLD int fs_stddev_merge(uint64_t *slots, const uint64_t *others) { /* Chan */
    fs_real_slot *slot = (fs_real_slot *)slots;
    const fs_real_slot *from = (const fs_real_slot *)others;
    if (!(from[0] > 0)) return 0;
    double rows = slot[0] + from[0], delta = (from[1] - slot[1]) + (from[2] - slot[2]);
    slot[3] += from[3] + delta * delta * slot[0] * (from[0] / rows);
    fs_move_mean(slot, delta * (from[0] / rows));
    slot[0] = rows;
    return 0;
}
/* Null for a single row. An input's NaN may have the bits that stand for null: it leaves as the usual one. */
FS_FOLD uint64_t fs_deviation(double value, uint64_t rows) {
    return rows < 2 ? FS_NULL_BITS : fs_bits(value != value ? __builtin_nan("") : value);
}
FS_FOLD uint64_t fs_stddev_finish(const uint64_t *slot, uint64_t rows) {
    return rows < 2 ? FS_NULL_BITS : fs_deviation(sqrt(fs_real(slot[3]) / (double)(rows - 1)), rows);
}

FS_KEEPS_WHAT(variance, stddev)
FS_FOLD uint64_t fs_variance_finish(const uint64_t *slot, uint64_t rows) {
    return rows < 2 ? FS_NULL_BITS : fs_deviation(fs_real(slot[3]) / (double)(rows - 1), rows);
}

/* The value of the row with the smallest or greatest `by`, and if there are several, the smallest or greatest of their
 * values, so that no order matters. Two slots: value, by, both as integers of the same order: of a double the bits, with
 * NaN the greatest; those of -0.0 are before those of 0.0 for values, and the same for what decides. */
FS_FOLD int64_t fs_order_i(uint64_t bits) { return (int64_t)bits; }
FS_FOLD int64_t fs_turned(uint64_t bits) { return (int64_t)(bits ^ ((uint64_t)((int64_t)bits >> 63) >> 1)); }
FS_FOLD int64_t fs_order_f(uint64_t bits) {
    return fs_turned(fs_real(bits) != fs_real(bits) ? fs_bits(__builtin_nan("")) : bits);
}
FS_FOLD int64_t fs_decides_i(uint64_t bits) { return (int64_t)bits; }
FS_FOLD int64_t fs_decides_f(uint64_t bits) { return fs_turned(fs_value_bits(fs_real(bits))); }
FS_FOLD uint64_t fs_back_i(uint64_t order) { return order; }
FS_FOLD uint64_t fs_back_f(uint64_t order) { return (uint64_t)fs_turned(order); }
#define FS_BY(name, before, last, of, by_what)                                                                     \
    FS_FOLD void fs_##name##_empty(uint64_t *slot) { slot[0] = slot[1] = (uint64_t)last; }                         \
    FS_FOLD void fs_##name##_take(uint64_t *slot, int64_t value, int64_t by) {                                     \
        if (by before (int64_t)slot[1] || (by == (int64_t)slot[1] && value before (int64_t)slot[0]))               \
            slot[0] = (uint64_t)value, slot[1] = (uint64_t)by;                                                     \
    }                                                                                                              \
    FS_FOLD int fs_##name##_update(uint64_t *slot, fs_row row) {                                                   \
        if (row.keep) fs_##name##_take(slot, fs_order_##of(row.value), fs_decides_##by_what(row.by));              \
        return 0;                                                                                                  \
    }                                                                                                              \
    FS_FOLD int fs_##name##_merge(uint64_t *slot, const uint64_t *from) {                                          \
        return fs_##name##_take(slot, (int64_t)from[0], (int64_t)from[1]), 0;                                      \
    }                                                                                                              \
    FS_FOLD uint64_t fs_##name##_finish(const uint64_t *slot, uint64_t rows) { return (void)rows, fs_back_##of(slot[0]); }
FS_BY(min_by_ii, <, INT64_MAX, i, i)
FS_BY(min_by_if, <, INT64_MAX, i, f)
FS_BY(min_by_fi, <, INT64_MAX, f, i)
FS_BY(min_by_ff, <, INT64_MAX, f, f)
FS_BY(max_by_ii, >, INT64_MIN, i, i)
FS_BY(max_by_if, >, INT64_MIN, i, f)
FS_BY(max_by_fi, >, INT64_MIN, f, i)
FS_BY(max_by_ff, >, INT64_MIN, f, f)

/* The first or last row by (event time, session, sequence), in four slots: value, time, session, sequence. So it does not
 * matter which row comes first here. */
FS_FOLD int fs_is_before(const uint64_t *slot, fs_row row) {
    if (row.time != (int64_t)slot[1]) return row.time < (int64_t)slot[1];
    if (row.session != slot[2]) return row.session < slot[2];
    return row.sequence < slot[3];
}
FS_FOLD void fs_hold(uint64_t *slot, fs_row row) {
    slot[0] = row.value, slot[1] = (uint64_t)row.time, slot[2] = row.session, slot[3] = row.sequence;
}
FS_FOLD fs_row fs_held(const uint64_t *slot) {
    return (fs_row){.value = slot[0], .keep = 1, .time = (int64_t)slot[1], .session = slot[2], .sequence = slot[3]};
}
FS_FOLD void fs_first_empty(uint64_t *slot) { slot[1] = (uint64_t)INT64_MAX; } /* later than any row */
FS_FOLD int fs_first_update(uint64_t *slot, fs_row row) {
    if (row.keep && fs_is_before(slot, row)) fs_hold(slot, row);
    return 0;
}
FS_FOLD int fs_first_merge(uint64_t *slot, const uint64_t *from) { return fs_first_update(slot, fs_held(from)); }
FS_SAYS_ITS_SLOT(first)

FS_FOLD void fs_last_empty(uint64_t *slot) { slot[1] = (uint64_t)INT64_MIN; }
FS_FOLD int fs_last_update(uint64_t *slot, fs_row row) {
    if (row.keep && !fs_is_before(slot, row)) fs_hold(slot, row);
    return 0;
}
FS_FOLD int fs_last_merge(uint64_t *slot, const uint64_t *from) { return fs_last_update(slot, fs_held(from)); }
FS_SAYS_ITS_SLOT(last)

/* HyperLogLog: a byte per register, the longest run of zeros seen among the hashes that fall to it, plus one. */
FS_FOLD void fs_sketch_add(unsigned char *sketch, uint64_t bits) {
    uint64_t h = fs_hash_value(bits);
    unsigned char rank = (unsigned char)(1 + __builtin_clzll(h << FS_SKETCH_BITS | 1ull << (FS_SKETCH_BITS - 1)));
    unsigned char *held = sketch + (h >> (64 - FS_SKETCH_BITS));
    if (rank > *held) *held = rank;
}
/* For the registers that saw nothing. x < 1. */
static inline double fs_sketch_sigma(double x) {
    double y = 1, z = x, before = -1;
    while (z != before) {
        x *= x;
        before = z;
        z += x * y;
        y += y;
    }
    return z;
}
/* For the registers that saw all that a hash can have. */
static inline double fs_sketch_tau(double x) {
    double y = 1, z = 1 - x, before = -1;
    if (x == 0 || x == 1) return 0;
    while (z != before) {
        x = sqrt(x);
        before = z;
        y *= 0.5;
        z -= (1 - x) * (1 - x) * y;
    }
    return z / 3;
}
/* Ertl's estimator (New cardinality estimation algorithms for HyperLogLog sketches, 2017, algorithm 6): without tables and
 * without a seam between small and large counts. Its relative standard error is 1.04 / sqrt(1024), 3.3%. */
static inline double fs_sketch_estimate(const unsigned char *sketch) {
    uint32_t seen[66 - FS_SKETCH_BITS] = {0}; /* registers by rank */
    const double m = FS_SKETCH_BYTES;
    for (int i = 0; i < FS_SKETCH_BYTES; i++) seen[sketch[i]]++;
    if (seen[0] == FS_SKETCH_BYTES) return 0;
    double z = m * fs_sketch_tau((m - seen[65 - FS_SKETCH_BITS]) / m);
    for (int k = 64 - FS_SKETCH_BITS; k > 0; k--) z = 0.5 * (z + seen[k]);
    z += m * fs_sketch_sigma(seen[0] / m);
    return 0.7213475204444817 * m * m / z; /* 1 / (2 ln 2) */
}
FS_BEGINS_WITH_ZERO(approx_i)
FS_FOLD int fs_approx_i_update(uint64_t *slot, fs_row row) {
    if (row.keep) fs_sketch_add((unsigned char *)slot, row.value);
    return 0;
}
FS_FOLD int fs_approx_i_merge(uint64_t *slot, const uint64_t *from) {
    unsigned char *into = (unsigned char *)slot;
    const unsigned char *other = (const unsigned char *)from;
    for (int i = 0; i < FS_SKETCH_BYTES; i++) into[i] = other[i] > into[i] ? other[i] : into[i];
    return 0;
}
FS_FOLD uint64_t fs_approx_i_finish(const uint64_t *slot, uint64_t rows) {
    return (void)rows, (uint64_t)(int64_t)(fs_sketch_estimate((const unsigned char *)slot) + 0.5);
}
FS_BEGINS_WITH_ZERO(approx_f)
FS_FOLD int fs_approx_f_update(uint64_t *slot, fs_row row) {
    return fs_sketch_add((unsigned char *)slot, fs_value_bits(fs_real(row.value))), 0;
}
FS_FOLD int fs_approx_f_merge(uint64_t *slot, const uint64_t *from) { return fs_approx_i_merge(slot, from); }
FS_FOLD uint64_t fs_approx_f_finish(const uint64_t *slot, uint64_t rows) { return fs_approx_i_finish(slot, rows); }

/* Of these the slots say what the side tables of a part make of them; who merges parts counts anew. Side entries count
 * their rows in their first word; one without rows is not there. */
FS_FOLD uint64_t fs_word_of(uint64_t value, int real) { return real ? fs_value_bits(fs_real(value)) : value; }
#define FS_KEEPS_VALUES(name)                                                                                       \
    FS_KEEPS_WHAT(name, count)                                                                                      \
    FS_FOLD void fs_##name##_beside(uint64_t *slot, uint64_t *entry, uint64_t *behind, uint64_t value) {            \
        (void)behind;                                                                                               \
        fs_##name##_value(slot, entry[0] & FS_ROWS, 1, value);                                                      \
        entry[0] += 1;                                                                                              \
    }

/* Slots: values in this part; those in the window, while it is counted without memory. */
FS_FOLD void fs_distinct_i_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    (void)rows, (void)value;
    slot[0] += !before;
}
FS_FOLD void fs_distinct_f_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    fs_distinct_i_value(slot, before, rows, value);
}
FS_KEEPS_VALUES(distinct_i)
FS_SAYS_ITS_SLOT(distinct_i)
FS_KEEPS_VALUES(distinct_f)
FS_SAYS_ITS_SLOT(distinct_f)

/* The value with the most rows, of several the smallest. Slots: the value, as an integer of the same order, and its rows in
 * this part; the same in the window, while it is counted without memory. Rows only become more, so the one that has the
 * most now is the one that has the most of all that were ever ahead. */
FS_FOLD void fs_mode_take(uint64_t *slot, int64_t order, uint64_t rows) {
    if (rows > slot[1] || (rows == slot[1] && order < (int64_t)slot[0])) slot[0] = (uint64_t)order, slot[1] = rows;
}
FS_FOLD void fs_mode_i_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    fs_mode_take(slot, fs_order_i(value), before + rows);
}
FS_FOLD void fs_mode_f_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    fs_mode_take(slot, fs_order_f(value), before + rows);
}
FS_KEEPS_VALUES(mode_i)
FS_SAYS_ITS_SLOT(mode_i)
FS_KEEPS_VALUES(mode_f)
FS_FOLD uint64_t fs_mode_f_finish(const uint64_t *slot, uint64_t rows) { return (void)rows, fs_back_f(slot[0]); }

/* Slots: the median, when a window fires; the values of the key, chained, while it does (ranking.pxd). Between the two
 * middle values it is as Spark works it out, so that they may be as large as a double can be. */
FS_FOLD void fs_median_i_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    (void)slot, (void)before, (void)rows, (void)value;
}
FS_FOLD void fs_median_f_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
    fs_median_i_value(slot, before, rows, value);
}
FS_FOLD int64_t fs_rank_of(uint64_t value, int real) { return real ? fs_order_f(value) : fs_order_i(value); }
FS_FOLD double fs_ranked(int64_t order, int real) {
    return real ? fs_real(fs_back_f((uint64_t)order)) : (double)order;
}
FS_FOLD uint64_t fs_middle(int64_t lower, int64_t upper, int real) {
    double low = fs_ranked(lower, real), high = fs_ranked(upper, real);
    return fs_value_bits(lower == upper ? low : 0.5 * low + 0.5 * high);
}
FS_KEEPS_VALUES(median_i)
FS_SAYS_ITS_SLOT(median_i)
FS_KEEPS_VALUES(median_f)
FS_SAYS_ITS_SLOT(median_f)

/* Slot: the sum of the sessions' hashes, which are behind the side entries' keys. It never has a second part. */
#define FS_IN_ORDER(name)                                                                                           \
    FS_KEEPS_WHAT(name, count)                                                                                      \
    FS_SAYS_ITS_SLOT(name)                                                                                          \
    FS_FOLD void fs_##name##_value(uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {                \
        (void)slot, (void)before, (void)rows, (void)value;                                                          \
    }                                                                                                               \
    FS_FOLD void fs_##name##_beside(uint64_t *slot, uint64_t *entry, uint64_t *hash, uint64_t value) {              \
        slot[0] -= *hash;                                                                                           \
        *hash = fs_hash_value(*hash ^ value);                                                                       \
        slot[0] += *hash;                                                                                           \
        entry[0] += 1;                                                                                              \
    }
FS_IN_ORDER(order_i)
FS_IN_ORDER(order_f)

#endif
