"""Logs: one line per event, quoted where needed, and bounded however many events there are."""

from __future__ import annotations

import io
import logging

import pytest

from flexstream.daemon.logs import MAX_EVENTS, KeyValueFormatter, RateLimit, quote, setup


def record(name: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("flexstream.engine", logging.WARNING, __file__, 1, name, (), None)
    made.fields = fields
    return made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (3, "3"),
        ("two words", '"two words"'),
        ("", '""'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("line\nbreak level=error", '"line\\nbreak level=error"'),
        ("\x1b[31m", '"\\x1b[31m"'),
    ],
)
def test_values_cannot_break_out_of_their_place(value: object, text: str) -> None:
    assert quote(value) == text


def test_long_values_are_cut() -> None:
    assert len(quote("x" * 10_000)) < 600


def test_a_line_names_connection_stream_and_group() -> None:
    line = KeyValueFormatter(journal=False).format(
        record("connection_closed", peer="10.0.0.7:4711", stream="ads", group=3, reason="bad_crc")
    )
    assert line.startswith("time=20")
    assert line.endswith(
        "level=warning logger=engine event=connection_closed peer=10.0.0.7:4711 stream=ads group=3 "
        "reason=bad_crc"
    )
    assert KeyValueFormatter(journal=True).format(record("x")) == "<4>level=warning logger=engine event=x"


def test_a_flood_is_cut_and_the_next_line_says_by_how_much() -> None:
    now = [0.0]
    limit = RateLimit(burst=3, period_s=10, clock=lambda: now[0])
    assert [limit.filter(record("flood")) for _ in range(100)].count(True) == 3
    assert limit.filter(record("other"))
    now[0] = 10.0
    after = record("flood", group=1)
    assert limit.filter(after)
    assert after.fields == {"group": 1, "suppressed": 97}  # type: ignore[attr-defined]
    assert limit.suppressed == 97


def test_endless_new_event_names_do_not_take_endless_memory() -> None:
    limit = RateLimit(burst=1, period_s=10, clock=lambda: 0.0)
    for number in range(MAX_EVENTS * 3):
        limit.filter(record(f"event {number}"))
    assert len(limit._seen) <= MAX_EVENTS + 1


def test_setup_sends_the_package_log_to_the_stream_with_exceptions_on_one_line() -> None:
    stream = io.StringIO()
    before = logging.getLogger("flexstream").handlers, logging.getLogger("aiohttp").handlers
    try:
        setup("info", stream)
        log = logging.getLogger("flexstream.engine")
        log.debug("hidden")
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.exception("failed", extra={"fields": {"stream": "ads"}})
    finally:
        logging.getLogger("flexstream").handlers, logging.getLogger("aiohttp").handlers = before
        logging.getLogger("flexstream").propagate = logging.getLogger("aiohttp").propagate = True
    [line] = stream.getvalue().splitlines()
    assert "event=failed stream=ads exception=" in line
    assert "ValueError" in line
