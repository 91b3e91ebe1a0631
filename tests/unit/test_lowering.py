"""The lowering: what becomes of a plan before it runs."""

import pytest

import flexstream as fs
from flexstream import col
from flexstream.cython_ext.lowering import FILTER, FILTER_BYTES_EQ, FILTER_BYTES_NE, LOADS, lower

STREAM = fs.Stream(
    "s",
    {"t": "timestamp[s]", "k": "i32", "a": "i64", "b": "i64", "f": "f64", "w": "bytes[4]", "v": "bytes[5]",
     "x": "bytes[9]"},
    key="k", time="t",
)  # fmt: skip


def lowered(query, **aggregates):
    return lower(query.window(fs.tumbling("10s")).agg(**(aggregates or {"n": fs.count()})).bound())


def ops(query, **aggregates):
    return [instruction[0] for instruction in lowered(query, **aggregates).instructions]


def test_counting_computes_nothing():
    plain = lowered(STREAM.query("q"))
    assert plain.instructions == []
    assert plain.registers == 0


def test_equal_expressions_are_computed_once():
    query = STREAM.query("q").map(s=col("a") + col("b"))
    assert len(ops(query, x=fs.sum("s"), y=fs.max("s"), z=fs.min(col("a") + col("b")))) == 3


def test_columns_that_nothing_reads_are_not_computed():
    assert ops(STREAM.query("q").map(s=col("a") // col("b")).project("s")) == []


def test_conjunctions_become_filters_in_order():
    found = ops(STREAM.query("q").filter((col("a") > 1) & (col("b") > 2) & (col("f") > 3.0)))
    assert found.count(FILTER) == 3


def test_short_bytes_compare_as_a_word():
    assert ops(STREAM.query("q").filter(col("w") == b"ab")) == [FILTER_BYTES_EQ]
    assert ops(STREAM.query("q").filter(col("w") != b"ab")) == [FILTER_BYTES_NE]
    assert FILTER_BYTES_EQ not in ops(STREAM.query("q").filter(col("x") == b"ab"))


def test_registers_are_loaded_again_after_a_filter():
    found = ops(STREAM.query("q").filter(col("a") > 1), x=fs.sum("a"))
    assert found.count(LOADS["i64"]) == 2


def test_columns_may_swap_their_names():
    query = STREAM.query("q").map(a=col("b"), b=col("a"))
    loads = lowered(query, x=fs.max("a")).instructions
    assert [instruction[4] for instruction in loads] == [STREAM.schema.field("b").offset]


@pytest.mark.parametrize("n", [32, 33])
def test_too_many_aggregates_are_refused_with_a_hint(n):
    aggregates = {f"x{i}": fs.count() for i in range(n)}
    if n == 32:
        assert len(lowered(STREAM.query("q"), **aggregates).folds) == 32
        return
    with pytest.raises(fs.QueryError) as error:
        lowered(STREAM.query("q"), **aggregates)
    assert error.value.code == "too_complex"


def test_too_many_values_are_refused_with_a_hint():
    tree = col("a")
    for i in range(80):
        tree = tree + (col("b") * i)
    with pytest.raises(fs.QueryError) as error:
        lowered(STREAM.query("q"), x=fs.sum(tree))
    assert error.value.code == "too_complex"
    assert error.value.hint


def test_bytes_of_different_width_are_refused_before_they_run():
    with pytest.raises(fs.QueryError) as error:
        lowered(STREAM.query("q").filter(col("w") == col("v")))
    assert error.value.code == "bad_types"
