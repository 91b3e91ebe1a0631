/* The arithmetic of windows: ends are k * slide + size, a pane is a slice of gcd(size, slide).
 *
 * Times stay within FS_TIME_LIMIT of 0; sizes, slides and lateness are at most FS_SPAN_LIMIT (plans and rows beyond are
 * refused where they come in). Then no sum here leaves the type: the farthest is limit + three spans, 7/8 of its range.
 * Sums saturate all the same, so that a bound that is missed somewhere gives a late row or an empty window, not an address
 * out of bounds. tests/native/window_times.c tries every value of the 8-bit type, and the 64-bit one at random under UBSan. */
#ifndef FLEXSTREAM_WINDOW_TIMES_H
#define FLEXSTREAM_WINDOW_TIMES_H

#include <stdint.h>

#ifndef FS_MOMENT
#define FS_MOMENT int64_t
#endif
#define FS_MOMENT_MAX ((FS_MOMENT)((((FS_MOMENT)1 << (sizeof(FS_MOMENT) * 8 - 2)) - 1) * 2 + 1))
#define FS_MOMENT_MIN ((FS_MOMENT)(-FS_MOMENT_MAX - 1))
#define FS_TIME_LIMIT ((FS_MOMENT)((FS_MOMENT)1 << (sizeof(FS_MOMENT) * 8 - 2)))
#define FS_SPAN_LIMIT ((FS_MOMENT)((FS_MOMENT)1 << (sizeof(FS_MOMENT) * 8 - 4)))

#ifndef FS_SATURATED
#define FS_SATURATED(value) (value)
#endif

static inline FS_MOMENT fs_plus(FS_MOMENT a, FS_MOMENT b) {
    FS_MOMENT sum;
    if (!__builtin_add_overflow(a, b, &sum)) return sum;
    return FS_SATURATED(b > 0 ? FS_MOMENT_MAX : FS_MOMENT_MIN);
}
static inline FS_MOMENT fs_minus(FS_MOMENT a, FS_MOMENT b) {
    FS_MOMENT rest;
    if (!__builtin_sub_overflow(a, b, &rest)) return rest;
    return FS_SATURATED(b < 0 ? FS_MOMENT_MAX : FS_MOMENT_MIN);
}
/* The last multiple of `step` at or before the moment. step > 0. */
static inline FS_MOMENT fs_floor_to(FS_MOMENT moment, FS_MOMENT step) {
    FS_MOMENT rest = moment % step;
    return fs_minus(moment, rest < 0 ? (FS_MOMENT)(rest + step) : rest);
}
/* The end of the earliest and of the latest window that hold the pane. */
static inline FS_MOMENT fs_first_end(FS_MOMENT pane_start, FS_MOMENT pane, FS_MOMENT size, FS_MOMENT slide) {
    FS_MOMENT earliest = fs_minus(pane_start, (FS_MOMENT)(size - pane)); /* a window that holds it starts there or later */
    FS_MOMENT before = fs_floor_to(earliest, slide);
    return fs_plus(before == earliest ? before : fs_plus(before, slide), size);
}
static inline FS_MOMENT fs_last_end(FS_MOMENT pane_start, FS_MOMENT size, FS_MOMENT slide) {
    return fs_plus(fs_floor_to(pane_start, slide), size);
}
/* The earliest window end later than the moment. */
static inline FS_MOMENT fs_end_after(FS_MOMENT moment, FS_MOMENT size, FS_MOMENT slide) {
    return fs_plus(fs_floor_to(fs_minus(moment, size), slide), (FS_MOMENT)(slide + size));
}
/* Where the earliest window begins that ends later than the moment: rows before it have no window left. */
static inline FS_MOMENT fs_open_from(FS_MOMENT moment, FS_MOMENT size, FS_MOMENT slide) {
    return fs_plus(fs_floor_to(fs_minus(moment, size), slide), slide);
}

#endif
