"""How event time is cut into windows: which windows a row belongs to, which are due, what is late, what may go.

The same answers as `cython_ext/operators/windower.pxd` gives to workers, for whoever asks from Python. Nobody else does
arithmetic with sizes and slides. There is one kind so far, the fixed grid: windows end at k * slide + size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Run = tuple[int, int]  # the first and the last end of windows that follow each other


@dataclass(frozen=True, slots=True)
class Windower:
    """What answers for the windows of a query. All times are in the unit of the stream's time field."""

    size: int
    slide: int
    pane: int
    lateness: int

    def windows_of(self, time: int) -> list[tuple[int, int]]:
        """(start, end) of every window that holds the time, the latest first."""
        latest = time // self.slide * self.slide  # floor, also before 1970
        starts = range(latest, time - self.size, -self.slide)
        return [(start, start + self.size) for start in starts]

    def end_after(self, moment: int) -> int:
        """The earliest window end later than `moment`."""
        return (moment - self.size) // self.slide * self.slide + self.slide + self.size

    def last_end_until(self, moment: int) -> int:
        """The latest window end at or before `moment`."""
        return self.end_after(moment) - self.slide

    def open_from(self, moment: int) -> int:
        """Where the earliest window begins that ends after `moment`: rows before it have no window left."""
        return self.end_after(moment) - self.size

    def is_due(self, end: int, watermark: float) -> bool:
        """Whether the window that ends there fires, or has fired."""
        return end <= watermark

    def is_final(self, end: int, watermark: float) -> bool:
        """Whether the window that ends there never changes any more: rows that have no other are late."""
        return end + self.lateness <= watermark

    def final_at(self, time: int) -> int:
        """The watermark at which no window that holds the time changes any more."""
        return time // self.slide * self.slide + self.size + self.lateness

    def joined(self, runs: Iterable[Run]) -> list[Run]:
        """The same windows in as few runs as there can be, in order."""
        found: list[Run] = []
        for first, last in sorted(runs):
            if found and first - self.slide <= found[-1][1]:
                found[-1] = (found[-1][0], max(last, found[-1][1]))
            else:
                found.append((first, last))
        return found

    def count(self, run: Run) -> int:
        """How many windows are in a run."""
        first, last = run
        return (last - first) // self.slide + 1

    def times(self, run: Run) -> tuple[int, int]:
        """From where to where rows belong to the windows of a run."""
        first, last = run
        return first - self.size, last
