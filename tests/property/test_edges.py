"""The edges of what a row, a key and a number can be, in every variant that there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import Pipeline, generate
from flexstream.compile.toolchain import compile_code
from flexstream.compile.variant_choices import PLAIN, Choices
from flexstream.testing import run
from tests.property.checks import as_rows, assert_counts, assert_ledger, assert_same_results

WAIT_S = 120.0
VARIANTS: dict[str, Choices | None] = {
    "generic": None,
    "compiled": PLAIN,
    "instrumented": Choices(instrumented=True),
    "dense": Choices(dense=True),
    "hot": Choices(hot=True),
    "masked": Choices(masked=True, order=((0, 1),)),
    "all of them": Choices(masked=True, order=((1, 0),), dense=True, hot=True),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
pytestmark = pytest.mark.time_limit(300)


def played(query: fs.Query, variant: Choices | None, *batches: np.ndarray, dense: int = 100) -> tuple[Any, Any]:
    """Result batches and status of a query that this variant alone runs (and the generic one behind it)."""
    function = 0 if variant is None else compile_code(generate(query.bound(), variant)).function
    with fs.Engine(workers=1, groups=4, compile="off", pin=False) as engine:
        engine.submit(query)
        (running,) = engine.running()[1]
        for state in running.states:
            if variant is not None and variant.dense:
                state.use_range(0, dense)
            state.use_variant(function)
        for batch in batches:
            engine.feed(query.stream.name, batch)
        engine.finish(timeout=WAIT_S)
        status = engine.status()
        compiled = sum(state.counters()["compiled_rows"] for state in running.states)
        assert (compiled > 0) == (variant is not None)
        assert_ledger(status, query.stream.name, sum(map(len, batches)))
        return list(engine.results(query.name)), status


def check(query: fs.Query, variant: Choices | None, rows: np.ndarray) -> None:
    batches = np.array_split(rows, 5)
    results, status = played(query, variant, *batches)
    oracle = run(query, rows)
    assert_same_results(query, as_rows(results), oracle.windows)
    assert_counts(status, query, oracle, len(rows))
    rejected = status["queries"][query.name]["rejected"]
    assert {reason: n for reason, n in rejected.items() if n} == oracle.rejected_by_reason


@every_variant
@pytest.mark.parametrize("kind", ["u8", "i8", "bool", "bytes[1]"])
def test_rows_with_a_single_byte_beside_the_time(variant, kind):
    stream = fs.Stream("tiny", {"k": kind, "t": "timestamp[s]"}, key="k", time="t")
    assert stream.schema.row_bytes == 9
    rows = np.zeros(4000, stream.schema.dtype)
    rows["t"] = np.arange(len(rows)) // 900
    rows["k"] = np.resize(np.array([0, 1, 1, 1], np.uint8), len(rows)).astype(stream.schema.dtype["k"])
    query = stream.query("q").filter((col("t") != 2) & (col("t") < 9)).window(fs.tumbling("2s"))
    check(query.agg(n=fs.count(), last=fs.max("t")), variant, rows)


@every_variant
def test_rows_of_two_kilobytes(variant):
    fields = {"pad": "bytes[2000]", "k": "i16", "x": "i32", "t": "timestamp[ms]", "name": "bytes[34]"}
    stream = fs.Stream("huge", fields, key="k", time="t")
    assert stream.schema.row_bytes == 2048
    rows = np.zeros(3000, stream.schema.dtype)
    rows["k"], rows["x"] = np.arange(len(rows)) % 7, np.arange(len(rows)) % 100 - 50
    rows["pad"] = np.resize(np.array([b"x" * 2000, b"x" * 1999, b""], "S2000"), len(rows))
    rows["name"] = np.resize(np.array([b"x" * 34, b"", b"xy"], "S34"), len(rows))
    rows["t"] = np.arange(len(rows)) // 4
    query = stream.query("q").filter((col("pad") != b"x" * 2000) & (col("x") < 40)).window(fs.tumbling("100ms"))
    same = fs.when(col("pad") == col("name"), 1).otherwise(0)
    long = fs.when(col("pad").startswith(b"x" * 1999), 1).otherwise(0)
    check(
        query.agg(n=fs.count(), a=fs.sum("x"), b=fs.max(same), c=fs.max(long), d=fs.max(fs.hash("pad"))), variant, rows
    )


@every_variant
@pytest.mark.parametrize("keys", [1, 1_000_000])
def test_one_key_and_a_million(variant, keys):
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i32", "y": "i32"}, key="k", time="t")
    query = stream.query("q").filter((col("y") >= 0) & (col("x") >= 0)).window(fs.tumbling("10s"))
    query = query.agg(n=fs.count(), total=fs.sum("x"), most=fs.max("x"))
    rows = np.zeros(1_200_000, stream.schema.dtype)
    rows["k"] = np.arange(len(rows)) % keys
    rows["x"] = np.arange(len(rows)) % 1000
    results, status = played(query, variant, *np.array_split(rows, 6), dense=700_000)
    found = {name: np.concatenate([batch.column(name).to_numpy() for batch in results]) for name in ("k", "n", "total")}
    order = np.argsort(found["k"])
    assert np.array_equal(found["k"][order], np.arange(keys))
    assert np.array_equal(found["n"][order], np.bincount(rows["k"]))
    assert np.array_equal(found["total"][order], np.bincount(rows["k"], rows["x"]).astype(int))
    assert status["queries"]["q"]["open_windows"] == 0


NUMBERS = fs.Stream(
    "s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "y": "i64", "f": "f64", "g": "f32"}, key="k", time="t"
)


def number_rows(n: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(11)
    rows = np.zeros(n, NUMBERS.schema.dtype)
    rows["t"], rows["k"] = np.arange(n) // 1500, rng.integers(0, 5, n)
    rows["x"] = rng.choice(
        np.array([2**63 - 1, -(2**63), 0, -1, 1, 3, 2**62]), n, p=[0.03, 0.03, 0.1, 0.1, 0.2, 0.5, 0.04]
    )
    rows["y"] = rng.choice(np.array([0, -1, 1, 2, -(2**63)]), n, p=[0.1, 0.1, 0.3, 0.48, 0.02])
    rows["f"] = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 1e300]), n)
    rows["g"] = rng.choice(np.array([np.nan, np.inf, 0.0, 1.5, 3e38], np.float32), n)
    return rows


X, Y, F, G = (col(name) for name in "xyfg")
ARGUMENTS = {
    "integer overflow": (X + Y) % 1000,
    "overflow of a product": X * Y % 1000,
    "overflow of a negation": -X % 1000,
    "overflow of an absolute value": abs(X) % 1000,
    "division by zero": X // Y % 1000,
    "remainder by zero": X % Y % 1000,
    "real division by zero": F / G,
    "not a number": F + G,
    "no integer": F.cast("i64") % 1000,
    "no 32-bit integer": X.cast("i32"),
    "guarded": fs.when(Y != 0, X // Y % 1000).otherwise(7),
    "time without nanoseconds": X.cast("timestamp[s]").cast("timestamp[ns]").second(),
}


@every_variant
@pytest.mark.parametrize("what", ARGUMENTS)
def test_numbers_at_their_edges(variant, what):
    """As an argument behind filters that every variant has, of NaN among others."""
    tree = ARGUMENTS[what]
    query = NUMBERS.query("q").filter((F >= G) & (X != 3)).window(fs.tumbling("1s"))
    check(query.agg(n=fs.count(), low=fs.min(tree), high=fs.max(tree), mean=fs.avg(tree)), variant, number_rows())


@every_variant
def test_numbers_at_their_edges_in_conditions(variant):
    query = NUMBERS.query("q").filter((F <= G) & (G != 0.0) & ((X == 0) | (Y // X < 5)) & (X + 1 > Y))
    query = query.filter(fs.when(Y > 0, X % Y == 0).otherwise(F.cast("i64") > 0)).window(fs.sliding("2s", every="1s"))
    check(query.agg(n=fs.count(), nan=fs.max("f"), low=fs.min("g")), variant, number_rows())


@every_variant
def test_windows_without_rows_have_no_results(variant):
    rows = number_rows(300)
    rows["t"] = np.repeat([-1_000_000, 0, 5_000_000], 100)
    rows["x"] = 1
    query = NUMBERS.query("q").filter((X > 0) & (G >= 0.0)).window(fs.sliding("10s", every="5s"))
    check(query.agg(n=fs.count(), a=fs.sum("x")), variant, rows)
    none = NUMBERS.query("q").filter((X > 1) & (G >= 0.0)).window(fs.tumbling("1s")).agg(n=fs.count())
    check(none, variant, rows)


def test_every_variant_is_another():
    """The choices above are possible for these queries, so that none of the tests says nothing."""
    query = NUMBERS.query("q").filter((F >= G) & (X != 3)).window(fs.tumbling("1s")).agg(n=fs.count(), m=fs.max("x"))
    assert Pipeline(query.bound()).can_mask
    assert Pipeline(query.bound()).can_be_hot
    codes = [generate(query.bound(), variant) for variant in VARIANTS.values() if variant is not None]
    assert len(set(codes)) == len(codes)
