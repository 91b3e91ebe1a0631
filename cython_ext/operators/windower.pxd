"""How event time is cut: which pane a row belongs to, which windows are due, what is late, what merges, what may go.

Nobody else does arithmetic with sizes and slides. There is one kind so far, the fixed grid: window ends are
k * slide + size, and a pane is the smallest slice that windows share, so a window is a run of panes. The moment
INT64_MIN is before all time: no watermark has come. Sums saturate (includes/window_times.h).
"""

from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t

from flexstream.cython_ext.includes.native cimport (
    fs_end_after, fs_first_end, fs_floor_to, fs_last_end, fs_minus, fs_open_from,
)


cdef struct Windower:         # in the unit of the stream's time field; immutable
    int64_t size
    int64_t slide
    int64_t pane
    int64_t lateness


# Which pane does a row belong to?

cdef inline int64_t pane_of(const Windower *windower, int64_t time) noexcept nogil:
    """Where the pane of the time starts."""
    return fs_floor_to(time, windower.pane)


cdef inline int64_t pane_end(const Windower *windower, int64_t pane_start) noexcept nogil:
    return pane_start + windower.pane


# Which windows are due?

cdef inline int64_t end_after(const Windower *windower, int64_t moment) noexcept nogil:
    """The earliest window end later than `moment`."""
    if moment == INT64_MIN:
        return INT64_MIN
    return fs_end_after(moment, windower.size, windower.slide)


cdef inline int64_t last_end_until(const Windower *windower, int64_t moment) noexcept nogil:
    """The latest window end at or before `moment`, which is not INT64_MIN."""
    return fs_minus(end_after(windower, moment), windower.slide)


cdef inline int64_t first_end(const Windower *windower, int64_t pane_start) noexcept nogil:
    """The end of the earliest window that holds the pane."""
    return fs_first_end(pane_start, windower.pane, windower.size, windower.slide)


cdef inline int64_t last_end(const Windower *windower, int64_t pane_start) noexcept nogil:
    return fs_last_end(pane_start, windower.size, windower.slide)


cdef inline bint follows(const Windower *windower, int64_t end, int64_t earlier) noexcept nogil:
    """Whether no window ends between the two."""
    return fs_minus(end, windower.slide) <= earlier


# What is late? What may still change?

cdef inline int64_t final_until(const Windower *windower, int64_t watermark) noexcept nogil:
    """Windows that end at or before this never change any more."""
    return fs_minus(watermark, windower.lateness)


cdef inline int64_t open_from(const Windower *windower, int64_t moment) noexcept nogil:
    """Where the earliest window begins that ends after `moment`: rows and panes before it have no window left."""
    if moment == INT64_MIN:
        return INT64_MIN
    return fs_open_from(moment, windower.size, windower.slide)


cdef inline bint revises(const Windower *windower) noexcept nogil:
    """Whether a window may fire again, after a late row."""
    return windower.lateness > 0


# What merges?

cdef inline int64_t window_start(const Windower *windower, int64_t end) noexcept nogil:
    """The window's panes start at or after this, and before `end`."""
    return fs_minus(end, windower.size)


cdef inline bint is_one_pane(const Windower *windower) noexcept nogil:
    """Whether a pane is a whole window: it takes many rows and is looked through once, not again and again."""
    return windower.pane == windower.size


cdef inline uint64_t panes_of_window(const Windower *windower) noexcept nogil:
    return <uint64_t> (windower.size // windower.pane)


cdef inline uint32_t windows_of_pane(const Windower *windower) noexcept nogil:
    """At most."""
    return <uint32_t> ((windower.size + windower.slide - 1) // windower.slide)


cdef inline uint32_t window_number(const Windower *windower, int64_t pane_start, int64_t end) noexcept nogil:
    """Of the windows that hold the pane, the how manieth ends there, from 0."""
    return <uint32_t> ((end - first_end(windower, pane_start)) // windower.slide)


# What may go?

cdef inline int64_t needed_from(const Windower *windower, int64_t watermark) noexcept nogil:
    """No window after the watermark, and no revision, needs a pane that starts before this."""
    return open_from(windower, final_until(windower, watermark))
