"""The optimised plan: less work, the same rows kept, the same rows rejected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexstream as fs
from flexstream import col, lit
from flexstream.query.constants import evaluate
from flexstream.query.expr import Typed, bind
from flexstream.query.plan.explain import text
from flexstream.query.plan.nodes import Filter
from flexstream.query.plan.rewrite import optimise
from flexstream.query.simplify import fold

STREAM = fs.Stream(
    "s",
    {"t": "timestamp[s]", "k": "i32", "a": "i64", "b": "i64", "f": "f64", "on": "bool", "pad": "bytes[40]", "u": "u64"},
    key="k", time="t",
)  # fmt: skip


def filters(*conditions: fs.Expr) -> list[str]:
    query = STREAM.query("q")
    for condition in conditions:
        query = query.filter(condition)
    plan = optimise(query.window(fs.tumbling("10s")).agg(n=fs.count()).bound())
    return [text(step.typed) for step in plan.steps if isinstance(step, Filter)]


def folded(tree: fs.Expr) -> str:
    return text(fold(bind(tree, STREAM.schema.to_dict()), STREAM.schema))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (col("a") + (lit(2) * 3 - 1), "(a + 5)"),
        (col("a") > lit(7) // 2, "(a > 3)"),
        (col("a") > -(lit(7)) // 2, "(a > -3)"),  # cut towards zero, as workers do
        (col("a") > lit(-7) % 3, "(a > -1)"),
        (col("f") > lit(1) / 4, "(f > 0.25)"),
        (col("a") + 0, "a"),
        (1 * col("a"), "a"),
        (~(col("a") > 3), "(a <= 3)"),
        (~~col("on"), "on"),
        ((col("a") > 1) & (lit(1) < 2), "(a > 1)"),
        ((lit(1) > 2) | (col("a") > 1), "(a > 1)"),
        ((col("a") > 1) | lit(True), "True"),
        (lit(False) & (col("a") // col("b") > 1), "False"),
        (lit(math.nan) > lit(math.inf), "True"),
        (lit(math.nan) == lit(math.nan), "True"),
        (lit(b"a") == lit(b"a\0"), "True"),
        (lit(2.9).cast("i64") + col("a"), "(2 + a)"),
        (fs.when(lit(1) < 2, col("a")).otherwise(col("a") // col("b")), "a"),
        (fs.when(lit(False), col("a") // col("b")).otherwise(col("b")), "b"),
        (fs.when(col("on"), True).otherwise(False), "on"),
        (fs.when(col("a") > 3, lit(False)).otherwise(lit(1) == 1), "(a <= 3)"),
        (fs.when(col("on"), col("a")).otherwise(col("a") + 0), "a"),
        (fs.when(~col("on"), 1).otherwise(col("a")), "when(on, a).otherwise(1)"),
        (fs.when(col("on"), lit(1) + 1).when(lit(False), 7).otherwise(col("a")), "when(on, 2).otherwise(a)"),
        (lit(0).cast("timestamp[ms]").year() + col("a"), "(1970 + a)"),
        (col("a") > lit(-1).cast("timestamp[ns]").hour(), "(a > 23)"),
        (fs.hash(lit(1), lit(b"a")) == col("a"), "(a == 573093329)"),
        (lit(b"abc").startswith(b"ab") & col("on"), "on"),
        (col("pad").startswith(b"\0") | col("on"), "True"),
        (lit(300).cast("i16") + col("a"), "(300 + a)"),
        (lit(0.1).cast("f32") < col("f"), "(0.10000000149011612 < f)"),
        (col("t").cast("timestamp[s]").year() > 0, "(year(floor(t, 86400)) > 0)"),
    ],
)
def test_constants_are_folded(tree, expected):
    assert folded(tree) == expected


@pytest.mark.parametrize(
    "tree",
    [
        col("a") > lit(1) // 0,
        col("a") > lit(2**62) * 4,
        col("f") > lit(1.0) / 0.0,
        col("a") > lit(1e300).cast("i64"),
        (col("a") // col("b") > 1) | lit(True),  # a division by zero is rejected, not kept
        (col("a") + 1 > 0) & lit(False),
        col("a") > lit(300).cast("i8"),
        col("a") > lit(2**60).cast("timestamp[s]").cast("timestamp[ns]"),
        fs.when(col("a") // col("b") > 1, 7).otherwise(7) > 1,
        fs.when(col("a") // col("b") > 1, col("on")).otherwise(col("a") > 1),
        col("f") + 0.0 > 1.0,  # -0.0 is no neutral element's business
    ],
)
def test_what_decides_about_rejection_stays(tree):
    assert folded(tree) == text(bind(tree, STREAM.schema.to_dict()))


def test_conditions_are_cut_pushed_before_maps_and_not_repeated():
    query = (
        STREAM.query("q")
        .map(s=col("a") + col("b"), unread=col("a") // col("b"))
        .filter((col("s") > 1) & (col("f") > 0.0))
    )
    query = query.project("s", "f").filter(col("f") > 0.0).filter(lit(True))
    plan = optimise(query.window(fs.tumbling("10s")).agg(x=fs.sum("s"), y=fs.max(col("s") * 2)).bound())
    assert [text(step.typed) for step in plan.steps] == ["((a + b) > 1)", "(f > 0.0)"]
    assert [text(aggregate.arg) for aggregate in plan.aggregates] == ["(a + b)", "((a + b) * 2)"]


def test_nothing_is_asked_behind_a_condition_that_never_holds():
    assert filters(col("a") > 1, lit(False), col("a") // col("b") > 1) == ["(a > 1)", "False"]


def test_equal_expressions_become_equal_trees():
    assert filters((col("f") * 2.0 > 1.0) | (2.0 * col("f") == 0.0))[0].count("(f * 2.0)") == 2
    assert folded(col("f") * col("f")) == "(f * f)"
    assert folded(col("on") == lit(True)) == folded(lit(True) == col("on"))


def test_explain_shows_what_is_read_and_what_is_common():
    query = STREAM.query("q").map(s=col("a") * col("b")).filter(col("s") > 1 + lit(1)).window(fs.tumbling("10s"))
    shown = query.agg(n=fs.count(), x=fs.sum("s"), y=fs.max("s")).explain("optimised")
    assert shown == "\n".join(
        [
            "query q, optimised",
            "  read    t, k, a, b (28 of 85 bytes)",
            "  filter  ((a * b) > 2)",
            "  agg     n = count()",
            "  agg     x = sum((a * b))",
            "  agg     y = max((a * b))",
            "  common  (a * b), 3 times, computed once",
        ]
    )


def test_a_query_that_is_not_complete_or_too_large_is_refused():
    with pytest.raises(fs.QueryError, match="not complete"):
        STREAM.query("q").explain("optimised")
    query = STREAM.query("q").map(x=col("a"))
    for _ in range(40):
        query = query.map(x=col("x") + col("x"))
    with pytest.raises(fs.QueryError, match="operations"):
        query.window(fs.tumbling("10s")).agg(x=fs.sum("x")).explain("optimised")


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.sampled_from(["floordiv", "mod"]))
def test_division_is_that_of_the_workers(a, b, op):
    found = evaluate(Typed(op, "i64", (Typed("lit", "i64", value=a), Typed("lit", "i64", value=b))))
    if b == 0 or (a == -(2**63) and b == -1 and op == "floordiv"):
        assert found is None
        return
    quotient = abs(a) // abs(b) * (1 if (a >= 0) == (b >= 0) else -1)
    assert found == (quotient if op == "floordiv" else a - quotient * b)
