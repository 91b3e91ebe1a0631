"""Plans of version 1, as the code of that time wrote them (the files in version_1), are read and become nodes.

fingerprints.json has what result logs of that time know their queries by.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexstream as fs
from flexstream import FlexStreamError, QueryError, col
from flexstream.daemon.catalog import Catalog
from flexstream.query.plan import serial
from flexstream.results.query_logs import plan_of
from flexstream.testing.ysb import YSB_QUERY
from tests.unit.query.test_query import FULL

STORED = Path(__file__).parent / "version_1"
FINGERPRINTS = json.loads((STORED / "fingerprints.json").read_text())
GOOD = json.loads((STORED / "full.json").read_text())
SHOP = fs.Stream.from_dict(GOOD["stream"])
stored = pytest.mark.parametrize("name", FINGERPRINTS)


def read(name: str) -> fs.Query:
    return fs.Query.from_json((STORED / f"{name}.json").read_bytes())


@stored
def test_a_stored_plan_is_read_and_written_as_version_2(name: str) -> None:
    assert json.loads((STORED / f"{name}.json").read_text())["version"] == 1
    query = read(name)
    assert query.name == name
    assert query.to_dict()["version"] == 2
    assert fs.Query.from_json(query.to_json()) == query


@stored
def test_result_logs_of_that_time_know_the_query_again(name: str) -> None:
    query = read(name)
    assert plan_of(query) == FINGERPRINTS[name]
    assert plan_of(fs.Query.from_json(query.to_json())) == FINGERPRINTS[name]


def test_a_stored_plan_is_the_same_query_as_one_written_today() -> None:
    assert read("ysb") == YSB_QUERY
    windowed = SHOP.query("windowed").map(twice=col("n") * 2).window(fs.tumbling("10s"), allowed_lateness="5s")
    assert read("windowed") == windowed
    assert read("unfinished") == SHOP.query("unfinished").filter(col("n") > 1)
    longest = SHOP.query("longest")
    for number in range(256):
        longest = longest.filter(col("n") > number)
    assert read("longest") == longest.window(fs.tumbling("1s")).agg(n=fs.count())
    slack = {**FULL.to_dict(), "streams": {"shop": {**FULL.stream.to_dict(), "max_disorder": "2s"}}}
    assert read("full") == fs.Query.from_dict(slack)


def test_a_stored_plan_runs() -> None:
    query = read("odd")
    rows = np.zeros(50, query.stream.schema.dtype)
    rows["city"], rows["n"], rows["ok"] = b"bern", np.arange(50) % 7, True
    with fs.Engine(workers=1, groups=4, compile="off") as engine:
        engine.submit(query)
        engine.feed("shop", rows)
        engine.finish()
        found = [row for batch in engine.results("odd") for row in batch.to_pylist()]
    expected = fs.testing.run(query, rows).windows
    assert [row["n"] for row in found] == [values["n"] for values in expected.values()] == [50]
    assert found[0]["first"] == expected[0, (b"bern", 0)]["first"]


def test_a_catalog_of_that_time_is_read(tmp_path: Path) -> None:
    (tmp_path / "catalog.json").write_bytes((STORED / "catalog.json").read_bytes())
    catalog = Catalog(tmp_path)
    assert catalog.queries == {name: read(name) for name in ("full", "odd", "ysb")}
    assert catalog.groups == 16
    catalog.write()
    assert Catalog(tmp_path).queries == catalog.queries


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": 3},
        {"version": None},
        {"name": "a/b"},
        {"name": None},
        {"stream": None},
        {"stream": {}},
        {"stream": "shop"},
        {"steps": None},
        {"steps": {}},
        {"steps": [["filter"]]},
        {"steps": [["explode", 1]]},
        {"steps": [["map", []]]},
        {"steps": [["map", {"x": 3}]]},
        {"steps": [["project", ["nope"]]]},
        {"steps": [["project", [["n"]]]]},
        {"steps": [3]},
        {"steps": [["filter", ["col", "ok"]]] * 257},
        {"window": {"kind": "tumbling"}},
        {"window": 3},
        {"window": None},
        {"allowed_lateness": None},
        {"allowed_lateness": "soon"},
        {"aggregates": []},
        {"aggregates": {"n": ["count", 1]}},
        {"aggregates": {"n": ["no_such", ["col", "half"]]}},
        {"aggregates": {"": ["count"]}},
        {"extra": 1},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_plan_from_elsewhere_is_checked_like_one_written_here(change: dict[str, object]) -> None:
    with pytest.raises(FlexStreamError):
        fs.Query.from_json(json.dumps({**GOOD, **change}))


def test_mistakes_are_told_of_the_query_as_when_it_is_written_here() -> None:
    with pytest.raises(QueryError) as here:
        SHOP.query("full").filter(col("prise") > 1)
    with pytest.raises(QueryError) as there:
        fs.Query.from_dict({**GOOD, "steps": [["filter", ["gt", ["col", "prise"], ["lit", 1]]]]})
    assert there.value.to_dict() == here.value.to_dict()
    assert there.value.message == "query 'full': no column 'prise'"


def test_nodes_without_a_version_are_no_version_1() -> None:
    body = {name: part for name, part in FULL.to_dict().items() if name != "version"}
    with pytest.raises(QueryError, match="no version"):
        fs.Query.from_dict(body)
    assert serial.VERSION == 2


def paths(node, prefix=()):
    yield prefix
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from paths(child, (*prefix, key))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(paths(GOOD), key=str)),
    st.sampled_from([None, -1, 2**70, 0.5, "x", [], {}, [[]], True]),
)
def test_any_one_part_replaced_by_junk_gives_a_query_or_one_of_our_errors(path, junk):
    body = json.loads(json.dumps(GOOD))
    if not path:
        body = junk
    else:
        node = body
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = junk
    with contextlib.suppress(FlexStreamError):
        fs.Query.from_json(json.dumps(body)).explain()
