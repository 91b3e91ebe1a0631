"""What all benchmarks share: the machine's facts, alternating pairs, medians, a table, one JSON line.

Method: two things are compared in alternating pairs (A B, B A, A B, ...), because a machine's speed drifts by
more than what is measured; the answer is the median of the pairs' ratios, not the ratio of two averages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

PROJECT = Path(__file__).resolve().parent.parent
CACHE = PROJECT / ".cache" / "bench"
INCLUDES = PROJECT / "cython_ext" / "includes"
BUDGET_S = 280.0  # a benchmark takes at most five minutes

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Cores:
    """Which core does what. With a single core both are the same, and the numbers say little."""

    receiver: int
    sender: int

    @classmethod
    def pick(cls) -> Cores:
        available = sorted(os.sched_getaffinity(0))
        return cls(receiver=available[-1], sender=available[0])


def arguments(description: str, *, pairs: int, commit: str | None = None, **flags: str) -> argparse.Namespace:
    """The command line that every benchmark has: --json, --quick, --pairs, and flags of its own.

    With `commit` it also has COMMIT, and that is the default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if commit is not None:
        parser.add_argument("commit", nargs="?", default=commit, help=f"compare with this one (default {commit})")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="few and short runs: does it work at all?")
    parser.add_argument(
        "--pairs", type=int, default=None, help=f"alternating pairs per case (default {pairs})"
    )
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parsed = parser.parse_args()
    if parsed.pairs is None:
        parsed.pairs = 3 if parsed.quick else pairs
    return parsed


def machine() -> dict[str, Any]:
    """The facts without which a number means nothing."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(memory_kb / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit that was measured, with "+" when the tree has changes on top."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=PROJECT, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def compiled(name: str, *, shared: bool = False) -> Path:
    """A C program or shared object of benchmarks/native, built for this machine when missing or old."""
    source = PROJECT / "benchmarks" / "native" / f"{name}.c"
    target = CACHE / (f"{name}.so" if shared else name)
    newest = max(path.stat().st_mtime for path in (*source.parent.iterdir(), *INCLUDES.glob("*.h")))
    if not target.exists() or target.stat().st_mtime < newest:
        CACHE.mkdir(parents=True, exist_ok=True)
        flags = ["-shared", "-fPIC"] if shared else []
        command = ["cc", "-O3", "-march=native", "-Wall", f"-I{INCLUDES}", *flags, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"cannot build {source.name}:\n{done.stderr}")
    return target


def alternate(
    pairs: int, first: Callable[[], A], second: Callable[[], B], *, until: float | None = None
) -> list[tuple[A, B]]:
    """Run both in turn, swapping the order each time.

    `until` (monotonic seconds) ends it early, never below one.
    """
    results: list[tuple[A, B]] = []
    for index in range(pairs):
        if results and until is not None and time.monotonic() > until:
            break
        if index % 2 == 0:
            a = first()
            b = second()
        else:
            b = second()
            a = first()
        results.append((a, b))
    return results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The quartiles: how far the runs lie apart."""
    if len(values) < 4:
        return f"{min(values):.2f}-{max(values):.2f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.2f}-{high:.2f}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *text]) for i in range(len(columns))]
    print("  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True)))
    print("  ".join("-" * width for width in widths))
    for line in text:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def start(name: str) -> float:
    """Print the heading; returns the monotonic time at which the budget ends."""
    facts = machine()
    print(f"{name}: commit {commit()}, {facts['cpu']}, {facts['cores']} cores, kernel {facts['kernel']}")
    if facts["load"] > 0.5:
        print(f"note: the machine is busy (load {facts['load']}); trust the ratios only")
    return time.monotonic() + BUDGET_S


def finish(result: dict[str, Any], *, as_json: bool, target: tuple[str, float] | None = None) -> None:
    """Say whether the target is met, and print the JSON line. A missed target is a result, not a failure."""
    if target is not None:
        key, wanted = target
        value = result.get(key)
        if value is not None:
            word = "met" if value >= wanted else "MISSED"
            print(f"{key} {value:.3f}, target {wanted}: {word}")
    if as_json:
        print(json.dumps({**result, "machine": machine(), "commit": commit()}))
    sys.stdout.flush()
