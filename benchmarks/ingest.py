"""How much of the receive-and-discard rate is left when the YSB query runs over the rows?

78-byte rows over loopback TCP, one C sender on one core, one worker on the other. The reference is a C
program that receives and throws away, in the same run, in turn with the generic and the compiled variant;
"generic_ratio" and "ratio" are the medians of the rounds' ratios of taken rows per second for the two, in the
worst of the judged cases. Two workers and a sender are three busy threads on two cores, so that case is judged
in receiver CPU per row only; the case with CRC is reported beside the others.

    python -m benchmarks.ingest [--json] [--quick] [--soak]
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import harness, workload
from benchmarks.harness import Cores
from benchmarks.programs import Discard, EngineProcess, run_sender, sender_result, start_sender

TARGET = 0.65
VARIANTS = {"generic_ratio": "off", "ratio": "require"}  # what `compile` makes of the query
DURATION_S = 0.7
SOAK_S = 60
_names = (f"ads{number}" for number in itertools.count())


@dataclass(frozen=True)
class Case:
    groups: int
    crc: bool = False
    workers: int = 1

    @property
    def name(self) -> str:
        extras = (", crc" if self.crc else "") + (", 2 workers" if self.workers == 2 else "")
        return f"{self.groups} groups{extras}"

    @property
    def judged(self) -> bool:
        return not self.crc and self.workers == 1


@dataclass(frozen=True)
class Run:
    """One run of one side, in the terms in which the two sides are compared."""

    rows_per_s: float
    cpu_ns_per_row: float
    calls_per_mb: float


CASES = (Case(16), Case(64), Case(128), Case(128, crc=True), Case(128, workers=2))


def run_discard(case: Case, cores: Cores, duration_s: float) -> Run:
    frames = workload.frames(case.groups)
    with Discard(case.groups, cpu=cores.receiver) as sink:
        sent = run_sender(sink.port, frames, cpu=cores.sender, duration_s=duration_s, crc=case.crc)
        taken = sink.result()
    return Run(
        sent["rows"] / sent["seconds"],
        taken["cpu_ns"] / sent["rows"],
        taken["receive_calls"] / (taken["bytes"] / 1e6),
    )


def run_engine(engine: EngineProcess, case: Case, cores: Cores, duration_s: float) -> Run:
    """One session on a stream of its own.

    A run in which a row was lost or late is no result: it ends the benchmark.
    """
    name = next(_names)
    engine.ask("open", stream=name)
    before = engine.ask("status")["workers"]
    frames = workload.frames(case.groups)
    sender_cpu = cores.sender if case.workers == 1 else -1
    sent = run_sender(engine.port, frames, cpu=sender_cpu, duration_s=duration_s, stream=name, crc=case.crc)
    after = engine.ask("status")["workers"]
    ledger = engine.ask("close", stream=name)["query"]["ledger"]
    if ledger["accepted"] != sent["rows"] or ledger["late"] or ledger["rejected"]:
        raise SystemExit(f"{case.name}: sent {sent['rows']} rows, but the engine's ledger is {ledger}")

    def grown(field: str) -> float:
        return float(sum(worker[field] for worker in after) - sum(worker[field] for worker in before))

    return Run(
        sent["rows"] / sent["seconds"],
        grown("cpu_seconds") * 1e9 / sent["rows"],
        grown("receive_calls") / (grown("bytes") / 1e6),
    )


def measure(case: Case, cores: Cores, rounds: int, duration_s: float, until: float) -> dict[str, Any]:
    cpus = [cores.receiver] if case.workers == 1 else [cores.receiver, cores.sender]
    with (
        EngineProcess(case.groups, cpus=cpus, compile="off") as generic,
        EngineProcess(case.groups, cpus=cpus, compile="require") as compiled,
    ):
        engines = (generic, compiled)
        for engine in engines:  # warm-up: page faults, the C programs' first build
            run_engine(engine, case, cores, duration_s / 2)
        found = harness.alternate(
            rounds,
            lambda: [run_engine(engine, case, cores, duration_s) for engine in engines],
            lambda: run_discard(case, cores, duration_s),
            until=until,
        )
        memory = generic.rss_bytes()
    discards = [discard for _, discard in found]
    result: dict[str, Any] = {
        "name": case.name,
        "groups": case.groups,
        "keys": workload.KEYS,
        "crc": case.crc,
        "workers": case.workers,
        "judged": case.judged,
        "pairs": len(found),
        "rss_bytes": memory,
        "reference": _medians(discards),
    }
    for index, name in enumerate(VARIANTS):
        runs = [ours[index] for ours, _ in found]
        ratios = [ours.rows_per_s / discard.rows_per_s for ours, discard in zip(runs, discards, strict=True)]
        if case.workers == 1:
            result[name] = round(harness.median(ratios), 4)
        result["generic" if index == 0 else "compiled"] = {**_medians(runs), "spread": harness.spread(ratios)}
    return result


def _medians(runs: list[Run]) -> dict[str, float]:
    return {
        "records_per_s": round(harness.median([run.rows_per_s for run in runs])),
        "cpu_ns_per_row": round(harness.median([run.cpu_ns_per_row for run in runs]), 2),
        "receive_calls_per_mb": round(harness.median([run.calls_per_mb for run in runs]), 1),
    }


def soak(cores: Cores, seconds: int) -> dict[str, Any]:
    """Resident memory of the engine under full load: the last 10 s against seconds 10 to 20.

    The result log is on disk, as a daemon has it; in memory it would grow by what it is asked to keep.
    """
    frames, name = workload.frames(128), next(_names)
    with tempfile.TemporaryDirectory() as folder, EngineProcess(128, cpus=[cores.receiver], data_dir=folder) as engine:
        engine.ask("open", stream=name)
        sender = start_sender(engine.port, frames, cpu=cores.sender, duration_s=seconds, stream=name)
        samples = []
        for _ in range(seconds):
            time.sleep(1)
            samples.append(engine.rss_bytes())
        sent = sender_result(sender, 0)
    early, late = samples[seconds // 6 : seconds // 3], samples[-seconds // 6 :]
    growth = (sum(late) / len(late)) / (sum(early) / len(early))
    return {
        "seconds": seconds,
        "records_per_s": round(sent["rows"] / sent["seconds"]),
        "rss_early_mb": round(sum(early) / len(early) / 1e6, 1),
        "rss_late_mb": round(sum(late) / len(late) / 1e6, 1),
        "growth": round(growth, 4),
        "target": 1.05,
    }


def show(cases: list[dict[str, Any]]) -> None:
    columns = ["case", "who", "ratio", "quartiles", "M rows/s", "CPU ns/row", "calls/MB", "RSS MB"]
    rows = []
    for case in cases:
        for who, ratio in (("generic", "generic_ratio"), ("compiled", "ratio"), ("reference", None)):
            found = case[who]
            rows.append(
                [
                    case["name"] if who == "generic" else "",
                    "discard in C" if who == "reference" else who,
                    case.get(ratio) if ratio else None,
                    found.get("spread") if "ratio" in case else None,
                    found["records_per_s"] / 1e6,
                    found["cpu_ns_per_row"],
                    found["receive_calls_per_mb"],
                    round(case["rss_bytes"] / 1e6) if who == "generic" else None,
                ]
            )
    harness.print_table(columns, rows)


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=20, soak="only the memory over 60 s of full load")
    end = harness.start("ingest")
    cores = Cores.pick()
    if options.soak:
        result = soak(cores, 12 if options.quick else SOAK_S)
        harness.print_table(list(result), [list(result.values())])
        harness.finish({"benchmark": "ingest", "soak": result}, as_json=options.json)
        return
    duration_s = 0.3 if options.quick else DURATION_S
    cases = []
    for index, case in enumerate(CASES):
        now = time.monotonic()
        until = now + (end - now) / (len(CASES) - index)
        cases.append(
            measure(case, cores, options.pairs if case.judged else min(8, options.pairs), duration_s, until)
        )
    show(cases)
    result = {
        "benchmark": "ingest",
        **{name: min(case[name] for case in cases if case["judged"]) for name in VARIANTS},
        "target": TARGET,
        "cases": sorted(cases, key=lambda case: case.get("generic_ratio", 9.0)),
    }
    harness.finish(result, as_json=options.json, target=("generic_ratio", TARGET))


if __name__ == "__main__":
    main()
