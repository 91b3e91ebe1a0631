"""Waiting for a state instead of sleeping: the deadline is for machines with far too much to do, not for good ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 90.0  # less than a test may take (conftest.py): it is better to hear what did not happen
PAUSE_S = 0.01


def wait_until(
    true: Callable[[], T],
    what: str,
    *,
    seconds: float = WAIT_S,
    pause_s: float = PAUSE_S,
    seen: Callable[[], object] | None = None,
) -> T:
    """The first true value. After `seconds` it fails with `what`, the last value, and what `seen` says, if given."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        if time.monotonic() > deadline:
            state = "" if seen is None else f"; {seen()!r}"
            raise AssertionError(f"waited {seconds:g} s for {what}; the last value was {value!r}{state}")
        time.sleep(pause_s)
    return value
