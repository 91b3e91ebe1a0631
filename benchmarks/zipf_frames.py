"""The load of `benchmarks.zipf`: keys of a Zipf distribution, in frames for the C senders, and what bounds it."""

from __future__ import annotations

import numpy as np

from benchmarks.harness import CACHE
from benchmarks.skewed_load import FRAME_ROWS, START_MS, framed
from benchmarks.workload import Frames
from flexstream.testing import ysb

KEYS, GROUPS, PRODUCERS = 10_000, 128, 4
ROWS = 300_000  # in a producer's file
TIME_DELTA_MS = 100


def weights(keys: int, z: float) -> np.ndarray:
    """The share of each rank."""
    ranks = np.arange(1, keys + 1, dtype=np.float64) ** -z
    return ranks / ranks.sum()


def group_shares(groups_of_keys: np.ndarray, shares: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(groups_of_keys, shares, groups)


def bound(shares: np.ndarray, workers: int) -> float:
    """Throughput / that of uniform keys which the hottest part allows: 1.0 when it fits into a worker's share."""
    return min(1.0, 1.0 / (workers * float(shares.max())))


def key_groups() -> np.ndarray:
    rows = np.zeros(KEYS, ysb.YSB_STREAM.schema.dtype)
    rows["campaign_id"] = np.arange(KEYS)
    return ysb.YSB_STREAM.group_of(rows, GROUPS)


def shares_of_keys(z: float) -> np.ndarray:
    rank_of_key = np.random.default_rng(1).permutation(KEYS)  # the same keys are hot for all producers
    return weights(KEYS, z)[rank_of_key]


def shares_of_groups(z: float) -> np.ndarray:
    return group_shares(key_groups(), shares_of_keys(z), GROUPS)


def zipf_frames(z: float, producer: int) -> Frames:
    """Frames in the order in which a producer with such keys would fill them; made once and kept."""
    path = CACHE / f"zipf-{GROUPS}-{KEYS}-{ROWS}-{z}-{producer}-{ysb.YSB_STREAM.schema.hash}.bin"
    if not path.exists():
        random = np.random.default_rng(1000 * producer + int(10 * z))
        rows = ysb.generate(ROWS, keys=KEYS, seed=producer, start=START_MS)
        rows["campaign_id"] = random.choice(KEYS, ROWS, p=shares_of_keys(z))
        rows["event_time"] = START_MS + np.arange(ROWS) * TIME_DELTA_MS // ROWS
        group = ysb.YSB_STREAM.group_of(rows, GROUPS)
        parts: list[tuple[int, bytes]] = []
        for g in range(GROUPS):
            mine = np.flatnonzero(group == g)
            data = framed(rows[mine], g)
            size = len(data) // max(1, len(mine) // FRAME_ROWS) if data else 0
            ends = mine[FRAME_ROWS - 1 :: FRAME_ROWS]  # a frame goes out when its last row is there
            parts += [(int(end), data[i * size : (i + 1) * size]) for i, end in enumerate(ends)]
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(data for _, data in sorted(parts)))
        temporary.replace(path)
    sent = path.stat().st_size // (32 + FRAME_ROWS * ysb.YSB_STREAM.schema.row_bytes) * FRAME_ROWS
    return Frames(path, GROUPS, sent, TIME_DELTA_MS)
