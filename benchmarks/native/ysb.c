/* Hand-written reference for YSB over rows in memory: filter, then a dense count per campaign and window.
 * It knows everything in advance: the layout, the key range, the span of time, and that there is no disorder across
 * more windows than it has room for. A shared object for ctypes: cc -O3 -march=native -shared -fPIC. */
#include <stdint.h>
#include <string.h>

enum { TIME_OFFSET = 0, CAMPAIGN_OFFSET = 8, TYPE_OFFSET = 48, ROW_BYTES = 78 };

static inline int64_t load(const unsigned char *at)
{
    int64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Counts views into counts[slot * keys + campaign - first_key], slot = (time - first_time) / slot_span.
 * Assumes: every time and campaign is in range. The division is done only when the slot changes. */
void ysb_count(const unsigned char *rows, int64_t n, int64_t first_time, int64_t slot_span, int64_t first_key,
               int64_t keys, uint32_t *counts)
{
    const int64_t view = load((const unsigned char *)"view\0\0\0");
    int64_t low = 0, high = 0;
    uint32_t *slot = counts;
    for (int64_t i = 0; i < n; i++, rows += ROW_BYTES) {
        int64_t time = load(rows + TIME_OFFSET);
        if (__builtin_expect(time < low || time >= high, 0)) {
            int64_t index = (time - first_time) / slot_span;
            low = first_time + index * slot_span, high = low + slot_span;
            slot = counts + index * keys - first_key;
        }
        slot[load(rows + CAMPAIGN_OFFSET)] += load(rows + TYPE_OFFSET) == view;
    }
}

/* Sliding windows from panes: windows[w] = panes[w] + ... + panes[w + per_window - 1], each a row of `keys` counts.
 * A running sum: one addition and one subtraction per key and window. */
void ysb_slide(const uint32_t *panes, int64_t pane_count, int64_t per_window, int64_t keys, uint32_t *windows)
{
    for (int64_t w = 0; w < pane_count - per_window + 1; w++)
        for (int64_t k = 0; k < keys; k++) {
            uint32_t sum = 0;
            if (w == 0)
                for (int64_t p = 0; p < per_window; p++)
                    sum += panes[p * keys + k];
            else
                sum = windows[(w - 1) * keys + k] - panes[(w - 1) * keys + k] + panes[(w + per_window - 1) * keys + k];
            windows[w * keys + k] = sum;
        }
}
