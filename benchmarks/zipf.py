"""What does a skewed key cost, with the balancer and without?

  python -m benchmarks.zipf [--json] [--quick]

Two workers, costly rows, four producers that send as fast as they are let. Keys are Zipf with z from 0.2 to 2.0 over
10,000 campaigns. An engine with its producers that is balanced (groups moved, and split when they are hotter than a
core) and one with uniform keys run in turn, a fraction of a second each, while the other is stopped (SIGSTOP): whatever
else happens to the machine happens to both. Before that, the balancer has had its time. The ratio is the median over
neighbouring turns of several rounds, each with new processes (the same work costs 10% more in one than in another).
The engine that is not balanced runs in the first round only.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import median
from benchmarks.programs import Served
from benchmarks.zipf_frames import PRODUCERS, bound, shares_of_groups, zipf_frames

WORKERS = 2
EXPONENTS = (0.2, 0.6, 1.0, 1.4, 1.8, 2.0)
ROUNDS = 3
TURNS = 10  # of the balanced engine and of the uniform one, in each round and for each z
UNBALANCED_TURNS = 4
WARM_S = 4.0  # a split is made when a group has been hot for a while, and then the others find their places
UNIFORM_WARM_S = 1.5
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
                "began": before,
                "ended": after,
                "balancer_cores": (after["balancer_s"] - before["balancer_s"]) / took,
            }
        )

    def finish(self) -> dict[str, Any]:
        """Every row that was sent must have been applied once: the process ends with an error otherwise."""
        self.go_on()
        return self.ask("end")

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        super().__exit__(*error)


@dataclass(frozen=True)
class Round:
    """All turns of an engine in one round together."""

    row_ns: float  # CPU of the workers
    evenness: float  # rows of the mean worker / rows of the busiest

    @classmethod
    def of(cls, turns: list[dict[str, Any]]) -> Round:
        began, ended = turns[0]["began"], turns[-1]["ended"]
        rows = np.subtract(ended["rows"], began["rows"])
        return cls(
            row_ns=1e9 * (ended["worker_s"] - began["worker_s"]) / max(1, int(rows.sum())),
            evenness=float(rows.mean() / max(1, rows.max())),
        )


@dataclass
class Case:
    """What was found for one z."""

    z: float
    ours: list[dict[str, Any]] = field(default_factory=list)  # turns
    uniform: list[dict[str, Any]] = field(default_factory=list)  # each beside one of ours
    unbalanced_ratio: float | None = None
    rounds: list[tuple[Round, Round]] = field(default_factory=list)  # ours and uniform
    history: list[str] = field(default_factory=list)  # of the balancer, in the last round

    def measure(self, uniform: Turns, turns: int) -> None:
        with Turns(self.z, balanced=True) as ours:
            ours.warm_up(WARM_S)
            first = len(uniform.turns)
            for number in range(turns):
                for one in (ours, uniform) if number % 2 == 0 else (uniform, ours):
                    one.turn(TURN_S)
            told = ours.finish()["history"]
        beside = uniform.turns[first:]
        self.ours += ours.turns
        self.uniform += beside
        self.rounds.append((Round.of(ours.turns), Round.of(beside)))
        self.history = [entry["text"] for entry in told if entry["what"] != "tick" or entry["moved"]]

    def measure_unbalanced(self, uniform: Turns) -> None:
        with Turns(self.z, balanced=False) as unbalanced:
            unbalanced.warm_up(UNIFORM_WARM_S)
            ratios = []
            for _ in range(UNBALANCED_TURNS):
                unbalanced.turn(TURN_S)
                uniform.turn(TURN_S)
                ratios.append(unbalanced.turns[-1]["rows_per_s"] / uniform.turns[-1]["rows_per_s"])
            unbalanced.finish()
        self.unbalanced_ratio = round(median(ratios), 4)

    def summary(self) -> dict[str, Any]:
        shares = shares_of_groups(self.z)
        ratios = [a["rows_per_s"] / b["rows_per_s"] for a, b in zip(self.ours, self.uniform, strict=True)]
        by_placement, by_split = bound(shares, WORKERS), bound(shares / PRODUCERS, WORKERS)  # each has a connection
        return {
            "z": self.z,
            "balanced_ratio": round(median(ratios), 4),
            "balanced_spread": harness.spread(ratios),
            "unbalanced_ratio": self.unbalanced_ratio,
            "uniform_records_per_s": round(median_of(self.uniform, "rows_per_s")),
            "hottest_group": round(float(shares.max()), 4),
            "bound": round(by_split, 4),
            "possible": by_split >= 1.0,
            "needs_split": by_placement < 1.0,
            "moves": self.ours[-1]["ended"]["moves"],
            "split_groups": self.ours[-1]["ended"]["splits"],
            "row_ns": round(median([ours.row_ns for ours, _ in self.rounds]), 1),
            "uniform_row_ns": round(median([uniform.row_ns for _, uniform in self.rounds]), 1),
            "balancer_cores": round(median_of(self.ours, "balancer_cores"), 4),
            "evenness": round(median([ours.evenness for ours, _ in self.rounds]), 4),
            "uniform_evenness": round(median([uniform.evenness for _, uniform in self.rounds]), 4),
            "turns": len(ratios),
            "rounds": len(self.rounds),
            "history": self.history,
        }


def median_of(turns: list[dict[str, Any]], value: str) -> float:
    return median([turn[value] for turn in turns])


def measure_all(exponents: Sequence[float], rounds: int, turns: int, end: float) -> list[Case]:
    """All z in every round. One begins only if it would end in time, by what the longest took."""
    cases = [Case(z) for z in exponents]
    longest = 0.0
    for number in range(rounds):
        with Turns(UNIFORM, balanced=False) as uniform:
            uniform.warm_up(UNIFORM_WARM_S)
            for case in cases:
                begin = time.monotonic()
                if case.ours and begin + longest > end:
                    break
                case.measure(uniform, turns)
                longest = max(longest, time.monotonic() - begin)
                if number == 0:
                    case.measure_unbalanced(uniform)
            uniform.finish()
    return cases


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
    rounds = 1 if options.quick else ROUNDS
    cases = [case.summary() for case in measure_all(exponents, rounds, options.pairs, end)]
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
    print(f"{min(c['rounds'] for c in cases)} to {max(c['rounds'] for c in cases)} rounds")
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
