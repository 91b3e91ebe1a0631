"""What the engine says against what the oracle says, and random cases to compare them on."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from dataclasses import field as made_by
from typing import Any

import numpy as np
import pyarrow as pa

import flexstream as fs
from flexstream import col
from flexstream.query.expr import PARTS, Cast, Column
from flexstream.testing import run
from tests.waiting import WAIT_S

FINISH_S = WAIT_S
UNITS = ("s", "ms", "us", "ns")
KEY_KINDS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "f32", "f64", "bool", "timestamp", "bytes")
VALUE_KINDS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f32", "f64", "bool", "timestamp", "bytes")
INTEGER_CASTS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
BESIDE = (fs.order_hash,)  # not compiled
VALUED = (fs.min, fs.max, fs.first, fs.last, fs.approx_distinct, fs.distinct, fs.mode, *BESIDE)  # of any value
CONDITIONS = (fs.count_if, fs.bool_and, fs.bool_or)
DECIDED = (fs.min_by, fs.max_by)  # of any value, by another
NUMBERS = (fs.sum, fs.avg, fs.stddev, fs.variance, fs.median)
COMPILED = (*CONDITIONS, *DECIDED, *NUMBERS, *(fn for fn in VALUED if fn not in BESIDE))
FUNCTIONS = (*COMPILED, *BESIDE)
SUMMABLE = 1_000_003  # integer sums take remainders of it: no sum of a test's rows overflows


@dataclass
class Case:
    stream: fs.Stream
    rows: np.ndarray
    queries: list[fs.Query]
    _oracles: dict[Any, Any] = made_by(default_factory=dict)

    def oracle(self, query: fs.Query, sessions: list[int] | None = None) -> Any:
        """What the oracle says, asked once: it takes longer than the engines that are compared with it."""
        asked = (query.name, None if sessions is None else tuple(sessions))
        if asked not in self._oracles:
            self._oracles[asked] = run(query, self.rows, sessions=sessions)
        return self._oracles[asked]

    def __repr__(self) -> str:
        plans = "\n".join(query.explain() for query in self.queries)
        return f"{self.stream.to_dict()}\n{plans}\n{self.rows[:40]!r} ({len(self.rows)} rows)"


# -- reading what the engine says


def column(batch: pa.RecordBatch, name: str) -> list[Any]:
    values = batch.column(name)
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.int64()).to_pylist()
    if pa.types.is_fixed_size_binary(values.type):
        return [value.rstrip(b"\0") for value in values.to_pylist()]
    return values.to_pylist()


def as_rows(batches: Any) -> list[dict[str, Any]]:
    """Rows of record batches; times are integers, bytes are without padding."""
    found: list[dict[str, Any]] = []
    for batch in batches:
        names = batch.schema.names
        columns = [column(batch, name) for name in names]
        found += [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return found


def key_value(value: Any) -> Any:
    if isinstance(value, float):
        return math.nan if value != value else value + 0.0
    return value


def window_of(query: fs.Query, row: dict[str, Any]) -> tuple[int, tuple[Any, ...]]:
    return row["window_start"], tuple(key_value(row[name]) for name in query.stream.key)


def equal(left: Any, right: Any) -> bool:
    """Integers exactly, floats within 1e-9, NaN equals NaN, None equals None."""
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right or math.isclose(left, right, rel_tol=1e-9)
    return type(left) is type(right) and left == right


# -- comparing


def assert_same_results(query: fs.Query, results: list[dict[str, Any]], windows: dict[Any, Any]) -> None:
    """`results` hold every window of the oracle once, with its values, and nothing else."""
    size = query.window_spec.size_ns // query.stream.unit_ns
    found = {}
    for row in results:
        window = window_of(query, row)
        assert window not in found, f"{window} was emitted twice"
        assert row["window_end"] == row["window_start"] + size
        assert row["complete"] is True
        found[window] = {name: row[name] for name in query.aggregates}
    assert found.keys() == windows.keys(), (
        f"missing {sorted(map(repr, windows.keys() - found.keys()))[:5]}, "
        f"too many {sorted(map(repr, found.keys() - windows.keys()))[:5]}"
    )
    for window, expected in windows.items():
        for name, value in expected.items():
            assert equal(found[window][name], value), (
                f"{query.name} {window} {name}: engine {found[window][name]!r}, oracle {value!r}"
            )


def assert_last_results(query: fs.Query, results: list[dict[str, Any]], windows: dict[Any, Any], note: str) -> None:
    """The last revision of each window is what the oracle says, and there are no others."""
    last = {window_of(query, row): row for row in results}
    assert last.keys() == windows.keys(), note
    for window, values in windows.items():
        for name, value in values.items():
            assert equal(last[window][name], value), f"{window} {name} {last[window]} {value}\n{note}"


def assert_counts(status: dict[str, Any], query: fs.Query, oracle: Any, n: int) -> None:
    """Every row is in exactly one of applied, filtered, late and rejected."""
    said = status["queries"][query.name]
    assert said["state"] == "running", said
    assert said["rows"] == n
    assert said["filtered"] == len(oracle.filtered)
    assert said["late"] == len(oracle.late)
    assert sum(said["rejected"].values()) == len(oracle.rejected), (said["rejected"], oracle.rejected_by_reason)
    assert said["ledger"] == {
        "accepted": n,
        "applied": len(oracle.applied),
        "filtered": len(oracle.filtered),
        "late": len(oracle.late),
        "rejected": len(oracle.rejected),
        "in_flight": 0,
    }
    assert said["open_windows"] == 0


def assert_ledger(status: dict[str, Any], stream: str, n: int) -> None:
    ledger = status["streams"][stream]["ledger"]
    assert ledger["received"] == n
    assert ledger["in_flight"] == 0
    assert_balances(ledger, "received")
    assert sum(status["streams"][stream]["groups"]) == n
    for query in status["queries"].values():
        if query["stream"] == stream:
            assert_balances(query["ledger"], "accepted")
            assert query["ledger"]["in_flight"] == 0
            assert query["ledger"]["accepted"] <= ledger["accepted"]


def assert_balances(ledger: dict[str, int], whole: str) -> None:
    assert min(ledger.values()) >= 0, ledger
    assert 2 * ledger[whole] == sum(ledger.values()), ledger


def assert_conserved(engine: fs.Engine, case: Case, sessions: list[int] | None = None) -> None:
    """After finish(): results, counts and ledger agree with the oracle. `sessions`: who sent each row."""
    status = engine.status()
    for query in case.queries:
        oracle = case.oracle(query, sessions)
        results = as_rows(engine.results(query.name))
        assert all(row["revision"] == 0 for row in results)
        assert_same_results(query, results, oracle.windows)
        assert_counts(status, query, oracle, len(case.rows))
        assert as_rows(engine.late(query.name)) == []
        assert_groups(engine, case.stream, results)
    assert_ledger(status, case.stream.name, len(case.rows))


def assert_groups(engine: fs.Engine, stream: fs.Stream, results: list[dict[str, Any]]) -> None:
    if not results:
        return
    rows = np.zeros(len(results), stream.schema.dtype)
    for name in stream.key:
        rows[name] = [row[name] for row in results]
    assert stream.group_of(rows, engine.groups).tolist() == [row["group"] for row in results]


# -- making cases


def random_type(rnd: random.Random, kind: str) -> str:
    if kind == "timestamp":
        return f"timestamp[{rnd.choice(UNITS)}]"
    return f"bytes[{rnd.choice((1, 2, 5, 8, 9, 16))}]" if kind == "bytes" else kind


def random_stream(rnd: random.Random, name: str = "s") -> fs.Stream:
    unit = rnd.choice(UNITS)
    keys = {f"k{i}": random_type(rnd, rnd.choice(KEY_KINDS)) for i in range(rnd.randint(1, 3))}
    values = {f"v{i}": random_type(rnd, rnd.choice(VALUE_KINDS)) for i in range(rnd.randint(1, 5))}
    fields = [("t", f"timestamp[{unit}]"), *keys.items(), *values.items()]
    rnd.shuffle(fields)
    disorder = rnd.choice((0, 0, 1, 7, 50))
    return fs.Stream(name, dict(fields), key=list(keys), time="t", max_disorder=f"{disorder}{unit}")


def random_values(rng: np.random.Generator, kind: str, dtype: Any, n: int) -> np.ndarray:
    if kind == "bytes":
        width = np.dtype(dtype).itemsize
        letters = np.array([b"", b"a", b"b", b"ab", b"view", b"a\0b", b"\0c", b"\xff\x80", b"zzzzzzzzzzzzzzzz"], "S16")
        return rng.choice(letters, n).astype(f"S{width}")
    if kind == "bool":
        return rng.integers(0, 2, n).astype(bool)
    if kind in ("f32", "f64"):
        values = np.round(rng.normal(0, 100, n), 3).astype(dtype)
        special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -7.5], dtype)
        return np.where(rng.random(n) < 0.08, rng.choice(special, n), values).astype(dtype)
    limits = np.iinfo(dtype)
    low, high = max(limits.min, -50), min(limits.max, 50)
    values = rng.integers(low, high + 1, n).astype(dtype)
    special = np.array([limits.min, limits.max, limits.max - 1, 0, 1], dtype)
    return np.where(rng.random(n) < 0.04, rng.choice(special, n), values).astype(dtype)


def random_rows(seed: int, stream: fs.Stream, n: int, keys: int, disordered: bool = True) -> np.ndarray:
    """Rows in order of arrival, none further behind the newest than the stream's max_disorder."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, stream.schema.dtype)
    pool = np.zeros(max(1, keys), stream.schema.dtype)
    for field in stream.schema:
        if field.name in stream.key:
            pool[field.name] = random_values(rng, field.kind, field.numpy, len(pool))
    chosen = rng.integers(0, len(pool), n)
    for field in stream.schema:
        if field.name in stream.key:
            rows[field.name] = pool[field.name][chosen]
        elif field.name != stream.time:
            rows[field.name] = random_values(rng, field.kind, field.numpy, n)
    start = int(rng.choice([0, -1000, 1_600_000_000]))
    pace = int(rng.choice([0, 1, 3, 40]))
    newest = start + np.cumsum(rng.integers(0, pace + 1, n))
    back = rng.integers(0, stream.max_disorder + 1, n) if disordered else 0
    rows[stream.time] = newest - back
    return rows


class Expressions:
    """Random expressions over a query's columns."""

    def __init__(self, rnd: random.Random, columns: dict[str, str]) -> None:
        self.rnd = rnd
        self.ints = [n for n, t in columns.items() if t[0] in "iu" or t.startswith("timestamp")]
        self.reals = [n for n, t in columns.items() if t[0] == "f"]
        self.bools = [n for n, t in columns.items() if t == "bool"]
        self.bytes = [n for n, t in columns.items() if t.startswith("bytes")]
        self.times = [n for n, t in columns.items() if t.startswith("timestamp")]
        self.widths = {n: int(columns[n][6:-1]) for n in self.bytes}
        self.unsigned = [n for n, t in columns.items() if t == "u64"]
        self.names = list(columns)

    def integer(self, depth: int = 2) -> Any:
        rnd = self.rnd
        choice = rnd.randint(0, 13) if depth else rnd.randint(0, 2)
        if choice == 0 or (choice <= 2 and not self.ints):
            return fs.lit(rnd.choice((0, 1, -1, 2, 3, 7, -13, 100, 2**40, 2**63 - 1, -(2**63))))
        if choice <= 2:
            return col(rnd.choice(self.ints))
        if choice == 10:
            return self.part(depth)
        if choice == 11:
            return fs.hash(*(self.hashable(depth - 1) for _ in range(rnd.choice((1, 1, 2, 3)))))
        left = self.integer(depth - 1)
        if choice == 12:
            return self.choice(self.integer, left, depth)
        if choice == 13:
            return rnd.choice((left, self.real(depth - 1))).cast(rnd.choice(INTEGER_CASTS))
        if choice == 3:
            return -left
        if choice == 4:
            return abs(left)
        if choice == 5:
            return self.real(depth - 1).cast("i64")
        right = self.integer(depth - 1)
        return rnd.choice((left + right, left - right, left * right, left // right, left % right))

    def time(self, depth: int) -> Any:
        rnd = self.rnd
        known = col(rnd.choice(self.times)) if self.times and rnd.random() < 0.7 else None
        unit = rnd.choice(UNITS)
        if known is None:
            return self.integer(depth - 1).cast("i64").cast(f"timestamp[{unit}]")
        return known if rnd.random() < 0.6 else known.cast(f"timestamp[{unit}]")

    def part(self, depth: int) -> Any:
        return getattr(self.time(depth), self.rnd.choice(PARTS))()

    def hashable(self, depth: int) -> Any:
        rnd = self.rnd
        plain = [name for name in self.names if name not in self.unsigned]
        if plain and rnd.random() < 0.5:
            return rnd.choice(plain)
        if rnd.random() < 0.2:
            return rnd.choice((fs.lit(b""), fs.lit(b"view"), fs.lit(b"a\0\xff"), self.time(depth + 1)))
        made = rnd.choice((self.integer, self.real, self.boolean))(max(0, depth))
        is_u64 = (isinstance(made, Column) and made.name in self.unsigned) or (
            isinstance(made, Cast) and made.to == "u64"
        )
        return made.cast("i64") if is_u64 else made

    def choice(self, make: Any, value: Any, depth: int) -> Any:
        """A conditional; values are of one kind, not of several units of time."""
        one = (lambda tree: tree.cast("i64")) if make == self.integer else (lambda tree: tree)
        cases = fs.when(self.boolean(depth - 1), one(value))
        if self.rnd.random() < 0.3:
            cases = cases.when(self.boolean(depth - 1), one(make(depth - 1)))
        return cases.otherwise(one(make(depth - 1)))

    def real(self, depth: int = 2) -> Any:
        rnd = self.rnd
        choice = rnd.randint(0, 10) if depth else rnd.randint(0, 2)
        if choice == 0 or (choice <= 2 and not self.reals):
            return fs.lit(rnd.choice((0.0, -0.0, 1.0, 0.5, -2.25, 1e3, math.inf, math.nan)))
        if choice <= 2:
            return col(rnd.choice(self.reals))
        if choice == 3:
            return self.integer(depth - 1).cast("f64")
        left = self.real(depth - 1)
        if choice == 9:
            return self.choice(rnd.choice((self.real, self.real, self.integer)), left, depth)
        if choice == 10:
            return rnd.choice((left, self.integer(depth - 1))).cast("f32")
        if choice == 4:
            return -left
        if choice == 5:
            return abs(left)
        right = rnd.choice((self.real, self.integer))(depth - 1)
        return rnd.choice((left + right, left - right, left * right, left / right))

    def boolean(self, depth: int = 2) -> Any:
        rnd = self.rnd
        choice = rnd.randint(0, 9)
        if choice <= 1 and depth:
            return self.boolean(depth - 1) & self.boolean(depth - 1)
        if choice <= 3 and depth:
            return self.boolean(depth - 1) | self.boolean(depth - 1)
        if choice == 4 and depth:
            return ~self.boolean(depth - 1)
        if choice == 5 and self.bools:
            flag = col(rnd.choice(self.bools))
            return rnd.choice((flag, flag == fs.lit(True), flag != col(rnd.choice(self.bools))))
        if choice == 6 and self.bytes:
            name = rnd.choice(self.bytes)
            text = rnd.choice((b"", b"a", b"ab", b"view", b"zzzzzzzzz", b"a\0b"))[: self.widths[name]]
            other = col(rnd.choice(self.bytes))
            return rnd.choice(
                (
                    col(name) == text,
                    col(name) != text,
                    col(name).startswith(text),
                    col(name) == other,
                    other != col(name),
                )
            )
        if choice == 7 and depth:
            return self.choice(self.boolean, self.boolean(depth - 1), depth)
        kinds = rnd.choice(((self.integer, self.integer), (self.real, self.real), (self.integer, self.real)))
        left, right = kinds[0](max(0, depth - 1)), kinds[1](max(0, depth - 1))
        return rnd.choice((left == right, left != right, left < right, left <= right, left > right, left >= right))


def random_query(
    rnd: random.Random, stream: fs.Stream, name: str, lateness: int = 0, functions: tuple[Any, ...] = COMPILED
) -> fs.Query:
    query = stream.query(name)
    for step in range(rnd.randint(0, 3)):
        make = Expressions(rnd, query.columns)
        kind = rnd.randint(0, 3)
        if kind <= 1:
            query = query.filter(make.boolean())
        elif kind == 2:
            made = {f"m{step}": rnd.choice((make.integer, make.real))()}
            if rnd.random() < 0.3:  # replace a column
                known = [n for n in query.columns if n.startswith("v")]
                if known:
                    made[rnd.choice(known)] = make.integer(1)
            query = query.map(**made)
        else:
            names = [n for n in query.columns if n not in stream.key and n != "t"]
            if names:
                query = query.project(*rnd.sample(names, rnd.randint(1, len(names))))
    unit = stream.time_unit
    if rnd.random() < 0.5:
        window = fs.tumbling(f"{rnd.choice((1, 10, 60, 1000))}{unit}")
    else:
        size = rnd.choice((2, 10, 30, 101))
        window = fs.sliding(f"{size}{unit}", every=f"{rnd.randint(max(1, size // 8), size)}{unit}")
    query = query.window(window, allowed_lateness=f"{lateness}{unit}")
    make = Expressions(rnd, query.columns)
    aggregates: dict[str, Any] = {"n": fs.count()} if rnd.random() < 0.7 else {}
    for i in range(rnd.randint(0 if aggregates else 1, 4)):
        fn = rnd.choice([fn for fn in functions if fn is not fs.order_hash or window.kind == "tumbling"])
        if fn in CONDITIONS:
            argument = make.boolean(1)
        elif fn in VALUED or fn in DECIDED:
            argument = rnd.choice((make.integer, make.real))(1)
            if rnd.random() < 0.4 and (make.ints or make.reals):
                argument = col(rnd.choice(make.ints + make.reals))
            if fn not in (fs.min, fs.max) and rnd.random() < 0.2:
                argument = make.boolean(1)
        elif rnd.random() < 0.5:
            argument = make.integer(1) % SUMMABLE
        else:
            argument = col(rnd.choice(make.reals)) if make.reals else make.real(1)
        by = [rnd.choice((make.integer, make.real))(1)] if fn in DECIDED else []
        aggregates[f"a{i}"] = fn(argument, *by)
    return query.agg(**aggregates)


def random_case(rnd: random.Random, max_rows: int = 300) -> Case:
    stream = random_stream(rnd)
    rows = random_rows(rnd.getrandbits(32), stream, rnd.randint(0, max_rows), rnd.choice((1, 3, 20, 1000)))
    queries = [random_query(rnd, stream, f"q{i}", functions=FUNCTIONS) for i in range(rnd.randint(1, 3))]
    return Case(stream, rows, queries)


def random_batches(rnd: random.Random, rows: np.ndarray) -> list[np.ndarray]:
    biggest = rnd.choice((1, 7, 100, 5000))
    batches, at = [], 0
    while at < len(rows):
        n = rnd.randint(1, biggest)
        batches.append(rows[at : at + n])
        at += n
    return batches
