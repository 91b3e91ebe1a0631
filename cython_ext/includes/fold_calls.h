/* The folds by number: what the generic variant and merging call. A number that no fold has is FS_NO_FOLD, which fails the
 * query; a query with one is not made in the first place (queries.pyx). */
#ifndef FLEXSTREAM_FOLD_CALLS_H
#define FLEXSTREAM_FOLD_CALLS_H

#include "folds.h"

#define FS_NO_FOLD 2

/* m rows whose values, and what decides, are columns, into slot `at` (in words) of each one's entry. A loop for each fold. */
static inline int fs_fold_column(uint32_t fold, uint32_t at, const int64_t *values, const int64_t *by, uint32_t m,
                                 unsigned char **entry, const int64_t *time, const uint32_t *selected, uint64_t session, uint64_t sequence) {
    int problem = 0;
    switch (fold) {
#define FS_EACH_ROW(name, number, slots, flags)                                                             \
    case number:                                                                                            \
        for (uint32_t i = 0; i < m; i++)                                                                    \
            problem |= fs_##name##_update((uint64_t *)entry[i] + at,                                        \
                                          (fs_row){.value = (uint64_t)values[i], .by = (uint64_t)by[i],     \
                                                   .keep = 1, .time = time[i], .session = session,          \
                                                   .sequence = sequence + selected[i]});                    \
        return problem;
    FS_FOLDS(FS_EACH_ROW)
#undef FS_EACH_ROW
    default: return FS_NO_FOLD;
    }
}

static inline int fs_fold_empty(uint32_t fold, uint64_t *slot) {
#define FS_EMPTY(name, number, slots, flags) case number: fs_##name##_empty(slot); return 0;
    switch (fold) { FS_FOLDS(FS_EMPTY) default: return FS_NO_FOLD; }
#undef FS_EMPTY
}

static inline int fs_fold_merge(uint32_t fold, uint64_t *slot, const uint64_t *from) {
#define FS_MERGE(name, number, slots, flags) case number: return fs_##name##_merge(slot, from);
    switch (fold) { FS_FOLDS(FS_MERGE) default: return FS_NO_FOLD; }
#undef FS_MERGE
}

static inline int fs_fold_take_out(uint32_t fold, uint64_t *slot, const uint64_t *from) {
#define FS_TAKE_OUT(name, number, slots, flags) case number: return fs_##name##_take_out(slot, from);
    switch (fold) { FS_INVERTIBLE_FOLDS(FS_TAKE_OUT) default: return FS_NO_FOLD; }
#undef FS_TAKE_OUT
}

static inline uint64_t fs_fold_finish(uint32_t fold, const uint64_t *slot, uint64_t rows) {
#define FS_FINISH(name, number, slots, flags) case number: return fs_##name##_finish(slot, rows);
    switch (fold) { FS_FOLDS(FS_FINISH) default: return FS_NULL_BITS; }
#undef FS_FINISH
}

static inline void fs_fold_beside(uint32_t fold, uint64_t *slot, uint64_t *entry, uint64_t *behind, uint64_t value) {
#define FS_BESIDE(name, number, slots, flags) case number: fs_##name##_beside(slot, entry, behind, value); return;
    switch (fold) { FS_SIDE_FOLDS(FS_BESIDE) }
#undef FS_BESIDE
}

static inline void fs_fold_value(uint32_t fold, uint64_t *slot, uint64_t before, uint64_t rows, uint64_t value) {
#define FS_VALUE(name, number, slots, flags) case number: fs_##name##_value(slot, before, rows, value); return;
    switch (fold) { FS_SIDE_FOLDS(FS_VALUE) }
#undef FS_VALUE
}

#endif
