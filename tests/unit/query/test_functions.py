"""Every aggregate function has one record, and everybody who has to know the function does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import generate
from flexstream.compile.fold_table import FOLDS
from flexstream.compile.lowering import lower
from flexstream.cython_ext.memory.allocator import Allocator
from flexstream.cython_ext.operators.queries import QueryState
from flexstream.errors import QueryError
from flexstream.query.aggregates import FUNCTIONS, SAME, Function
from flexstream.query.analysis import why_generic
from flexstream.results.result_rows import ResultRows
from flexstream.testing import oracle

COLUMNS = {"i64": "x", "f64": "y", "bool": "ok", "bytes": "name", "timestamp": "at"}
STREAM = fs.Stream(
    "s",
    {"t": "timestamp[ms]", "k": "i32", "x": "i64", "y": "f64", "ok": "bool", "name": "bytes[8]", "at": "timestamp[s]"},
    key="k",
    time="t",
)
KINDS = [(record, kind, by) for record in FUNCTIONS.values() for kind in record.of for by in record.by or [None]]
every = pytest.mark.parametrize("record", FUNCTIONS.values(), ids=list(FUNCTIONS))


def kinds_of(record: Function) -> list[tuple[str | None, str | None]]:
    return [(kind, by) for known, kind, by in KINDS if known is record]


def query_of(record: Function, kind: str | None, by: str | None = None) -> fs.Query:
    arguments = [None if kind is None else col(COLUMNS[kind]) for kind in (kind, by)]
    aggregate = fs.Aggregate(record.name, *arguments)
    return STREAM.query("q").window(fs.tumbling("10s")).agg(a=aggregate)


@every
def test_a_user_can_write_it(record):
    made = getattr(fs, record.name)
    assert record.name in fs.__all__
    assert made.__doc__
    aggregate = made() if None in record.of else made("x", "y") if record.by else made("x")
    assert aggregate.fn == record.name
    again = fs.Aggregate.from_json(aggregate.to_json())
    assert again.to_json() == aggregate.to_json()


@every
def test_what_it_is_not_for_is_refused_and_what_it_is_for_is_bound(record):
    for kind in (None, *COLUMNS):
        known = record.times if kind == "timestamp" else kind in record.of
        by = "f64" if record.by else None
        if known:
            aggregate = query_of(record, kind, by).bound().aggregates[0]
            of = record.of["i64" if kind == "timestamp" else kind]
            assert aggregate.function is record
            assert of[1] in (SAME, aggregate.result_type)
        else:
            with pytest.raises(QueryError) as refused:
                query_of(record, kind, by).bound()
            assert refused.value.code == "bad_types"
            assert refused.value.hint


@every
def test_what_cannot_decide_is_refused(record):
    kind = next(iter(record.of))
    for by in (None, *COLUMNS):
        known = by in (*record.by, "timestamp") if record.by else by is None
        if known:
            query_of(record, kind, by).bound()
        else:
            with pytest.raises(QueryError) as refused:
                query_of(record, kind, by).bound()
            assert refused.value.code in ("bad_types", "bad_aggregate")


@every
def test_all_variants_know_its_folds(record):
    for kind, by in kinds_of(record):
        bound = query_of(record, kind, by).bound()
        (fold,) = lower(bound).folds
        known = FOLDS[record.fold(kind, by)]
        assert (fold.fold, fold.slots) == (known.number, known.slots)
        assert known.has("SIDE") == record.beside
        assert known.has("ORDERED") == record.ordered
        if why_generic(bound) is None:
            assert "*count += " in generate(bound)


@every
def test_its_results_have_the_type_that_was_said(record):
    for kind, by in kinds_of(record):
        query = query_of(record, kind, by)
        schema = ResultRows(query.bound()).schema
        assert schema.field("a").nullable == record.nullable
        assert ResultRows(query.bound()).dtype["a"].itemsize == 8


@every
def test_the_oracle_knows_it(record):
    rows = np.zeros(3, STREAM.schema.dtype)
    for kind, by in kinds_of(record):
        ((_, values),) = oracle.run(query_of(record, kind, by), rows).windows.items()
        assert "a" in values
    assert set(oracle.AGGREGATES) == set(FUNCTIONS)


@every
def test_it_is_in_spark_or_the_record_says_why_not(record):
    """That Spark has the function of that name, tests/spark/test_aggregate_names.py checks."""
    assert record.spark is not None or record.not_in_spark is not None


@every
def test_the_documentation_lists_it(record, project):
    assert f"`{record.name}(" in (project / "docs/queries.md").read_text()
    assert f"`{record.name}`" in (project / "README.md").read_text()


def test_folds_are_used_and_their_numbers_are_their_own():
    assert {record.fold(kind, by) for record, kind, by in KINDS} == set(FOLDS)
    assert len({fold.number for fold in FOLDS.values()}) == len(FOLDS)


def test_an_aggregate_that_nobody_knows_is_an_error_everywhere():
    with pytest.raises(QueryError, match="no aggregate 'nope'") as refused:
        STREAM.query("q").window(fs.tumbling("10s")).agg(a=fs.Aggregate("nope", col("x")))
    assert refused.value.code == "bad_aggregate"
    with pytest.raises(QueryError, match="not an aggregate"):
        fs.Aggregate.from_json(["nope", ["col", "x"]])
    with pytest.raises(QueryError, match="the oracle does not know"):
        oracle._aggregate("nope", [1], [(0, 0, 0)])


@pytest.mark.parametrize(("number", "slots", "said"), [(999, 1, "no fold 999"), (1, 2, "keeps 1 slots, not 2")])
def test_a_fold_that_native_code_does_not_know_is_an_error(number, slots, said):
    query = query_of(FUNCTIONS["sum"], "i64")
    bound = query.bound()
    lowered = lower(bound)
    wrong = SimpleNamespace(
        instructions=lowered.instructions,
        registers=lowered.registers,
        key=lowered.key,
        folds=[SimpleNamespace(fold=number, register=0, slots=slots, by=0)],
    )
    with pytest.raises(ValueError, match=said):
        QueryState(0, bound, wrong, 4, Allocator())
