"""Queries: built step by step, refused early, the same after a trip through JSON."""

import json
from collections import Counter

import pyarrow as pa
import pytest

import flexstream as fs
from flexstream import FlexStreamError, QueryError, Stream, col
from flexstream.query.plan import nodes
from flexstream.query.plan.nodes import Filter, Map, Project
from flexstream.query.windower import Windower

SHOP = Stream(
    "shop",
    {
        "at": "timestamp[ms]",
        "user": "i64",
        "city": "bytes[4]",
        "price": "f32",
        "n": "i16",
        "u": "u64",
        "ok": "bool",
    },
    key=["city", "user"],
    time="at",
)
FULL = (
    SHOP.query("full")
    .filter((col("price") > 0.5) & col("ok"))
    .map(total=col("price") * col("n"), half=col("n") // 2, copy=col("n"))
    .filter(col("city") != b"")
    .project("total", "half", "copy")
    .window(fs.sliding("10s", every="4s"), allowed_lateness="1m")
    .agg(
        rows=fs.count(),
        total=fs.sum("total"),
        halves=fs.sum("half"),
        low=fs.min("copy"),
        high=fs.max("total"),
        mean=fs.avg(col("half") + 1),
        spread=fs.stddev("copy"),
        last=fs.max("at"),
    )
)


def test_each_step_makes_a_new_query():
    base = SHOP.query("q")
    filtered = base.filter(col("n") > 0)
    assert base.steps == ()
    assert len(filtered.steps) == 1
    assert filtered.window(fs.tumbling("1s")).window_spec == fs.tumbling("1s")
    assert filtered.window_spec is None


def test_bound_query_has_types_and_times_in_units_of_the_time_field():
    bound = FULL.bound()
    assert [type(step) for step in bound.steps] == [Filter, Map, Filter, Project]
    assert bound.windower == Windower(size=10_000, slide=4_000, pane=2_000, lateness=60_000)
    assert [(a.name, a.fn, a.arg.type if a.arg else None) for a in bound.aggregates[:3]] == [
        ("rows", "count", None),
        ("total", "sum", "f64"),
        ("halves", "sum", "i64"),
    ]


def test_result_schema_has_window_key_aggregates_group_and_revision():
    ms = pa.timestamp("ms")
    expected = [
        ("window_start", ms),
        ("window_end", ms),
        ("city", pa.binary(4)),
        ("user", pa.int64()),
        ("rows", pa.int64()),
        ("total", pa.float64()),
        ("halves", pa.int64()),
        ("low", pa.int16()),
        ("high", pa.float64()),
        ("mean", pa.float64()),
        ("spread", pa.float64()),
        ("last", ms),
        ("group", pa.int32()),
        ("revision", pa.int32()),
        ("complete", pa.bool_()),
    ]
    schema = FULL.result_schema()
    assert [(field.name, field.type) for field in schema] == expected
    assert [field.name for field in schema if field.nullable] == ["spread"]


def test_min_and_max_keep_the_type_of_their_argument():
    query = (
        SHOP.query("q")
        .window(fs.tumbling("1s"))
        .agg(a=fs.min("price"), b=fs.max("u"), c=fs.min(col("n") + 0))
    )
    types = dict(query.bound().result_fields)
    assert (types["a"], types["b"], types["c"]) == ("float", "uint64", "int64")
    assert query.result_schema().field("a").type == pa.float32()


def test_json_form_comes_back_and_is_plain_json():
    text = FULL.to_json()
    again = fs.Query.from_json(text)
    assert again == FULL
    assert again.to_json() == text
    assert json.loads(text)["streams"] == {"shop": SHOP.to_dict()}
    incomplete = SHOP.query("q").filter(col("n") > 1)
    assert fs.Query.from_json(incomplete.to_json()) == incomplete


def test_explain_shows_every_part():
    text = FULL.explain()
    for part in (
        "query full",
        "shop",
        "(price > 0.5)",
        "total = (price * n)",
        "project total, half, copy",
        "key     city, user",
        "sliding 10s every 4s",
        "panes of 2s",
        "lateness 1m",
        "spread = stddev(copy)",
        "revision int32",
    ):
        assert part in text, part
    assert "not complete" in SHOP.query("q").explain()


def test_map_columns_all_see_the_row_before_the_step():
    query = SHOP.query("q").map(n=col("price"), was=col("n"))
    assert query.columns["n"] == "f32"
    assert query.columns["was"] == "i16"


def test_project_keeps_key_and_time_and_hides_the_rest():
    query = SHOP.query("q").project("n")
    assert list(query.columns) == ["at", "user", "city", "n"]
    with pytest.raises(QueryError, match="price"):
        query.filter(col("price") > 0)


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda q: q.filter(col("prise") > 1), "unknown_field"),
        (lambda q: q.filter(col("n") + 1), "bad_types"),
        (lambda q: q.filter(True), "bad_expression"),
        (lambda q: q.filter("n > 1"), "bad_expression"),
        (lambda q: q.filter(None), "bad_expression"),
        (lambda q: q.map(), "bad_step"),
        (lambda q: q.map(_x=col("n")), "bad_name"),
        (lambda q: q.map(user=col("n")), "needs_reshuffle"),
        (lambda q: q.map(at=col("n")), "needs_reshuffle"),
        (lambda q: q.map(x=b"constant"), "bad_types"),
        (lambda q: q.map(x=None), "bad_literal"),
        (lambda q: q.project(), "bad_step"),
        (lambda q: q.project("nn"), "unknown_field"),
        (lambda q: q.project(3), "unknown_field"),
        (lambda q: q.project(["n"]), "unknown_field"),
        (lambda q: q.window("10s"), "bad_window"),
        (lambda q: q.window(fs.tumbling("1500us")), "bad_window"),
        (lambda q: q.window(fs.sliding("2ms", every="500us")), "bad_window"),
        (lambda q: q.window(fs.tumbling("1s"), allowed_lateness="1us"), "bad_window"),
        (lambda q: q.window(fs.tumbling("1s"), allowed_lateness="-1s"), "bad_duration"),
        (lambda q: q.window(fs.tumbling("1s")).window(fs.tumbling("1s")), "bad_step"),
        (lambda q: q.window(fs.tumbling("1s")).filter(col("ok")), "bad_step"),
        (lambda q: q.window(fs.tumbling("1s")).map(x=col("n")), "bad_step"),
        (lambda q: q.agg(n=fs.count()), "bad_step"),
        (lambda q: q.window(fs.tumbling("1s")).agg(), "bad_aggregate"),
        (lambda q: q.window(fs.tumbling("1s")).agg(n=3), "bad_aggregate"),
        (lambda q: q.window(fs.tumbling("1s")).agg(n=fs.count), "bad_aggregate"),
        (lambda q: q.window(fs.tumbling("1s")).agg(user=fs.count()), "bad_name"),
        (lambda q: q.window(fs.tumbling("1s")).agg(group=fs.count()), "bad_name"),
        (lambda q: q.window(fs.tumbling("1s")).agg(window_start=fs.count()), "bad_name"),
        (lambda q: q.window(fs.tumbling("1s")).agg(_n=fs.count()), "bad_name"),
        (lambda q: q.window(fs.tumbling("1s")).agg(x=fs.sum("city")), "bad_types"),
        (lambda q: q.window(fs.tumbling("1s")).agg(x=fs.max("ok")), "bad_types"),
        (lambda q: q.window(fs.tumbling("1s")).agg(x=fs.sum("at")), "bad_types"),
        (lambda q: q.window(fs.tumbling("1s")).agg(x=fs.sum("nothing")), "unknown_field"),
        (lambda q: q.window(fs.tumbling("1s")).agg(x=fs.count()).agg(y=fs.count()), "bad_step"),
        (lambda q: q.bound(), "incomplete"),
        (lambda q: q.window(fs.tumbling("1s")).bound(), "incomplete"),
        (lambda q: q.key_by("n"), "needs_reshuffle"),
        (lambda q: q.key_by(), "needs_reshuffle"),
    ],
)
def test_steps_that_cannot_work_are_refused_where_they_are_written(build, code):
    with pytest.raises(FlexStreamError) as caught:
        build(SHOP.query("q"))
    assert caught.value.code == code


def test_key_by_the_streams_own_key_is_no_change_and_another_says_re_shuffle():
    query = SHOP.query("q")
    assert query.key_by("city", "user") is query
    with pytest.raises(QueryError, match="needs a re-shuffle"):
        query.key_by("n")


@pytest.mark.parametrize("name", ["", "a/b", "../q", None, 3, "x" * 65])
def test_query_names_follow_the_rules_of_files(name):
    with pytest.raises(QueryError):
        SHOP.query(name)


def test_columns_and_aggregates_may_be_called_self():
    query = SHOP.query("q").map(self=col("n")).window(fs.tumbling("1s")).agg(self=fs.max("self"))
    assert dict(query.bound().result_fields)["self"] == "int16"
    assert fs.Query.from_json(query.to_json()) == query


def test_unknown_fields_list_near_matches():
    with pytest.raises(QueryError, match="did you mean price") as caught:
        SHOP.query("q").filter(col("prise") > 1)
    assert "'q'" in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"x"', "[" * 100_000, "{}", " " * (2 << 20), b"\xff\xfe{", '{"name": NaN}'],
    ids=lambda text: str(text[:8]),
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(FlexStreamError):
        fs.Query.from_json(text)


def test_plans_too_large_are_refused():
    many = SHOP.query("q")
    with pytest.raises(QueryError, match="256 steps"):  # noqa: PT012
        for _ in range(257):
            many = many.filter(col("ok"))
    with pytest.raises(QueryError, match="1024 columns"):
        SHOP.query("q").map(**{f"x{i}": col("n") for i in range(1020)})
    with pytest.raises(QueryError, match="256 aggregates"):
        SHOP.query("q").window(fs.tumbling("1s")).agg(**{f"x{i}": fs.count() for i in range(257)})


def test_a_long_list_of_alternatives_works():
    membership = col("n") == 0
    for value in range(1, 200):
        membership = membership | (col("n") == value)
    query = SHOP.query("q").filter(membership)
    assert fs.Query.from_json(query.to_json()) == query


def test_each_step_of_a_plan_is_typed_a_few_times_and_not_once_per_step_after_it(monkeypatch):
    typed = Counter()
    real = nodes.bind_expression

    def count(tree, columns):
        typed[repr(tree)] += 1
        return real(tree, columns)

    monkeypatch.setattr(nodes, "bind_expression", count)
    query = SHOP.query("q")
    for number in range(100):
        query = query.map(**{f"y{number}": col("n") + number})
    query = query.filter(col("y99") > 0).window(fs.tumbling("1s")).agg(n=fs.count())
    read = fs.Query.from_json(query.to_json())
    read.bound()
    assert read.columns == query.columns
    assert len(typed) == 100
    assert max(typed.values()) < 20
