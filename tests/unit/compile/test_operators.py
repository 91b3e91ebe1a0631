"""Every operator on the edges of every type, in both variants, against the oracle; and truths that all must know."""

from __future__ import annotations

import contextlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col, lit
from flexstream.query.constants import calendar, evaluate
from flexstream.query.expr import PARTS, bind
from flexstream.testing.values import Row
from flexstream.testing.values import evaluate as oracle_value
from tests.property.checks import FINISH_S, Case, as_rows, assert_conserved, equal
from tests.property.operators import (
    DAY,
    PER_SECOND,
    STREAM,
    TIMES,
    conditions,
    fallible,
    hashes,
    make_rows,
    parts,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "murmur3_golden.json").read_text())
ROWS = make_rows()
pytestmark = pytest.mark.time_limit(300)


def ended(query: fs.Query, trees: list[Any]) -> fs.Query:
    return query.window(fs.tumbling("10s")).agg(**{f"v{i}": fs.max(tree) for i, tree in enumerate(trees)})


def check(query: fs.Query, rows: np.ndarray = ROWS, *, compiled: bool = True) -> list[dict[str, Any]]:
    """Generic and compiled give what the oracle gives, with the same rows rejected."""
    found: list[dict[str, Any]] = []
    case = Case(query.stream, np.concatenate([rows, rows]), [query])
    for mode in ("off", "require") if compiled else ("off",):
        with fs.Engine(workers=1, groups=1, compile=mode, pin=False) as engine:
            engine.submit(query)
            engine.feed(query.stream.name, rows)
            engine.feed(query.stream.name, rows)  # once more: keys and pane are there, compiled code finishes the row
            engine.finish(timeout=FINISH_S)
            assert_conserved(engine, case)
            said = engine.status()["queries"][query.name]
            assert (said["compiled_rows"] > 0) == (mode == "require")
            rejected = {reason: n for reason, n in said["rejected"].items() if n}
            assert rejected == case.oracle(query).rejected_by_reason
            found = as_rows(engine.results(query.name))
    return found


def groups_of(trees: list[Any], size: int) -> list[list[Any]]:
    return [trees[at : at + size] for at in range(0, len(trees), size)]


def test_parts_of_times_in_every_unit():
    for some in groups_of(parts(), 32):
        check(ended(STREAM.query("q"), some))


def test_hashes():
    for some in groups_of(hashes(), 32):
        check(ended(STREAM.query("q"), some))


def test_conditions_as_values():
    trees = [fs.when(tree, 1).otherwise(0) for tree in conditions()]
    for some in groups_of(trees, 14):
        check(ended(STREAM.query("q"), some))


@pytest.mark.parametrize("number", range(len(conditions())), ids=lambda i: str(conditions()[i]))
def test_conditions_as_filters(number):
    query = STREAM.query("q").filter(conditions()[number])
    check(query.window(fs.tumbling("10s")).agg(n=fs.count()), compiled=number % 3 == 0)


@pytest.mark.parametrize("number", range(len(list(fallible()))), ids=lambda i: str(list(fallible())[i]))
def test_what_some_rows_have_no_value_for(number):
    check(ended(STREAM.query("q"), [list(fallible())[number]]), compiled=False)


@pytest.mark.slow
def test_what_some_rows_have_no_value_for_in_compiled_code():
    """Several at once: guarded, so that a row that fails in one does not hide the others."""
    trees = list(fallible())
    for at, some in enumerate(groups_of(trees, 4)):
        check(ended(STREAM.query("q"), [fs.when(col("k") % 4 == i, tree).otherwise(at) for i, tree in enumerate(some)]))


# -- truths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1969-12-31T23:59:59", (1969, 12, 31, 4, 365, 23, 59, 59)),
        ("1970-01-01T00:00:00", (1970, 1, 1, 5, 1, 0, 0, 0)),
        ("2000-02-29T12:34:56", (2000, 2, 29, 3, 60, 12, 34, 56)),
        ("2000-03-01T00:00:00", (2000, 3, 1, 4, 61, 0, 0, 0)),
        ("2000-12-31T23:00:00", (2000, 12, 31, 1, 366, 23, 0, 0)),
        ("1900-03-01T00:00:00", (1900, 3, 1, 5, 60, 0, 0, 0)),
        ("2024-12-31T23:59:59", (2024, 12, 31, 3, 366, 23, 59, 59)),
        ("2026-11-16T08:00:01", (2026, 11, 16, 2, 320, 8, 0, 1)),
        ("0001-01-01T00:00:00", (1, 1, 1, 2, 1, 0, 0, 0)),
    ],
)
def test_known_days(text, expected):
    """As datetime and Spark have them; Sunday is 1."""
    second = int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
    for name, per_second in zip(TIMES, PER_SECOND.values(), strict=True):
        if abs(second) * per_second >= 2**63:
            continue
        rows = np.zeros(1, STREAM.schema.dtype)
        rows[name] = second * per_second + per_second - 1
        (found,) = check(ended(STREAM.query("q"), [getattr(col(name), part)() for part in PARTS]), rows)
        assert tuple(found[f"v{i}"] for i in range(len(PARTS))) == expected


def test_parts_agree_with_numpy_on_any_day():
    """A third opinion, far beyond the years of datetime."""
    rng = np.random.default_rng(5)
    days = np.concatenate(
        [rng.integers(-(10**11), 10**11, 3000), np.arange(-1500, 1500), rng.integers(-(10**6), 10**6, 3000)]
    )
    dates = days.astype("datetime64[D]")
    years, months = dates.astype("datetime64[Y]"), dates.astype("datetime64[M]")
    rows = np.zeros(len(days), STREAM.schema.dtype)
    rows["k"], rows["ts"] = np.arange(len(days)), days * DAY + rng.integers(0, DAY, len(days))
    trees = [getattr(col("ts"), part)() for part in ("year", "month", "day", "day_of_year", "day_of_week")]
    wanted = [
        years.astype(int) + 1970,
        months.astype(int) % 12 + 1,
        (dates - months).astype(int) + 1,
        (dates - years).astype(int) + 1,
        (days + 4) % 7 + 1,
    ]
    with fs.Engine(workers=1, compile="require", pin=False) as engine:
        engine.submit(ended(STREAM.query("q"), trees))
        engine.feed("s", rows)
        engine.feed("s", rows)  # all keys are known: compiled code finishes these
        engine.finish(timeout=FINISH_S)
        assert engine.status()["queries"]["q"]["compiled_rows"] > len(days) // 2
        found = {row["k"]: [row[f"v{i}"] for i in range(5)] for row in as_rows(engine.results("q"))}
    assert [found[k] for k in range(len(days))] == np.array(wanted).T.tolist()
    assert [calendar("year", day) for day in days[:50].tolist()] == wanted[0][:50].tolist()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(case["types"]))
def test_hash_is_what_spark_said(case):
    names = [f"f{i}" for i in range(len(case["types"]))]
    fields = {"lead": "u8", **dict(zip(names, case["types"], strict=True)), "k": "i32", "t": "timestamp[s]"}
    stream = fs.Stream("golden", fields, key="k", time="t")
    rows = np.zeros(len(case["keys"]), stream.schema.dtype)
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    rows["k"] = np.arange(len(rows))
    for at, key in enumerate(case["keys"]):
        for name, value in zip(names, key, strict=True):
            if isinstance(value, str):  # bits of floats, and bytes
                packed = np.frombuffer(bytes.fromhex(value), np.uint8)
                raw[at, stream.schema.field(name).offset :][: len(packed)] = packed
            else:
                rows[name][at] = value
    found = {row["k"]: row["v0"] for row in check(ended(stream.query("q"), [fs.hash(*names)]), rows)}
    assert [found.get(at, "rejected") for at in range(len(rows))] == case["hash"]


def test_types_of_results_follow_casts_hashes_and_conditions():
    query = STREAM.query("q").map(n=col("a").cast("i16"), day=col("tus").cast("timestamp[s]")).window(fs.tumbling("1s"))
    on, b = col("on"), col("b")
    query = query.agg(
        a=fs.max("n"),
        b=fs.max("day"),
        c=fs.max(fs.hash("a")),
        d=fs.min(col("a").cast("u64")),
        e=fs.max(col("f").cast("f32")),
        g=fs.max(fs.when(on, b).otherwise(b + 0)),
        h=fs.max(fs.when(on, b).otherwise(col("k"))),
        i=fs.max(fs.when(on, 1).otherwise(0.5)),
        j=fs.max(col("ts").year()),
        l=fs.sum("n"),
    )
    kinds = dict(query.bound().result_fields)
    assert [kinds[name] for name in "abcdeghijl"] == [
        "int16", "timestamp[s]", "int32", "uint64", "float", "int64", "int32", "double", "int64", "int64",
    ]  # fmt: skip
    found = check(query, ROWS[:50])
    assert found


def test_integers_become_floats_in_one_rounding():
    """2**62 + 2**38 + 1 is just above the middle of two floats; through a double it would be in the middle."""
    rows = np.zeros(2, STREAM.schema.dtype)
    rows["k"], rows["a"] = [0, 1], [2**62 + 2**38 + 1, -(2**62) - 2**38 - 1]
    found = sorted(row["v0"] for row in check(ended(STREAM.query("q"), [col("a").cast("f32")]), rows))
    assert found == [-(2.0**62) - 2.0**39, 2.0**62 + 2.0**39]


def deepest(grow: Any) -> Any:
    tree: Any = col("a")
    while True:
        try:
            larger = grow(tree)
            bind(larger, STREAM.schema.to_dict())
        except fs.QueryError:
            return tree
        tree = larger


@pytest.mark.parametrize(
    "grow",
    [
        lambda tree: tree.cast("timestamp[ns]").minute(),
        lambda tree: fs.hash(tree),
        lambda tree: fs.hash(tree, "f", "z"),
        lambda tree: fs.hash("tns", tree.cast("timestamp[ns]")),
        lambda tree: tree.cast("f32").cast("i8"),
        lambda tree: fs.when(col("on"), col("b") // tree).otherwise(col("b")),
        lambda tree: fs.when(tree > 0, 1).otherwise(2),
        lambda tree: -tree,
    ],
)
def test_whatever_can_be_bound_can_be_explained_or_is_refused(grow):
    query = ended(STREAM.query("q"), [deepest(grow)])
    assert "agg" in query.explain("optimised")
    with contextlib.suppress(fs.QueryError):  # too many values at once
        assert "fs_variant_run" in query.explain("code")
    assert fs.Query.from_json(query.to_json()) == query


def test_columns_that_nest_too_deep_when_written_out_are_refused():
    query = STREAM.query("q").map(m=col("a"))
    for _ in range(100):
        query = query.map(m=abs(-abs(col("m"))))
    with pytest.raises(fs.QueryError, match="nested operations") as caught:
        ended(query, [col("m")]).explain("code")
    assert caught.value.code == "too_complex"


# -- constants


def constant_trees() -> list[Any]:
    numbers = [lit(v) for v in (0, 1, -1, 127, 128, -129, 2**31, 2**40 + 1, 2**63 - 1, -(2**63))]
    reals = [lit(v) for v in (0.0, -0.0, 1.5, -2.5, 1e300, 3.4028235677973366e38, math.nan, math.inf)]
    trees: list[Any] = [n.cast(to) for n in numbers + reals for to in ("i8", "u16", "i32", "u64", "f32", "f64")]
    trees += [fs.hash(n) for n in numbers + reals] + [fs.hash(n.cast("f32")) for n in reals]
    trees += [fs.hash(lit(text), lit(3)) for text in (b"", b"a", b"abcd", b"ab\0\xff\x80", b"a\0")]
    for unit in PER_SECOND:
        times = [n.cast(f"timestamp[{unit}]") for n in numbers]
        trees += [getattr(time, part)() for time in times for part in PARTS]
        trees += [time.cast(f"timestamp[{to}]").cast("i64") for time in times for to in PER_SECOND]
    trees += [lit(b"abc").startswith(b"ab"), lit(b"a").startswith(b"ab"), fs.when(lit(True), 1).otherwise(2.5)]
    return trees


def test_constants_are_folded_to_what_the_oracle_says():
    from flexstream.query.simplify import fold
    from flexstream.testing.values import RowError

    folded = 0
    for tree in constant_trees():
        found = fold(bind(tree, STREAM.schema.to_dict()), STREAM.schema)
        try:
            expected = oracle_value(tree, Row({}, {}))
        except RowError:
            assert found.op != "lit", f"{tree} has no value, but was folded to {found.value!r}"
            continue
        if found.op == "lit":
            folded += 1
            assert equal(found.value, expected), f"{tree}: {found.value!r}, oracle {expected!r}"
            assert math.copysign(1, found.value) == math.copysign(1, expected)
    assert folded > 300
    assert evaluate(bind(lit(2**60 + 1).cast("f32"), {})) is None  # left to the workers, who round once
