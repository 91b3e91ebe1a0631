"""Window shapes: which slices of event time a row belongs to.

Windows are half-open, `[start, start + size)`, and aligned to 1970-01-01T00:00Z (time 0), also before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flexstream import durations
from flexstream.errors import QueryError
from flexstream.query.windower import Windower

MAX_PANES_PER_WINDOW = 65_536
MOST_WINDOWS_COUNTED_ANEW = 1_024  # of a row: what each of its windows costs by itself, a row costs so many times


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A window's shape. Made by `tumbling` and `sliding`, which check it."""

    kind: str
    size_ns: int
    slide_ns: int

    @property
    def pane_ns(self) -> int:
        """The smallest slice of event time that all windows share."""
        return math.gcd(self.size_ns, self.slide_ns)

    @property
    def windows_per_row(self) -> int:
        return -(-self.size_ns // self.slide_ns)

    def windower(self, unit_ns: int, lateness_ns: int) -> Windower:
        """What answers for these windows, in units of a stream's time field."""
        spans = (self.size_ns, self.slide_ns, self.pane_ns, lateness_ns)
        return Windower(*(span // unit_ns for span in spans))

    def to_dict(self) -> dict[str, str]:
        body = {"kind": self.kind, "size": durations.format(self.size_ns)}
        if self.kind == "sliding":
            body["every"] = durations.format(self.slide_ns)
        return body

    @classmethod
    def from_dict(cls, body: Any) -> WindowSpec:
        if not isinstance(body, dict):
            raise QueryError(f"a window must be an object, not {body!r}", code="bad_window")
        allowed = {"tumbling": {"kind", "size"}, "sliding": {"kind", "size", "every"}}.get(
            str(body.get("kind"))
        )
        if allowed is None:
            raise QueryError(
                f"unknown window kind {body.get('kind')!r}", code="bad_window", hint="tumbling or sliding"
            )
        if set(body) != allowed:
            raise QueryError(
                f"a {body['kind']} window needs exactly {sorted(allowed)}, not {sorted(map(str, body))}",
                code="bad_window",
            )
        return (
            tumbling(body["size"])
            if body["kind"] == "tumbling"
            else sliding(body["size"], every=body["every"])
        )

    def __str__(self) -> str:
        every = f" every {durations.format(self.slide_ns)}" if self.kind == "sliding" else ""
        return f"{self.kind} {durations.format(self.size_ns)}{every}"


def tumbling(size: durations.Duration) -> WindowSpec:
    """Windows of `size`, one after the other: each row is in exactly one."""
    size_ns = _positive("window size", size)
    return WindowSpec("tumbling", size_ns, size_ns)


def sliding(size: durations.Duration, *, every: durations.Duration) -> WindowSpec:
    """Windows of `size`, one beginning every `every`: each row is in `size / every` of them.

    `every` may not be longer than `size` (rows would fall between windows); `size` need not be a multiple.
    """
    size_ns, slide_ns = _positive("window size", size), _positive("slide", every)
    if slide_ns > size_ns:
        raise QueryError(
            f"with windows of {size!r} every {every!r} some rows would be in no window",
            code="bad_window",
            hint=f"use every={size!r} or less",
        )
    spec = WindowSpec("sliding", size_ns, slide_ns)
    if size_ns // spec.pane_ns > MAX_PANES_PER_WINDOW:
        raise QueryError(
            f"a window of {size!r} every {every!r} has {size_ns // spec.pane_ns} panes of "
            f"{durations.format(spec.pane_ns)}; the limit is {MAX_PANES_PER_WINDOW}",
            code="bad_window",
            hint="use a coarser slide, one that divides the size",
        )
    return spec


def _positive(what: str, value: durations.Duration) -> int:
    nanoseconds = durations.parse(value)
    if nanoseconds == 0:
        raise QueryError(f"{what} must be longer than zero", code="bad_window")
    return nanoseconds
