"""What does a skewed key cost, with the balancer and without?

  python -m benchmarks.zipf [--json] [--quick]

Two workers, costly rows, four producers that send as fast as they are let. Keys are Zipf with z from 0.2 to 2.0 over
10,000 campaigns; the throughput is measured from the end of a warm-up on, in which the balancer has had its time:
balanced (groups moved, and split when they are hotter than a core) and with uniform keys, in pairs whose order
changes; every round goes through all z, and ratios are medians over rounds. Not balanced runs in the first round only.
Beside the throughput, which other programs on the machine disturb, there are the CPU nanoseconds that workers take for
a row, the part of a core that the balancer's thread takes, and the evenness: rows of the mean worker / rows of the
busiest, which is what the placement alone would let through.
"worst_loss" is the largest shortfall of balanced against uniform (0.05: five percent) among the z where an even load is
possible: no group has more than a worker's share, or it can be split because the hottest connection has no more than
that. Where it is not possible, the table says so and by how much (`bound`: the most that any placement or split could
reach, as a part of uniform).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks import harness, migration, skewed_load
from benchmarks.engine_process import ysb_stream
from benchmarks.harness import CACHE, PROJECT, Cores, median
from benchmarks.programs import sender_result, start_sender
from benchmarks.skewed_load import FRAME_ROWS, START_MS, framed
from benchmarks.workload import Frames
from flexstream.testing import ysb

KEYS, GROUPS, PRODUCERS, WORKERS = 10_000, 128, 4, 2
ROWS = 300_000  # in a producer's file
SEND_BUFFER = 16 << 10  # what is in buffers when the time is up must be worked off
EXPONENTS = (0.2, 0.6, 1.0, 1.4, 1.6, 1.8, 2.0)  # fewer of them rather than fewer rounds
ROUNDS = 5
WARM_S, UNIFORM_WARM_S, MEASURE_S = 2.5, 0.8, 1.5  # a split is made when a group has been hot for a while
UNIFORM = 0.0
TARGET = 0.05
FINISH_S = 60.0
TIME_DELTA_MS = 100


# -- pure

HEADINGS = [
    "z", "balanced / uniform", "quartiles", "not balanced", "hottest group", "possible", "needs split", "bound",
    "moves", "split groups", "row ns", "uniform row ns", "balancer cores",
    "evenness",
]  # fmt: skip


def weights(keys: int, z: float) -> np.ndarray:
    """The share of each rank."""
    ranks = np.arange(1, keys + 1, dtype=np.float64) ** -z
    return ranks / ranks.sum()


def group_shares(groups_of_keys: np.ndarray, shares: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(groups_of_keys, shares, groups)


def bound(shares: np.ndarray, workers: int) -> float:
    """Throughput / that of uniform keys which the hottest part allows: 1.0 when it fits into a worker's share."""
    return min(1.0, 1.0 / (workers * float(shares.max())))


def worst_loss(cases: list[dict[str, Any]]) -> float | None:
    losses = [1.0 - case["balanced_ratio"] for case in cases if case["possible"]]
    return max(losses) if losses else None


# -- the load


def key_groups() -> np.ndarray:
    rows = np.zeros(KEYS, ysb.YSB_STREAM.schema.dtype)
    rows["campaign_id"] = np.arange(KEYS)
    return ysb.YSB_STREAM.group_of(rows, GROUPS)


def zipf_frames(z: float, producer: int) -> Frames:
    """Frames in the order in which a producer with such keys would fill them; made once and kept."""
    path = CACHE / f"zipf-{GROUPS}-{KEYS}-{ROWS}-{z}-{producer}-{ysb.YSB_STREAM.schema.hash}.bin"
    if not path.exists():
        random = np.random.default_rng(1000 * producer + int(10 * z))
        rank_of_key = np.random.default_rng(1).permutation(KEYS)  # the same keys are hot for all producers
        rows = ysb.generate(ROWS, keys=KEYS, seed=producer, start=START_MS)
        rows["campaign_id"] = random.choice(KEYS, ROWS, p=weights(KEYS, z)[rank_of_key])
        rows["event_time"] = START_MS + np.arange(ROWS) * TIME_DELTA_MS // ROWS
        group = ysb.YSB_STREAM.group_of(rows, GROUPS)
        parts: list[tuple[int, bytes]] = []
        for g in range(GROUPS):
            mine = np.flatnonzero(group == g)
            data = framed(rows[mine], g)
            size = len(data) // max(1, len(mine) // FRAME_ROWS) if data else 0
            ends = mine[FRAME_ROWS - 1 :: FRAME_ROWS]  # a frame goes out when its last row is there
            parts += [(int(end), data[i * size : (i + 1) * size]) for i, end in enumerate(ends)]
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(data for _, data in sorted(parts)))
        temporary.replace(path)
    sent = path.stat().st_size // (32 + FRAME_ROWS * ysb.YSB_STREAM.schema.row_bytes) * FRAME_ROWS
    return Frames(path, GROUPS, sent, TIME_DELTA_MS)


# -- runs


def execute(z: float, balanced: bool, warm_s: float, measure_s: float) -> dict[str, Any]:
    cores = Cores.pick()
    stream = ysb_stream("ads", max_disorder="1h")
    with (
        ExitStack() as stack,
        fs.Engine([cores.receiver, cores.sender], groups=GROUPS, listen="127.0.0.1:0", compile="off",
                  expected_producers=PRODUCERS, balance="off") as engine,
    ):  # fmt: skip
        for query in skewed_load.costly_queries(stream, "costly"):
            engine.submit(query)
        duration_s = warm_s + measure_s + 0.5
        watch = migration.Balanced(engine) if balanced else None
        senders = [
            start_sender((engine.data_address or ("", 0))[1], zipf_frames(z, producer), cpu=-1, duration_s=duration_s,
                         stream="ads", watermark_every=0, sndbuf=SEND_BUFFER)
            for producer in range(PRODUCERS)
        ]  # fmt: skip
        for sender in senders:
            stack.callback(end_process, sender)
        if watch is not None:
            watch.start()
        wait_for_rows(engine)
        time.sleep(warm_s)
        begin, rows, own_s, of_workers = time.monotonic(), received(engine), balancer_seconds(engine), by_worker(engine)
        time.sleep(measure_s)
        seconds, rows = time.monotonic() - begin, received(engine) - rows
        own_s, of_workers = balancer_seconds(engine) - own_s, by_worker(engine) - of_workers
        splits = split_groups(engine)
        sent = sum(sender_result(sender, duration_s)["rows"] for sender in senders)
        if watch is not None:
            watch.stop()
        engine.finish(timeout=FINISH_S)
        ledger = engine.status()["streams"]["ads"]["ledger"]
        if ledger["received"] != sent or ledger["applied"] != sent:
            raise SystemExit(f"z={z}: {sent} rows were sent, the ledger says {ledger}")
        return {
            "z": z, "balanced": balanced, "rows_per_s": rows / seconds, "moves": engine.mover.moved, "splits": splits,
            "row_ns": 1e9 * worker_seconds(engine) / max(1, sent), "balancer_cores": own_s / seconds,
            "evenness": float(of_workers.mean() / max(1, of_workers.max())),
        }  # fmt: skip


def by_worker(engine: fs.Engine) -> np.ndarray:
    """Rows that each worker has worked off."""
    return np.array([worker["rows"] for worker in engine.status()["workers"]], np.float64)


def worker_seconds(engine: fs.Engine) -> float:
    """CPU time of the workers since they began."""
    return float(sum(worker["cpu_seconds"] for worker in engine.status()["workers"]))


def balancer_seconds(engine: fs.Engine) -> float:
    """CPU time of the balancer's thread."""
    ident = engine.rebalancer.ident
    return time.clock_gettime(time.pthread_getcpuclockid(ident)) if ident is not None else 0.0


def end_process(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def wait_for_rows(engine: fs.Engine) -> None:
    """Until all producers are there and rows come."""
    deadline = time.monotonic() + FINISH_S
    while len(engine.status()["streams"]["ads"]["sessions"]) < PRODUCERS or not received(engine):
        if time.monotonic() > deadline:
            raise SystemExit("the producers did not come")
        time.sleep(0.01)


def received(engine: fs.Engine) -> int:
    return int(engine.status()["streams"]["ads"]["ledger"]["received"])


def split_groups(engine: fs.Engine) -> list[int] | None:
    """Groups that several workers serve now; None: this engine has no splits."""
    if not hasattr(engine.mover, "split"):
        return None
    found = engine.status()["rebalance"].get("split", [])
    return [int(one["group"] if isinstance(one, dict) else one) for one in found]


def run(z: float, balanced: bool, warm_s: float, measure_s: float) -> dict[str, Any]:
    """In a process of its own."""
    order = json.dumps([z, balanced, warm_s, measure_s])
    command = [sys.executable, "-m", "benchmarks.zipf", "--execute", order]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True, timeout=240)
    if done.returncode != 0:
        raise SystemExit(f"the run with z={z} failed; see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Case:
    """What was found for one z."""

    def __init__(self, z: float) -> None:
        self.z = z
        rank_of_key = np.random.default_rng(1).permutation(KEYS)
        self.shares = group_shares(key_groups(), weights(KEYS, z)[rank_of_key], GROUPS)
        self.pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.unbalanced: float | None = None

    def measure(self, number: int, warm_s: float, uniform_warm_s: float, measure_s: float) -> None:
        orders = [(self.z, True, warm_s), (UNIFORM, False, uniform_warm_s)]
        found = {z: run(z, balanced, warm, measure_s) for z, balanced, warm in orders[:: 1 if number % 2 == 0 else -1]}
        self.pairs.append((found[self.z], found[UNIFORM]))
        if number == 0:
            self.unbalanced = run(self.z, False, uniform_warm_s, measure_s)["rows_per_s"] / found[UNIFORM]["rows_per_s"]

    def of(self, value: str, which: int = 0) -> float:
        return median([pair[which][value] for pair in self.pairs])

    def summary(self) -> dict[str, Any]:
        ratios = [ours["rows_per_s"] / uniform["rows_per_s"] for ours, uniform in self.pairs]
        last = self.pairs[-1][0]
        can_split = last["splits"] is not None
        by_placement = bound(self.shares, WORKERS)
        by_split = bound(self.shares / PRODUCERS, WORKERS) if can_split else by_placement  # each has a connection
        return {
            "z": self.z,
            "balanced_ratio": round(median(ratios), 4),
            "balanced_spread": harness.spread(ratios),
            "unbalanced_ratio": round(self.unbalanced, 4) if self.unbalanced is not None else None,
            "uniform_records_per_s": round(self.of("rows_per_s", 1)),
            "hottest_group": round(float(self.shares.max()), 4),
            "bound": round(by_split, 4),
            "possible": by_split >= 1.0,
            "can_split": can_split,
            "needs_split": by_placement < 1.0,
            "moves": last["moves"],
            "split_groups": last["splits"],
            "splits_in_rounds": sum(bool(ours["splits"]) for ours, _ in self.pairs),
            "row_ns": round(self.of("row_ns"), 1),
            "uniform_row_ns": round(self.of("row_ns", 1), 1),
            "balancer_cores": round(self.of("balancer_cores"), 4),
            "evenness": round(self.of("evenness"), 4),
            "rounds": len(ratios),
        }


def measure_all(exponents: Sequence[float], rounds: int, lengths: tuple[float, float, float], end: float) -> list[Case]:
    """All z in every round. A round begins only if it would end in time, by what the first took."""
    cases = [Case(z) for z in exponents]
    longest = 0.0
    for number in range(rounds):
        for case in cases:
            begin = time.monotonic()
            if case.pairs and begin + longest > end:
                return cases
            case.measure(number, *lengths)
            if number > 0 or longest == 0.0:
                longest = max(longest, time.monotonic() - begin)
    return cases


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--execute":
        print(json.dumps(execute(*json.loads(sys.argv[2]))), flush=True)
        return
    options = harness.arguments(__doc__ or "", pairs=ROUNDS)
    end = harness.start("zipf")
    exponents = (0.2, 1.0, 2.0) if options.quick else EXPONENTS
    for z in (*exponents, UNIFORM):
        for producer in range(PRODUCERS):
            zipf_frames(z, producer)
    lengths = (WARM_S, 0.5, 0.5) if options.quick else (WARM_S, UNIFORM_WARM_S, MEASURE_S)
    measured = measure_all(exponents, 1 if options.quick else options.pairs, lengths, end)
    cases = [case.summary() for case in measured]
    harness.print_table(
        HEADINGS,
        [
            [c["z"], c["balanced_ratio"], c["balanced_spread"], c["unbalanced_ratio"], c["hottest_group"],
             "yes" if c["possible"] else "no", "yes" if c["needs_split"] else "no", c["bound"], c["moves"],
             ", ".join(map(str, c["split_groups"] or [])) or "-", c["row_ns"], c["uniform_row_ns"],
             c["balancer_cores"], c["evenness"]]
            for c in cases
        ],
    )  # fmt: skip
    print(f"{min(c['rounds'] for c in cases)} to {max(c['rounds'] for c in cases)} rounds")
    for case in cases:
        if not case["possible"]:
            why = "a connection alone is too hot" if case["can_split"] else "and there is no split"
            print(
                f"z={case['z']}: one group has {case['hottest_group']:.0%} of the rows; {WORKERS} workers cannot reach "
                f"more than {case['bound']:.2f} of uniform: {why}"
            )
    loss = worst_loss(cases)
    if loss is not None:
        print(f"worst_loss {loss:.3f}, target {TARGET}: {'met' if loss <= TARGET else 'MISSED'}")
    result = {"benchmark": "zipf", "worst_loss": loss, "target": TARGET, "producers": PRODUCERS, "cases": cases}
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
