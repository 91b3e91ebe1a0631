"""Expressions as the engine runs them, against the oracle's: every row alone in its key, so that its value shows."""

import math
import random

import numpy as np
import pytest

import flexstream as fs
from flexstream import col, lit
from flexstream.testing.values import Row, RowError, evaluate
from tests.property.checks import FINISH_S, Expressions, as_rows, equal

STREAM = fs.Stream(
    "s",
    {"t": "timestamp[s]", "k": "i32", "a": "i64", "b": "i64", "f": "f64", "g": "f32", "u": "u64", "h": "u8",
     "p": "bool", "q": "bool", "w": "bytes[4]", "z": "bytes[12]"},
    key="k", time="t",
)  # fmt: skip
INTS = [0, 1, -1, 2, -7, 7, 100, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]
REALS = [0.0, -0.0, 1.0, -2.5, math.nan, math.inf, -math.inf, 2.0**63, -(2.0**63), 1e300, 0.1]


def make_rows(n=400, seed=7):
    rnd = random.Random(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["k"] = np.arange(n)
    for name, values in (("a", INTS), ("b", INTS), ("f", REALS), ("g", REALS[:8]), ("h", [0, 1, 255])):
        rows[name] = [rnd.choice(values) for _ in range(n)]
    rows["u"] = np.array([rnd.choice((0, 1, 5, 2**63 - 1, 2**63, 2**64 - 1)) for _ in range(n)], np.uint64)
    rows["p"] = [rnd.random() < 0.5 for _ in range(n)]
    rows["q"] = [rnd.random() < 0.5 for _ in range(n)]
    rows["w"] = [rnd.choice((b"", b"a", b"ab", b"abcd", b"a\0b")) for _ in range(n)]
    rows["z"] = [rnd.choice((b"", b"abcd", b"abcdefghijkl", b"a\0b")) for _ in range(n)]
    return rows


ROWS = make_rows()
TYPES = STREAM.schema.to_dict()
DICTS = [Row(zip(STREAM.schema.names, values, strict=True), TYPES) for values in ROWS.tolist()]


def expected(tree):
    values = {}
    for row in DICTS:
        try:
            values[row["k"]] = evaluate(tree, row)
        except RowError:
            continue
    return values


def computed(trees, kind):
    """{key: value} for each expression; a key is missing when its row was rejected (or, of a filter, dropped)."""
    found = []
    for start in range(0, len(trees), 60):
        part = trees[start : start + 60]
        with fs.Engine(groups=1, pin=False) as engine:
            for i, tree in enumerate(part):
                query = STREAM.query(f"q{i}")
                query = query.filter(tree) if kind == "bool" else query
                value = fs.count() if kind == "bool" else fs.max(tree)
                engine.submit(query.window(fs.tumbling("10s")).agg(v=value))
            engine.feed("s", ROWS)
            engine.finish(timeout=FINISH_S)
            status = engine.status()["queries"]
            for i in range(len(part)):
                values = {row["k"]: row["v"] for row in as_rows(engine.results(f"q{i}"))}
                found.append((values, sum(status[f"q{i}"]["rejected"].values())))
    return found


def check(trees, kind="number"):
    for tree, (values, rejected) in zip(trees, computed(trees, kind), strict=True):
        wanted = expected(tree)
        assert rejected == len(ROWS) - len(wanted), f"{tree}: {rejected} rejected, oracle {len(ROWS) - len(wanted)}"
        if kind == "bool":
            assert set(values) == {k for k, keep in wanted.items() if keep}, str(tree)
            continue
        assert values.keys() == wanted.keys(), str(tree)
        for k, value in wanted.items():
            if isinstance(value, int):
                assert values[k] == value, f"{tree} on {DICTS[k]}: {values[k]!r}, oracle {value!r}"
            else:
                assert equal(float(values[k]), value), f"{tree} on {DICTS[k]}: {values[k]!r}, oracle {value!r}"


A, B, F, G, U, H, P, Q, W, Z = (col(name) for name in "abfguhpqwz")


def test_integer_arithmetic_overflows_are_rejected():
    check([A + B, A - B, A * B, -A, abs(A), A + 1, A * -1, H + A, U + 1, U - A, col("t") + A])


def test_division_and_remainder_cut_towards_zero():
    check([A // B, A % B, A // -2, A % -2, A // 3, A % 3, 7 // B, -7 % B, A // -1, A % -1, A // 0, A % 0, U // 2])


def test_real_arithmetic():
    check([F + G, F - G, F * G, F / G, -F, abs(F), F + A, A / B, A / 2, 1 / F, F * 0.5, G + 1, U / 2])


def test_casts():
    check([F.cast("i64"), G.cast("i64"), (F * 2).cast("i64"), A.cast("f64"), U.cast("f64")])
    check([P.cast("i64"), P.cast("f64")])
    check([(A < B).cast("i64") + 1, (P & Q).cast("i64"), A.cast("f64").cast("i64")])


@pytest.mark.parametrize(("left", "right"), [(A, B), (F, G), (A, F), (F, A), (U, A), (G, lit(math.nan)), (F, lit(0.0))])
def test_comparisons_with_nan_the_greatest(left, right):
    check([left == right, left != right, left < right, left <= right, left > right, left >= right], "bool")


def test_comparisons_of_bytes_and_booleans():
    trees = [W == b"a", W != b"a", W == b"", W == b"ab\0", W == b"abcd", W == b"a\0b", Z == b"abcd", Z != b"a\0b"]
    check([*trees, P == Q, P != Q, lit(True) == P, ~P, ~(W == b"a"), ~(Z != b"")], "bool")


def test_the_right_side_does_not_count_when_the_left_decides():
    risky = 10 // A > 1
    other = U > 5
    trees = [
        (A != 0) & risky, (A == 0) | risky, risky & (A != 0), risky | (A == 0), ~((A == 0) | risky),
        ((A != 0) & risky) | (B > 0), (B > 0) | ((A != 0) & risky), (P & risky) | (Q & risky),
        ((A == 0) | risky) & other, other & ((A == 0) | risky), (P | other) & (Q | other), P | (Q & (other | risky)),
        (P & (F / G > 1)) | (F.cast("i64") > 0), lit(True) | risky, lit(False) & risky, lit(True) & risky,
    ]  # fmt: skip
    check(trees, "bool")


def test_what_one_side_skipped_still_rejects_the_row_where_it_is_needed():
    risky = 10 // A
    query = STREAM.query("q").filter(P | (risky > 1)).window(fs.tumbling("10s")).agg(v=fs.max(risky))
    with fs.Engine(groups=1, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", ROWS)
        engine.finish(timeout=FINISH_S)
        oracle = fs.testing.run(query, ROWS)
        status = engine.status()["queries"]["q"]
        assert sum(status["rejected"].values()) == len(oracle.rejected)
        assert {r["k"]: r["v"] for r in as_rows(engine.results("q"))} == {
            key[0]: values["v"] for (_, key), values in oracle.windows.items()
        }


def test_constants():
    check([lit(7) + 0, lit(2.5) + 0.0, lit(2**63 - 1) + 0, lit(-(2**63)) - 0])
    check([lit(2**63 - 1) + 1, lit(1) / 0, lit(1) // 0])


@pytest.mark.slow
def test_random_expressions(seed):
    rnd = random.Random(seed)
    make = Expressions(rnd, STREAM.schema.to_dict())
    check([make.integer(3) for _ in range(60)])
    check([make.real(3) for _ in range(60)])
    check([make.boolean(4) for _ in range(120)], "bool")
