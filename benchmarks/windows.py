"""What does a firing cost when many windows are open, or when windows have many panes?

  python -m benchmarks.windows [--json] [--quick] [--pairs N]

One group, one worker, rows fed in memory; every window has the same few keys, so a firing has the same results in all
cases. "open windows": tumbling windows, so many of them open while watermarks pass some at a time, then all at once.
(Where fewer are open than pass at a time, it is the watermark's own cost that is seen: not in the slope.) "panes":
sliding windows of so many panes; as many windows as one has panes have fired before, and as many again are measured,
some at a time, so that what is done rarely counts too. Costs are CPU time of the worker's thread, of the rows and of
the firings apart.
"slope" is the larger of the slopes of log(CPU per firing) over log(open windows) and log(panes per window), by least
squares (target: at most 0.2; a cost that is linear in either has slope 1).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks import harness
from benchmarks.harness import Cores
from flexstream import col

TARGET = 0.2
KEYS = 8
OPEN = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
PANES = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536)
LEAST_FIRINGS = 4_096
AT_ONCE = 64  # windows that fire at one watermark, in the cases of panes
MANY = 16_384  # of more, one round is enough: it has many firings
FEED_WINDOWS = 50_000  # whose rows are made at once
STATE_BYTES = 12 << 30
AGGREGATES = {"count": {"n": fs.count()}, "min": {"n": fs.count(), "least": fs.min("x")}}

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i64", "x": "i64"}, key="k", time="t")


@dataclass
class Cost:
    row_ns: float
    firing_ns: float
    firings: int


class Measured:
    """An engine with one query, and the CPU time of its one worker."""

    def __init__(self, query: fs.Query) -> None:
        self.engine = fs.Engine(workers=[Cores.pick().receiver], groups=1, state_memory_bytes=STATE_BYTES)
        self.engine.submit(query)
        self.query = query.name
        while not (thread := self.engine.workers[0].stats()["thread_id"]):  # it is just beginning
            time.sleep(0.001)
        self._thread = Path(f"/proc/self/task/{thread}/schedstat")
        self.row_ns = self.firing_ns = 0

    def cpu_ns(self) -> int:
        return int(self._thread.read_text().split()[0])

    def rows(self, first: int, n: int) -> None:
        """A row of each key in each of n seconds."""
        before = self.cpu_ns()
        for at in range(first, first + n, FEED_WINDOWS):
            seconds = np.arange(at, min(at + FEED_WINDOWS, first + n))
            rows = np.zeros(len(seconds) * KEYS, STREAM.schema.dtype)
            rows["t"] = np.repeat(seconds, KEYS).astype("datetime64[s]")
            rows["k"] = np.tile(np.arange(KEYS), len(seconds))
            rows["x"] = rows["k"] * 7 + np.repeat(seconds, KEYS) % 100
            self.engine.feed("s", rows, watermark=False)
        self.engine.flush()
        self.row_ns += self.cpu_ns() - before

    def fire(self, until: int) -> None:
        before = self.cpu_ns()
        behind = np.zeros(1, STREAM.schema.dtype)
        behind["x"] = -1  # a row that the filter drops: when it is through, so is the watermark before it
        self.engine.feed("s", behind[:0], watermark=until)
        self.engine.feed("s", behind, watermark=False)
        self.engine.flush()
        self.firing_ns += self.cpu_ns() - before

    def fired(self) -> int:
        return int(self.engine.status()["queries"][self.query]["windows_fired"])

    def forget(self) -> int:
        """What was measured so far does not count. Returns how many windows have fired."""
        self.row_ns = self.firing_ns = 0
        return self.fired()

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


def open_windows(aggregates: dict[str, Any], n: int, firings: int) -> dict[str, Cost]:
    query = STREAM.query("q").filter(col("x") >= 0).window(fs.tumbling("1s")).agg(**aggregates)
    at_once = min(n, AT_ONCE)
    steps = max(1, min(firings, 64 * n) // at_once)
    with Measured(query) as measured:
        measured.rows(0, n)
        row_ns = measured.row_ns / (n * KEYS)
        already = measured.forget()
        for step in range(steps):
            measured.rows(n + step * at_once, at_once)
            measured.fire((step + 1) * at_once)
        some = Cost(row_ns, measured.firing_ns / (steps * at_once), steps * at_once)
        measured.forget()
        measured.fire(n + steps * at_once)
        fired = measured.fired() - already
        if fired != n + steps * at_once:
            raise SystemExit(f"{fired} windows fired, not {n + steps * at_once}: nothing was measured")
        return {"open windows, some fire": some, "open windows, all fire": Cost(row_ns, measured.firing_ns / n, n)}


def panes_per_window(aggregates: dict[str, Any], n: int, firings: int) -> dict[str, Cost]:
    query = STREAM.query("q").filter(col("x") >= 0).window(fs.sliding(f"{n}s", every="1s")).agg(**aggregates)
    measured_panes = max(n, firings)
    with Measured(query) as measured:
        for at in range(0, n, AT_ONCE):
            measured.rows(at, min(AT_ONCE, n - at))
            measured.fire(min(at + AT_ONCE, n))
        already = measured.forget()
        for at in range(n, n + measured_panes, AT_ONCE):
            measured.rows(at, AT_ONCE)
            measured.fire(at + AT_ONCE)
        fired = measured.fired() - already
        if fired < measured_panes:
            raise SystemExit(f"{fired} windows fired, not {measured_panes}: nothing was measured")
        return {"panes": Cost(measured.row_ns / (fired * KEYS), measured.firing_ns / fired, fired)}


def slope(points: dict[int, float]) -> float:
    """Of log(cost) over log(n), by least squares."""
    x = np.log([float(n) for n in points])
    y = np.log(list(points.values()))
    return float(np.polyfit(x, y, 1)[0])


def measure_all(quick: bool, rounds: int, end: float) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    firings = LEAST_FIRINGS // 4 if quick else LEAST_FIRINGS
    for sizes, measure in ((OPEN, open_windows), (PANES, panes_per_window)):
        for name, aggregates in AGGREGATES.items():
            for n in sizes[:-2] if quick else sizes:
                costs = [measure(aggregates, n, firings)]
                while len(costs) < rounds and n <= MANY and time.monotonic() < end:
                    costs.append(measure(aggregates, n, firings))
                for over, first in costs[0].items():
                    found = {"over": over, "aggregate": name, "n": n, "firings": first.firings, "rounds": len(costs)}
                    found["row_ns"] = round(harness.median([cost[over].row_ns for cost in costs]), 1)
                    found["firing_ns"] = round(harness.median([cost[over].firing_ns for cost in costs]), 1)
                    cases.append(found)
    return sorted(cases, key=lambda case: (case["over"], case["aggregate"], case["n"]))


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=3)
    end = harness.start("windows")
    cases = measure_all(options.quick, options.pairs, end - harness.BUDGET_S / 2)
    columns = ["over", "aggregate", "n", "firings", "rounds", "row_ns", "firing_ns"]
    harness.print_table(columns, [[case[column] for column in columns] for case in cases])
    slopes = {}
    for over, name in dict.fromkeys((case["over"], case["aggregate"]) for case in cases):
        points = {
            c["n"]: c["firing_ns"]
            for c in cases
            if (c["over"], c["aggregate"]) == (over, name) and (over == "panes" or c["n"] >= AT_ONCE)
        }
        slopes[f"{over}, {name}"] = round(slope(points), 3)
        print(f"slope over {over}, {name}: {slopes[f'{over}, {name}']:.3f}")
    worst = max(slopes.values())
    print(f"slope {worst:.3f}, target at most {TARGET}: {'met' if worst <= TARGET else 'MISSED'}")
    harness.finish(
        {"benchmark": "windows", "slope": worst, "target": TARGET, "slopes": slopes, "keys": KEYS, "cases": cases},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
