"""What has to be known of rows to read them: where their fields are, which are their key, which is their time."""

from __future__ import annotations

from dataclasses import dataclass

from flexstream import durations
from flexstream.rows.schema import Field, Schema

SPAN_LIMIT = 1 << 60  # of a time field's units, as in window_times.h: no sum of times and spans leaves 64 bits


@dataclass(frozen=True)
class RowLayout:
    """Rows of `schema`, with a `time` field and the fields of their `key`. `of` names whose they are, for people.

    What reads rows takes one of these, not a stream: it does not know whether they came from a producer or from
    another part of a plan. Assumes that the fields exist, and that `time` is a timestamp.
    """

    of: str
    schema: Schema
    time: str
    key: tuple[str, ...]

    @property
    def key_fields(self) -> tuple[Field, ...]:
        return tuple(self.schema.field(name) for name in self.key)

    @property
    def time_field(self) -> Field:
        return self.schema.field(self.time)

    @property
    def time_unit(self) -> str:
        """The unit of event time, of watermarks and of window bounds: s, ms, us or ns."""
        unit = self.time_field.unit
        assert unit is not None, "checked to be a timestamp"
        return unit

    @property
    def unit_ns(self) -> int:
        return durations.UNIT_NS[self.time_unit]

    def too_long(self, nanoseconds: int) -> str | None:
        """Why a span of time is too long for the arithmetic of windows over these rows; None: it is not."""
        if nanoseconds <= SPAN_LIMIT * self.unit_ns:
            return None
        years = SPAN_LIMIT * self.unit_ns // (365 * durations.UNIT_NS["d"])
        return f"with times in {self.time_unit} the limit is 2**60 {self.time_unit}, {years} years"
