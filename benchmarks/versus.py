"""Is this tree as fast as it was at COMMIT?

    python -m benchmarks.versus [COMMIT] [--json] [--quick] [--full] [--pairs N]

COMMIT is built in a venv of its own (kept under .cache); then old and new run in turn: YSB over rows in memory with
tumbling and sliding windows, compiled and generic; 128 groups over loopback TCP from the C sender; batches of moves
between two workers, of which the median one counts. Each side is a process that stays, an engine of its tree under this
tree's measuring code (versus_side.py). A round is old, new, new again, and a second process of the new tree: two pairs,
of which the second shows how far two runs of the same code lie apart ("new / new"); every other round goes backwards. A
round in which a side did not do its work (a total is wrong, the code was not compiled) is void.

"ratio" is the worst case's median of new / old in rows (or moves) per second, target 0.98. A case below that is
measured again in fresh processes with twice the pairs, and that counts. "CPU" is the same in CPU time of the workers'
threads per row, old / new: the steadier number where others use the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, workload
from benchmarks.harness import CACHE, PROJECT, Cores
from benchmarks.programs import Served, run_sender
from benchmarks.versus_tree import Tree, built, this_tree
from flexstream.testing import ysb

COMMIT = "e2e5293"
TARGET = 0.98
PAIRS = 11
FULL = 5  # times as many
LEAST_PAIRS = 9  # whatever the budget
GROUPS = 128
SLICES, SLICE_S = 5, 4  # of event time; the second is also the disorder that the streams allow
ROWS = 4_000_000
MOVED_ROWS = 500_000
SEND_S = 0.5
VERSUS, AGAIN = "versus", "again"  # the two pairs of a round
ROUND = ((VERSUS, "old"), (VERSUS, "new"), (AGAIN, "new"), (AGAIN, "same"))


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # memory | moves | ingest
    window: str = "tumbling"
    compile: str = "require"
    rows: int = ROWS
    repeats: int = 1  # of the rows, within a run
    unit: str = "M rows/s"


CASES = (
    Case("in memory, tumbling, compiled", "memory", repeats=6),
    Case("in memory, tumbling, generic", "memory", compile="off", repeats=4),
    Case("in memory, sliding, compiled", "memory", "sliding", repeats=6),
    Case("in memory, sliding, generic", "memory", "sliding", "off", repeats=4),
    Case("TCP, 128 groups", "ingest"),
    Case("batches of 128 moves", "moves", rows=MOVED_ROWS, repeats=4, unit="K moves/s"),
)


@dataclass(frozen=True)
class Run:
    """One run of one side. `wrong`: what it did not do."""

    per_s: float
    cpu_ns: float  # of a row, or of a move
    wrong: str | None = None


Pair = tuple[Run, Run]  # (the other, new)
Round = dict[str, Pair]


# -- the rules


def order(index: int) -> tuple[tuple[str, str], ...]:
    """Who runs in a round. Backwards every other time: each runs as often after itself as after the other."""
    return ROUND if index % 2 == 0 else ROUND[::-1]


def run_round(index: int, sides: dict[str, Callable[[], Run]]) -> tuple[Round | None, list[str]]:
    """(the round, nothing), or (None, what went wrong) when it is void."""
    found: dict[tuple[str, str], Run] = {}
    for pair, side in order(index):
        found[pair, side] = sides[side]()
    wrong = [f"{side}: {run.wrong}" for (_, side), run in found.items() if run.wrong is not None]
    if wrong:
        return None, wrong
    pairs = {VERSUS: (found[VERSUS, "old"], found[VERSUS, "new"]), AGAIN: (found[AGAIN, "same"], found[AGAIN, "new"])}
    return pairs, []


def run_rounds(
    pairs: int,
    sides: dict[str, Callable[[], Run]],
    *,
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Round], list[str]]:
    """(so many rounds that are not void, why the others are). Void ones are repeated, but at most `pairs` of them;
    `until` ends it early, but not before LEAST_PAIRS.
    """
    rounds: list[Round] = []
    void: list[str] = []
    index = 0
    while len(rounds) < pairs and index < 2 * pairs:
        if len(rounds) >= LEAST_PAIRS and clock() > until:
            break
        tell(f"round {len(rounds) + 1} of {pairs}")
        found, wrong = run_round(index, sides)
        index += 1
        if found is None:
            tell(f"void: {'; '.join(wrong)}")
            void.append("; ".join(wrong))
        else:
            rounds.append(found)
    return rounds, void


def ratios(rounds: Iterable[Round], pair: str = VERSUS) -> list[float]:
    return [new.per_s / other.per_s for other, new in (one[pair] for one in rounds)]


def cpu_ratios(rounds: Iterable[Round], pair: str = VERSUS) -> list[float]:
    """Above 1: the new one needs less."""
    return [other.cpu_ns / new.cpu_ns for other, new in (one[pair] for one in rounds)]


def again(rounds: Sequence[Round]) -> bool:
    """Whether a case must be measured once more."""
    return bool(rounds) and harness.median(ratios(rounds)) < TARGET


def worst(cases: Iterable[dict[str, Any]], key: str = "ratio") -> float | None:
    """The smallest median. None when a case has none: nothing can be said then."""
    found = [case[key] for case in cases]
    return None if not found or None in found else min(found)


def summary(case: Case, rounds: list[Round], void: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case.name, "unit": case.unit, "pairs": len(rounds), "void": void}
    for key, each in {
        "ratio": ratios(rounds),
        "cpu_ratio": cpu_ratios(rounds),
        "same_ratio": ratios(rounds, AGAIN),
        "same_cpu_ratio": cpu_ratios(rounds, AGAIN),
    }.items():
        result[key] = round(harness.median(each), 4) if each else None
        result[f"{key}_spread"] = harness.spread(each) if each else None
    for at, side in enumerate(("old", "new")):
        runs = [one[VERSUS][at] for one in rounds]
        result[side] = {
            "per_s": round(harness.median([run.per_s for run in runs])) if runs else None,
            "cpu_ns": round(harness.median([run.cpu_ns for run in runs]), 2) if runs else None,
        }
    return result


# -- the runs


def prepare(rows: int) -> Path:
    """A folder with rows of slices of event time, each sorted by group, and where a slice's groups begin. Kept."""
    folder = CACHE / f"versus-{rows}-{GROUPS}-{ysb.YSB_STREAM.schema.hash}"
    if not (folder / "bounds.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        rate = rows // (SLICE_S * SLICES)
        generated = ysb.generate(rows, keys=workload.KEYS, seed=workload.SEED, rate=rate, start=workload.START_MS)
        bounds, at = np.zeros((SLICES, GROUPS + 1), np.int64), 0
        for index, part in enumerate(np.array_split(generated, SLICES)):
            group = ysb.YSB_STREAM.group_of(part, GROUPS)
            sorting = np.argsort(group, kind="stable")
            bounds[index] = at + np.searchsorted(group[sorting], np.arange(GROUPS + 1))
            part[:] = part[sorting]
            at += len(part)
        np.save(folder / "rows.npy", generated)
        np.save(folder / "bounds.npy", bounds)  # last: now all is there
    return folder


class Side(Served):
    """A process of `versus_side.py` with the package of a tree."""

    def __init__(self, tree: Tree, case: Case, cores: Cores) -> None:
        self._case, self._cores = case, cores
        data = "" if case.kind == "ingest" else str(prepare(case.rows))
        cpus = [cores.receiver, cores.sender] if case.kind == "moves" else [cores.receiver]
        work = {"kind": case.kind, "window": case.window, "compile": case.compile, "groups": GROUPS, "cpus": cpus}
        work |= {"feeder_cpu": cores.sender, "data": data, "repeats": case.repeats}
        script = PROJECT / "benchmarks" / "versus_side.py"
        self._process = subprocess.Popen(
            [tree.python, "-P", str(script), json.dumps(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=tree.folder, env={**os.environ, "PYTHONPATH": str(tree.folder)},
        )  # fmt: skip
        self.pid = self._process.pid
        self.ready = self._answer()
        if Path(self.ready["tree"]) != tree.folder.resolve():
            raise SystemExit(f"the process meant for {tree.folder} imports {self.ready['tree']}")

    def run(self) -> Run:
        found = self._run_sender() if self._case.kind == "ingest" else self.ask("run")
        rows = max(1, found["rows"])
        return Run(rows / found["seconds"], found["cpu_seconds"] * 1e9 / rows, found["wrong"])

    def _run_sender(self) -> dict[str, Any]:
        stream = self.ask("open")["stream"]
        port, frames = self.ready["port"], workload.frames(GROUPS)
        sent = run_sender(port, frames, cpu=self._cores.sender, duration_s=SEND_S, stream=stream)
        found = self.ask("close")
        if found["wrong"] is None and found["rows"] != sent["rows"]:
            found["wrong"] = f"{found['rows']} rows arrived, not {sent['rows']}"
        return {**found, "rows": sent["rows"], "seconds": sent["seconds"]}


def sit(case: Case, old: Tree, pairs: int, until: float) -> tuple[list[Round], list[str]]:
    """Rounds of fresh processes: how memory happens to lie is the same for all runs of a process."""
    cores, new = Cores.pick(), this_tree()
    with Side(old, case, cores) as first, Side(new, case, cores) as second, Side(new, case, cores) as third:
        sides = {"old": first.run, "new": second.run, "same": third.run}
        for run in sides.values():
            run()
        return run_rounds(pairs, sides, until=until, tell=lambda text: progress(f"{case.name}: {text}"))


def measure(case: Case, old: Tree, pairs: int, sittings: int, until: float) -> dict[str, Any]:
    """In so many sittings; when the median is below the target, again in twice as many, and those count."""
    rounds, void = several(case, old, pairs, sittings, until)
    first = harness.median(ratios(rounds)) if rounds else None
    if again(rounds):
        progress(f"{case.name}: {first:.3f} is below {TARGET}: again, with twice the pairs")
        rounds, more = several(case, old, pairs, 2 * sittings, float("inf"))
        void += more
        return {**summary(case, rounds, void), "first_ratio": round(first or 0.0, 4)}
    return summary(case, rounds, void)


def several(case: Case, old: Tree, pairs: int, sittings: int, until: float) -> tuple[list[Round], list[str]]:
    rounds: list[Round] = []
    void: list[str] = []
    for _ in range(sittings):
        found, wrong = sit(case, old, pairs, until)
        rounds += found
        void += wrong
    return rounds, void


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the report


def show(cases: Sequence[dict[str, Any]]) -> None:
    columns = ["case", "new / old", "quartiles", "new / new", "quartiles", "CPU old / new", "quartiles"]
    columns += ["CPU new / new", "new", "old", "unit", "new, CPU ns", "old, CPU ns", "pairs", "void"]
    keys = ["name", "ratio", "ratio_spread", "same_ratio", "same_ratio_spread", "cpu_ratio", "cpu_ratio_spread"]
    rows = []
    for case in cases:
        scale = 1e3 if case["unit"].startswith("K") else 1e6
        rates = [case[side]["per_s"] and case[side]["per_s"] / scale for side in ("new", "old")]
        row = [exact(case[key]) for key in [*keys, "same_cpu_ratio"]]
        row += [*rates, case["unit"], *(case[side]["cpu_ns"] for side in ("new", "old"))]
        rows.append([*row, case["pairs"], len(case["void"])])
    harness.print_table(columns, rows)
    for case in cases:
        if "first_ratio" in case:
            print(f"{case['name']}: {case['first_ratio']:.3f} at first, measured again with twice the pairs")
        if case["same_ratio"] is not None and abs(case["same_ratio"] - 1) > 1 - TARGET:
            print(f"{case['name']}: too noisy, the same tree twice gave {case['same_ratio']:.3f}")


def exact(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) else value


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=PAIRS, commit=COMMIT, full=f"{FULL} times as many pairs")
    old = built(options.commit)
    for case in CASES:
        if case.kind != "ingest":
            prepare(case.rows)
    end = harness.start(f"versus {old.name}")
    cases = []
    for index, case in enumerate(CASES):
        now = time.monotonic()
        until = float("inf") if options.full else now + (end - now) / (len(CASES) - index)
        cases.append(measure(case, old, options.pairs, FULL if options.full else 1, until))
    show(cases)
    result = {
        "benchmark": "versus",
        "against": old.name,
        "ratio": worst(cases),
        "cpu_ratio": worst(cases, "cpu_ratio"),
        "same_ratio": worst(cases, "same_ratio"),
        "target": TARGET,
        "definition": [asdict(case) for case in CASES],
        "cases": cases,
    }
    harness.finish(result, as_json=options.json, target=("ratio", TARGET))
    if result["ratio"] is None:
        raise SystemExit("a case has only void rounds: there is no ratio")


if __name__ == "__main__":
    main()
