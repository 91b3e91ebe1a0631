"""For tests only: the workers' windower as a Python object."""

from libc.stdint cimport int64_t

from flexstream.cython_ext.operators.windower cimport (
    Windower, end_after, final_until, first_end, follows, last_end, last_end_until, needed_from, open_from, pane_end, pane_of,
    panes_of_window, window_number, window_start, windows_of_pane,
)


cdef class WindowerProbe:
    cdef Windower windower

    def __cinit__(self, int64_t size, int64_t slide, int64_t pane, int64_t lateness):
        self.windower.size, self.windower.slide = size, slide
        self.windower.pane, self.windower.lateness = pane, lateness

    def pane_of(self, int64_t time):
        return pane_of(&self.windower, time)

    def pane_end(self, int64_t pane_start):
        return pane_end(&self.windower, pane_start)

    def end_after(self, int64_t moment):
        return end_after(&self.windower, moment)

    def last_end_until(self, int64_t moment):
        return last_end_until(&self.windower, moment)

    def first_end(self, int64_t pane_start):
        return first_end(&self.windower, pane_start)

    def last_end(self, int64_t pane_start):
        return last_end(&self.windower, pane_start)

    def follows(self, int64_t end, int64_t earlier):
        return bool(follows(&self.windower, end, earlier))

    def final_until(self, int64_t watermark):
        return final_until(&self.windower, watermark)

    def open_from(self, int64_t moment):
        return open_from(&self.windower, moment)

    def needed_from(self, int64_t watermark):
        return needed_from(&self.windower, watermark)

    def window_start(self, int64_t end):
        return window_start(&self.windower, end)

    def panes_of_window(self):
        return panes_of_window(&self.windower)

    def windows_of_pane(self):
        return windows_of_pane(&self.windower)

    def window_number(self, int64_t pane_start, int64_t end):
        return window_number(&self.windower, pane_start, end)
