"""Rewrites of a plan: each by itself does what it says, and leaves results, rejected and filtered rows as they were."""

from __future__ import annotations

import random

import pytest

import flexstream as fs
from flexstream import col, lit
from flexstream.compile.codegen import generate
from flexstream.compile.lowering import lower
from flexstream.engine import engine as engine_module
from flexstream.query.plan.explain import text
from flexstream.query.plan.nodes import Filter, Node, Sink, walk
from flexstream.query.plan.rewrite import RULES, drop_repeats, fold_constants, optimise, split_conditions, write_out
from flexstream.query.plan.stages import BoundQuery
from tests.property.checks import assert_conserved, random_case

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "a": "i64", "b": "i64", "on": "bool"}, key="k", time="t")
HEAD = [RULES[:number] for number in range(len(RULES) + 1)]


def rewritten(query: fs.Query, *rules: object) -> Node:
    root: Node = query.bound().root
    for rule in rules:
        root = rule(root)  # type: ignore[operator]
    return root


def filters(root: Node) -> list[str]:
    return [text(node.typed) for node in walk(root) if isinstance(node, Filter)]


def arguments(root: Node) -> list[str]:
    assert isinstance(root, Sink)
    return [text(tree) for aggregate in root.input.bound for tree in aggregate.args]


def counting(query: fs.Query, **aggregates: fs.Aggregate) -> fs.Query:
    return query.window(fs.tumbling("10s")).agg(n=fs.count(), **aggregates)


def test_write_out_leaves_no_map_and_no_projection() -> None:
    query = STREAM.query("q").map(c=col("a") + col("b"), d=-col("a")).filter(col("c") > 1)
    query = query.map(c=col("c") * 2, a=col("b")).project("a", "c", "d")
    root = rewritten(counting(query, x=fs.sum("c"), y=fs.min_by("a", "c"), z=fs.max("d")), write_out)
    assert [node.op for node in walk(root)] == ["scan", "filter", "window", "aggregate", "sink"]
    assert filters(root) == ["((a + b) > 1)"]
    assert arguments(root) == ["((a + b) * 2)", "b", "((a + b) * 2)", "-a"]


def test_fold_constants_decides_what_constants_decide() -> None:
    query = STREAM.query("q").filter((col("a") > lit(2) * 3) & (lit(1) < 2))
    root = rewritten(counting(query, x=fs.sum(col("a") + 0)), write_out, fold_constants)
    assert (filters(root), arguments(root)) == (["(a > 6)"], ["a"])


def test_split_conditions_cuts_at_each_and_also_past_the_limit_of_steps() -> None:
    query = STREAM.query("q").filter((col("a") > 1) & ((col("b") > 2) & col("on")))
    assert filters(rewritten(counting(query), split_conditions)) == ["(a > 1)", "(b > 2)", "on"]
    many = STREAM.query("many")
    for number in range(0, 400, 2):
        many = many.filter((col("a") > number) & (col("a") > number + 1))
    assert len(filters(optimise(counting(many).bound()).root)) == 400


def test_drop_repeats_keeps_what_is_new_and_nothing_behind_false() -> None:
    query = STREAM.query("q").filter(col("on")).filter(lit(True)).filter(col("on")).filter(col("a") > 1)
    assert filters(rewritten(counting(query), drop_repeats)) == ["on", "(a > 1)"]
    never = STREAM.query("q").filter(col("on")).filter(lit(False)).filter(col("a") > 1)
    assert filters(rewritten(counting(never), drop_repeats)) == ["on", "False"]


@pytest.mark.parametrize("rules", HEAD, ids=lambda rules: "+".join(rule.__name__ for rule in rules) or "none")
def test_schema_and_traits_of_the_results_stay(rules: tuple[object, ...]) -> None:
    query = STREAM.query("q").map(c=col("a") + 1).filter((col("c") > 1) & col("on"))
    query = query.window(fs.tumbling("10s"), allowed_lateness="5s").agg(n=fs.count(), d=fs.stddev("c"))
    root = rewritten(query, *rules)
    assert (root.schema, root.traits) == (query.root.schema, query.root.traits)
    assert filters(query.root) == ["((c > 1) & on)"]  # the query's own plan is never changed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rules", HEAD, ids=lambda rules: "+".join(rule.__name__ for rule in rules) or "none")
def test_every_rewrite_gives_what_the_oracle_gives(rules, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(random.Random(seed), max_rows=120)

    def only(bound: BoundQuery) -> BoundQuery:
        root = rewritten(bound.query, *rules)
        assert isinstance(root, Sink)
        return BoundQuery(bound.query, root)

    monkeypatch.setattr(engine_module, "optimise", only)
    with fs.Engine(workers=1, groups=8, compile="off") as engine:
        for query in case.queries:
            engine.submit(query)
        engine.feed(case.stream.name, case.rows)
        engine.finish()
        assert_conserved(engine, case)


def test_pipelines_know_rows_by_their_layout_alone() -> None:
    """The same C and the same program whatever stream the rows are of, but for its name in a comment."""
    other = fs.Stream("other", STREAM.schema, key="k", time="t", max_disorder="9s", max_future="off")
    built = [counting(stream.query("q").filter(col("a") > 1), x=fs.sum("b")) for stream in (STREAM, other)]
    one, two = (optimise(query.bound()) for query in built)
    assert lower(one) == lower(two)
    assert generate(one) == generate(two).replace("over stream other", "over stream s")
