"""What does a skewed key cost, with the balancer and without?

  python -m benchmarks.zipf [--json] [--quick]

Two workers, costly rows, four producers that send as fast as they are let. Keys are Zipf with z from 0.2 to 2.0 over
10,000 campaigns; the throughput is measured from the end of a warm-up on, in which the balancer has had its time:
balanced (groups moved, and split when they are hotter than a core), not balanced, and with uniform keys, in turn.
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
EXPONENTS = tuple(round(0.2 * step, 1) for step in range(1, 11))
UNIFORM = 0.0
TARGET = 0.05
FINISH_S = 60.0
TIME_DELTA_MS = 100


# -- pure


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
        begin, rows = time.monotonic(), received(engine)
        time.sleep(measure_s)
        rate = (received(engine) - rows) / (time.monotonic() - begin)
        splits = split_groups(engine)
        sent = sum(sender_result(sender, duration_s)["rows"] for sender in senders)
        if watch is not None:
            watch.stop()
        engine.finish(timeout=FINISH_S)
        ledger = engine.status()["streams"]["ads"]["ledger"]
        if ledger["received"] != sent or ledger["applied"] != sent:
            raise SystemExit(f"z={z}: {sent} rows were sent, the ledger says {ledger}")
        return {"z": z, "balanced": balanced, "rows_per_s": rate, "moves": engine.mover.moved, "splits": splits}


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


def measure(z: float, rounds: int, lengths: tuple[float, float], until: float) -> dict[str, Any]:
    rank_of_key = np.random.default_rng(1).permutation(KEYS)
    shares = group_shares(key_groups(), weights(KEYS, z)[rank_of_key], GROUPS)
    ratios: list[tuple[float, float]] = []
    found: list[dict[str, Any]] = []
    uniform_rates = []
    for number in range(rounds):
        if ratios and time.monotonic() > until:
            break
        orders = [(z, True), (UNIFORM, False), (z, False)]
        results = {order: run(*order, *lengths) for order in (orders if number % 2 == 0 else orders[::-1])}
        uniform = results[UNIFORM, False]["rows_per_s"]
        ratios.append((results[z, True]["rows_per_s"] / uniform, results[z, False]["rows_per_s"] / uniform))
        uniform_rates.append(uniform)
        found.append(results[z, True])
    can_split = found[-1]["splits"] is not None
    by_placement = bound(shares, WORKERS)
    by_split = bound(shares / PRODUCERS, WORKERS) if can_split else by_placement  # a connection for each producer
    return {
        "z": z,
        "balanced_ratio": round(median([ours for ours, _ in ratios]), 4),
        "unbalanced_ratio": round(median([theirs for _, theirs in ratios]), 4),
        "uniform_records_per_s": round(median(uniform_rates)),
        "hottest_group": round(float(shares.max()), 4),
        "bound": round(by_split, 4),
        "possible": by_split >= 1.0,
        "can_split": can_split,
        "needs_split": by_placement < 1.0,
        "moves": found[-1]["moves"],
        "split_groups": found[-1]["splits"],
        "rounds": len(ratios),
    }


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--execute":
        print(json.dumps(execute(*json.loads(sys.argv[2]))), flush=True)
        return
    options = harness.arguments(__doc__ or "", pairs=1)
    end = harness.start("zipf")
    lengths = (2.5, 0.5) if options.quick else (2.5, 1.2)  # a split is made when a group has been hot for a while
    exponents = (0.2, 1.0, 2.0) if options.quick else EXPONENTS
    for z in (*exponents, UNIFORM):
        for producer in range(PRODUCERS):
            zipf_frames(z, producer)
    cases: list[dict[str, Any]] = []
    for z in exponents:
        if cases and time.monotonic() > end:
            print(f"no time left for z={z} and above")
            break
        cases.append(measure(z, 1 if options.quick else options.pairs, lengths, end))
    harness.print_table(
        ["z", "balanced / uniform", "not balanced", "hottest group", "possible", "needs split", "bound", "moves",
         "split groups"],
        [
            [c["z"], c["balanced_ratio"], c["unbalanced_ratio"], c["hottest_group"],
             "yes" if c["possible"] else "no", "yes" if c["needs_split"] else "no", c["bound"], c["moves"],
             ", ".join(map(str, c["split_groups"] or [])) or "-"]
            for c in cases
        ],
    )  # fmt: skip
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
