"""One run of `benchmarks.skew`, in a process of its own: engine, sender, watch, check.

    python -m benchmarks.skew_run '{"way": "flexstream", "keys": 10000, "rate": 2000000, ...}'

Prints one JSON object. The results are compared with what was sent, to the last row, in every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks import migration, skewed_load
from benchmarks.engine_process import ysb_stream
from benchmarks.harness import PROJECT, Cores
from benchmarks.programs import sender_result
from flexstream.ingest import receive_room

STREAM = "ads"
QUERY = "costly"
FINISH_S = 60.0
WAYS = ("flexstream", "fetching", "restarting")
NAMES = {"flexstream": "FlexStream", "fetching": "locks, fetch on demand", "restarting": "stop, snapshot, restart"}


@dataclass(frozen=True)
class Run:
    """What to do. `way` "none": nobody balances. `rate` 0: as fast as it goes, and nothing turns."""

    way: str
    keys: int
    rate: float
    duration_s: float
    turn_s: float = 1e6
    groups: int = 64
    hot_percent: int = 80
    marker_ms: int = 5
    forced: bool = False  # migrate after the turn without waiting for back-pressure: for tests

    def run(self) -> dict[str, Any]:
        """In a process of its own."""
        command = [sys.executable, "-m", "benchmarks.skew_run", json.dumps(asdict(self))]
        done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True, timeout=self.duration_s + 120)
        if done.returncode != 0:
            raise SystemExit(f"a run of {self.way!r} failed; see above")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


class Markers:
    """When each marker was seen (CLOCK_MONOTONIC ns) and how long it took, beside the engine's own summary."""

    def __init__(self, engine: fs.Engine) -> None:
        self._seen: list[tuple[int, int]] = []
        latencies = engine.collector.latencies
        add = latencies.add

        def noting(ns: int) -> None:
            self._seen.append((time.monotonic_ns(), ns))
            add(ns)

        latencies.add = noting  # type: ignore[method-assign]

    def entered(self, since_ns: int) -> np.ndarray:
        """[(when it was sent, in ms after `since_ns`; its latency in ms)] in the order of sending."""
        seen = np.array(self._seen, np.float64).reshape(-1, 2)
        sent = np.stack([(seen[:, 0] - seen[:, 1] - since_ns) / 1e6, seen[:, 1] / 1e6], axis=1)
        return sent[np.argsort(sent[:, 0], kind="stable")]


def watch_for(run: Run, engine: fs.Engine, store: Any, shared: Path) -> migration.Watch | None:
    if run.way == "flexstream":
        return migration.Balanced(engine)
    if run.way == "fetching":
        return migration.Fetching(engine, store, shared, run.forced)
    return migration.Restarting(engine, store, shared, run.forced) if run.way == "restarting" else None


def keys_of_fullest_group(frames: skewed_load.KeyedFrames) -> int:
    rows = np.zeros(frames.keys, skewed_load.ysb.YSB_STREAM.schema.dtype)
    rows["campaign_id"] = np.arange(frames.keys)
    return int(np.bincount(skewed_load.ysb.YSB_STREAM.group_of(rows, frames.groups)).max())


def execute(run: Run) -> dict[str, Any]:
    cores = Cores.pick()
    receive_room.ROOM_BYTES = 0  # the kernel's own windows: back-pressure would wait for megabytes to fill
    frames = skewed_load.keyed_frames(run.groups, run.keys)
    stream = ysb_stream(STREAM)
    store = migration.fetching_store() if run.way in ("fetching", "restarting") else None
    with (
        tempfile.TemporaryDirectory() as folder,
        fs.Engine([cores.receiver, cores.sender], groups=run.groups, listen="127.0.0.1:0", compile="off",
                  balance="off") as engine,
    ):  # fmt: skip
        for query in skewed_load.costly_queries(stream, QUERY):
            engine.submit(query)
        markers = Markers(engine)
        placement = engine.placement()
        if store is not None:
            states = next(running.states for running in engine.running()[1] if running.query.name == QUERY)
            if skewed_load.window_of_row(int(run.rate * run.duration_s)) > 0:
                raise SystemExit("the store has room for one window: choose a shorter run or fewer rows a second")
            store.install(states, placement, keys_of_fullest_group(frames), skewed_load.START_MS)
        log, shared = Path(folder) / "log", Path(folder) / "shared"
        shared.write_bytes(bytes(32))
        watch = watch_for(run, engine, store, shared)
        process = skewed_load.start_turning(
            (engine.data_address or ("", 0))[1], frames, stream=STREAM, cpu=cores.sender, duration_s=run.duration_s,
            rate=run.rate, hot=[worker == 0 for worker in placement] if run.rate else None, turn_s=run.turn_s,
            hot_percent=run.hot_percent, marker_ms=run.marker_ms if run.rate else 0, log=log, shared=shared,
        )  # fmt: skip
        if watch is not None:
            watch.start()
        sent = sender_result(process, run.duration_s)
        found = watch.stop() if watch is not None else {}
        if run.way == "flexstream":
            found = migration.reaction(engine.mover.history, int(sent["turned_ns"]))
        engine.finish(timeout=FINISH_S)
        expected = skewed_load.expected_counts(frames, np.fromfile(log, np.uint32))
        if store is None:
            counted = skewed_load.counts_of_results(engine.results(QUERY), expected)
        else:
            counted = np.zeros_like(expected)
            cells = store.counts()
            np.add.at(counted, (cells[:, 0], cells[:, 1]), cells[:, 2])
        if not (counted == expected).all():
            wrong = int((counted != expected).sum())
            raise SystemExit(f"{run.way}: {wrong} of {expected.size} counts are wrong; nothing is measured")
        cpu_s = sum(worker["cpu_seconds"] for worker in engine.status()["workers"])
        return summary(run, sent, found, markers, cpu_s)


def summary(run: Run, sent: dict[str, Any], found: dict[str, Any], markers: Markers, cpu_s: float) -> dict[str, Any]:
    turned_ns = int(sent["turned_ns"]) or int(sent["started_ns"])
    result = {
        "way": run.way,
        "keys": run.keys,
        "rows": sent["rows"],
        "rows_per_s": sent["rows"] / sent["seconds"],
        "sender_cores": sent["cpu_ns"] / 1e9 / sent["seconds"],
        "blocked_ms": sent["blocked_ns"] / 1e6,
        "row_ns": cpu_s * 1e9 / max(1, sent["rows"]),
        "timeline": np.round(markers.entered(turned_ns), 4).tolist(),
        "migrated": bool(found) and found.get("absorbed_ns") is not None,
        **{name: value for name, value in found.items() if not name.endswith("_ns")},
    }
    if result["migrated"]:
        result["detected_after_ms"] = (found["detected_ns"] - turned_ns) / 1e6
        result["migration_ms"] = (found["absorbed_ns"] - found["detected_ns"]) / 1e6
    return result


def main() -> None:
    print(json.dumps(execute(Run(**json.loads(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
