"""The Yahoo Streaming Benchmark as wire frames: the same bytes for every receiver."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import CACHE
from flexstream.rows.stream import Stream
from flexstream.testing import ysb
from flexstream.wire import frames as wire

KEYS = 10_000
SEED = 7
FRAME_BYTES = 32_768
EVENT_RATE = 1_000_000  # rows per second of event time: a 10 s window has 10 million rows
START_MS = 1_700_000_000_000  # a multiple of 10 s
FILE_BYTES = 4 << 20  # small enough to stay in the sender's cache, so that the sender is not what is measured


@dataclass(frozen=True)
class Frames:
    """A file of DATA frames for the C sender: one frame per group in turn, several times over."""

    path: Path
    groups: int
    rows: int
    time_delta: int  # what one pass over the file advances event time by, in milliseconds


def rows_per_frame(stream: Stream = ysb.YSB_STREAM) -> int:
    return FRAME_BYTES // stream.schema.row_bytes


def frames(groups: int, *, keys: int = KEYS) -> Frames:
    """The frames for this number of groups, made once and kept."""
    stream = ysb.YSB_STREAM
    count = rows_per_frame(stream)
    rounds = max(1, FILE_BYTES // (groups * FRAME_BYTES))
    delta = max(1, groups * rounds * count * 1000 // EVENT_RATE)
    path = CACHE / f"frames-{groups}-{keys}-{stream.schema.hash}.bin"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(_framed(grouped_rows(groups, rounds * count, keys), rounds, delta))
        temporary.replace(path)
    return Frames(path, groups, groups * rounds * count, delta)


def grouped_rows(groups: int, each: int, keys: int = KEYS) -> list[np.ndarray]:
    """`each` rows of every group, in the order in which they were generated."""
    stream = ysb.YSB_STREAM
    found: list[list[np.ndarray]] = [[] for _ in range(groups)]
    have = np.zeros(groups, dtype=np.int64)
    seed = SEED
    while have.min() < each:
        rows = ysb.generate(
            max(100_000, groups * each), keys=keys, seed=seed, rate=EVENT_RATE, start=START_MS
        )
        group = stream.group_of(rows, groups)
        for g in range(groups):
            found[g].append(rows[group == g])
            have[g] += len(found[g][-1])
        seed += 1
    return [np.concatenate(parts)[:each] for parts in found]


def _framed(rows: list[np.ndarray], rounds: int, delta: int) -> bytes:
    stream = ysb.YSB_STREAM
    each = len(rows[0])
    count = each // rounds
    times = START_MS + np.arange(each, dtype=np.int64) * delta // each
    parts: list[bytes] = []
    for part in rows:
        part[stream.time] = times
    for index in range(rounds):
        for group, part in enumerate(rows):
            payload = part[index * count : (index + 1) * count].tobytes()
            header = wire.HEADER.pack(
                wire.MAGIC, wire.VERSION, wire.FrameType.DATA, 0, group, len(payload), 0, count, 0
            )
            parts += [header, payload]
    return b"".join(parts)


def control_reply(groups: int) -> str:
    """What the discarding receiver adds to its answer to a control HELLO:

    the JSON members without the braces.
    """
    stream = ysb.YSB_STREAM
    reply: dict[str, Any] = {
        "stream": stream.to_dict(),
        "schema": stream.schema.hash,
        "groups": groups,
        "placement": [0] * groups,
        "nic": {"kind": "user", "aligned": False, "reason": "a discarding sink"},
        "frame_bytes": FRAME_BYTES,
        "max_frame_bytes": 1 << 20,
        "epoch": 1,
    }
    return json.dumps(reply)[1:-1]
