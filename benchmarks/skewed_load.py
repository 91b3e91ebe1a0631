"""The load of `benchmarks.skew` and `benchmarks.zipf`: costly rows, frames for the C senders, and the right answer.

A row costs more than a microsecond because queries compute over it: scores by Lehmer's method, multiplications and
remainders in turn, before YSB's own filter. The work is the program's, so it is the same whoever keeps the counts.
"""

from __future__ import annotations

import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks.harness import CACHE
from benchmarks.programs import start_program
from flexstream.testing import ysb
from flexstream.wire import frames as wire

FRAME_ROWS = 210  # 16 KiB: every group is heard of every few milliseconds
STEPS, OTHERS = 28, 12
PRIME = 1_000_003
WINDOW_MS = 10_000
START_MS = 1_700_000_000_000  # a multiple of the window
EVENT_RATE = 4_000_000  # rows per second of event time: a run stays within one window, and none fires in mid-run
SEED = 7
SEND_BUFFER = 64 << 10  # the kernel doubles it: with what the receiver holds, less than Flink's ten 32 KiB buffers


def score() -> fs.Expr:
    value: Any = fs.col("ip")
    for _ in range(STEPS):
        value = (value % fs.col("ad")) * PRIME
    return value


def costly_queries(stream: fs.Stream, name: str) -> list[fs.Query]:
    """Views per campaign and 10 s behind a score that every row passes, and queries whose score no row passes.

    The first is the one with state; a query has no more intermediate values than its score needs, hence the others.
    """
    scored = [stream.query(one).map(ad=fs.col("ad_id") + 1) for one in (name, *(f"{name}-{i}" for i in range(OTHERS)))]
    views = scored[0].filter(score() >= 0).filter(fs.col("event_type") == b"view")
    return [query.window(fs.tumbling("10s")).agg(n=fs.count())
            for query in (views, *(other.filter(score() < 0) for other in scored[1:]))]  # fmt: skip


@dataclass(frozen=True)
class KeyedFrames:
    """A file of DATA frames, all of FRAME_ROWS rows, the same number for each group that has keys."""

    path: Path
    groups: int
    keys: int

    def table(self) -> np.ndarray:
        rows = ysb.YSB_STREAM.schema.dtype
        return np.fromfile(self.path, np.dtype([("header", f"V{wire.HEADER_BYTES}"), ("rows", rows, FRAME_ROWS)]))


def keyed_frames(groups: int, keys: int) -> KeyedFrames:
    """Every key about equally often; made once and kept."""
    stream = ysb.YSB_STREAM
    path = CACHE / f"keyed-{groups}-{keys}-{FRAME_ROWS}-{stream.schema.hash}.bin"
    if not path.exists():
        each = max(8, -(-3 * keys // (2 * groups * FRAME_ROWS)))  # frames of a group
        probe = np.zeros(keys, stream.schema.dtype)
        probe["campaign_id"] = np.arange(keys)
        group_of_key = stream.group_of(probe, groups)
        random = np.random.default_rng(SEED)
        parts = []
        for group in range(groups):
            mine = random.permutation(np.flatnonzero(group_of_key == group))
            if len(mine):
                rows = ysb.generate(each * FRAME_ROWS, keys=1, seed=group, start=START_MS)
                rows["campaign_id"] = np.resize(mine, len(rows))
                rows["ad_id"] += 10 * rows["campaign_id"]
                parts.append(framed(rows, group))
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(parts))
        temporary.replace(path)
    return KeyedFrames(path, groups, keys)


def framed(rows: np.ndarray, group: int) -> bytes:
    """Whole frames of FRAME_ROWS rows; what is left over is not used."""
    parts = []
    for start in range(0, len(rows) - FRAME_ROWS + 1, FRAME_ROWS):
        payload = rows[start : start + FRAME_ROWS].tobytes()
        fields = (wire.MAGIC, wire.VERSION, wire.FrameType.DATA, 0, group, len(payload), 0, FRAME_ROWS, 0)
        parts += [wire.HEADER.pack(*fields), payload]
    return b"".join(parts)


# -- the right answer


def expected_counts(frames: KeyedFrames, sent: np.ndarray) -> np.ndarray:
    """[window, key] -> views, from the numbers of the frames in the order in which they were sent."""
    rows = frames.table()["rows"]
    views, keys = rows["event_type"] == b"view", rows["campaign_id"]
    first = np.arange(len(sent), dtype=np.int64) * FRAME_ROWS
    window_of_first, window_of_last = window_of_row(first), window_of_row(first + FRAME_ROWS - 1)
    counts = np.zeros((int(window_of_last.max(initial=0)) + 1, frames.keys), np.int64)
    whole = window_of_first == window_of_last
    for window in range(len(counts)):
        times = np.bincount(sent[whole & (window_of_first == window)], minlength=len(rows))
        used = np.repeat(times, FRAME_ROWS).reshape(rows.shape)[views]
        counts[window] += np.bincount(keys[views], used, frames.keys).astype(np.int64)
    for at in np.flatnonzero(~whole):
        windows = window_of_row(first[at] + np.arange(FRAME_ROWS))
        seen = views[sent[at]]
        np.add.at(counts, (windows[seen], keys[sent[at]][seen]), 1)
    return counts


def window_of_row(number: Any) -> Any:
    """The window, from 0, of the row that was sent as number `number`."""
    return (START_MS + number * 1000 // EVENT_RATE) // WINDOW_MS - START_MS // WINDOW_MS


def counts_of_results(batches: Any, like: np.ndarray) -> np.ndarray:
    """The engine's results in the form of `expected_counts`."""
    counts = np.zeros_like(like)
    for batch in batches:
        starts = np.asarray(batch.column("window_start").cast("int64"))
        window = (starts - START_MS) // WINDOW_MS
        np.add.at(counts, (window, np.asarray(batch.column("campaign_id"))), np.asarray(batch.column("n")))
    return counts


# -- the sender


def start_turning(
    port: int,
    frames: KeyedFrames,
    *,
    stream: str,
    cpu: int,
    duration_s: float,
    rate: float = 0,
    hot: list[bool] | None = None,
    turn_s: float = 1e6,
    hot_percent: int = 80,
    marker_ms: int = 0,
    log: Path | None = None,
    shared: Path | None = None,
) -> subprocess.Popen[str]:
    """benchmarks/native/turning.c"""
    schema = ysb.YSB_STREAM.schema
    options: dict[str, Any] = {
        "port": port,
        "frames": frames.path,
        "groups": frames.groups,
        "stream": stream,
        "schema": schema.hash,
        "row-bytes": schema.row_bytes,
        "time-offset": schema.field(ysb.YSB_STREAM.time).offset,
        "start-time": START_MS,
        "event-rate": EVENT_RATE,
        "cpu": cpu,
        "duration-ms": int(duration_s * 1000),
        "turn-ms": int(turn_s * 1000),
        "hot-percent": hot_percent,
        "rate": int(rate),
        "marker-ms": marker_ms,
        "sndbuf": SEND_BUFFER,
        "producer": uuid.uuid4(),
    }
    if hot is not None:
        options["hot"] = "".join("1" if one else "0" for one in hot)
    options |= {name: path for name, path in (("log", log), ("shared", shared)) if path is not None}
    return start_program("turning", options)
