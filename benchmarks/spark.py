"""What does it cost to bring a DataFrame's rows to FlexStream, and when is it worth it?

YSB rows (78 bytes) in Parquet files, Spark as `local[2]`, the daemon beside it on the same cores. All cases run in turn
in one warm session, in the other order every second round; a ratio is the median over the rounds.

  sink_vs_transfer   the staged sink / the same Arrow writer that only counts rows: what exactly-once delivery costs
  sink_vs_rows       the staged sink / foreachPartition with a socket, row by row: what people write themselves
  ship_vs_stream     the fast lane, with the query in FlexStream / Spark's Structured Streaming with the query itself;
                     both read the three columns that the query uses (all eight: ship_all_vs_stream, not judged)

CPU seconds are those of all processes: JVM, Python workers, daemon.

    python -m benchmarks.spark [--json] [--quick]     (needs Java 17 and pip install 'flexstream[spark]')
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

TARGETS = {"sink_vs_transfer": 0.85, "sink_vs_rows": 5.0, "ship_vs_stream": 3.0}
RATIOS = (*TARGETS, "ship_all_vs_stream")
NAMES = {
    "noop": "Spark's noop sink",
    "transfer": "Arrow writer that counts",
    "sink": "sink, staged",
    "unstaged": "sink, at_least_once",
    "rows": "foreachPartition + socket",
    "ship": "ship (fast lane) + query, its 3 columns",
    "ship_all": "ship + query, all 8 columns",
    "stream": "Structured Streaming's query",
}
WARM_UPS = 3  # the JVM compiles what runs often
WARM_UP_SHARE = 0.35  # of the time, at most
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    rows: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.rows / self.seconds


def cpu_seconds(root: int) -> float:
    """User and system time of a process and all that came from it, the ended ones included."""
    times: dict[int, tuple[int, float]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            times[int(name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, (parent, _) in times.items() if parent in family}
    return sum(times[pid][1] for pid in family if pid in times)


def measure(case: Callable[[], int]) -> Run:
    cpu, began = cpu_seconds(os.getpid()), time.perf_counter()
    rows = case()
    return Run(rows, time.perf_counter() - began, cpu_seconds(os.getpid()) - cpu)


def check_packages() -> None:
    """Says what is missing, and ends."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise SystemExit("benchmarks.spark needs Java 17 and there is none: apt-get install default-jre-headless")
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise SystemExit(f"benchmarks.spark needs pyspark: {sys.executable} -m pip install '.[spark]'") from None


def warm_up(cases: dict[str, Callable[[], int]], until: float) -> None:
    """Each case at least once; more often while it takes little of the time."""
    enough = time.monotonic() + (until - time.monotonic()) * WARM_UP_SHARE
    for number in range(WARM_UPS):
        for case in cases.values():
            if number == 0 or time.monotonic() < enough:
                case()


def run_rounds(cases: dict[str, Callable[[], int]], rounds: int, until: float) -> list[dict[str, Run]]:
    """Whole rounds only; at least one, and none that would pass `until`."""
    found: list[dict[str, Run]] = []
    longest = 0.0
    for number in range(rounds):
        if found and time.monotonic() + longest > until:
            break
        began = time.monotonic()
        names = list(cases) if number % 2 == 0 else list(reversed(cases))
        measured = {name: measure(cases[name]) for name in names}
        found.append({name: measured[name] for name in cases})
        longest = max(longest, time.monotonic() - began)
    return found


def ratios(rounds: list[dict[str, Run]]) -> dict[str, list[float]]:
    """ratio -> its value in each round."""
    return {
        name: [found[name.split("_vs_")[0]].rate / found[name.split("_vs_")[1]].rate for found in rounds]
        for name in RATIOS
    }


def summary(rounds: list[dict[str, Run]]) -> list[dict[str, Any]]:
    return [
        {
            "case": case,
            "rows": rounds[0][case].rows,
            "rows_per_s": round(harness.median([found[case].rate for found in rounds])),
            "cpu_s_per_million": round(
                harness.median([found[case].cpu_s / found[case].rows * 1e6 for found in rounds]), 3
            ),
        }
        for case in rounds[0]
    ]


def run_all(options: Any, until: float, folder: Path) -> list[dict[str, Run]]:
    from benchmarks.spark_cases import Cases, Daemon, Files, start_session

    files = Files.make(2 if options.quick else 8)
    (folder / "data").mkdir()
    daemon = Daemon(folder / "data")
    try:
        print("starting Spark ...", flush=True)
        session = start_session(folder)
        cases = Cases(session, daemon, files, folder)
        try:
            print("warming up ...", flush=True)
            warm_up(cases.all(), until)
            return run_rounds(cases.all(), options.pairs, until)
        finally:
            cases.close()
            session.stop()
    finally:
        daemon.close()


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=9)
    check_packages()
    end = harness.start("spark")
    with tempfile.TemporaryDirectory(prefix="flexstream-bench-") as name:
        rounds = run_all(options, end, Path(name))
    cases = summary(rounds)
    harness.print_table(
        ["case", "rows", "M rows/s", "CPU s per million"],
        [[NAMES[c["case"]], c["rows"], c["rows_per_s"] / 1e6, c["cpu_s_per_million"]] for c in cases],
    )
    result: dict[str, Any] = {"benchmark": "spark", "rounds": len(rounds)}
    found = ratios(rounds)
    result |= {ratio: round(harness.median(values), 4) for ratio, values in found.items()}
    for ratio, wanted in TARGETS.items():
        harness.finish(result, as_json=False, target=(ratio, wanted))
    print(f"ship_all_vs_stream {result['ship_all_vs_stream']:.3f}, not judged")
    result |= {"targets": TARGETS, "spread": {k: harness.spread(v) for k, v in found.items()}, "cases": cases}
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
