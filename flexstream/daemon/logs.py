"""Logs for machines and people: one line of key=value per event, and never a flood.

    log = logging.getLogger("flexstream.engine")
    log.warning("connection_closed", extra={"fields": {"stream": "ads", "group": 3, "reason": "bad_crc"}})
    # time=2026-01-01T00:00:00.000Z level=warning logger=engine event=connection_closed stream=ads group=3 ...

The message is the event's name, a constant; what varies goes into `fields`. Events of one name beyond the
limit are counted, and the next line that passes says how many were left out (`suppressed=`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_MAX_VALUE = 500
MAX_EVENTS = 1024


def quote(value: object) -> str:
    """The value as it stands in a line: bare if it is one plain word, else in double quotes, escaped."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > _MAX_VALUE:
        text = text[:_MAX_VALUE] + "..."
    if text and text.isprintable() and not any(c in ' "=\\' for c in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return '"' + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in escaped) + '"'


class KeyValueFormatter(logging.Formatter):
    """time= level= logger= event= and the record's fields, on one line."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal  # the journal has its own time, and reads <priority> at the start of a line

    def format(self, record: logging.LogRecord) -> str:
        pairs: dict[str, Any] = {}
        if not self._journal:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            pairs["time"] = f"{stamp}.{int(record.msecs):03d}Z"
        pairs["level"] = record.levelname.lower()
        pairs["logger"] = record.name.removeprefix("flexstream.")
        pairs["event"] = record.getMessage()
        pairs.update(getattr(record, "fields", {}))
        if record.exc_info:
            pairs["exception"] = self.formatException(record.exc_info).replace("\n", " | ")
        line = " ".join(f"{key}={quote(value)}" for key, value in pairs.items())
        return f"<{_PRIORITY.get(record.levelname, 6)}>{line}" if self._journal else line


class RateLimit(logging.Filter):
    """At most `burst` lines of one event in `period_s`; the next line says how many were left out.

    Memory is bounded: past MAX_EVENTS different names all others share one allowance.
    """

    def __init__(self, burst: int, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._burst, self._period_s, self._clock = burst, period_s, clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], list[float]] = {}  # [period began, lines in it, suppressed]
        self.suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        with self._lock:
            if key not in self._seen and len(self._seen) >= MAX_EVENTS:
                key = ("", "")
            now = self._clock()
            seen = self._seen.setdefault(key, [now, 0, 0])
            if now - seen[0] >= self._period_s:
                seen[0], seen[1] = now, 0
            if seen[1] >= self._burst:
                seen[2] += 1
                self.suppressed += 1
                return False
            seen[1] += 1
            left_out, seen[2] = int(seen[2]), 0
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "suppressed": left_out}
        return True


def setup(
    level: str = "info", stream: TextIO | None = None, *, burst: int = 10, period_s: float = 10.0
) -> RateLimit:
    """Send the log of everything under `flexstream` (and aiohttp's errors) to `stream` (standard error)."""
    limit = RateLimit(burst, period_s)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(journal="JOURNAL_STREAM" in os.environ and stream is None))
    handler.addFilter(limit)
    for name in ("flexstream", "aiohttp"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "flexstream" else logging.WARNING)
    return limit
