"""Three ways to get even again, on the same engine: FlexStream's, fetching keys under locks, and stopping.

Each is a thread that watches a run and moves groups once it must. All of them use the same solver for the plan and
the same handing over of sockets; they differ in what triggers them and in how the state gets to the new worker.
Detection is the moment at which the trigger has fired, for all of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks.harness import CACHE, PROJECT
from flexstream.balance.group_loads import Loads
from flexstream.cython_ext.worker.worker import now_ns
from flexstream.nic.balance.balancer import Limits, plan

SAMPLE_S = 0.05  # Flink samples a task so often,
BLOCKED_SHARE = 0.1  # and calls it back-pressured from this share of the time on
SETTLE_S = 20.0
SAME_REACTION_S = 0.2  # a move that begins so soon after another belongs to the same migration
STEP_KEYS = ("state_update", "table_update", "transfer", "synchronisation")


class Watch(threading.Thread):
    """`found` is filled when groups have moved: detected_ns, absorbed_ns, groups, and what the way has to tell."""

    def __init__(self, engine: fs.Engine) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.found: dict[str, Any] = {}
        self.failure: BaseException | None = None
        self._stop_wanted = threading.Event()

    def run(self) -> None:
        try:
            self.watch()
        except BaseException as error:
            self.failure = error

    def watch(self) -> None:
        raise NotImplementedError

    def stop(self) -> dict[str, Any]:
        self._stop_wanted.set()
        self.join(SETTLE_S + 5)
        if self.failure is not None:
            raise self.failure
        return self.found


# -- FlexStream


class Balanced(Watch):
    """The engine's own balancer decides and moves. Nothing moves before it begins: start the engine without."""

    def watch(self) -> None:
        self.engine.balance.set_auto(True)
        self._stop_wanted.wait()


def reaction(history: Any, since_ns: int) -> dict[str, Any]:
    """The first migration that began after `since_ns`, with the moves that followed it closely."""
    settled = sorted(
        (m for m in history if m.state == "moved" and m.steps["flag"] >= since_ns), key=lambda m: m.steps["flag"]
    )
    chosen: list[Any] = []
    for move in settled:
        if chosen and move.steps["flag"] - max(m.steps["clear"] for m in chosen) > SAME_REACTION_S * 1e9:
            break
        chosen.append(move)
    if not chosen:
        return {}
    to_monotonic = time.monotonic_ns() - time.time_ns()
    return {
        "detected_ns": int(min(move.began_at for move in chosen) * 1e9) + to_monotonic,
        "absorbed_ns": max(move.steps["adopt"] for move in chosen),
        "groups": len({move.group for move in chosen}),
        "moved_keys": sum(move.facts["entries"] for move in chosen),
        "batches": len({move.steps["flag"] for move in chosen}),
        "later_moves": len(settled) - len(chosen),
        "split": cost_split(chosen),
    }


def cost_split(moves: Any) -> dict[str, float]:
    """Milliseconds, the median over batches of groups that moved together (the paper's figure 10f).

    state_update: both owners work, each on its own partials, until the old one has published the last panes;
    table_update: the NIC's table; transfer: sockets and panes change hands, of a group; synchronisation: grace before,
    and clearing the flags after the last group was absorbed. They overlap, so they need not add up to the whole.
    """
    batches: dict[int, list[Any]] = {}
    for move in moves:
        batches.setdefault(move.steps["flag"], []).append(move)
    parts: dict[str, list[float]] = {name: [] for name in STEP_KEYS}
    for batch in batches.values():
        steps = batch[0].steps
        facts = [move.facts for move in batch]
        settled = max(steps["table"], *(fact["absorbed_ns"] for fact in facts))
        cleared = max(move.steps["clear"] for move in batch)
        hands = [f["adopted_ns"] - f["swept_ns"] + f["absorbed_ns"] - f["drained_ns"] for f in facts]
        parts["state_update"].append(max(fact["drained_ns"] for fact in facts) - steps["grace"])
        parts["table_update"].append(steps["table"] - steps["sweep"])
        parts["transfer"].append(float(np.median(hands)))
        parts["synchronisation"].append(steps["grace"] - steps["flag"] + cleared - settled)
    return {name: round(float(np.median(values)) / 1e6, 4) for name, values in parts.items()}


# -- the others


class SenderFacts(ctypes.LittleEndianStructure):
    """`struct shared` of native/turning.c"""

    _fields_ = [(name, ctypes.c_uint64) for name in ("rows", "blocked_ns", "turned_ns", "blocked_since_ns")]


class BackPressure:
    """For how much of the time since the last look could the sender not send?"""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._facts = SenderFacts.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(SenderFacts)))
        self._last = now_ns(), 0

    @property
    def turned(self) -> bool:
        return bool(self._facts.turned_ns)

    def share(self) -> float:
        now, blocked, since = now_ns(), self._facts.blocked_ns, self._facts.blocked_since_ns
        if 0 < since < now:
            blocked += now - since
        (before, blocked_before), self._last = self._last, (now, blocked)
        return max(0, blocked - blocked_before) / max(1, now - before)


class Triggered(Watch):
    """Waits for back-pressure, then migrates once, by what came for each group since the sample before.

    What happens before the turn is not its business.
    """

    def __init__(self, engine: fs.Engine, store: Any, shared: Path, forced: bool = False) -> None:
        super().__init__(engine)
        self._least_share = 0.0 if forced else BLOCKED_SHARE
        self.store = store
        self._pressure = BackPressure(shared)
        self._loads = Loads(engine.workers, engine.groups, lambda: engine.running()[0], {})

    def watch(self) -> None:
        while not self._stop_wanted.wait(SAMPLE_S):
            self._loads.look(time.monotonic())
            self._loads.want_samples()
            if self._pressure.share() < self._least_share or not self._pressure.turned:
                continue
            detected = now_ns()
            nothing = np.zeros(self.engine.groups)
            made = plan(self._loads.fresh, nothing, self.engine.placement(), Limits(len(self.engine.workers)))
            if made.moves:
                absorbed = self.migrate(made.moves)
                self.found |= {"detected_ns": detected, "absorbed_ns": absorbed, "groups": len(made.moves)}
                return

    def migrate(self, moves: list[Any]) -> int | None:
        raise NotImplementedError


class Fetching(Triggered):
    """Rows go over at once, keys when they are asked for, the rest bin by bin; a lock for every key."""

    def migrate(self, moves: list[Any]) -> int | None:
        self.store.begin_fetching(moves)
        self.engine.move({group: target for group, _, target in moves}, reason="back-pressure")
        groups = [group for group, _, _ in moves]
        self.store.all_given(groups)
        deadline = time.monotonic() + SETTLE_S
        while (absorbed := self.store.fetched(groups)) is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        facts = self.store.facts()
        self.found |= {"moved_keys": facts["keys_demanded"] + facts["keys_handed_over"], **facts}
        return absorbed


class Restarting(Triggered):
    """Stop, snapshot, restore into new places, go on. Nothing is reconnected and no process starts anew."""

    def migrate(self, moves: list[Any]) -> int | None:
        before = self.engine.placement()
        after = list(before)
        for group, _, target in moves:
            after[group] = target
        self.store.pause()
        placement = self.engine._parts.placement  # past a quiescent point no worker is in a batch that began before
        if not placement.grace(placement.publish((), ()), SETTLE_S):
            raise SystemExit("a worker did not stop")
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/snapshot"
            cells = self.store.snapshot(path)
            self.store.restore(path, after, before)
        self.store.resume()
        self.engine.move({group: target for group, _, target in moves}, reason="restart")
        self.found |= {"snapshot_keys": cells}
        return now_ns()


# -- the store of the others


def fetching_store() -> Any:
    """native/fetching.pyx, built against this tree when it or the native headers are newer."""
    source = PROJECT / "benchmarks" / "native" / "fetching.pyx"
    headers = [*(PROJECT / "cython_ext").rglob("*.pxd"), *(PROJECT / "cython_ext" / "includes").iterdir()]
    newest = max(path.stat().st_mtime for path in [source, *headers])
    folder = CACHE / "fetching"
    built = sorted(folder.glob("fetching.*.so"))
    if not built or built[0].stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", BUILD, str(PROJECT), str(source), str(folder)]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"cannot build {source.name}:\n{done.stdout}{done.stderr}")
        built = sorted(folder.glob("fetching.*.so"))
    spec = importlib.util.spec_from_file_location("fetching", built[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = """
import sys
from setuptools import Extension, setup
from Cython.Build import cythonize
project, source, folder = sys.argv[1:]
flags = ["-std=gnu11", "-O3", "-march=x86-64-v2", "-Wall", "-Wno-unused-function"]
extension = Extension("fetching", [source], include_dirs=[f"{project}/cython_ext/includes"], extra_compile_args=flags)
modules = cythonize([extension], include_path=[project], build_dir=folder, quiet=True, force=True)
command = ["-q", "build_ext", "--build-lib", folder, "--build-temp", folder, "--force"]
setup(name="fetching", ext_modules=modules, script_args=command)
"""
