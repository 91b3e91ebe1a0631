"""A plan as JSON, version 2: it comes back as it was, and what is wrong with one from elsewhere is said."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexstream as fs
from flexstream import QueryError, col
from flexstream.query.plan.nodes import KINDS, walk
from flexstream.query.plan.serial import MAX_NODES
from tests.property.checks import FUNCTIONS, random_query, random_stream
from tests.unit.query.test_query import FULL, SHOP

GOOD = json.loads(FULL.to_json())
SECOND = {"kind": "tumbling", "size": "1s"}
OTHER = {**SHOP.to_dict(), "name": "b"}
SCAN, FILTER, MAP, _, PROJECT, WINDOW, AGGREGATE, SINK = range(8)


def changed(node: int, **parts: Any) -> Any:
    """The good plan, but for these parts of a node; None: without the part."""
    body = copy.deepcopy(GOOD)
    body["nodes"][node].update(parts)
    body["nodes"][node] = {name: part for name, part in body["nodes"][node].items() if part is not None}
    return body


def test_the_form() -> None:
    query = SHOP.query("q").filter(col("ok")).window(fs.tumbling("1s")).agg(n=fs.count())
    assert query.to_dict() == {
        "version": 2,
        "name": "q",
        "nodes": [
            {"id": 0, "op": "scan", "in": [], "stream": "shop"},
            {"id": 1, "op": "filter", "in": [0], "predicate": ["col", "ok"]},
            {"id": 2, "op": "window", "in": [1], "window": SECOND, "allowed_lateness": "0s"},
            {"id": 3, "op": "aggregate", "in": [2], "keys": ["city", "user"], "aggregates": {"n": ["count"]}},
            {"id": 4, "op": "sink", "in": [3], "to": "results"},
        ],
        "streams": {"shop": SHOP.to_dict()},
        "tables": {},
    }


def test_every_kind_of_node_is_written_with_its_parts() -> None:
    assert {node.op for node in walk(FULL.root)} == set(KINDS)
    for node in GOOD["nodes"]:
        assert set(node) == {"id", "op", "in", *KINDS[node["op"]].parts}


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_come_back(seed: int) -> None:
    rnd = random.Random(seed)
    stream = random_stream(rnd)
    for number in range(5):
        query = random_query(rnd, stream, f"q{number}", rnd.choice((0, 7)), FUNCTIONS)
        again = fs.Query.from_json(query.to_json())
        assert again == query
        assert again.to_json() == query.to_json()
        assert again.explain() == query.explain()
        assert again.bound().result_fields == query.bound().result_fields


def test_ids_are_any_different_numbers_and_tables_may_be_left_out() -> None:
    body = copy.deepcopy(GOOD)
    for node in body["nodes"]:
        node["id"] = 1000 - node["id"]
        node["in"] = [1000 - before for before in node["in"]]
    del body["tables"]
    assert fs.Query.from_dict(body) == FULL


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "must be an object, not None"),
        ([], r"must be an object, not \[\]"),
        ({**GOOD, "version": 3}, "plan version 3, this is 2"),
        ({**GOOD, "version": "2"}, "plan version '2', this is 2"),
        ({**GOOD, "version": None}, "plan version None, this is 2"),
        ({**GOOD, "extra": 1}, "unknown part 'extra'.*\n.*version, name, nodes, streams, tables"),
        ({name: part for name, part in GOOD.items() if name != "streams"}, r"lacks \['streams'\]"),
        ({**GOOD, "name": "a/b"}, "'a/b' cannot be the name of a query"),
        ({**GOOD, "name": None}, "None cannot be the name of a query"),
        ({**GOOD, "nodes": None}, "query 'full': nodes is None"),
        ({**GOOD, "nodes": {}}, "query 'full': nodes is {}"),
        ({**GOOD, "nodes": []}, "nodes has 0 of them"),
        ({**GOOD, "nodes": [3]}, r"nodes\[0\] is 3.*\n.*object"),
        ({**GOOD, "nodes": [{}]}, r"nodes\[0\] lacks \['id', 'op', 'in'\]"),
        ({**GOOD, "nodes": GOOD["nodes"][:1] * 2}, r"nodes\[1\] has the id 0, as a node before it"),
        ({**GOOD, "nodes": GOOD["nodes"][:1] * (MAX_NODES + 1)}, f"nodes has {MAX_NODES + 1} of them"),
        ({**GOOD, "nodes": GOOD["nodes"][::-1]}, r"node 7 \(sink\): in has 6, which is no node before it"),
        ({**GOOD, "tables": {"t": {}}}, "tables is {'t': {}}"),
        ({**GOOD, "tables": []}, r"tables is \[\]"),
        ({**GOOD, "streams": []}, r"streams is \[\]"),
        ({**GOOD, "streams": {}}, r"node 0 \(scan\): stream is 'shop', which `streams` does not define"),
        ({**GOOD, "streams": {"shop": 3}}, r"streams\['shop'\]: "),
        ({**GOOD, "streams": {"shop": {}}}, r"streams\['shop'\]: "),
        ({**GOOD, "streams": {"shop": OTHER}}, r"streams\['shop'\] has the name 'b'"),
        ({**GOOD, "streams": {**GOOD["streams"], "b": OTHER}}, "streams defines 'b', which no"),
        ({**GOOD, "streams": {f"s{i}": {} for i in range(MAX_NODES + 1)}}, f"streams has {MAX_NODES + 1} of them"),
        (changed(SCAN, id=True), r"nodes\[0\] has the id True"),
        (changed(SCAN, id=-1), r"nodes\[0\] has the id -1"),
        (changed(SCAN, id="0"), r"nodes\[0\] has the id '0'"),
        (changed(SCAN, id=2**40), r"nodes\[0\] has the id 1099511627776"),
        (changed(SCAN, **{"in": [0]}), r"node 0 \(scan\): in is \[0\].*\n.*0 inputs"),
        (changed(SCAN, stream=["shop"]), r"node 0 \(scan\): stream is \['shop'\], which"),
        (changed(SCAN, stream="ship"), r"node 0 \(scan\): stream is 'ship'.*\n.*did you mean shop"),
        (changed(FILTER, op="filtre"), r"node 1 has the op 'filtre', which there is not\n.*did you mean filter"),
        (changed(FILTER, op=["filter"]), r"has the op \['filter'\]"),
        (changed(FILTER, op="join"), r"node 1 has the op 'join'"),
        (changed(FILTER, **{"in": [1]}), r"node 1 \(filter\): in has 1, which is no node before it"),
        (changed(FILTER, **{"in": [2]}), r"node 1 \(filter\): in has 2, which is no node before it"),
        (changed(FILTER, **{"in": [True]}), r"node 1 \(filter\): in has True"),
        (changed(FILTER, **{"in": [[]]}), r"node 1 \(filter\): in has \[\]"),
        (changed(FILTER, **{"in": []}), r"node 1 \(filter\): in is \[\].*\n.*1 inputs"),
        (changed(FILTER, **{"in": [0, 0]}), r"node 1 \(filter\): in is \[0, 0\]"),
        (changed(FILTER, **{"in": 0}), r"node 1 \(filter\): in is 0"),
        (changed(FILTER, predicate=None), r"node 1 \(filter\) lacks \['predicate'\]"),
        (changed(FILTER, more=1), r"node 1 \(filter\) has the unknown part 'more'"),
        (changed(FILTER, predicate=3), r"node 1 \(filter\): this is not an expression: 3"),
        (changed(FILTER, predicate=["col", "prise"]), r"node 1 \(filter\): no column 'prise'\n.*did you mean price"),
        (changed(FILTER, predicate=["col", "n"]), r"node 1 \(filter\): a filter must be true or false"),
        (changed(MAP, columns=[]), r"node 2 \(map\): columns is \[\]\n.*an object"),
        (changed(MAP, columns={}), r"node 2 \(map\): map\(\) needs at least one column"),
        (changed(MAP, columns={"x": 3}), r"node 2 \(map\): this is not an expression: 3"),
        (changed(MAP, columns={"user": ["col", "n"]}), r"node 2 \(map\): map\(\) cannot replace 'user'"),
        (changed(MAP, columns={"_x": ["col", "n"]}), r"node 2 \(map\): '_x' cannot be a field name"),
        (changed(PROJECT, columns={}), r"node 4 \(project\): columns is {}\n.*a list of names"),
        (changed(PROJECT, columns=["nope"]), r"no column 'nope' in query 'full', node 4 \(project\)"),
        (changed(PROJECT, columns=[["n"]]), r"no column \['n'\]"),
        (changed(WINDOW, window=3), r"node 5 \(window\): a window must be an object, not 3"),
        (changed(WINDOW, window={"kind": "hop"}), r"node 5 \(window\): unknown window kind 'hop'"),
        (changed(WINDOW, allowed_lateness="soon"), r"node 5 \(window\): .*soon"),
        (changed(WINDOW, allowed_lateness="1us"), r"node 5 \(window\): .* not a whole number of ms"),
        (changed(AGGREGATE, keys=None), r"node 6 \(aggregate\) lacks \['keys'\]"),
        (changed(AGGREGATE, keys="user"), r"node 6 \(aggregate\): keys is 'user'"),
        (changed(AGGREGATE, keys=["n"]), r"node 6 \(aggregate\) cannot be keyed by n: .*re-shuffle"),
        (changed(AGGREGATE, keys=["user", "city"]), r"cannot be keyed by user, city"),
        (changed(AGGREGATE, keys=[{}]), r"cannot be keyed by {}"),
        (changed(AGGREGATE, aggregates=[]), r"node 6 \(aggregate\): aggregates is \[\]"),
        (changed(AGGREGATE, aggregates={}), r"node 6 \(aggregate\): agg\(\) needs at least one"),
        (changed(AGGREGATE, aggregates={"n": ["nope"]}), r"node 6 \(aggregate\): not an aggregate"),
        (changed(AGGREGATE, aggregates={"group": ["count"]}), r"an aggregate cannot be called 'group'"),
        (changed(AGGREGATE, **{"in": [4]}), r"node 6 \(aggregate\) has no window to aggregate over"),
        (changed(SINK, to="nowhere"), r"node 7 \(sink\): to is 'nowhere'"),
        (changed(SINK, to={}), r"node 7 \(sink\): to is {}"),
        (changed(SINK, **{"in": [5]}), r"node 7 \(sink\) has no aggregates"),
        (changed(PROJECT, **{"in": [2]}), r"node 3 \(filter\) is read by no node"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_its_place_and_what_should_be_there(body: Any, said: str) -> None:
    with pytest.raises(QueryError, match=said) as caught:
        fs.Query.from_json(json.dumps(body))
    assert len(caught.value.message) <= 1000


STEP = {"op": "filter", "in": [7], "id": 8, "predicate": ["col", "n"]}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (STEP, r"node 8 \(filter\): filter\(\) comes before the window"),
        ({**STEP, "in": [5]}, r"node 8 \(filter\): filter\(\) comes before the window"),
        ({**STEP, "in": [0]}, r"node 8 \(filter\): a filter must be true"),
        ({**STEP, "in": [0], "predicate": ["col", "ok"]}, r"node 7 \(sink\) is read by no node"),
        ({"id": 8, "op": "window", "in": [6], "window": {"kind": "tumbling", "size": "1s"}, "allowed_lateness": "0s"},
         r"node 8 \(window\) has a window already"),
        ({"id": 8, "op": "aggregate", "in": [6], "keys": ["city", "user"], "aggregates": {"m": ["count"]}},
         r"node 8 \(aggregate\) has aggregates already"),
        ({"id": 8, "op": "sink", "in": [7], "to": "results"}, r"node 8 \(sink\) has no aggregates"),
        ({"id": 8, "op": "scan", "in": [], "stream": "shop"}, r"node 7 \(sink\) is read by no node"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_node_more_that_has_no_place_there_is_refused(node: Any, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        fs.Query.from_json(json.dumps({**GOOD, "nodes": [*GOOD["nodes"], node]}))


def test_as_many_nodes_as_the_longest_query_has_are_read_and_no_more() -> None:
    query = SHOP.query("q")
    for _ in range(256):
        query = query.filter(col("ok"))
    longest = query.window(fs.tumbling("1s")).agg(n=fs.count())
    assert len(longest.to_dict()["nodes"]) == MAX_NODES
    assert fs.Query.from_json(longest.to_json()) == longest
    body = query.to_dict()
    body["nodes"].append({"id": 257, "op": "filter", "in": [256], "predicate": ["col", "ok"]})
    with pytest.raises(QueryError, match="256 steps"):
        fs.Query.from_json(json.dumps(body))


# -- anything at all

JUNK = [None, -1, 0, 3, 2**70, 0.5, "x", "shop", [], {}, [[]], [0], True, ["col", "n"], {"x": ["col", "n"]}]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def paths(node, prefix=()):
    yield prefix
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from paths(child, (*prefix, key))


PATHS = sorted((path for path in paths(GOOD) if path), key=str)


def put(body: Any, path: tuple[Any, ...], value: Any) -> None:
    """Where the path still leads somewhere."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value


def read_or_refuse(body: Any) -> None:
    """A query that is whole, and equal when it comes back; or a QueryError that fits a screen."""
    query, refused = None, None
    try:
        query = fs.Query.from_json(json.dumps(body))
    except QueryError as error:
        refused = error
    if query is None:
        assert refused is not None
        assert len(refused.message) <= 1000
        return
    assert fs.Query.from_json(query.to_json()) == query
    assert query.explain()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(JUNK) | ANYTHING), min_size=1, max_size=3))
def test_parts_replaced_by_junk_give_a_query_or_a_query_error(changes: list[tuple[Any, Any]]) -> None:
    body = copy.deepcopy(GOOD)
    for path, junk in changes:
        put(body, path, junk)
    read_or_refuse(body)


NODES = st.fixed_dictionaries(
    {
        "id": st.integers(0, 9),
        "op": st.sampled_from([*KINDS, "join"]),
        "in": st.lists(st.integers(0, 9), max_size=2),
    },
    optional={
        "stream": st.sampled_from(["shop", "x"]),
        "predicate": st.sampled_from([["col", "ok"], ["col", "n"], 3]),
        "columns": st.sampled_from([["n"], {"x": ["col", "n"]}, {}, []]),
        "window": st.sampled_from([{"kind": "tumbling", "size": "1s"}, {"kind": "tumbling", "size": "1us"}]),
        "allowed_lateness": st.sampled_from(["0s", "1m"]),
        "keys": st.sampled_from([["city", "user"], ["n"]]),
        "aggregates": st.sampled_from([{"n": ["count"]}, {}]),
        "to": st.just("results"),
    },
)


@settings(deadline=None)
@given(st.lists(NODES | st.sampled_from(GOOD["nodes"]), max_size=10))
def test_nodes_in_any_shape_give_a_query_or_a_query_error(nodes: list[Any]) -> None:
    read_or_refuse({**GOOD, "nodes": nodes})


@settings(deadline=None)
@given(ANYTHING)
def test_anything_gives_a_query_error(body: Any) -> None:
    with pytest.raises(QueryError):
        fs.Query.from_json(json.dumps(body))


def test_large_values_are_refused_in_a_few_words() -> None:
    long = "x" * 500_000
    for body in (
        {**GOOD, "name": long},
        {**GOOD, long: 1},
        {**GOOD, "nodes": [0] * 300_000},
        {**GOOD, "nodes": [list(range(100_000))]},
        changed(FILTER, op=long),
        changed(FILTER, predicate=["col", long]),
        changed(PROJECT, columns=[long]),
        changed(AGGREGATE, keys=[long]),
        changed(SINK, to=long),
    ):
        read_or_refuse(body)
