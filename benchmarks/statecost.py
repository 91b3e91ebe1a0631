"""What do flags, counters, load counts and sketches cost when nothing moves?

  python -m benchmarks.statecost [--json] [--quick]

In-memory YSB (as `benchmarks.inmemory`: grouped rows, fed without a copy) with this tree, against a copy of it whose
native code was built with FLEXSTREAM_NO_MOVES=1: no quiescent points, no look at flags, counters and other workers'
rings, no sampling of keys and sockets. Both in processes of their own, in alternating pairs; "ratio" is the median of
throughput with / without over the pairs of both tumbling cases (target: at least 0.98); sliding windows are reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import flexstream as fs
from benchmarks import harness, inmemory
from benchmarks.harness import CACHE, PROJECT, Cores
from benchmarks.programs import Served

TARGET = 0.98
ROWS = 4_000_000
REPEATS = 2  # runs of a pair's half: the best counts, so that what else the machine does counts less
CASES = tuple(case for case in inmemory.CASES if case.judged)
PACKAGES = ("flexstream", "cython_ext", "nic", "state", "benchmarks")
BUILT_APART = ("moving", "work_item")
LINKS = ("nic", "state", "cython_ext")
UNWANTED = shutil.ignore_patterns("__pycache__", "*.c", "plots")


def native_hash(project: Path) -> str:
    """Of all that the copy is made from."""
    digest = hashlib.sha256(sys.version.encode())
    native = project / "cython_ext"
    sources = [
        project / "setup.py",
        *native.rglob("*.p[yx][xd]"),
        *native.rglob("*.so"),
        *(native / "includes").iterdir(),
    ]
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def tree_without_moves() -> Path:
    """A copy of the project, its record path built without moves; kept as long as the native code stays the same."""
    folder = CACHE / "statecost"
    tree = folder / native_hash(PROJECT)
    if not (tree / "built").exists():
        shutil.rmtree(folder, ignore_errors=True)
        tree.mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(PROJECT / name, tree / name)
        copy_packages(tree)
        for name in BUILT_APART:
            (built,) = (tree / "cython_ext").rglob(f"{name}.*.so")
            built.unlink()
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, capture_output=True, text=True,
            env={**os.environ, "FLEXSTREAM_NO_MOVES": "1", "FLEXSTREAM_EXT": ",".join(BUILT_APART)},
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"cannot build the variant without moves:\n{done.stdout}{done.stderr}")
        (tree / "built").touch()
    else:
        copy_packages(tree, shutil.ignore_patterns("__pycache__", "*.c", "*.so", "*.p[yx][xd]", "plots"))
    return tree


def copy_packages(tree: Path, ignore: Any = UNWANTED) -> None:
    for package in PACKAGES:
        shutil.copytree(
            PROJECT / package, tree / package, symlinks=True, dirs_exist_ok=True, ignore=links_apart(ignore)
        )
    for name in LINKS:
        link = tree / "flexstream" / name
        if not link.is_symlink():
            link.symlink_to(f"../{name}")


def links_apart(ignore: Any) -> Any:
    """flexstream/nic and its like are links to the folders beside it: they are made apart."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        skipped = {name for name in names if (Path(folder) / name).is_symlink()}
        return set(ignore(folder, names)) | skipped

    return ignored


class Worker(Served):
    """A process that runs a case on demand and says how long it took."""

    def __init__(self, tree: Path, case: int, rows: int) -> None:
        super().__init__("benchmarks.statecost", "--serve", json.dumps([case, rows]), tree=tree)
        if Path(self.ready["tree"]) != tree.resolve():
            raise SystemExit(f"the process meant for {tree} imports {self.ready['tree']}")

    def seconds(self) -> float:
        return float(self.ask("run")["seconds"])


def serve(case_number: int, rows: int) -> None:
    case, cores = CASES[case_number], Cores.pick()
    data = inmemory.prepare(case.groups, rows, case.mixed)
    with fs.Engine(workers=[cores.receiver], groups=case.groups, compile="require") as engine:
        os.sched_setaffinity(0, {cores.sender})
        inmemory.run_engine(engine, case, data)
        print(json.dumps({"tree": str(Path(fs.__file__).resolve().parent.parent)}), flush=True)
        for _ in sys.stdin:
            best = min(inmemory.run_engine(engine, case, data) for _ in range(REPEATS))
            print(json.dumps({"seconds": best}), flush=True)


def measure(number: int, tree: Path, rows: int, pairs: int, until: float) -> dict[str, Any]:
    with Worker(PROJECT, number, rows) as ours, Worker(tree, number, rows) as without:
        found = harness.alternate(pairs, ours.seconds, without.seconds, until=until)
    each = [theirs / mine for mine, theirs in found]
    return {
        "name": CASES[number].name,
        "ratio": round(harness.median(each), 4),
        "spread": harness.spread(each),
        "judged": CASES[number].slide_ms == inmemory.WINDOW_MS,
        "pairs": [round(one, 4) for one in each],
        "records_per_s": round(harness.median([rows / mine for mine, _ in found])),
        "without_records_per_s": round(harness.median([rows / theirs for _, theirs in found])),
    }


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--serve":
        serve(*json.loads(sys.argv[2]))
        return
    options = harness.arguments(__doc__ or "", pairs=20)
    end = harness.start("statecost")
    tree = tree_without_moves()
    rows = ROWS // 8 if options.quick else ROWS
    now = harness.time.monotonic()
    cases = []
    for number in range(len(CASES)):
        until = now + (end - now) * (number + 1) / len(CASES)
        cases.append(measure(number, tree, rows, options.pairs, until))
    harness.print_table(
        ["case", "with / without", "quartiles", "with, M rows/s", "without, M rows/s"],
        [
            [c["name"], c["ratio"], c["spread"], c["records_per_s"] / 1e6, c["without_records_per_s"] / 1e6]
            for c in cases
        ],
    )
    result = {
        "benchmark": "statecost",
        "ratio": round(harness.median([one for case in cases if case["judged"] for one in case["pairs"]]), 4),
        "target": TARGET,
        "rows": rows,
        "cases": cases,
    }
    harness.finish(result, as_json=options.json, target=("ratio", TARGET))


if __name__ == "__main__":
    main()
