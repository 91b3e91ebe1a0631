"""What does a skewed key cost, with the balancer and without?

  python -m benchmarks.zipf [--json] [--quick]

Two workers, costly rows, four producers that send as fast as they are let. Keys are Zipf with z from 0.2 to 2.0 over
10,000 campaigns. For each z three engines are set up with their producers: balanced (groups moved, and split when they
are hotter than a core), not balanced, and one with uniform keys. After a warm-up, in which the balancer has its time,
they run in turn for a fraction of a second each while the others are stopped (SIGSTOP), so that whatever else happens
to the machine happens to all of them; the ratio is the median over neighbouring turns.
Beside the throughput there are the CPU nanoseconds that workers take for a row, the part of a core that the balancer's
thread takes, and the evenness: rows of the mean worker / rows of the busiest, which is what the placement alone would
let through.
"worst_loss" is the largest shortfall of balanced against uniform (0.05: five percent) among the z where an even load is
possible: no group has more than a worker's share, or it can be split because the hottest connection has no more than
that. Where it is not possible, the table says so and by how much (`bound`: the most that any placement or split could
reach, as a part of uniform).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import median
from benchmarks.programs import Served
from benchmarks.zipf_frames import PRODUCERS, bound, shares_of_groups, zipf_frames

WORKERS = 2
EXPONENTS = (0.2, 0.6, 1.0, 1.4, 1.6, 1.8, 2.0)
TURNS = 24  # of the balanced engine and of the uniform one, for each z
UNBALANCED_TURNS = 6
WARM_S = 4.0  # a split is made when a group has been hot for a while, and then the others find their places
SETTLE_S, TURN_S = 0.06, 0.25
UNIFORM = 0.0
TARGET = 0.05

HEADINGS = [
    "z", "balanced / uniform", "quartiles", "not balanced", "hottest group", "possible", "needs split", "bound",
    "moves", "split groups", "row ns", "uniform row ns", "balancer cores", "evenness", "uniform's",
]  # fmt: skip


class Turns(Served):
    """An engine with its senders, which runs only in its turns."""

    def __init__(self, z: float, *, balanced: bool) -> None:
        super().__init__("benchmarks.zipf_process", json.dumps([z, balanced]), leads_group=True)
        self.turns: list[dict[str, Any]] = []
        self.stop()

    def stop(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def warm_up(self, seconds: float) -> None:
        self.go_on()
        time.sleep(seconds)
        self.stop()

    def turn(self, seconds: float) -> None:
        self.go_on()
        time.sleep(SETTLE_S)
        before = self.ask("count")
        time.sleep(seconds)
        after = self.ask("count")
        self.stop()
        rows = np.subtract(after["rows"], before["rows"])
        took = after["at_s"] - before["at_s"]
        self.turns.append(
            {
                "rows_per_s": float(rows.sum()) / took,
                "rows": rows,
                "row_ns": 1e9 * (after["worker_s"] - before["worker_s"]) / max(1, int(rows.sum())),
                "balancer_cores": (after["balancer_s"] - before["balancer_s"]) / took,
                "moves": after["moves"],
                "splits": after["splits"],
            }
        )

    def finish(self) -> dict[str, Any]:
        """Every row that was sent must have been applied once: the process ends with an error otherwise."""
        self.go_on()
        return self.ask("end")

    def of(self, value: str) -> float:
        return median([turn[value] for turn in self.turns])

    def evenness(self) -> float:
        rows = sum(turn["rows"] for turn in self.turns)
        return float(rows.mean() / max(1, rows.max()))

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        super().__exit__(*error)


def measure(z: float, turns: int, warm_s: float) -> dict[str, Any]:
    shares = shares_of_groups(z)
    with (
        Turns(z, balanced=True) as ours,
        Turns(UNIFORM, balanced=False) as uniform,
        Turns(z, balanced=False) as unbalanced,
    ):
        for one in (ours, uniform, unbalanced):
            one.warm_up(warm_s)
        for number in range(turns):
            order = [ours, uniform] if number % 2 == 0 else [uniform, ours]
            for one in order + [unbalanced] * (number < UNBALANCED_TURNS):
                one.turn(TURN_S)
        history = ours.finish()["history"]
        for one in (uniform, unbalanced):
            one.finish()
    ratios = [a["rows_per_s"] / b["rows_per_s"] for a, b in zip(ours.turns, uniform.turns, strict=True)]
    by_placement, by_split = bound(shares, WORKERS), bound(shares / PRODUCERS, WORKERS)  # each has a connection
    return {
        "z": z,
        "balanced_ratio": round(median(ratios), 4),
        "balanced_spread": harness.spread(ratios),
        "unbalanced_ratio": round(unbalanced.of("rows_per_s") / uniform.of("rows_per_s"), 4),
        "uniform_records_per_s": round(uniform.of("rows_per_s")),
        "hottest_group": round(float(shares.max()), 4),
        "bound": round(by_split, 4),
        "possible": by_split >= 1.0,
        "needs_split": by_placement < 1.0,
        "moves": ours.turns[-1]["moves"],
        "moves_in_turns": ours.turns[-1]["moves"] - ours.turns[0]["moves"],
        "split_groups": ours.turns[-1]["splits"],
        "row_ns": round(ours.of("row_ns"), 1),
        "uniform_row_ns": round(uniform.of("row_ns"), 1),
        "balancer_cores": round(ours.of("balancer_cores"), 4),
        "evenness": round(ours.evenness(), 4),
        "uniform_evenness": round(uniform.evenness(), 4),
        "turns": len(ratios),
        "history": [entry["text"] for entry in history if entry["what"] != "tick" or entry["moved"]],
    }


def worst_loss(cases: list[dict[str, Any]]) -> float | None:
    losses = [1.0 - case["balanced_ratio"] for case in cases if case["possible"]]
    return max(losses) if losses else None


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=TURNS)
    end = harness.start("zipf")
    exponents = (0.2, 1.0, 2.0) if options.quick else EXPONENTS
    for z in (*exponents, UNIFORM):
        for producer in range(PRODUCERS):
            zipf_frames(z, producer)
    cases, longest = [], 0.0
    for z in exponents:
        begin = time.monotonic()
        if begin + longest > end:
            print(f"no time is left for z={z} and above")
            break
        cases.append(measure(z, options.pairs, WARM_S))
        longest = max(longest, time.monotonic() - begin)
    harness.print_table(
        HEADINGS,
        [
            [c["z"], c["balanced_ratio"], c["balanced_spread"], c["unbalanced_ratio"], c["hottest_group"],
             "yes" if c["possible"] else "no", "yes" if c["needs_split"] else "no", c["bound"], c["moves"],
             ", ".join(map(str, c["split_groups"])) or "-", c["row_ns"], c["uniform_row_ns"],
             f"{c['balancer_cores']:.4f}", c["evenness"], c["uniform_evenness"]]
            for c in cases
        ],
    )  # fmt: skip
    for case in cases:
        if not case["possible"]:
            print(
                f"z={case['z']}: one group has {case['hottest_group']:.0%} of the rows; {WORKERS} workers cannot reach "
                f"more than {case['bound']:.2f} of uniform: a connection alone is too hot"
            )
    loss = worst_loss(cases)
    if loss is not None:
        print(f"worst_loss {loss:.3f}, target {TARGET}: {'met' if loss <= TARGET else 'MISSED'}")
    result = {"benchmark": "zipf", "worst_loss": loss, "target": TARGET, "producers": PRODUCERS, "cases": cases}
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
