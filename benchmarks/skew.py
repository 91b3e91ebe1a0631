"""What does a load that turns cost, and for how long? FlexStream's moves against two other ways, on the same engine.

  python -m benchmarks.skew [--json] [--quick]

Two workers, YSB over costly rows at a fixed rate; in mid-run 80% of the rows turn to one worker's groups. Every 5 ms
markers enter with rows; "peak" is the largest mean latency of those that entered within the same 5 ms, from the turn
on. "migration" is the time from detection (the trigger has fired) to the last absorption of state.

  a  FlexStream: the balancer sees loads and backlog, partials are adopted by pointer
  b  back-pressure (the sender could not send for a tenth of 50 ms), then rows go over at once, keys are fetched when
     they are asked for, each under its own lock, and the rest is handed over bin by bin (after Meces)
  c  back-pressure, then stop, snapshot to a file, restore, go on

They run in turn within a round (c in two rounds of a case); ratios (a/b) are medians over rounds, with quartiles. Every
run's counts must be those of the rows sent, or the benchmark ends. The rate is half of what two workers manage with
even load, as in the paper. There 80% of the rows went to one of many workers; of two, they are 0.8 of what one can do,
which fills no buffer, so back-pressure hardly ever comes and b does not migrate. So there are two cases:

  half     at half of the highest rate: "peak_ratio" is from here. Where b did not migrate, its peak is that of a worker
           that is busy for 0.8 of the time with nobody helping, and the table says so.
  pressed  at the lowest of the shares that are tried at which b does migrate: "migration_ratio" is from here, and the
           peak of this case is "pressed_peak_ratio". "judged_shares" has both shares.

The same again at 10^3 to 10^6 keys, pressed: ratios, and the slope of log(migration time) over log(moved keys).
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
HALF = 0.5
PRESSED = (0.65, 0.7, 0.75, 0.85)  # up to 0.625 one worker can do 80% of it
AFTER_S, BEFORE_S, MOST_BEFORE_S = 1.8, 1.0, 4.0  # a run after and before the turn
RESTARTS = 2  # rounds of a case in which c runs too
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


def spread_of(rounds: Sequence[dict[str, dict[str, Any]]], way: str, value: str) -> str | None:
    found = [r[way][value] for r in rounds if way in r and r[way].get(value) is not None]
    return harness.spread(found) if found else None


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
        now = ways if number < RESTARTS else ways[:2]
        found.append(one_round(number, now, keys, share * highest, duration_s, turn_s))
    case: dict[str, Any] = {"keys": keys, "share": share, "rounds": len(found), "ways": {}}
    for way in ways:
        case["ways"][way] = {value: medians(found, way, value) for value in VALUES}
        case["ways"][way]["runs"] = sum(way in r for r in found)
        case["ways"][way]["migrated"] = sum(r[way]["migrated"] for r in found if way in r)
        for value in ("peak_ms", "migration_ms"):
            case["ways"][way][f"{value}_spread"] = spread_of(found, way, value)
    for name, value in (("peak_ratio", "peak_ms"), ("migration_ratio", "migration_ms")):
        each = ratios(found, value) if value == "peak_ms" or compared(case) else []
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
        ["way", "peak ms", "quartiles", "migration ms", "quartiles", "after turn ms", "migrated", "groups", "batches",
         "keys", "sender blocked ms"],
        [
            [NAMES[way], f["peak_ms"], f["peak_ms_spread"], f["migration_ms"], f["migration_ms_spread"],
             f["detected_after_ms"], f"{f['migrated']} of {f['runs']}", f["groups"], f["batches"],
             f["moved_keys"] if f["moved_keys"] is not None else f["snapshot_keys"], f["blocked_ms"]]
            for way, f in case["ways"].items()
        ],
    )  # fmt: skip
    theirs = case["ways"]["fetching"]
    if theirs["migrated"] < theirs["runs"]:
        not_once = f"{theirs['runs'] - theirs['migrated']} of {theirs['runs']}"
        print(f"fetch on demand did not migrate in {not_once} runs: nothing pressed back, so nobody balanced")
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


def lowest_pressed(highest: float, quick: bool, until: float) -> float:
    """The lowest share at which b migrates, by one run each; the last if none does."""
    for share in PRESSED[:-1]:
        duration_s, turn_s = lengths(KEYS, share * highest, quick)
        if Run("fetching", KEYS, share * highest, duration_s, turn_s).run()["migrated"]:
            return share
        if time.monotonic() > until:
            break
    return PRESSED[-1]


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=5)
    end = harness.start("skew")
    quick = options.quick
    highest, row_ns = highest_rate(KEYS, 1 if quick else 3, 0.8 if quick else 1.5)
    print(f"highest rate {highest / 1e6:.2f} M rows/s, {row_ns:.0f} ns of CPU a row")
    rounds = 1 if quick else options.pairs
    half = measure(WAYS, KEYS, HALF, highest, rounds, quick, end - 180)
    show(half)
    share = PRESSED[-1] if quick else lowest_pressed(highest, quick, end - 170)
    pressed = measure(WAYS, KEYS, share, highest, rounds, quick, end - 95)
    show(pressed)
    draw(pressed)
    if pressed["split_ms"]:
        total = sum(pressed["split_ms"].values()) or 1.0
        harness.print_table(
            ["cost of a move", "ms", "%"], [[name, ms, 100 * ms / total] for name, ms in pressed["split_ms"].items()]
        )
    series = [pressed]
    for keys in () if quick else [keys for keys in KEY_COUNTS if keys != KEYS]:
        if time.monotonic() > end - 20:
            print(f"no time left for {keys} keys")
            continue
        at_keys, _ = highest_rate(keys, 1, 1.5)
        series.append(measure(WAYS[:2], keys, share, at_keys, min(2, rounds), quick, end - 20))
        show(series[-1])
    result = finished(half, pressed, sorted(series, key=lambda case: case["keys"]), highest, row_ns)
    harness.finish(result, as_json=options.json)


def finished(
    half: dict[str, Any], pressed: dict[str, Any], series: list[dict[str, Any]], highest: float, row_ns: float
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
    judged = {"peak_ratio": half["peak_ratio"], "migration_ratio": pressed["migration_ratio"]}
    for (name, value), case in zip(judged.items(), (half, pressed), strict=True):
        at = f"at {case['share']:.0%} of the highest rate"
        if value is None:
            print(f"{name}: nothing to compare {at}")
        else:
            print(f"{name} {value:.3f} {at}, target {TARGETS[name]}: {word(value, TARGETS[name])}")
    if pressed["peak_ratio"] is not None:
        where = "where both migrate" if compared(pressed) else "though not both migrated in most rounds"
        print(f"pressed_peak_ratio {pressed['peak_ratio']:.3f} at {pressed['share']:.0%} of the highest rate, {where}")
    for case in (half, *series):
        case.pop("last", None)
    return {
        "benchmark": "skew",
        **judged,
        "pressed_peak_ratio": pressed["peak_ratio"],
        "judged_shares": {"peak_ratio": half["share"], "migration_ratio": pressed["share"]},
        "slope": found,
        "split_ms": pressed["split_ms"],
        "highest_records_per_s": round(highest),
        "row_ns": round(row_ns, 1),
        "sender_cores": half["ways"]["flexstream"]["sender_cores"],
        "plot": str(PLOT.relative_to(PROJECT)),
        "cases": [half, pressed],
        "by_keys": series,
    }


def word(value: float, most: float) -> str:
    return "met" if value <= most else "MISSED"


if __name__ == "__main__":
    main()
