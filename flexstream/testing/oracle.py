"""What a query means, in plain Python: slow, obvious, and sharing nothing with what it checks.

It works on the nodes of the plan as written (not on their bound form). Each takes lists of rows and gives one; since
windows fire by watermark, results are a function of the rows that were not late. Windows keep every row in a list, and
the aggregates are worked out at the end from those lists.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexstream.errors import QueryError
from flexstream.query.aggregates import Aggregate
from flexstream.query.expr import Expr
from flexstream.query.plan import nodes
from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.query import Query
from flexstream.query.windower import Windower
from flexstream.testing.hashes import estimate, in_order, word_of
from flexstream.testing.values import I64_MAX, I64_MIN, Row, RowError, evaluate, orderable, type_of

END_OF_TIME = math.inf

WindowKey = tuple[int, tuple[Any, ...]]
Place = tuple[int, int, int]  # time, session, sequence


@dataclass
class OracleResult:
    """`windows`: (window start, key values) -> aggregate values after the last row.

    Times are in the unit of the time field. `applied`, `late`, `rejected` and `filtered` hold positions of
    input rows, and every position is in exactly one of them. Every window is `complete`. `revisions`: how often a
    window's result changed after it fired, when each late row is an update of its own (an engine may take several
    together).
    """

    windows: dict[WindowKey, dict[str, Any]] = field(default_factory=dict)
    applied: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    revisions: dict[WindowKey, int] = field(default_factory=dict)

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        return dict(Counter(self.rejected.values()))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A row of a stream: where it came in the order of arrival, from which session, and the watermark by then."""

    row: Row
    position: int
    session: int
    watermark: float

    def has(self, row: Row) -> Arrived:
        return Arrived(row, self.position, self.session, self.watermark)


@dataclass(frozen=True, slots=True)
class Result:
    """What a window says about a key."""

    window: WindowKey
    values: dict[str, Any]
    revisions: int


Rows = list[Any]  # Arrived before the aggregates, Result behind them


@dataclass
class Evaluation:
    """The rows that arrive, by stream, and what has become of them so far."""

    arriving: dict[str, Rows]
    result: OracleResult = field(default_factory=OracleResult)


def run(
    query: Query,
    rows: Any,
    watermarks: Mapping[int, int] | Iterable[tuple[int, int]] | None = None,
    sessions: Sequence[int] | None = None,
) -> OracleResult:
    """The results of `query` over `rows` in order of arrival, after the end of the stream.

    `watermarks` are (position, watermark): before the row at that position the watermark rises to that time.
    A watermark never goes back. Without any, nothing is late. `sessions` are the numbers of the rows' sessions, in the
    order of registration; without them there is one. Raises QueryError (`overflow`) when an integer
    sum does not fit 64 bits, which fails the query.
    """
    if not isinstance(query.root, nodes.Sink):
        raise QueryError(f"query {query.name!r} is not complete", code="incomplete")
    packed = query.stream.schema.pack(rows)
    pending = sorted(watermarks.items() if isinstance(watermarks, Mapping) else watermarks or [])
    names, types = query.stream.schema.names, query.stream.schema.to_dict()
    watermark: float = -math.inf
    arriving: Rows = []
    for position, values in enumerate(packed.tolist()):
        while pending and pending[0][0] <= position:
            watermark = max(watermark, pending.pop(0)[1])
        row = Row(zip(names, values, strict=True), types)
        arriving.append(Arrived(row, position, 0 if sessions is None else sessions[position], watermark))
    return evaluated(query.root, {query.stream.name: arriving})


def evaluated(root: nodes.Node, arriving: dict[str, Rows]) -> OracleResult:
    """What the plan makes of the rows that arrive on its streams."""
    evaluation = Evaluation(arriving)
    rows: dict[int, Rows] = {}
    for node in nodes.walk(root):
        rows[id(node)] = NODES[node.op](node, [rows[id(before)] for before in node.inputs], evaluation)
    result = evaluation.result
    result.filtered.sort()
    result.rejected = dict(sorted(result.rejected.items()))
    for one in rows[id(root)]:
        result.windows[one.window] = one.values
        if one.revisions:
            result.revisions[one.window] = one.revisions
    return result


# -- nodes: each with the rows of its inputs


def _scan(node: nodes.Scan, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    return evaluation.arriving[node.stream.name]


def _filter(node: nodes.Filter, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    kept = []
    assert isinstance(node.expr, Expr), "the oracle works on plans as written"
    for arrived in inputs[0]:
        try:
            if evaluate(node.expr, arrived.row):
                kept.append(arrived)
            else:
                evaluation.result.filtered.append(arrived.position)
        except RowError as error:
            evaluation.result.rejected[arrived.position] = str(error)
    return kept


def _map(node: nodes.Map, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    return [arrived.has(_Mapped(arrived.row, node.columns)) for arrived in inputs[0]]


def _project(node: nodes.Project, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    return inputs[0]  # nothing reads the columns that are gone: the plan would not exist


def _window(node: nodes.Window, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    return inputs[0]  # who consumes them puts them into windows, once it knows that they have values


def _windows(node: nodes.Aggregate, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    assert isinstance(node.input, nodes.Window)
    windower, time = node.input.windower, node.input.traits.time
    result = evaluation.result
    contents: dict[WindowKey, list[tuple[Place, list[Any]]]] = {}
    revisions: Counter[WindowKey] = Counter()
    for arrived in inputs[0]:
        row, watermark = arrived.row, arrived.watermark
        key = tuple(_key_value(row[name]) for name in node.keys)
        try:
            arguments = [_argument(aggregate, row) for aggregate in node.aggregates.values()]
            windows = _windows_of(row[time], windower)
        except RowError as error:
            result.rejected[arrived.position] = str(error)
            continue
        still_open = [(start, end) for start, end in windows if not windower.is_final(end, watermark)]
        (result.applied if still_open else result.late).append(arrived.position)
        for start, end in still_open:
            window = (start, key)
            if windower.is_due(end, watermark) and window in contents:  # fired already: an update
                revisions[window] += 1
            place = (row[time], arrived.session, arrived.position)
            contents.setdefault(window, []).append((place, arguments))
    return [Result(window, _values(node, rows), revisions[window]) for window, rows in contents.items()]


def _sink(node: nodes.Sink, inputs: list[Rows], evaluation: Evaluation) -> Rows:
    return inputs[0]


NODES: dict[str, Callable[[Any, list[Rows], Evaluation], Rows]] = {
    "scan": _scan,
    "filter": _filter,
    "map": _map,
    "project": _project,
    "window": _window,
    "aggregate": _windows,
    "sink": _sink,
}


def _key_value(value: Any) -> Any:
    if isinstance(value, float):
        return math.nan if value != value else value + 0.0  # one NaN object, one zero: equal keys are one key
    return value


def _windows_of(time: int, windower: Windower) -> list[tuple[int, int]]:
    windows = windower.windows_of(time)
    if windows[-1][0] < I64_MIN or windows[0][1] > I64_MAX:
        raise RowError("time_range")
    return windows


class _Mapped(Row):
    """A row after a map(): its columns are worked out when something reads them, as Spark's optimiser does."""

    def __init__(self, row: Row, columns: Mapping[str, Any]) -> None:
        super().__init__(row, {**row.types, **{name: type_of(tree, row.types) for name, tree in columns.items()}})
        self._row, self._columns = row, columns

    def __getitem__(self, name: str) -> Any:
        return evaluate(self._columns[name], self._row) if name in self._columns else self._row[name]


def _argument(aggregate: Aggregate | BoundAggregate, row: Row) -> Any:
    """(what decides, the value) where something decides."""
    assert isinstance(aggregate, Aggregate), "the oracle works on plans as written"
    value = None if aggregate.arg is None else evaluate(aggregate.arg, row)
    return value if aggregate.by is None else (evaluate(aggregate.by, row), value)


def _values(node: nodes.Aggregate, rows: list[tuple[Place, list[Any]]]) -> dict[str, Any]:
    rows.sort(key=lambda item: item[0])
    places = [place for place, _ in rows]
    columns = zip(*(arguments for _, arguments in rows), strict=True)
    return {
        name: _aggregate(aggregate.fn, list(column), places)
        for (name, aggregate), column in zip(node.aggregates.items(), columns, strict=True)
    }


# -- aggregates


def _aggregate(fn: str, values: list[Any], places: list[Place]) -> Any:
    """Of values in the order of (time, session, sequence)."""
    if fn not in AGGREGATES:
        raise QueryError(f"the oracle does not know the aggregate {fn!r}", code="bad_aggregate")
    return AGGREGATES[fn](values, places)


def _smallest_first(value: Any) -> Any:
    return orderable(float(value)) if isinstance(value, float) else value


def _sum(values: list[Any]) -> Any:
    if not isinstance(values[0], int):
        return _float_sum(values)
    total = sum(values)
    if not I64_MIN <= total <= I64_MAX:
        raise QueryError(f"a sum of {total} does not fit 64 bits", code="overflow")
    return total


def _mean(values: list[Any]) -> float:
    return (sum(values) if isinstance(values[0], int) else _float_sum(values)) / len(values)


def _order_hash(values: list[Any], places: list[Place]) -> int:
    """The sum, in 64 bits, of what the rows of each session say in the order in which they were sent."""
    sent: dict[int, list[tuple[int, Any]]] = {}
    for value, (_, session, sequence) in zip(values, places, strict=True):
        sent.setdefault(session, []).append((sequence, value))
    total = sum(in_order([value for _, value in sorted(rows, key=lambda row: row[0])]) for rows in sent.values())
    return (total + 2**63) % 2**64 - 2**63


def _float_sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum past the largest float
        return sum(values)


def _variance(values: list[float], of: Callable[[list[float]], float] = statistics.variance) -> float | None:
    if len(values) == 1:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return of(values)
    except OverflowError:
        return math.inf


def _mode(values: list[Any]) -> Any:
    """Of the values with the most rows the smallest. -0.0 and 0.0 are one, and so are all NaNs."""
    plain = [_key_value(value) for value in values]
    rows = Counter(map(_smallest_first, plain))
    return min(plain, key=lambda value: (-rows[_smallest_first(value)], _smallest_first(value)))


def _median(values: list[Any]) -> float:
    """As Spark's percentile(x, 0.5) has it: integers in their own order, then as reals."""
    ranked = sorted(values, key=_smallest_first)
    lower, upper = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return float(lower) if lower == upper else 0.5 * float(lower) + 0.5 * float(upper)


AGGREGATES: dict[str, Callable[[list[Any], list[Place]], Any]] = {
    "count": lambda values, _: len(values),
    "count_if": lambda values, _: values.count(True),
    "sum": lambda values, _: _sum(values),
    "min": lambda values, _: min(values, key=_smallest_first),
    "max": lambda values, _: max(values, key=_smallest_first),
    "avg": lambda values, _: _mean(values),
    "stddev": lambda values, _: _variance([float(value) for value in values], statistics.stdev),
    "variance": lambda values, _: _variance([float(value) for value in values]),
    "bool_and": lambda values, _: all(values),
    "bool_or": lambda values, _: any(values),
    "min_by": lambda values, _: min(values, key=lambda pair: tuple(map(_smallest_first, pair)))[1],
    "max_by": lambda values, _: max(values, key=lambda pair: tuple(map(_smallest_first, pair)))[1],
    "first": lambda values, _: values[0],
    "last": lambda values, _: values[-1],
    "distinct": lambda values, _: len({word_of(value) for value in values}),
    "mode": lambda values, _: _mode(values),
    "median": lambda values, _: _median(values),
    "approx_distinct": lambda values, _: estimate(values),
    "order_hash": _order_hash,
}
