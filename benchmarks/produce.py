"""What does `Producer.send` cost over sending bytes that are framed already?

`Producer.send` of numpy arrays (hash, partition, frame, send) against the C sender of pre-framed bytes, both
on one core, both into the same discarding sink on the other. "ratio" is the median over alternating pairs of
taken rows per second, in the worst case.

    python -m benchmarks.produce [--json] [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks import harness, workload
from benchmarks.harness import PROJECT, Cores
from benchmarks.programs import PATIENCE_S, Discard, run_sender
from flexstream.testing import ysb

TARGET = 0.8
DURATION_S = 0.8
BATCH_ROWS = 65_536
GROUPS = (16, 128)


def produce(port: int, cpu: int, duration_s: float) -> dict[str, Any]:
    """The Producer's side, in its own process: send the same arrays again and again, then close."""
    import flexstream as fs

    os.sched_setaffinity(0, {cpu})
    batches = []
    for index in range(8):
        start = workload.START_MS + index * BATCH_ROWS * 1000 // workload.EVENT_RATE
        batches.append(
            ysb.generate(BATCH_ROWS, keys=workload.KEYS, seed=index, rate=workload.EVENT_RATE, start=start)
        )
    rows = 0
    with fs.Producer(f"tcp://127.0.0.1:{port}", stream=ysb.YSB_STREAM.name, watermark="explicit") as producer:
        producer.send(batches[0])  # opens the connections
        producer.flush(30)
        begin, cpu_begin = time.perf_counter(), time.process_time_ns()
        while time.perf_counter() - begin < duration_s:
            for batch in batches:
                producer.send(batch)
                rows += len(batch)
        producer.flush(30)
        seconds, cpu_ns = time.perf_counter() - begin, time.process_time_ns() - cpu_begin
    return {"rows": rows, "seconds": seconds, "cpu_ns": cpu_ns}


def run_producer(groups: int, cores: Cores, duration_s: float) -> dict[str, Any]:
    with Discard(groups, cpu=cores.receiver) as sink:
        command = [sys.executable, "-m", "benchmarks.produce", "--child", str(sink.port), str(cores.sender)]
        done = subprocess.run(
            [*command, str(duration_s)], cwd=PROJECT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
        if done.returncode != 0:
            raise SystemExit("the producer's process failed; see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_reference(groups: int, cores: Cores, duration_s: float) -> dict[str, Any]:
    with Discard(groups, cpu=cores.receiver) as sink:
        return run_sender(sink.port, workload.frames(groups), cpu=cores.sender, duration_s=duration_s)


def measure(groups: int, cores: Cores, pairs: int, duration_s: float, until: float) -> dict[str, Any]:
    found = harness.alternate(
        pairs,
        lambda: run_producer(groups, cores, duration_s),
        lambda: run_reference(groups, cores, duration_s),
        until=until,
    )

    def rate(run: dict[str, Any]) -> float:
        return float(run["rows"] / run["seconds"])

    ratios = [rate(ours) / rate(theirs) for ours, theirs in found]
    return {
        "name": f"{groups} groups",
        "groups": groups,
        "pairs": len(found),
        "ratio": round(harness.median(ratios), 4),
        "spread": harness.spread(ratios),
        "records_per_s": round(harness.median([rate(ours) for ours, _ in found])),
        "reference_records_per_s": round(harness.median([rate(theirs) for _, theirs in found])),
        "cpu_ns_per_row": round(harness.median([ours["cpu_ns"] / ours["rows"] for ours, _ in found]), 2),
        "reference_cpu_ns_per_row": round(
            harness.median([run["cpu_ns"] / run["rows"] for _, run in found]), 2
        ),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(produce(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
        return
    options = harness.arguments(__doc__ or "", pairs=20)
    end = harness.start("produce")
    cores = Cores.pick()
    cases = []
    for index, groups in enumerate(GROUPS):
        now = time.monotonic()
        until = now + (end - now) / (len(GROUPS) - index)
        cases.append(measure(groups, cores, options.pairs, 0.3 if options.quick else DURATION_S, until))
    harness.print_table(
        ["case", "ratio", "quartiles", "M rows/s", "C sender", "CPU ns/row", "C sender"],
        [
            [
                case["name"],
                case["ratio"],
                case["spread"],
                case["records_per_s"] / 1e6,
                case["reference_records_per_s"] / 1e6,
                case["cpu_ns_per_row"],
                case["reference_cpu_ns_per_row"],
            ]
            for case in cases
        ],
    )
    result = {
        "benchmark": "produce",
        "ratio": min(case["ratio"] for case in cases),
        "target": TARGET,
        "cases": sorted(cases, key=lambda case: case["ratio"]),
    }
    harness.finish(result, as_json=options.json, target=("ratio", TARGET))


if __name__ == "__main__":
    main()
