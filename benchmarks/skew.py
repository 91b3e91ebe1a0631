"""What does a load that turns cost, and for how long? FlexStream's moves against two other ways, on the same engine.

  python -m benchmarks.skew [--json] [--quick]

Two workers, YSB over costly rows at a fixed rate; in mid-run 80% of the rows turn to one worker's groups. Every 5 ms
markers enter with rows; "peak" is the largest mean latency of those that entered within the same 5 ms, from the turn
on. "migration" is the time from detection (the trigger has fired) to the last absorption of state.

  a  FlexStream: the balancer sees loads and backlog, partials are adopted by pointer
  b  back-pressure (the sender could not send for a tenth of 50 ms), then rows go over at once, keys are fetched when
     they are asked for, each under its own lock, and the rest is handed over bin by bin (after Meces)
  c  back-pressure, then stop, snapshot to a file, restore, go on

They run in turn within a round; ratios (a/b) are medians over rounds. Every run's counts must be those of the rows
sent, or the benchmark ends. The rate is half of what two workers manage with even load, as in the paper; 80% of that
is 0.8 of one worker, which fills no buffer, so back-pressure never comes. Where b does not migrate there is nothing to
compare, and the same is run at three quarters (1.2 of one worker), and where need be at 0.9; "judged_share" says
which the ratios are from.

The same again at 10^3 to 10^6 keys: ratios, and the slope of log(migration time) over log(moved keys).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import harness, plot
from benchmarks.harness import PROJECT, median
from benchmarks.migration import STEP_KEYS
from benchmarks.skew_run import NAMES, WAYS, Run

KEYS = 10_000
KEY_COUNTS = (1_000, 10_000, 100_000, 1_000_000)
SHARES = (0.5, 0.75, 0.9)
AFTER_S, BEFORE_S, MOST_BEFORE_S = 1.8, 1.2, 4.0  # a run after and before the turn
ROWS_PER_KEY = 1.5  # before the turn: so often a key has come
BIN_MS = 5.0
VALUES = (
    "peak_ms", "migration_ms", "detected_after_ms", "groups", "moved_keys", "batches", "blocked_ms", "sender_cores",
    "row_ns", "keys_demanded", "keys_handed_over", "lock_conflicts", "snapshot_keys",
)  # fmt: skip
TARGETS = {"peak_ratio": 0.38, "migration_ratio": 0.33}
SLOPE_TARGET = 1.1
PLOT = PROJECT / "benchmarks" / "plots" / "skew.png"


# -- pure


def binned(timeline: Sequence[Sequence[float]], bin_ms: float = BIN_MS) -> tuple[np.ndarray, np.ndarray]:
    """Middle of each bin that has markers, and their mean latency; the turn is between two bins."""
    points = np.asarray(timeline, np.float64).reshape(-1, 2)
    number = np.floor(points[:, 0] / bin_ms).astype(np.int64)
    bins, which = np.unique(number, return_inverse=True)
    means = np.bincount(which, points[:, 1]) / np.maximum(np.bincount(which), 1)
    return (bins + 0.5) * bin_ms, means


def peak_ms(timeline: Sequence[Sequence[float]]) -> float:
    """The largest mean of a bin after the turn."""
    at, means = binned(timeline)
    after = means[at > 0]
    return float(after.max()) if len(after) else float("nan")


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of log y over log x, by least squares. None: fewer than two different x."""
    if len(set(x)) < 2:
        return None
    return float(np.polyfit(np.log10(x), np.log10(y), 1)[0])


def ratios(rounds: Sequence[dict[str, dict[str, Any]]], value: str) -> list[float]:
    """a/b of each round in which both have the value."""
    return [r["flexstream"][value] / r["fetching"][value] for r in rounds
            if all(r[way].get(value) for way in ("flexstream", "fetching"))]  # fmt: skip


def medians(rounds: Sequence[dict[str, dict[str, Any]]], way: str, value: str) -> float | None:
    found = [r[way][value] for r in rounds if way in r and r[way].get(value) is not None]
    return round(median(found), 3) if found else None


# -- runs


def highest_rate(keys: int, runs: int, duration_s: float) -> tuple[float, float]:
    """Rows per second with even load, and CPU nanoseconds per row."""
    found = [Run("none", keys, 0, duration_s).run() for _ in range(runs)]
    return median([f["rows_per_s"] for f in found]), median([f["row_ns"] for f in found])


def lengths(keys: int, rate: float, quick: bool) -> tuple[float, float]:
    """Seconds of a run and until the turn: the keys must be there before they can move."""
    if quick:
        return 1.6, 0.6
    turn_s = min(max(BEFORE_S, ROWS_PER_KEY * keys / rate), MOST_BEFORE_S)
    return turn_s + AFTER_S, turn_s


def one_round(
    number: int, ways: Sequence[str], keys: int, rate: float, duration_s: float, turn_s: float
) -> dict[str, dict[str, Any]]:
    order = ways if number % 2 == 0 else tuple(reversed(ways))
    found = {}
    for way in order:
        found[way] = Run(way, keys, rate, duration_s, turn_s).run()
        found[way]["peak_ms"] = peak_ms(found[way]["timeline"])
    return found


def measure(
    ways: Sequence[str],
    keys: int,
    share: float,
    highest: float,
    rounds: int,
    quick: bool,
    until: float,
) -> dict[str, Any]:
    duration_s, turn_s = lengths(keys, share * highest, quick)
    found: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        if found and time.monotonic() > until:
            break
        found.append(one_round(number, ways, keys, share * highest, duration_s, turn_s))
    case: dict[str, Any] = {"keys": keys, "share": share, "rounds": len(found), "ways": {}}
    for way in ways:
        case["ways"][way] = {value: medians(found, way, value) for value in VALUES}
        case["ways"][way]["migrated"] = sum(r[way]["migrated"] for r in found)
    for name, value in (("peak_ratio", "peak_ms"), ("migration_ratio", "migration_ms")):
        each = ratios(found, value) if compared(case) else []
        case[name] = round(median(each), 4) if each else None
        case[f"{name}_spread"] = harness.spread(each) if each else None
    splits = [r["flexstream"]["split"] for r in found if r["flexstream"].get("split")]
    case["split_ms"] = {name: round(median([s[name] for s in splits]), 4) for name in STEP_KEYS} if splits else None
    case["last"] = found[-1]
    return case


def compared(case: dict[str, Any]) -> bool:
    """Did both migrate in most rounds, so that there is something to compare?"""
    return all(2 * case["ways"][way]["migrated"] > case["rounds"] for way in ("flexstream", "fetching"))


def show(case: dict[str, Any]) -> None:
    print(f"\n{case['keys']} keys, {case['share']:.0%} of the highest rate, {case['rounds']} rounds")
    harness.print_table(
        ["way", "peak ms", "migration ms", "after turn ms", "migrated", "groups", "keys", "sender blocked ms"],
        [
            [NAMES[way], f["peak_ms"], f["migration_ms"], f["detected_after_ms"], f["migrated"], f["groups"],
             f["moved_keys"] if f["moved_keys"] is not None else f["snapshot_keys"], f["blocked_ms"]]
            for way, f in case["ways"].items()
        ],
    )  # fmt: skip
    for name, target in TARGETS.items():
        value = case[name]
        words = (
            "not both migrated in most rounds" if value is None else f"{value:.3f} (quartiles {case[f'{name}_spread']})"
        )
        print(f"{name} a/b: {words}, target {target}")


def draw(case: dict[str, Any]) -> None:
    lines = [plot.Line(NAMES[way], *(values.tolist() for values in binned(found["timeline"])))
             for way, found in case["last"].items()]  # fmt: skip
    plot.draw(PLOT, "latency over time, the load turns at 0", "ms after the turn", "latency ms", lines)
    print(f"plot: {PLOT.relative_to(PROJECT)}")


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=5)
    end = harness.start("skew")
    highest, row_ns = highest_rate(KEYS, 1 if options.quick else 3, 0.8 if options.quick else 1.5)
    print(f"highest rate {highest / 1e6:.2f} M rows/s, {row_ns:.0f} ns of CPU a row")
    rounds = 1 if options.quick else options.pairs
    cases: list[dict[str, Any]] = []
    for share in SHARES:
        cases.append(measure(WAYS, KEYS, share, highest, 1, options.quick, end))  # does b see back-pressure at all?
        if rounds > 1 and (share == SHARES[-1] or compared(cases[-1])):
            cases[-1] = measure(WAYS, KEYS, share, highest, rounds, options.quick, end - 150)
        show(cases[-1])
        if compared(cases[-1]):
            break
    judged = cases[-1]
    draw(judged)
    if judged["split_ms"]:
        total = sum(judged["split_ms"].values()) or 1.0
        harness.print_table(
            ["cost of a move", "ms", "%"], [[name, ms, 100 * ms / total] for name, ms in judged["split_ms"].items()]
        )
    series = []
    for keys in KEY_COUNTS[:1] if options.quick else KEY_COUNTS:
        if keys == KEYS:
            series.append(judged)
            continue
        at_keys, _ = highest_rate(keys, 1, 0.8 if options.quick else 1.5)
        series.append(measure(WAYS[:2], keys, judged["share"], at_keys, min(2, rounds), options.quick, end - 30))
        show(series[-1])
    result = finished(cases, judged, sorted(series, key=lambda case: case["keys"]), highest, row_ns)
    harness.finish(result, as_json=options.json)


def finished(
    cases: list[dict[str, Any]], judged: dict[str, Any], series: list[dict[str, Any]], highest: float, row_ns: float
) -> dict[str, Any]:
    ours = [(case["ways"]["flexstream"]["moved_keys"], case["ways"]["flexstream"]["migration_ms"]) for case in series]
    ours = [(keys, ms) for keys, ms in ours if keys and ms]
    found = slope([keys for keys, _ in ours], [ms for _, ms in ours])
    print()
    harness.print_table(
        ["keys", "moved", "FlexStream ms", "fetching ms", "peak_ratio", "migration_ratio"],
        [
            [c["keys"], c["ways"]["flexstream"]["moved_keys"], c["ways"]["flexstream"]["migration_ms"],
             c["ways"]["fetching"]["migration_ms"], c["peak_ratio"], c["migration_ratio"]]
            for c in series
        ],
    )  # fmt: skip
    if found is not None:
        print(
            f"slope of migration time over moved keys {found:.2f}, target {SLOPE_TARGET}: {word(found, SLOPE_TARGET)}"
        )
    for name, target in TARGETS.items():
        if judged[name] is not None:
            print(f"{name} {judged[name]:.3f}, target {target}: {word(judged[name], target)}")
    for case in (*cases, *series):
        case.pop("last", None)
    return {
        "benchmark": "skew",
        "peak_ratio": judged["peak_ratio"],
        "migration_ratio": judged["migration_ratio"],
        "judged_share": judged["share"],
        "slope": found,
        "split_ms": judged["split_ms"],
        "highest_records_per_s": round(highest),
        "row_ns": round(row_ns, 1),
        "sender_cores": judged["ways"]["flexstream"]["sender_cores"],
        "plot": str(PLOT.relative_to(PROJECT)),
        "cases": cases,
        "by_keys": series,
    }


def word(value: float, most: float) -> str:
    return "met" if value <= most else "MISSED"


if __name__ == "__main__":
    main()
