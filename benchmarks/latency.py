"""How long does a record take from the producer to the results, at half and at nearly full load?

The C sender puts a marker, stamped with the clock, between its frames every few milliseconds; the engine
notes when each has passed everything before it and is seen on the results' side. First the highest rate is
measured, then the latency at 50% and at 90% of it, each with an engine of its own.

    python -m benchmarks.latency [--json] [--quick]
"""

from __future__ import annotations

from typing import Any

from benchmarks import harness, workload
from benchmarks.harness import Cores
from benchmarks.programs import EngineProcess, run_sender

GROUPS = 128
SHARES = (0.5, 0.9)
MARKER_MS = 2


def highest_rate(cores: Cores, runs: int, duration_s: float) -> float:
    rates = []
    with EngineProcess(GROUPS, cpus=[cores.receiver]) as engine:
        for number in range(runs):
            name = f"max{number}"
            engine.ask("open", stream=name)
            sent = run_sender(
                engine.port, workload.frames(GROUPS), cpu=cores.sender, duration_s=duration_s, stream=name
            )
            engine.ask("close", stream=name)
            rates.append(sent["rows"] / sent["seconds"])
    return harness.median(rates)


def measure(share: float, highest: float, cores: Cores, duration_s: float) -> dict[str, Any]:
    with EngineProcess(GROUPS, cpus=[cores.receiver]) as engine:
        engine.ask("open", stream="ads")
        sent = run_sender(
            engine.port,
            workload.frames(GROUPS),
            cpu=cores.sender,
            duration_s=duration_s,
            stream="ads",
            rate=share * highest,
            marker_ms=MARKER_MS,
            watermark_every=1,
        )
        latency = engine.ask("status")["latency"]
    return {
        "name": f"{share:.0%} of the highest rate",
        "share": share,
        "wanted_records_per_s": round(share * highest),
        "records_per_s": round(sent["rows"] / sent["send_seconds"]),
        "markers": latency["count"],
        "markers_sent": sent["markers"],
        "p50_ms": latency["p50_ms"],
        "p99_ms": latency["p99_ms"],
        "max_ms": latency["max_ms"],
    }


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=5)
    harness.start("latency")
    cores = Cores.pick()
    highest = highest_rate(cores, options.pairs, 0.3 if options.quick else 1.0)
    cases = [measure(share, highest, cores, 2.0 if options.quick else 20.0) for share in SHARES]
    print(f"highest rate: {highest / 1e6:.1f} M rows/s")
    harness.print_table(
        ["load", "M rows/s", "markers", "p50 ms", "p99 ms", "max ms"],
        [
            [c["name"], c["records_per_s"] / 1e6, c["markers"], c["p50_ms"], c["p99_ms"], c["max_ms"]]
            for c in cases
        ],
    )
    worst = cases[-1]
    result = {
        "benchmark": "latency",
        "highest_records_per_s": round(highest),
        "p50_ms": worst["p50_ms"],
        "p99_ms": worst["p99_ms"],
        "max_ms": worst["max_ms"],
        "cases": cases,
    }
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
