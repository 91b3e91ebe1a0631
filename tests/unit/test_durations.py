"""Durations: what people write, in nanoseconds, and back."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexstream import durations
from flexstream.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("10s", 10_000_000_000),
        ("500ms", 500_000_000),
        (" 1 m ", 60_000_000_000),
        ("2h", 7_200_000_000_000),
        ("1d", 86_400_000_000_000),
        ("7us", 7_000),
        ("3ns", 3),
        ("1.5s", 1_500_000_000),
        ("0.1ms", 100_000),
        ("0s", 0),
        ("10S", 10_000_000_000),
        ("5 minutes", 300_000_000_000),
        (timedelta(seconds=1, microseconds=1), 1_000_001_000),
        (42, 42),
        (0, 0),
    ],
)
def test_durations_become_nanoseconds(text, nanoseconds):
    assert durations.parse(text) == nanoseconds


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "10",
        "s",
        "-1s",
        "1e3s",
        "10 parsecs",
        "1.5ns",
        "\u0661s",
        "1s1s",
        "0x1s",
        "nan s",
        "1" * 50 + "s",
        None,
        1.5,
        True,
        b"10s",
        -1,
        timedelta(seconds=-1),
        "300000d",
        2**63,
        "9" * 20 + "d",
        "\x00s",
        "1.s",
        ".5s",
    ],
)
def test_nonsense_is_refused_with_a_code(bad):
    with pytest.raises(ConfigError) as caught:
        durations.parse(bad)
    assert caught.value.code == "bad_duration"


@settings(deadline=None)
@given(st.integers(0, durations.MAX_NS))
def test_format_is_undone_by_parse(nanoseconds):
    assert durations.parse(durations.format(nanoseconds)) == nanoseconds


def test_format_uses_the_largest_exact_unit():
    units = {0: "0s", 1: "1ns", 1500: "1500ns", 10**10: "10s", 9 * 10**10: "90s", 86_400 * 10**9: "1d"}
    assert {ns: durations.format(ns) for ns in units} == units
