"""No choice decides a result: all variants say what the oracle says, wherever they are switched."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import Pipeline, generate
from flexstream.compile.toolchain import FLAGS, INCLUDES, find_compiler
from flexstream.compile.variant_choices import PLAIN, Choices
from tests.property.checks import (
    FINISH_S,
    Case,
    as_rows,
    assert_conserved,
    assert_ledger,
    equal,
    random_batches,
    random_query,
    random_rows,
    random_stream,
)

CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "y": "i32", "f": "f64"}, key="k", time="t")
NAMES = ("fs_variant_run", "load_key", "hash_key", "merge_hot", "passes", "over_rows", "over_known")


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("objects")


def functions(objects: Path, query: fs.Query, choices: list[Choices]) -> list[int]:
    """The addresses of the variants, all from one run of the compiler."""
    parts = []
    for number, chosen in enumerate(choices):
        parts += [f"#define {name} {name}_{number}" for name in NAMES]
        parts += [generate(query.bound(), chosen), *(f"#undef {name}" for name in NAMES)]
    code = "\n".join(parts)
    target = objects / f"{hashlib.sha256(code.encode()).hexdigest()}.so"
    if not target.exists():
        source = target.with_suffix(".c")
        source.write_text(code)
        flags = [flag if flag != "-O3" else "-O1" for flag in FLAGS]
        command = [*find_compiler(), *flags, f"-I{INCLUDES}", "-o", str(target), str(source)]
        subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(target))
    return [ctypes.cast(library[f"fs_variant_run_{i}"], ctypes.c_void_p).value or 0 for i in range(len(choices))]


def random_choices(rnd: random.Random, query: fs.Query, n: int) -> list[Choices]:
    made = [PLAIN, Choices(instrumented=True, dense=True)]
    for _ in range(n):
        numbers = list(range(len(Pipeline(query.bound()).ahead)))
        rnd.shuffle(numbers)
        cuts = sorted({0, *(rnd.randrange(len(numbers) + 1) for _ in range(2)), len(numbers)})
        order = tuple(tuple(numbers[a:b]) for a, b in itertools.pairwise(cuts))
        made.append(Choices(rnd.choice((None, order)), *(rnd.random() < 0.6 for _ in range(3)), rnd.random() < 0.2))
    return made


def random_switch(rnd: random.Random, engine: fs.Engine, addresses: list[int]) -> None:
    """Some variant, and some range: one that fits, one that keys leave, one that they never were in."""
    for running in engine.running()[1]:
        for state in running.states:
            state.use_variant(rnd.choice((0, *addresses, *addresses)))
            if rnd.random() < 0.5:
                base, size = rnd.choice(((0, 0), (-64, 128), (0, 40), (-3, 7), (20, 1), (-(2**63), 9), (0, 70_000)))
                state.use_range(base, size)


def single_key_case(rnd: random.Random) -> Case:
    """Mostly one integer key, which a dense array can be for."""
    stream = random_stream(rnd)
    while len(stream.key) > 1 and rnd.random() < 0.9:
        stream = random_stream(rnd)
    keys = rnd.choice((1, 3, 20, 60, 1000))
    rows = random_rows(rnd.getrandbits(32), stream, rnd.choice((0, 1, 40, 700, 2500)), keys)
    if len(rows) and rnd.random() < 0.3:  # a key becomes hot
        at = rnd.randrange(len(rows))
        mask = np.random.default_rng(at).random(len(rows) - at) < 0.9
        for name in stream.key:
            rows[name][at:][mask] = rows[name][at]
    return Case(stream, rows, [random_query(rnd, stream, "q0")])


@settings(max_examples=30, suppress_health_check=CHECKS)
@given(rnd=st.randoms(use_true_random=False))
@pytest.mark.time_limit(300)
def test_variants_of_any_choice_switched_at_random_give_what_the_oracle_gives(rnd, objects):
    case = single_key_case(rnd)
    (query,) = case.queries
    addresses = functions(objects, query, random_choices(rnd, query, 4))
    with fs.Engine(workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7)), compile="off", pin=False) as engine:
        engine.submit(query)
        for batch in random_batches(rnd, case.rows):
            random_switch(rnd, engine, addresses)
            engine.feed(case.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        try:
            assert_conserved(engine, case)
        except BaseException:
            print(case)
            raise


def fixed(
    objects: Path, query: fs.Query, choices: Choices, size: int, *batches: Any, base: int = 0, **options: Any
) -> Any:
    """Results by key, and counters, of one variant that stays."""
    (address,) = functions(objects, query, [choices])
    with fs.Engine(groups=options.pop("groups", 4), compile="off", pin=False, **options) as engine:
        engine.submit(query)
        (running,) = engine.running()[1]
        for state in running.states:
            state.use_range(base, size)
            state.use_variant(address)
        for batch in batches:
            engine.feed(query.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        counters = [state.counters() for state in running.states]
        status = engine.status()
        assert_ledger(status, query.stream.name, sum(map(len, batches)))
        summed = {name: sum(part[name] for part in counters) for name in ("outside", "compiled_rows", "fresh_keys")}
        return as_rows(engine.results(query.name)), {**status["queries"][query.name], **summed}


def rows_of(n: int, **columns: Any) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


FOLDS = {
    "n": fs.count(), "total": fs.sum("y"), "least": fs.min("x"), "most": fs.max("x"), "mean": fs.avg("f"),
    "dev": fs.stddev("f"), "low": fs.min("f"), "sum": fs.sum("f"),
}  # fmt: skip


def by_key(results: list[dict[str, Any]]) -> dict[Any, Any]:
    return {(row["window_start"], row["k"]): row for row in results}


@pytest.mark.parametrize("window", [fs.tumbling("10s"), fs.sliding("10s", every="2s")])
@pytest.mark.parametrize(
    "choices", [Choices(dense=True), Choices(dense=True, hot=True), Choices(hot=True), Choices(masked=True, dense=True)]
)
def test_keys_that_leave_the_range_and_one_that_becomes_hot_change_no_result(objects, window, choices):
    rng = np.random.default_rng(5)
    n = 30_000
    keys = np.concatenate([rng.integers(0, 50, n // 3), rng.integers(-2000, 2000, n // 3), np.full(n // 3, 7)])
    keys[2 * n // 3 :: 9] = rng.integers(0, 3000, len(keys[2 * n // 3 :: 9]))
    columns = {"x": rng.integers(-9, 9, n), "y": rng.integers(-9, 9, n), "f": rng.normal(0, 10, n)}
    rows = rows_of(n, t=np.arange(n) // 1000, k=keys, **columns)
    query = STREAM.query("q").filter(col("x") > -5).filter(col("y") < 7).window(window).agg(**FOLDS)
    plain, _ = fixed(objects, query, PLAIN, 0, *np.array_split(rows, 7))
    found, said = fixed(objects, query, choices, 64 if choices.dense else 0, *np.array_split(rows, 7))
    assert len(found) == len(plain)
    expected, got = by_key(plain), by_key(found)
    assert got.keys() == expected.keys()
    for key, row in expected.items():
        for name in FOLDS:
            assert equal(got[key][name], row[name]), (key, name, got[key], row)
    assert said["compiled_rows"] > n / 2
    assert (said["outside"] > 1000) == choices.dense


@pytest.mark.parametrize("kind", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "timestamp[ms]"])
def test_a_dense_array_holds_keys_of_any_integer_type_at_its_limits(objects, kind):
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": kind, "x": "i64"}, key="k", time="t")
    dtype = stream.schema.dtype["k"]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    values = [low, low + 1, high, high - 1, low + 7, low + 8]
    rows = np.zeros(600, stream.schema.dtype)
    rows["k"] = np.resize(np.array(values, dtype=dtype), 600)
    query = stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count())
    for base in (low, high - 3, 0, -2):
        signed = base - (1 << 64) if base >= 1 << 63 else base
        found, said = fixed(objects, query, Choices(dense=True), 4, rows, rows, base=signed)
        assert sorted((row["k"], row["n"]) for row in found) == sorted((value, 200) for value in values), base
        assert said["compiled_rows"] > 600


def test_state_at_its_cap_with_a_dense_array_refuses_new_keys_and_counts_known_ones(objects):
    wide = {"t": "timestamp[s]", "k": "i64", "x": "i64"}
    stream = fs.Stream("w", wide, key="k", time="t")
    query = stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), **{f"a{i}": fs.sum("x") for i in range(20)})
    n = 30_000
    rows = np.zeros(n, stream.schema.dtype)
    rows["k"] = np.arange(n)
    rows["x"] = 1
    found, said = fixed(
        objects, query, Choices(dense=True), 4096, rows, rows[:10], rows, groups=1, state_memory_bytes=4 << 20
    )
    full = said["rejected"]["state_full"]
    assert full > 0
    assert sum(row["n"] for row in found) == 2 * n + 10 - full
    assert all(row["n"] == (3 if row["k"] < 10 else 2) and row["a0"] == row["n"] for row in found)


def test_an_instrumented_variant_counts_what_it_saw(objects):
    n = 32_000
    rows = rows_of(n, k=np.arange(n) % 100 - 20, x=np.arange(n) % 10, y=np.arange(n) % 2)
    query = STREAM.query("q").filter((col("x") < 3) & (col("y") == 0)).window(fs.tumbling("10s")).agg(n=fs.count())
    (address,) = functions(objects, query, [Choices(instrumented=True)])
    with fs.Engine(groups=1, compile="off", pin=False) as engine:
        engine.submit(query)
        (state,) = engine.running()[1][0].states
        state.clear_profile()
        state.use_variant(address)
        engine.feed("s", np.random.default_rng(1).permutation(rows))
        engine.finish(timeout=FINISH_S)
        profile = state.profile()
    assert n / 20 < profile["rows"] < n / 10
    assert profile["passed"][0] / profile["rows"] == pytest.approx(0.3, abs=0.1)
    assert profile["passed"][1] / profile["rows"] == pytest.approx(0.5, abs=0.1)
    assert profile["keys"] == sum(profile["buckets"])
    assert profile["keys"] / profile["rows"] == pytest.approx(0.2, abs=0.1)
    assert -20 <= profile["least"] < profile["most"] < 80


def test_a_pane_that_was_half_full_when_its_dense_array_came_is_still_compiled_code_s(objects):
    """Keys of the table and of the array share the table's room: when it is used up, the table goes on."""
    query = STREAM.query("q").window(fs.tumbling("1000s")).agg(n=fs.count())
    plain, dense = functions(objects, query, [PLAIN, Choices(dense=True)])
    rows = np.zeros(7000, STREAM.schema.dtype)
    rows["k"] = np.arange(7000) % 700
    with fs.Engine(workers=1, groups=1, compile="off", pin=False) as engine:
        engine.submit(query)
        ((state,),) = (running.states for running in engine.running()[1])
        state.use_variant(plain)
        engine.feed("s", rows)
        while state.counters()["rows"] < len(rows):
            time.sleep(0.001)
        before = state.counters()["compiled_rows"]
        state.use_range(0, 1024)
        state.use_variant(dense)
        engine.feed("s", rows)
        engine.finish(timeout=FINISH_S)
        assert state.counters()["compiled_rows"] - before > 0.9 * len(rows)
        counted = {row["k"]: row["n"] for row in as_rows(engine.results("q"))}
    assert counted == dict.fromkeys(range(700), 20)
