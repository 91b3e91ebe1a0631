"""Nodes of a plan: typed when they are made, with schema and traits, known by name to all who work on them."""

from __future__ import annotations

import pickle

import pytest

import flexstream as fs
from flexstream import QueryError, col
from flexstream.query.expr import Typed
from flexstream.query.plan import nodes
from flexstream.query.plan.bind import PlanError
from flexstream.query.plan.nodes import KINDS, Aggregate, Filter, Map, Project, Scan, Sink, Window, walk
from flexstream.query.plan.traits import ColumnType, Traits
from flexstream.testing import oracle
from tests.unit.query.test_query import FULL, SHOP

SCAN = Scan(SHOP)
HOP = fs.sliding("10s", every="4s")


def counted(node: nodes.Node, lateness_ns: int = 0) -> Aggregate:
    return Aggregate(Window(node, HOP, lateness_ns), SHOP.key, {"n": fs.count(), "dev": fs.stddev("n")})


# -- the registry


def test_every_kind_is_known_by_its_name_to_the_oracle() -> None:
    assert set(oracle.NODES) == set(KINDS)


def test_every_kind_of_node_in_the_module_is_in_the_registry() -> None:
    made = {kind for kind in vars(nodes).values() if isinstance(kind, type) and issubclass(kind, nodes.Node)}
    assert {kind for kind in made if "op" in vars(kind)} == set(KINDS.values())


@pytest.mark.parametrize("node", list(walk(FULL.root)), ids=lambda node: node.op)
def test_every_node_has_schema_traits_parts_and_lines(node: nodes.Node) -> None:
    assert node.schema
    assert isinstance(node.traits, Traits)
    assert tuple(node.body()) == node.parts
    assert len(node.inputs) == node.arity
    assert node.lines()
    assert node.lines()[0] in repr(node)
    again = node.over(*node.inputs)
    assert (again.schema, again.traits, again.body()) == (node.schema, node.traits, node.body())


@pytest.mark.parametrize("node", list(walk(FULL.root)), ids=lambda node: node.op)
def test_nodes_cannot_be_changed(node: nodes.Node) -> None:
    with pytest.raises(AttributeError):
        node.traits = Traits(dist=())  # type: ignore[misc]


def test_walk_gives_every_node_once_behind_its_inputs() -> None:
    order = list(walk(FULL.root))
    assert [node.op for node in order] == [
        "scan", "filter", "map", "filter", "project", "window", "aggregate", "sink",
    ]  # fmt: skip
    assert len({id(node) for node in order}) == len(order)
    assert order[-1] is FULL.root


# -- schema


def test_a_scan_has_the_streams_fields() -> None:
    assert SCAN.types == SHOP.schema.to_dict()
    assert SCAN.layout is SHOP.layout


def test_map_and_project_say_which_columns_there_are() -> None:
    mapped = Map(SCAN, {"n": col("price"), "twice": col("n") * 2, "late": col("at").cast("timestamp[s]")})
    assert mapped.types == {**SCAN.types, "n": "f32", "twice": "i64", "late": "timestamp[s]"}
    assert list(Project(mapped, ("twice", "n", "twice")).schema) == ["at", "user", "city", "n", "twice"]


def test_aggregates_give_windows_keys_and_values_and_the_sink_adds_what_is_known_of_a_result() -> None:
    aggregate = counted(SCAN)
    ms = ColumnType("timestamp[ms]")
    assert dict(aggregate.schema) == {
        "window_start": ms,
        "window_end": ms,
        "city": ColumnType("bytes[4]"),
        "user": ColumnType("i64"),
        "n": ColumnType("i64"),
        "dev": ColumnType("f64", nullable=True),
    }
    added = {name: column.type for name, column in Sink(aggregate).schema.items() if name not in aggregate.schema}
    assert added == {"group": "i32", "revision": "i32", "complete": "bool"}


# -- traits


def test_rows_stay_where_the_streams_key_puts_them_and_keep_their_time() -> None:
    for node in (SCAN, Filter(SCAN, col("ok")), Map(SCAN, {"x": col("n")}), Project(SCAN, ("n",))):
        assert (node.traits.dist, node.traits.time, node.traits.window) == (("city", "user"), "at", None)
        assert node.traits.placed == {"city", "user", "at"}


def test_a_window_is_known_from_there_on_and_results_have_no_time_column() -> None:
    window = Window(SCAN, HOP)
    assert (window.traits.window, window.traits.time) == (HOP, "at")
    aggregate = counted(SCAN)
    assert (aggregate.traits.dist, aggregate.traits.window) == (("city", "user"), HOP)
    assert aggregate.traits.time is None


def test_results_are_revised_where_late_rows_are_allowed() -> None:
    assert SCAN.traits.mode == "append"
    assert counted(SCAN).traits.mode == "append"
    assert counted(SCAN, 1_000_000).traits.mode == "revisions"
    assert Sink(counted(SCAN, 1_000_000)).traits.mode == "revisions"


def test_copies_of_a_column_are_equal_to_it_until_one_is_replaced_or_gone() -> None:
    copied = Map(SCAN, {"a": col("n"), "b": col("n"), "u2": col("user"), "c": col("n") + 0})
    assert copied.traits.equal == {frozenset({"a", "b", "n"}), frozenset({"u2", "user"})}
    replaced = Map(copied, {"a": col("price") * 2, "d": col("b")})
    assert replaced.traits.equal == {frozenset({"b", "d", "n"}), frozenset({"u2", "user"})}
    swapped = Map(copied, {"a": col("price"), "price": col("a")})
    assert swapped.traits.equal == {frozenset({"b", "n"}), frozenset({"u2", "user"})}
    assert Project(replaced, ("d", "u2")).traits.equal == {frozenset({"u2", "user"})}
    assert Project(replaced, ("d", "b")).traits.equal == {frozenset({"b", "d"})}


# -- mistakes show where the node is made


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Filter(SCAN, col("n")), "bad_types"),
        (lambda: Filter(Project(SCAN, ("n",)), col("ok")), "unknown_field"),
        (lambda: Filter(Window(SCAN, HOP), col("ok")), "bad_step"),
        (lambda: Filter(counted(SCAN), col("n") > 1), "bad_step"),
        (lambda: Map(SCAN, {}), "bad_step"),
        (lambda: Map(SCAN, {"user": col("n")}), "needs_reshuffle"),
        (lambda: Project(SCAN, ()), "bad_step"),
        (lambda: Project(SCAN, ("x",)), "unknown_field"),
        (lambda: Window(Window(SCAN, HOP), HOP), "bad_step"),
        (lambda: Window(counted(SCAN), HOP), "bad_step"),
        (lambda: Window(SCAN, fs.tumbling("1us")), "bad_window"),
        (lambda: Aggregate(SCAN, SHOP.key, {"n": fs.count()}), "bad_step"),
        (lambda: Aggregate(counted(SCAN), SHOP.key, {"n": fs.count()}), "bad_step"),
        (lambda: Aggregate(Window(SCAN, HOP), ("user",), {"n": fs.count()}), "needs_reshuffle"),
        (lambda: Aggregate(Window(SCAN, HOP), SHOP.key, {}), "bad_aggregate"),
        (lambda: Aggregate(Window(SCAN, HOP), SHOP.key, {"o": fs.order_hash("n")}), "bad_window"),
        (lambda: Sink(SCAN), "incomplete"),
        (lambda: Sink(Window(SCAN, HOP)), "incomplete"),
        (lambda: Sink(Sink(counted(SCAN))), "incomplete"),
        (lambda: Sink(counted(SCAN), "elsewhere"), "bad_sink"),
    ],
)
def test_a_node_that_makes_no_sense_is_not_made(make, code: str) -> None:
    with pytest.raises(QueryError) as caught:
        make()
    assert caught.value.code == code


def test_a_mistake_is_told_of_the_plan_or_of_the_query_that_has_it() -> None:
    with pytest.raises(PlanError, match=r"^the plan has a window already: sliding 10s every 4s") as caught:
        Window(Window(SCAN, HOP), HOP)
    assert caught.value.of("query 'q'").message == "query 'q' has a window already: sliding 10s every 4s"
    assert pickle.loads(pickle.dumps(caught.value)).to_dict() == caught.value.to_dict()
    with pytest.raises(QueryError, match=r"^query 'q' has a window already") as told:
        SHOP.query("q").window(HOP).window(HOP)
    assert type(told.value) is QueryError
    with pytest.raises(QueryError, match=r"^no column 'x' in query 'q'"):
        SHOP.query("q").project("x")
    with pytest.raises(QueryError, match=r"^query 'q': min_by cannot choose a row by city, which is bytes") as told:
        SHOP.query("q").window(HOP).agg(a=fs.min_by("n", "city"))
    with pytest.raises(QueryError, match=r"^query 'q': no column 'nope'"):
        SHOP.query("q").window(HOP).agg(a=fs.min_by("n", "nope"))


def test_what_a_rewrite_made_is_taken_as_it_is_and_never_written_down() -> None:
    made = Filter(SCAN, Typed("col", "bool", name="ok"))
    assert made.typed is made.expr
    with pytest.raises(AssertionError, match="not written down"):
        made.body()
