/* The folds: what an aggregate keeps of a key's rows, in 8-byte slots of the key's entry. */
#ifndef FLEXSTREAM_FOLDS_H
#define FLEXSTREAM_FOLDS_H

#include <stddef.h>
#include <stdint.h>

enum fs_fold_flags {
    FS_SIDE = 1,       /* has a table beside the entries (side_tables.pxd) */
    FS_ORDERED = 2,    /* needs rows in the order of arrival: a group's rows have one partial at a time */
    FS_INVERTIBLE = 4, /* a partial can be taken out of a sum again, exactly */
    FS_ORIGIN = 8,     /* goes by where rows come from: event time, session, sequence */
    FS_REAL = 16,      /* the value is a double, whose bits are made those of its equals before it is looked up */
    FS_MASKS = 32      /* a row that a filter dropped can be folded as nothing */
};

/* name, number, slots, flags. Numbers stay: a fold that goes leaves a gap. */
#define FS_FOLDS(X)                                         \
    X(count, 0, 0, FS_INVERTIBLE | FS_MASKS)                \
    X(sum_i, 1, 1, FS_INVERTIBLE | FS_MASKS)                \
    X(sum_f, 2, 2, 0)                                       \
    X(min_i, 3, 1, FS_MASKS)                                \
    X(max_i, 4, 1, FS_MASKS)                                \
    X(min_f, 5, 1, 0)                                       \
    X(max_f, 6, 1, 0)                                       \
    X(avg, 7, 2, 0)                                         \
    X(stddev, 8, 4, 0)                                      \
    X(first, 9, 4, FS_ORIGIN | FS_MASKS)                    \
    X(last, 10, 4, FS_ORIGIN | FS_MASKS)                    \
    X(approx_i, 11, 128, FS_MASKS)                          \
    X(approx_f, 12, 128, FS_REAL)                           \
    X(distinct_i, 13, 2, FS_SIDE)                           \
    X(distinct_f, 14, 2, FS_SIDE | FS_REAL)                 \
    X(order_i, 15, 1, FS_SIDE | FS_ORDERED)                 \
    X(order_f, 16, 1, FS_SIDE | FS_ORDERED | FS_REAL)

#define FS_FOLD_NUMBER(name, number, slots, flags) FS_FOLD_##name = number,
enum fs_fold { FS_FOLDS(FS_FOLD_NUMBER) FS_FOLDS_END };
#undef FS_FOLD_NUMBER

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

#endif
