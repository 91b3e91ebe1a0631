"""The lowering: what becomes of a plan before it runs."""

import random

import pytest

import flexstream as fs
from flexstream import col
from flexstream.compile import registers
from flexstream.compile.lowering import LOADS, lower
from flexstream.compile.registers import allocate, reads
from flexstream.cython_ext.expressions.program import Op
from flexstream.query.analysis import can_fail
from flexstream.query.expr import bind

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
    assert found.count(Op.FILTER) == 3


def test_short_bytes_compare_as_a_word():
    assert ops(STREAM.query("q").filter(col("w") == b"ab")) == [Op.FILTER_BYTES_EQ]
    assert ops(STREAM.query("q").filter(col("w") != b"ab")) == [Op.FILTER_BYTES_NE]
    assert Op.FILTER_BYTES_EQ not in ops(STREAM.query("q").filter(col("x") == b"ab"))


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
        tree = col("b") * i + tree
    with pytest.raises(fs.QueryError) as error:
        lowered(STREAM.query("q"), x=fs.sum(tree))
    assert error.value.code == "too_complex"
    assert error.value.hint


def test_bytes_of_different_width_are_compared_with_their_padding():
    for tree in (col("w") == col("v"), col("v") == col("w")):
        (compare, _) = lowered(STREAM.query("q").filter(tree)).instructions
        w, v = STREAM.schema.field("w"), STREAM.schema.field("v")
        assert (compare[0], compare[3], *compare[4:7]) == (Op.BYTES_EQ_FIELD, 1, w.offset, 4, v.offset)


def test_a_prefix_compares_as_a_word_whatever_the_field_is_wide():
    assert ops(STREAM.query("q").filter(col("x").startswith(b"ab"))) == [Op.FILTER_BYTES_EQ]
    (found,) = lowered(STREAM.query("q").filter(col("x").startswith(b"ab"))).instructions
    assert found[5:7] == (2, int.from_bytes(b"ab", "little"))
    assert Op.FILTER_BYTES_EQ not in ops(STREAM.query("q").filter(col("x").startswith(b"123456789")))


def test_registers_are_free_again_behind_the_last_reader():
    tree = col("a")
    for i in range(150):
        tree = tree + (col("b") * i)
    found = lowered(STREAM.query("q").filter(tree > 0).filter(tree < 9), x=fs.sum(tree), y=fs.max("f"))
    assert found.registers <= 6


def test_values_keep_their_register_until_they_were_read():
    """Played through: every value has one writer, and is in its place when it is read."""
    rnd = random.Random(3)
    some = [
        Op.LOAD_I64, Op.CONSTANT, Op.ADD_I, Op.NEG_I, Op.EQ_I, Op.BAD_SAVE, Op.SELECT, Op.FIT, Op.HASH_LONG,
        Op.HASH_BYTES,
    ]  # fmt: skip
    for _ in range(300):
        code, ended = [], []
        for value in range(rnd.randint(1, 40)):
            a, b, c = (rnd.randrange(value) if value else 0 for _ in range(3))
            op = rnd.choice(some) if value else Op.LOAD_I64
            code.append((op, value, a, b, 0, c, value, None))
            if value and rnd.random() < 0.2:
                code.append((Op.BAD_MASK, 0, a, b, 0, 0, 0, None))
        ended = rnd.sample(range(value + 1), rnd.randint(1, value + 1))
        made, places, used = allocate(code, ended)
        held: dict[int, int] = {}
        for before, after in zip(code, made, strict=True):
            assert [held[place] for place in reads(after)] == list(reads(before))
            if before[0] != Op.BAD_MASK:
                assert after[1] not in reads(after)
                held[after[1]] = before[1]
        assert [held[place] for place in places] == ended
        assert max(held) < used


def test_of_every_instruction_it_is_known_which_registers_it_reads():
    kinds = (registers.NONE, registers.ONE, registers.TWO, {Op.SELECT, Op.HASH_BYTES})
    assert sorted(op for kind in kinds for op in kind) == sorted(Op)
    assert set(Op) > registers.NO_RESULT


def test_a_division_by_a_constant_cannot_fail():
    schema = STREAM.schema
    fields = schema.to_dict()
    assert not can_fail(bind(col("a") // 7, fields), schema)
    assert not can_fail(bind(col("a") % -7, fields), schema)
    assert can_fail(bind(col("a") // -1, fields), schema)
    assert can_fail(bind(col("a") % 0, fields), schema)


@pytest.mark.parametrize(
    ("tree", "fails"),
    [
        (col("t").year(), False),
        (col("t").second(), False),
        (fs.hash("a", "w", col("f")), False),
        (fs.hash("t"), True),  # seconds may have no microseconds
        (fs.when(col("a") > 1, col("b")).otherwise(3), False),
        (fs.when(col("a") // col("b") > 1, col("b")).otherwise(3), True),
        (fs.when(col("a") > 1, col("b") * 2).otherwise(3), True),
        (col("a").cast("i32"), True),
        (col("k").cast("i64"), False),
        (col("a").cast("f32"), False),
        (col("f").cast("i64"), True),
        (col("t").cast("timestamp[ms]"), True),
        (col("a").cast("timestamp[ms]").cast("timestamp[s]"), False),
    ],
    ids=str,
)
def test_what_may_lack_a_value_is_known(tree, fails):
    assert can_fail(bind(tree, STREAM.schema.to_dict()), STREAM.schema) == fails
