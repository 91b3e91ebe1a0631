"""The adapter: when it looks, what it tries, what it keeps. Counters from a scripted worker, then a real engine."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.catalog.entries import RunningQuery
from flexstream.compile.adaptive import Adapter, Pace
from flexstream.compile.toolchain import Compiled, CompileError
from flexstream.compile.variant_choices import PLAIN
from flexstream.compile.variants import Variants
from tests.property.checks import FINISH_S, as_rows

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "y": "i32"}, key="k", time="t")
QUERY = STREAM.query("q").filter(col("x") > 0).filter(col("y") > 0).window(fs.tumbling("10s")).agg(n=fs.count())
PACE = Pace(first_rows=1000, first_s=0.0, sampled_rows=100, timed_rows=100, measurements=2)


class Worker:
    """A query's state whose rows are as the test says: what they take depends on the variant."""

    def __init__(self) -> None:
        self.bound = QUERY.bound()
        self.function, self.range = 1, (0, 0)
        self.counted = dict.fromkeys(
            ("rows", "filtered", "compiled_rows", "outside", "fresh_keys", "timed_rows", "timed_ns"), 0
        )
        self.sample: dict[str, Any] = {}
        self.passed, self.keys, self.hottest, self.fresh = [0.5, 0.5], (0, 99), 0.01, 0.001
        self.ns = lambda: 10.0
        self.samples = 0

    def counters(self) -> dict[str, Any]:
        return dict(self.counted)

    def run(self, rows: int = 10_000) -> None:
        low, high = self.range[0], self.range[0] + self.range[1]
        outside = bool(self.range[1]) and not (low <= self.keys[0] and self.keys[1] < high)
        added = {
            "rows": rows, "compiled_rows": rows, "filtered": rows * 3 // 4, "timed_rows": rows // 10,
            "timed_ns": int(rows // 10 * self.ns()), "outside": rows // 2 if outside else 0,
            "fresh_keys": int(rows * self.fresh),
        }  # fmt: skip
        for name, value in added.items():
            self.counted[name] += value
        self.samples += rows // 16

    def use_variant(self, function: int) -> None:
        self.function = function

    def use_range(self, base: int, size: int) -> None:
        self.range = (base, size)

    def clear_profile(self) -> None:
        self.samples = 0

    def profile(self) -> dict[str, Any]:
        n = self.samples
        hot = int(n * self.hottest)
        passed = [int(n * share) for share in self.passed] + [0] * 30
        return {"rows": n, "passed": passed, "keys": n, "least": self.keys[0], "most": self.keys[1],
                "buckets": [hot] + [(n - hot) // 255] * 255}  # fmt: skip


class Rig:
    def __init__(self, pace: Pace = PACE) -> None:
        self.worker = Worker()
        self.code: list[str] = []
        self.fails = False
        running: Any = SimpleNamespace(states=[self.worker], history=[], variant="compiled", submitted_at=0.0)
        running.note = RunningQuery.note.__get__(running)
        self.running = running
        self.misses = {"branch_misses": 0, "cache_misses": 0}
        self.misses_per_row = (0.0, 0.0)
        self.adapter = Adapter(running, 1, self.submit, pace, lambda: dict(self.misses))
        self.now = 0.0

    def submit(self, code, done) -> None:
        self.code.append(code())
        done(CompileError("no") if self.fails else Compiled(1 + len(self.code), None, 0.1, False))

    def go(self, ticks: int = 60, rows: int = 10_000) -> None:
        for _ in range(ticks):
            self.now += 0.01
            self.worker.run(rows)
            for name, misses in zip(self.misses, self.misses_per_row, strict=True):
                self.misses[name] += int(rows * misses)
            self.adapter.step(self.now)

    @property
    def history(self) -> list[str]:
        return [entry["variant"] for entry in self.running.history]


def test_the_first_look_waits_for_a_while_even_if_many_rows_came_before_the_first_tick():
    rig = Rig(replace(PACE, first_s=0.3))
    rig.go(20, rows=1_000_000)
    assert rig.adapter.phase == rig.adapter.steady
    assert rig.worker.function == 1
    rig.go(60)
    assert rig.adapter.profiles == 1


def test_it_profiles_specialises_and_notes_the_gain():
    rig = Rig()
    rig.worker.passed = [0.9, 0.05]
    rig.worker.ns = lambda: 10.0 if rig.worker.function in (1, 2) else 5.0
    rig.go()
    assert rig.history == ["instrumented", "specialised"]
    entry = rig.running.history[-1]
    assert entry["gain"] == pytest.approx(2.0, abs=0.01)
    assert "keys from 0 to 99" in entry["reason"]
    assert "pass 0.90, 0.05 of the rows" in entry["reason"]
    assert "dense" in entry["choices"]
    assert rig.running.variant == "specialised"
    assert rig.worker.function == 3
    assert rig.worker.range[1] >= 100


@pytest.mark.parametrize(
    ("misses", "said"),
    [
        ((0.5, 0.0), "0.50 branch misses a row; it was 0.10 before"),
        ((0.1, 0.9), "0.90 cache misses a row; it was 0.00 before"),
    ],
)
def test_misses_that_the_processor_counts_make_it_look_again(misses, said):
    rig = Rig(replace(PACE, period_s=1e9, longest_period_s=1e9))
    rig.misses_per_row = (0.1, 0.0)
    rig.worker.ns = lambda: 10.0 if rig.worker.function in (1, 2) else 5.0
    rig.go(200)
    looks = rig.adapter.profiles
    rig.go(200)
    assert rig.adapter.profiles == looks, "nothing has changed"
    rig.worker.passed = [0.05, 0.9]
    rig.misses_per_row = misses
    rig.go(200)
    assert rig.adapter.profiles == looks + 1
    assert said in [entry for entry in rig.running.history if entry["variant"] == "instrumented"][-1]["reason"]


def test_a_switch_that_does_not_help_is_taken_back_and_not_tried_again_soon():
    rig = Rig()
    rig.worker.ns = lambda: 10.0 if rig.worker.function in (1, 2) else 11.0
    rig.go(2000)
    assert rig.history == ["instrumented", "specialised", "compiled"]
    assert rig.worker.function == 1
    assert rig.worker.range == (0, 0)
    assert "back to the variant before" in rig.running.history[-1]["reason"]
    assert rig.running.variant == "compiled"


def test_keys_that_leave_the_range_are_a_reason_to_look_again():
    rig = Rig()
    rig.worker.ns = lambda: 10.0 - rig.worker.range[1] / 1e6
    rig.go()
    assert rig.adapter.now.size
    rig.worker.keys = (0, 50_000)
    rig.go()
    assert rig.history == ["instrumented", "specialised"] * 2
    assert "of the keys are outside of 0 to" in rig.running.history[-2]["reason"]
    assert rig.worker.range[1] > 50_000


def test_rows_that_take_longer_are_a_reason_to_look_again():
    rig = Rig()
    rig.worker.keys = (0, 10**9)
    rig.worker.passed = [0.99, 0.99]
    slow = 10.0
    rig.worker.ns = lambda: slow
    rig.go(300)
    looks = rig.adapter.profiles
    slow = 15.0
    rig.worker.passed = [0.99, 0.01]
    rig.go(30)
    assert rig.adapter.profiles == looks + 1
    assert "a row takes 15.0 ns; it took 10.0 before" in rig.running.history[-2]["reason"]


def test_while_nothing_changes_it_looks_less_and_less():
    rig = Rig()
    rig.worker.keys, rig.worker.passed = (0, 10**9), [0.99, 0.99]
    rig.go(3000)  # 30 s
    assert 3 <= rig.adapter.profiles <= 6
    assert rig.history == []


def test_few_rows_are_left_alone():
    rig = Rig()
    rig.go(50, rows=10)
    assert rig.code == []
    assert rig.adapter.profiles == 0


def test_rows_that_stop_in_the_middle_of_a_look_end_it():
    rig = Rig()
    while rig.adapter.phase != rig.adapter.profiling:
        rig.go(1)
    rig.worker.samples = 0
    rig.go(100, rows=0)
    assert rig.worker.function == 1
    assert rig.adapter.phase != rig.adapter.profiling


def test_a_compiler_that_fails_leaves_the_plain_variant_and_no_loop():
    rig = Rig()
    rig.fails = True
    rig.go(3000)
    assert rig.worker.function == 1
    assert len(rig.code) == 1
    rig = Rig()
    while not rig.code:
        rig.go(1)
    rig.fails = True
    rig.go(3000)
    assert rig.worker.function == 1
    assert rig.adapter.now.choices == PLAIN
    assert len(rig.code) <= 2


def test_the_history_is_bounded_and_keeps_how_it_began():
    rig = Rig()
    for i in range(600):
        rig.running.note("specialised", str(i))
    assert len(rig.running.history) == 256
    assert rig.running.history[0]["reason"] == "0"
    assert rig.running.history[-1]["reason"] == "599"


# -- the real thing


@pytest.mark.time_limit(180)
def test_a_real_engine_finds_a_dense_array_follows_the_keys_and_loses_no_row(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "flexstream.engine.wiring.Variants",
        partial(Variants, pace=Pace(first_rows=1000, timed_rows=100, measurements=2, worse=0.0)),
    )
    query = STREAM.query("q").filter(col("x") >= 0).window(fs.tumbling("10s")).agg(n=fs.count(), total=fs.sum("y"))
    rng = np.random.default_rng(3)
    sent: list[np.ndarray] = []

    def rows(keys: int) -> np.ndarray:
        made = np.zeros(100_000, STREAM.schema.dtype)
        made["k"] = rng.integers(0, keys, len(made))
        made["x"] = rng.integers(-2, 5, len(made))
        made["y"] = 3
        return made

    with fs.Engine(groups=4, pin=False, compile="require") as engine:
        engine.submit(query)

        def feed_until(batch: np.ndarray, done) -> dict[str, Any]:
            deadline = time.monotonic() + 80
            while True:
                engine.feed("s", batch, watermark=False, wait=True)
                sent.append(batch)
                said = engine.status()["queries"]["q"]
                if done(said):
                    return said
                assert time.monotonic() < deadline, said["history"]

        first = feed_until(rows(500), lambda said: said["variant"] == "specialised" and "gain" in said["history"][-1])
        assert "dense" in first["history"][-1]["choices"]
        lines = len(first["history"])
        last = feed_until(
            rows(20_000), lambda said: any("outside of" in entry["reason"] for entry in said["history"][lines:])
        )
        assert [entry["variant"] for entry in last["history"]][:3] == ["compiled", "instrumented", "specialised"]
        engine.finish(timeout=FINISH_S)
        found = {row["k"]: (row["n"], row["total"]) for row in as_rows(engine.results("q"))}
    everything = np.concatenate(sent)
    kept = everything[everything["x"] >= 0]
    keys, counts = np.unique(kept["k"], return_counts=True)
    assert found == {int(k): (int(n), 3 * int(n)) for k, n in zip(keys, counts, strict=True)}
