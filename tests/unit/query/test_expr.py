"""Expressions: trees from operators, types from binding, JSON there and back."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexstream import QueryError, col, hash, lit, when
from flexstream.query.expr import CASTS, MAX_DEPTH, PARTS, Literal, bind, from_json, same, to_json

FIELDS = {
    "i": "i32",
    "big": "i64",
    "u": "u64",
    "f": "f32",
    "d": "f64",
    "ok": "bool",
    "t": "timestamp[ms]",
    "tag": "bytes[4]",
    "wide": "bytes[8]",
}


def kind(expr):
    return bind(expr, FIELDS).type


def test_operators_build_the_tree_that_was_written():
    tree = (col("i") + 1 > 2 * col("big")) & ~col("ok") | (col("tag") == "ab")
    assert str(tree) == "((((i + 1) > (2 * big)) & ~ok) | (tag == b'ab'))"
    assert str(-col("i") % 3 // 2 - abs(col("d")).cast("i64")) == "(((-i % 3) // 2) - cast(abs(d) as i64))"
    assert str(1 / col("i") - (5 - col("i"))) == "((1 / i) - (5 - i))"
    assert str(7 // col("i") + 7 % col("i")) == "((7 // i) + (7 % i))"


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (col("i") + 1, "i64"),
        (col("i") + 1.0, "f64"),
        (col("u") * col("big"), "i64"),
        (col("i") / 2, "f64"),
        (col("big") // 2, "i64"),
        (col("big") % 2, "i64"),
        (col("f") - col("i"), "f64"),
        (col("t"), "timestamp[ms]"),
        (col("t") - 5 < col("big"), "bool"),
        (col("d") >= 3, "bool"),
        (col("tag") == b"x", "bool"),
        (col("tag") != col("wide"), "bool"),
        (col("ok") == True, "bool"),  # noqa: E712
        (col("ok") & (col("i") > 0), "bool"),
        (~col("ok"), "bool"),
        (-col("f"), "f64"),
        (abs(col("i")), "i64"),
        (col("ok").cast("i64") + 1, "i64"),
        (col("d").cast("i64"), "i64"),
        (col("t").year(), "i64"),
        (col("t").cast("timestamp[us]"), "timestamp[us]"),
        (col("t").cast("timestamp[us]").cast("timestamp[ms]"), "timestamp[ms]"),
        (col("t").cast("i64"), "i64"),
        (col("t") + 1, "i64"),
        (col("big").cast("timestamp[ns]"), "timestamp[ns]"),
        (col("d").cast("u8"), "u8"),
        (col("i").cast("i64"), "i64"),
        (col("f").cast("f64"), "f64"),
        (col("f").cast("f32"), "f32"),
        (col("ok").cast("i16"), "i16"),
        (hash("i", "tag", col("t")), "i32"),
        (col("tag").startswith("ab"), "bool"),
        (when(col("ok"), col("i")).otherwise(col("i")), "i32"),
        (when(col("ok"), col("i")).otherwise(1), "i64"),
        (when(col("ok"), col("t")).otherwise(col("t")), "timestamp[ms]"),
        (when(col("ok"), col("t")).otherwise(0), "i64"),
        (when(col("ok"), 1).when(col("i") > 1, 0.5).otherwise(2), "f64"),
        (when(col("ok"), col("i") > 1).otherwise(False), "bool"),
        (lit(3), "i64"),
        (lit(np.float32(0.5)), "f64"),
        (lit(np.bool_(True)), "bool"),
        (lit("x"), "bytes"),
    ],
    ids=str,
)
def test_types_follow_from_the_operands(expr, expected):
    assert bind(expr, FIELDS).field_type == expected


def test_both_sides_of_an_operator_get_one_type():
    typed = bind(col("i") + col("d"), FIELDS)
    assert [arg.type for arg in typed.args] == ["f64", "f64"]
    assert (typed.args[0].op, typed.args[0].args[0].name) == ("cast", "i")
    division = bind(col("i") / 2, FIELDS)
    assert [arg.type for arg in division.args] == ["f64", "f64"]
    assert division.args[1].value == 2.0
    assert isinstance(division.args[1].value, float)


def test_byte_constants_are_padded_to_the_field():
    typed = bind(col("tag") == b"ab\0", FIELDS)
    assert typed.args[1].value == b"ab\0\0"
    assert typed.args[0].size == typed.args[1].size == 4
    flipped = bind(lit(b"ab") == col("wide"), FIELDS)
    assert flipped.args[0].value == b"ab".ljust(8, b"\0")


def test_a_byte_constant_that_can_never_be_equal_is_refused():
    with pytest.raises(QueryError, match="5 bytes, but tag holds 4"):
        bind(col("tag") == b"views", FIELDS)


@pytest.mark.parametrize(
    "expr",
    [
        col("tag") + 1,
        col("tag") < b"x",
        col("tag") == 3,
        col("ok") + 1,
        col("ok") < True,
        col("ok") == 1,
        col("i") & col("ok"),
        ~col("i"),
        -col("ok"),
        abs(col("tag")),
        col("d") % 2,
        col("i") // 2.0,
        col("tag").cast("i64"),
        (col("i") > 1) > 2,
        col("i").year(),
        col("d").hour(),
        (col("t") + 1).second(),
        col("tag").day(),
        col("d").cast("timestamp[s]"),
        col("tag").cast("timestamp[s]"),
        col("ok").cast("timestamp[s]"),
        col("i").startswith(b"x"),
        col("tag") + col("tag").startswith(b"x"),
        hash("u"),
        hash(col("big").cast("u64")),
        when(col("i"), 1).otherwise(2),
        when(col("ok"), col("tag")).otherwise(b"x"),
        when(col("ok"), True).otherwise(2),
        when(col("ok"), col("t")).otherwise(col("t").cast("timestamp[s]")),
    ],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused_with_a_hint(expr):
    with pytest.raises(QueryError) as caught:
        bind(expr, FIELDS)
    assert caught.value.code == "bad_types"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("expr", "message", "hint"),
    [
        (col("i").year(), "year() does not work on i32 (i)", "timestamp[ms]"),
        (hash("u"), "hash() does not work on u64 (u)", "cast('i64')"),
        (col("tag").startswith(b"views"), "the prefix b'views' has 5 bytes, but tag holds 4", "at most 4"),
        (when(col("i"), 1).otherwise(2), "the condition of when() must be true or false, but it is i32", "compare"),
        (when(col("ok"), col("tag")).otherwise(1), "when() does not work on bytes[4] and i64 (tag)", "numbers"),
    ],
    ids=str,
)
def test_errors_name_what_they_are_about_and_the_way_out(expr, message, hint):
    with pytest.raises(QueryError) as caught:
        bind(expr, FIELDS)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_conditionals_are_written_in_a_chain_that_ends_with_otherwise():
    tree = when(col("i") > 1, 1).when(col("ok"), col("i")).otherwise(-1)
    assert str(tree) == "when((i > 1), 1).when(ok, i).otherwise(-1)"
    assert to_json(tree)[0] == "when"
    assert len(to_json(tree)) == 6
    for half in (when(col("ok"), 1), when(col("ok"), 1).when(col("ok"), 2)):
        for use in (lambda half=half: lit(half), lambda half=half: col("i") + half, lambda half=half: hash(half)):
            with pytest.raises(QueryError) as caught:
                use()
            assert caught.value.hint == "add .otherwise(value)"


def test_a_prefix_is_a_constant_without_its_padding():
    assert bind(col("tag").startswith(b"ab\0\0\0\0"), FIELDS).args[1].value == b"ab"
    assert bind(col("tag").startswith(b""), FIELDS).value is True
    assert bind(lit(b"ab").startswith(b"abc"), FIELDS).op == "startswith"
    with pytest.raises(QueryError, match="takes a constant"):
        bind(from_json(["startswith", ["col", "tag"], ["col", "wide"]]), FIELDS)
    with pytest.raises(QueryError):
        col("tag").startswith(None)


def test_casts_that_cannot_be_name_those_that_can():
    for bad in ("bool", "bytes[4]", "int", "timestamp", "timestamp[h]", 3, None):
        with pytest.raises(QueryError) as caught:
            col("i").cast(bad)
        assert repr(bad) in caught.value.message
        assert "u16" in caught.value.hint
        assert "timestamp[ms]" in caught.value.hint
    with pytest.raises(QueryError, match="cannot cast i to 'i9'"):
        from_json(["cast", ["col", "i"], "i9"])


def test_a_cast_that_holds_every_value_checks_nothing():
    assert bind(col("i").cast("i64"), FIELDS).op == "col"
    assert bind(col("ok").cast("u8"), FIELDS).op == "cast"
    assert bind(col("t").cast("timestamp[ms]"), FIELDS).op == "col"
    assert bind(col("i").cast("i16"), FIELDS).op == "fit_i16"
    assert bind(col("i").cast("i16").cast("i32"), FIELDS).op == "fit_i16"


def test_long_chains_are_refused_like_deep_nesting():
    cases = when(col("i") == 0, 0)
    for i in range(1, MAX_DEPTH + 1):
        cases = cases.when(col("i") == i, i)
    for tree in (cases.otherwise(1), hash(*["i"] * (MAX_DEPTH + 1))):
        with pytest.raises(QueryError, match="deep"):
            bind(tree, FIELDS)


def test_a_hash_is_of_something():
    with pytest.raises(QueryError) as caught:
        hash()
    assert caught.value.hint
    assert str(hash("i", 3, col("t").day())) == "hash(i, 3, day(t))"


def test_unknown_columns_suggest_near_ones():
    with pytest.raises(QueryError, match="did you mean wide") as caught:
        bind(col("wdie") == b"", FIELDS)
    assert caught.value.code == "unknown_field"


def test_python_and_or_not_raise_and_say_what_to_write():
    for attempt in (
        lambda: col("i") > 1 and col("i") < 3,
        lambda: col("i") > 1 or col("ok"),
        lambda: not col("ok"),
        lambda: 1 < col("i") < 3,
        lambda: col("i") in [1, 2],
        lambda: bool(col("ok")),
    ):
        with pytest.raises(TypeError, match="write & for and"):
            attempt()
    with pytest.raises(TypeError, match="not a sequence"):
        list(col("i"))


@pytest.mark.parametrize("bad", [None, [], {}, object(), 1j, 2**63, -(2**63) - 1, np.datetime64("2024")])
def test_constants_that_no_row_can_hold_are_refused(bad):
    with pytest.raises(QueryError) as caught:
        lit(bad)
    assert caught.value.code == "bad_literal"


def test_col_wants_a_name():
    with pytest.raises(TypeError, match="name"):
        col(3)


LEAVES = (
    st.sampled_from(sorted(FIELDS)).map(col)
    | st.integers(-(2**63), 2**63 - 1).map(lit)
    | st.floats().map(lit)
    | st.booleans().map(lit)
    | st.binary(max_size=9).map(lit)
)


def grow(children):
    pairs = st.tuples(children, children)
    return (
        pairs.map(lambda p: p[0] + p[1])
        | pairs.map(lambda p: p[0] == p[1])
        | pairs.map(lambda p: p[0] & p[1])
        | pairs.map(lambda p: p[0] % p[1])
        | pairs.map(lambda p: p[0] / p[1])
        | pairs.map(lambda p: p[0] < p[1])
        | children.map(lambda c: ~c)
        | children.map(abs)
        | children.map(lambda c: c.cast("f64"))
        | st.tuples(children, st.sampled_from(CASTS)).map(lambda p: p[0].cast(p[1]))
        | st.tuples(children, st.sampled_from(PARTS)).map(lambda p: getattr(p[0], p[1])())
        | st.tuples(children, st.binary(max_size=9)).map(lambda p: p[0].startswith(p[1]))
        | st.lists(children, min_size=1, max_size=3).map(lambda values: hash(*values))
        | st.tuples(children, children, children).map(lambda p: when(p[0], p[1]).otherwise(p[2]))
        | st.tuples(children, children).map(lambda p: when(p[0], 1).when(p[1], p[0]).otherwise(2.5))
    )


@settings(deadline=None)
@given(st.recursive(LEAVES, grow, max_leaves=12))
def test_json_comes_back_and_binding_gives_a_type_or_a_query_error(tree):
    text = json.dumps(to_json(tree), allow_nan=False)
    assert same(from_json(json.loads(text)), tree)
    assert str(tree)
    with contextlib.suppress(QueryError):
        assert kind(tree) in ("i64", "f64", "bool", "bytes")


@pytest.mark.parametrize(
    "body",
    [
        None,
        3,
        "col",
        [],
        ["col"],
        ["col", 3],
        ["lit"],
        ["lit", None],
        ["lit", "x"],
        ["lit", 2**63],
        ["lit", [1]],
        ["bytes", "!"],
        ["bytes", "é"],
        ["bytes", 3],
        ["float", "1"],
        ["pow", ["lit", 1], ["lit", 2]],
        {"col": "x"},
        ["add", ["lit", 1]],
        ["not"],
        ["cast", ["lit", 1], "i9"],
        ["cast", ["lit", 1]],
        [["col", "x"]],
        ["__class__", 1],
        ["hash"],
        ["hash", 3],
        ["when", ["lit", True], ["lit", 1]],
        ["when", ["lit", True], ["lit", 1], ["lit", True], ["lit", 1]],
        ["when", ["lit", True]],
        ["year"],
        ["year", ["col", "t"], ["lit", 1]],
        ["century", ["col", "t"]],
        ["startswith", ["col", "tag"]],
        ["startswith", ["col", "tag"], "ab"],
        ["if", ["lit", True], ["lit", 1], ["lit", 2]],
        ["fit_i8", ["lit", 1]],
        ["floor", ["lit", 1], ["lit", 0]],
        ["hash_int", ["lit", 1], ["lit", 0]],
    ],
)
def test_bad_json_is_refused(body):
    with pytest.raises(QueryError):
        from_json(body)


def test_endless_nesting_is_refused_and_not_a_crash():
    deep = ["lit", True]
    for _ in range(MAX_DEPTH + 1):
        deep = ["not", deep]
    with pytest.raises(QueryError, match="deep"):
        from_json(deep)
    tree = lit(True)
    for _ in range(MAX_DEPTH + 1):
        tree = ~tree
    with pytest.raises(QueryError, match="deep"):
        bind(tree, FIELDS)


def test_nodes_are_immutable_and_usable_in_sets():
    node = Literal(1)
    with pytest.raises(AttributeError):
        node.value = 2
    assert len({node, node, lit(1)}) == 2
