"""Durations as people write them ("10s", "500ms") and as the engine keeps them: integer nanoseconds."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

from flexstream.errors import ConfigError

UNIT_NS: dict[str, int] = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
MAX_NS = 2**63 - 1
_TEXT = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zµ]{1,12})\s*", re.ASCII | re.IGNORECASE)
_LONG_NAMES = {"sec": "s", "second": "s", "seconds": "s", "min": "m", "minute": "m", "minutes": "m",
               "hour": "h", "hours": "h", "day": "d", "days": "d", "millis": "ms", "milliseconds": "ms",
               "µs": "us", "micros": "us", "microseconds": "us", "nanos": "ns",
               "nanoseconds": "ns"}  # fmt: skip

Duration = str | int | timedelta


def parse(value: Duration) -> int:
    """Nanoseconds of `"10s"`, `"1.5h"`, a `timedelta`, or an int that is nanoseconds already.

    Never negative, at most 2**63 - 1 (292 years). Raises ConfigError (`bad_duration`).
    """
    if isinstance(value, bool):
        raise _bad(value)
    if isinstance(value, int):
        nanoseconds = value
    elif isinstance(value, timedelta):
        nanoseconds = (value.days * 86_400 + value.seconds) * UNIT_NS["s"] + value.microseconds * 1_000
    elif isinstance(value, str):
        nanoseconds = _parse_text(value)
    else:
        raise _bad(value)
    if nanoseconds < 0:
        raise ConfigError(f"duration {value!r} is negative", code="bad_duration", hint="give zero or more")
    if nanoseconds > MAX_NS:
        raise ConfigError(f"duration {value!r} is too long", code="bad_duration", hint="give at most 292 years")
    return nanoseconds


def _parse_text(text: str) -> int:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _bad(text)
    name = match[2].lower()
    unit = UNIT_NS.get(_LONG_NAMES.get(name, name))
    if unit is None:
        raise _bad(text)
    exact = Fraction(match[1]) * unit
    if exact.denominator != 1:
        raise ConfigError(
            f"duration {text!r} is not a whole number of nanoseconds", code="bad_duration", hint="round it"
        )
    return exact.numerator


def _bad(value: object) -> ConfigError:
    return ConfigError(
        f"{value!r} is not a duration",
        code="bad_duration",
        hint=f"give a number and a unit ({', '.join(UNIT_NS)}), such as '10s', or a timedelta",
    )


def format(nanoseconds: int) -> str:
    """The shortest exact text: `format(10_000_000_000) == "10s"`. `parse` undoes it."""
    if nanoseconds == 0:
        return "0s"
    unit = next(name for name in reversed(UNIT_NS) if nanoseconds % UNIT_NS[name] == 0)
    return f"{nanoseconds // UNIT_NS[unit]}{unit}"
