"""Keys chosen so that all of them begin at one place of a table: in any variant rows cost about the usual probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.compile.variant_choices import PLAIN, Choices
from flexstream.cython_ext.testing.probes import probes_of
from tests.property.checks import FINISH_S, as_rows
from tests.property.test_adaptive import functions
from tests.waiting import wait_until

GOLDEN = 0x9E3779B97F4A7C15
KEYS = 20_000
FAIR = 8.0  # steps per key; random keys at half load have 0.5, all in one heap half as many as there are keys
VARIANTS = {"generic": None, "compiled": PLAIN, "dense": Choices(dense=True), "hot": Choices(hot=True)}
FIELDS = {"t": "timestamp[s]", "k": "i64", "x": "i64"}
STREAM = fs.Stream("s", FIELDS, key="k", time="t")
WIDE = fs.Stream("s", {**FIELDS, "b": "bytes[8]"}, key=["k", "b"], time="t")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def keys_against(multiplier: int, n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint64) * np.uint64(pow(multiplier, -1, 1 << 64))


def rows_of(keys: np.ndarray, stream: fs.Stream = STREAM) -> np.ndarray:
    rows = np.zeros(len(keys), stream.schema.dtype)
    rows["k"], rows["x"] = keys.view(np.int64), keys.view(np.int64)
    return rows


def use(state: Any, objects: Path, query: fs.Query, variant: str, size: int = 0) -> None:
    choices = VARIANTS[variant]
    if choices is not None:
        state.use_range(0, size)
        state.use_variant(*functions(objects, query, [choices]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_flooding_keys_cost_as_many_probes_as_others(objects: Path, variant: str) -> None:
    keys = keys_against(GOLDEN, KEYS)
    query = STREAM.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), least=fs.min("x"))
    with fs.Engine(workers=1, groups=1, compile="off", pin=False) as engine:
        engine.submit(query)
        ((running,)) = engine.running()[1]
        (state,) = running.states
        use(state, objects, query, variant, 64)
        engine.feed("s", rows_of(keys))
        engine.feed("s", rows_of(keys[::-1]))
        engine.flush()
        probes = probes_of(state)
        assert (state.counters()["compiled_rows"] > KEYS) == (variant != "generic")
        engine.finish(timeout=FINISH_S)
        results = as_rows(engine.results("q"))
    assert sorted((row["k"], row["n"], row["least"]) for row in results) == sorted(
        (int(key), 2, int(key)) for key in keys.view(np.int64)
    )
    assert probes["too_far"] == 0, probes
    assert probes["steps"] < FAIR * KEYS, probes


def test_a_dense_array_of_flooding_keys_goes_to_the_table_in_as_many_probes(objects: Path) -> None:
    """Keys are of a small range; of these, the ones that begin near each other."""
    homes = np.arange(1 << 17, dtype=np.uint64) * np.uint64(GOLDEN)
    keys = np.sort(np.argsort(homes)[:4096]).astype(np.uint64)
    query = STREAM.query("q").window(fs.sliding("10s", every="5s")).agg(n=fs.count())
    with fs.Engine(workers=1, groups=1, compile="off", pin=False) as engine:
        engine.submit(query)
        ((running,)) = engine.running()[1]
        (state,) = running.states
        use(state, objects, query, "dense", 1 << 17)
        engine.feed("s", rows_of(keys))
        engine.feed("s", rows_of(keys))
        after = rows_of(keys[:1])
        after["t"] = 6  # the first window fires, and looks into the table; the second needs the pane still
        engine.feed("s", after)
        wait_until(lambda: state.counters()["windows_fired"], "the first window fires")
        probes = probes_of(state)
        engine.finish(timeout=FINISH_S)
        results = as_rows(engine.results("q"))
    assert sum(row["n"] for row in results) == 2 * (2 * len(keys) + 1)
    assert probes["keys"] >= len(keys)
    assert probes["too_far"] == 0, probes
    assert probes["steps"] < FAIR * len(keys), probes


@pytest.mark.parametrize("variant", ["generic", "compiled"])
def test_long_keys_and_side_tables_are_not_flooded_either(objects: Path, variant: str) -> None:
    """Of two words each: what the top bit of the first does to a product's low half, the second takes back."""
    rows = rows_of(np.repeat(keys_against(GOLDEN, KEYS // 2), 2), WIDE)
    flips = np.zeros(len(rows), np.uint64)
    flips[1::2] = (1 << 63) | (1 << 31)
    rows["k"][1::2] ^= np.int64(-(1 << 63))
    rows["b"] = flips.view("S8")
    aggregates = {"n": fs.count(), **({"values": fs.distinct("x")} if variant == "generic" else {})}
    query = WIDE.query("q").window(fs.tumbling("10s")).agg(**aggregates)
    with fs.Engine(workers=1, groups=1, compile="off", pin=False) as engine:
        engine.submit(query)
        ((running,)) = engine.running()[1]
        (state,) = running.states
        use(state, objects, query, variant)
        engine.feed("s", rows)
        engine.flush()
        probes = probes_of(state)
    assert probes["keys"] >= KEYS
    assert probes["too_far"] == 0, probes
    assert probes["steps"] < FAIR * probes["keys"], probes
