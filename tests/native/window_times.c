/* Every combination of the 8-bit type against wide arithmetic, and 64-bit ones at the edges and at random. Prints what it
 * found wrong and exits 1. Built twice by test_window_times.py: with FS_MOMENT=int8_t, and as it is with UBSan. */
#include <stdio.h>
#include <stdlib.h>

static long saturated;
#define FS_SATURATED(value) (saturated++, (value))
#include "window_times.h"

typedef __int128 wide;

static wide floor_wide(wide a, wide b) { return a / b - (a % b < 0); }

static long checked, failed;

static void expect(const char *what, wide got, wide wanted, wide t, wide size, wide slide) {
    checked++;
    if (got == wanted) return;
    if (failed++ < 10)
        printf("%s: %lld, not %lld (t %lld, size %lld, slide %lld)\n", what, (long long)got, (long long)wanted,
               (long long)t, (long long)size, (long long)slide);
}

static wide gcd(wide a, wide b) { return b ? gcd(b, a % b) : a; }

/* t: a row's time or a watermark. What follows from it is what the engine works out from it. */
static void check(FS_MOMENT t, FS_MOMENT size, FS_MOMENT slide, FS_MOMENT lateness) {
    FS_MOMENT pane = (FS_MOMENT)gcd(size, slide);
    FS_MOMENT start = fs_floor_to(t, pane);
    wide wide_start = floor_wide(t, pane) * pane;
    expect("floor_to", start, wide_start, t, size, slide);
    /* windows [k * slide, k * slide + size) that hold the pane: k from the first on to the last */
    wide last = floor_wide(wide_start, slide) * slide;
    wide first = -floor_wide(-(wide_start + pane - size), slide) * slide;
    FS_MOMENT first_end = fs_first_end(start, pane, size, slide), last_end = fs_last_end(start, size, slide);
    expect("first_end", first_end, first + size, t, size, slide);
    expect("last_end", last_end, last + size, t, size, slide);
    if (!(first <= wide_start && last <= t && t < first + size))
        expect("the windows hold the row", 0, 1, t, size, slide);
    /* a watermark may be a row's time, or the end of the last window that fired */
    FS_MOMENT marks[] = {t, first_end, last_end};
    for (int i = 0; i < 3; i++) {
        wide mark = marks[i];
        wide after = (floor_wide(mark - size, slide) + 1) * slide + size;
        expect("end_after", fs_end_after(marks[i], size, slide), after, mark, size, slide);
        expect("open_from", fs_open_from(marks[i], size, slide), after - size, mark, size, slide);
        if (!(after > mark && after - slide <= mark)) expect("the next end", 0, 1, mark, size, slide);
        wide late = mark - lateness;
        expect("late_before", fs_open_from(fs_minus(marks[i], lateness), size, slide),
               (floor_wide(late - size, slide) + 1) * slide, mark, size, slide);
        expect("a window's start", fs_minus(fs_end_after(marks[i], size, slide), size), after - size, mark, size, slide);
    }
}

static uint64_t random_bits(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

int main(void) {
    if (sizeof(FS_MOMENT) == 1) {
        for (long size = 1; size <= FS_SPAN_LIMIT; size++)
            for (long slide = 1; slide <= size; slide++)
                for (long t = -FS_TIME_LIMIT; t <= FS_TIME_LIMIT; t++)
                    for (long lateness = 0; lateness <= FS_SPAN_LIMIT; lateness++)
                        check((FS_MOMENT)t, (FS_MOMENT)size, (FS_MOMENT)slide, (FS_MOMENT)lateness);
    } else {
        FS_MOMENT limit = FS_TIME_LIMIT, span = FS_SPAN_LIMIT;
        FS_MOMENT times[] = {-limit, -limit + 1, -span - 1, -span, -1, 0, 1, span, span + 1, limit - 1, limit};
        FS_MOMENT spans[] = {1, 2, 3, 7, 100, span / 7, span / 2, span - 1, span};
        for (int t = 0; t < 11; t++)
            for (int i = 0; i < 9; i++)
                for (int j = 0; j <= i; j++)
                    for (int k = 0; k < 9; k++) check(times[t], spans[i], spans[j], spans[k]);
        for (int n = 0; n < 2000000; n++) {
            FS_MOMENT size = 1 + (FS_MOMENT)(random_bits() % (uint64_t)span) / (1LL << random_bits() % 60);
            FS_MOMENT slide = 1 + (FS_MOMENT)(random_bits() % (uint64_t)size);
            FS_MOMENT t = (FS_MOMENT)(random_bits() % (2 * (uint64_t)limit + 1) - (uint64_t)limit);
            check(t / (1LL << random_bits() % 62), size, slide, (FS_MOMENT)(random_bits() % ((uint64_t)span + 1)));
        }
    }
    if (saturated) printf("%ld sums left the type\n", saturated);
    printf("%ld checked, %ld wrong\n", checked, failed);
    return failed || saturated;
}
