"""The Yahoo streaming benchmark: ad events of 78 bytes, and views per campaign per 10 seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexstream.query.aggregates import count
from flexstream.query.expr import col
from flexstream.query.windows import tumbling
from flexstream.rows.stream import Stream

WINDOW_MS = 10_000
EVENT_TYPES = (b"view", b"click", b"purchase")

YSB_STREAM = Stream(
    "ads",
    {
        "event_time": "timestamp[ms]",
        "campaign_id": "i64",
        "user_id": "i64",
        "page_id": "i64",
        "ad_id": "i64",
        "ip": "i64",
        "event_type": "bytes[8]",
        "pad": "bytes[22]",
    },
    key="campaign_id",
    time="event_time",
    max_future="off",  # the times of generated rows have nothing to do with the clock
)
YSB_QUERY = (
    YSB_STREAM.query("ysb").filter(col("event_type") == b"view").window(tumbling("10s")).agg(views=count())
)


def generate(
    n: int, keys: int = 10_000, seed: int = 1, rate: int = 1_000_000, start: int = 1_700_000_000_000
) -> np.ndarray[Any, np.dtype[Any]]:
    """`n` ad events of `keys` campaigns in order of event time, `rate` in each second from `start` (ms) on.

    Equal arguments give equal rows. For a long feed, call it in pieces with other seeds and later starts.
    """
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, dtype=YSB_STREAM.schema.dtype)
    rows["event_time"] = start + np.arange(n, dtype=np.int64) * 1000 // rate
    rows["campaign_id"] = rng.integers(0, keys, n)
    rows["user_id"] = rng.integers(0, 1_000_000, n)
    rows["page_id"] = rng.integers(0, 1_000_000, n)
    rows["ad_id"] = rows["campaign_id"] * 10 + rng.integers(0, 10, n)
    rows["ip"] = rng.integers(0, 2**32, n)
    rows["event_type"] = np.array(EVENT_TYPES, dtype="S8")[rng.integers(0, len(EVENT_TYPES), n)]
    return rows


def expected_views(rows: np.ndarray[Any, np.dtype[Any]]) -> dict[tuple[int, int], int]:
    """(window start in ms, campaign) -> views, by numpy alone: an independent answer to the query."""
    views = rows[rows["event_type"] == b"view"]
    starts = views["event_time"] // WINDOW_MS * WINDOW_MS
    pairs, counts = np.unique(np.stack([starts, views["campaign_id"]]), axis=1, return_counts=True)
    return {(int(w), int(c)): int(n) for w, c, n in zip(*pairs, counts, strict=True)}
