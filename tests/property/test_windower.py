"""The windowers of Python and of workers against the definition: windows end at k * slide + size."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from flexstream.cython_ext.testing.windower_probe import WindowerProbe
from flexstream.query.windower import Windower

SPAN = 40
TIMES = st.integers(-200, 200)


@st.composite
def windowers(draw: st.DrawFn) -> Windower:
    size = draw(st.integers(1, SPAN))
    slide = draw(st.integers(1, size))
    return Windower(size, slide, math.gcd(size, slide), draw(st.integers(0, SPAN)))


def probe_of(windower: Windower) -> WindowerProbe:
    return WindowerProbe(windower.size, windower.slide, windower.pane, windower.lateness)


def all_ends(windower: Windower) -> list[int]:
    """By definition; of all windows near the times that tests ask about."""
    return [k * windower.slide + windower.size for k in range(-500, 501)]


@given(windowers(), TIMES)
def test_a_row_is_in_the_windows_that_hold_its_time(windower: Windower, time: int) -> None:
    held = [(end - windower.size, end) for end in all_ends(windower) if end - windower.size <= time < end]
    assert windower.windows_of(time) == held[::-1]
    probe = probe_of(windower)
    pane = probe.pane_of(time)
    assert pane <= time < probe.pane_end(pane)
    assert pane % windower.pane == 0
    assert (probe.first_end(pane), probe.last_end(pane)) == (held[0][1], held[-1][1])
    assert [probe.window_number(pane, end) for _, end in held] == list(range(len(held)))
    assert len(held) <= probe.windows_of_pane()
    assert all(probe.window_start(end) == start for start, end in held)
    assert probe.panes_of_window() * windower.pane == windower.size


@given(windowers(), TIMES)
def test_what_is_due_and_what_is_open_at_a_moment(windower: Windower, moment: int) -> None:
    later = min(end for end in all_ends(windower) if end > moment)
    due = max(end for end in all_ends(windower) if end <= moment)
    for answers in (windower, probe_of(windower)):
        assert answers.end_after(moment) == later
        assert answers.last_end_until(moment) == due
        assert answers.open_from(moment) == later - windower.size
    assert windower.is_due(due, moment)
    assert not windower.is_due(later, moment)


@given(windowers(), TIMES)
def test_what_is_final_and_what_may_go(windower: Windower, watermark: int) -> None:
    probe = probe_of(windower)
    changing = [end for end in all_ends(windower) if end + windower.lateness > watermark]
    assert all(windower.is_final(end, watermark) == (end not in changing) for end in all_ends(windower))
    assert probe.final_until(watermark) == watermark - windower.lateness
    assert probe.needed_from(watermark) == min(changing) - windower.size


@given(windowers(), TIMES)
def test_a_batch_is_over_when_no_window_of_its_rows_changes(windower: Windower, time: int) -> None:
    at = windower.final_at(time)
    ends = [end for _, end in windower.windows_of(time)]
    assert all(windower.is_final(end, at) for end in ends)
    assert not all(windower.is_final(end, at - 1) for end in ends)


@given(windowers(), st.sets(st.integers(-20, 20), min_size=1))
def test_runs_are_joined_where_windows_follow_each_other(windower: Windower, numbers: set[int]) -> None:
    ends = sorted(k * windower.slide + windower.size for k in numbers)
    runs = windower.joined((end, end) for end in ends)
    assert [end for first, last in runs for end in range(first, last + 1, windower.slide)] == ends
    assert sum(windower.count(run) for run in runs) == len(ends)
    probe = probe_of(windower)
    assert not any(probe.follows(after[0], before[1]) for before, after in itertools.pairwise(runs))
    times = [time for run in runs for time in range(*windower.times(run))]
    assert {time for end in ends for time in range(end - windower.size, end)} == set(times)
