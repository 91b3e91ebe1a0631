"""From a bound query to the generic variant's operator program (program.pxd). Pure: plan in, numbers out.

Conjunctions become one FILTER after the other, so that a later predicate sees only the rows that passed the
earlier ones. Within a run of steps without a filter, equal sub-expressions are computed once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from flexstream.cython_ext.folds import BESIDE, FOLDS, MAX_SIDES, MAX_SLOTS, folded
from flexstream.errors import QueryError
from flexstream.expr import Typed
from flexstream.query import BoundAggregate, BoundFilter, BoundMap, BoundQuery, Project
from flexstream.schema import Field, Schema

MAX_REGISTERS = 64
MAX_AGGREGATES = 32
MAX_KEY_BYTES = 256
MAX_NODES = 10_000

# Numbers as in the Op, Fold and KeyForm enums of program.pxd and partial.pxd.
LOADS = {
    "i8": 1, "i16": 2, "i32": 3, "i64": 4, "u8": 5, "u16": 6, "u32": 7, "u64": 8, "f32": 9, "f64": 10,
    "bool": 11, "timestamp": 4,
}  # fmt: skip
CONSTANT = 12
OPERATORS = {
    ("add", "i64"): 20, ("sub", "i64"): 21, ("mul", "i64"): 22, ("floordiv", "i64"): 23, ("mod", "i64"): 24,
    ("neg", "i64"): 25, ("abs", "i64"): 26,
    ("add", "f64"): 30, ("sub", "f64"): 31, ("mul", "f64"): 32, ("div", "f64"): 33, ("neg", "f64"): 34,
    ("abs", "f64"): 35,
    ("eq", "i64"): 50, ("ne", "i64"): 51, ("lt", "i64"): 52, ("le", "i64"): 53, ("gt", "i64"): 54,
    ("ge", "i64"): 55, ("eq", "bool"): 50, ("ne", "bool"): 51,
    ("eq", "f64"): 60, ("ne", "f64"): 61, ("lt", "f64"): 62, ("le", "f64"): 63, ("gt", "f64"): 64,
    ("ge", "f64"): 65,
    ("and", "bool"): 70, ("or", "bool"): 71, ("not", "bool"): 72,
}  # fmt: skip
I_TO_F, F_TO_I, BYTES_EQ, BYTES_EQ_FIELD, FILTER, FILTER_BYTES_EQ, FILTER_BYTES_NE = 40, 41, 80, 81, 90, 91, 92
NOT, BAD_SAVE, BAD_MASK = 72, 85, 86
SAFE_REAL = ("add", "sub", "mul", "neg", "abs")
KEY_FORMS = {"f32": 1, "f64": 2, "bool": 3}

Instruction = tuple[int, int, int, int, int, int, int, bytes | None]


@dataclass(frozen=True, slots=True)
class Fold:
    """One aggregate: which fold, over which register, in how many 8-byte slots of an entry."""

    fold: int
    register: int
    slots: int


@dataclass(frozen=True, slots=True)
class Lowered:
    instructions: list[Instruction]
    registers: int
    folds: list[Fold]
    key: list[tuple[int, int, int]]  # offset, size, form


class _Lowering:
    def __init__(self, bound: BoundQuery) -> None:
        self.bound = bound
        self.schema = bound.query.stream.schema
        self.code: list[Instruction] = []
        self.registers = 0
        self.known: dict[Typed, int] = {}
        self.columns: dict[str, Typed] = {}  # what map() made, over fields of the row

    def emit(
        self, op: int, dst: int = 0, a: int = 0, b: int = 0, offset: int = 0, size: int = 0,
        imm: int = 0, constant: bytes | None = None,
    ) -> int:  # fmt: skip
        self.code.append((op, dst, a, b, offset, size, imm, constant))
        return dst

    def new_register(self) -> int:
        if self.registers == MAX_REGISTERS:
            raise QueryError(
                f"query {self.bound.query.name!r} needs more than {MAX_REGISTERS} intermediate values",
                code="too_complex",
                hint="split it into several queries",
            )
        self.registers += 1
        return self.registers - 1

    def field(self, node: Typed) -> Field:
        return self.schema.field(node.name or "")

    def value(self, node: Typed) -> int:
        """The register that holds the expression for the rows selected now."""
        if node not in self.known:
            self.known[node] = self.compute(node)
        return self.known[node]

    def compute(self, node: Typed) -> int:
        if node.op == "col":
            field = self.field(node)
            return self.emit(LOADS[field.kind], self.new_register(), offset=field.offset, size=field.size)
        if node.op == "lit":
            return self.emit(CONSTANT, self.new_register(), imm=bits(node))
        if node.op in ("eq", "ne") and node.args[0].type == "bytes":
            return self.compare_bytes(node)
        if node.op in ("and", "or"):
            return self.connective(node)
        arguments = [self.value(arg) for arg in node.args]
        if node.op == "cast":
            source = node.args[0].type
            if source == node.type or {source, node.type} == {"bool", "i64"}:
                return arguments[0]
            return self.emit(I_TO_F if node.type == "f64" else F_TO_I, self.new_register(), arguments[0])
        right = arguments[1] if len(arguments) > 1 else 0
        return self.emit(OPERATORS[node.op, node.args[0].type], self.new_register(), arguments[0], right)

    def connective(self, node: Typed) -> int:
        """`&` and `|`: a right side without a value does not count where the left side decides."""
        left = self.value(node.args[0])
        if can_fail(node.args[1], self.schema):
            saved = self.emit(BAD_SAVE, self.new_register())
            known = dict(self.known)
            right = self.value(node.args[1])
            self.known = known  # what was computed under the mask may lack its failures elsewhere
            self.emit(BAD_MASK, a=left, b=saved, imm=int(node.op == "or"))
        else:
            right = self.value(node.args[1])
        return self.emit(OPERATORS[node.op, "bool"], self.new_register(), left, right)

    def compare_bytes(self, node: Typed) -> int:
        left, right = node.args
        if left.op == "lit":
            left, right = right, left
        dst = self.new_register()
        if left.op == "lit":
            equal = left.value == right.value
            return self.emit(CONSTANT, dst, imm=int(equal == (node.op == "eq")))
        field = self.field(left)
        if right.op == "lit":
            assert isinstance(right.value, bytes)
            self.emit(BYTES_EQ, dst, offset=field.offset, size=field.size, constant=right.value)
        else:
            other = self.field(right)
            if field.size != other.size:
                raise QueryError(
                    f"{left.name} has {field.size} bytes and {right.name} {other.size}: "
                    "fields of different width are not compared yet",
                    code="bad_types",
                    hint="declare both with the same width",
                )
            self.emit(BYTES_EQ_FIELD, dst, offset=field.offset, size=field.size, imm=other.offset)
        return dst if node.op == "eq" else self.emit(NOT, self.new_register(), dst)

    def filter(self, node: Typed) -> None:
        if node.op == "and":
            for part in node.args:
                self.filter(part)
            return
        word = self.word_comparison(node)
        if word is not None:
            field, value = word
            op = FILTER_BYTES_EQ if node.op == "eq" else FILTER_BYTES_NE
            self.emit(op, offset=field.offset, size=field.size, imm=value)
        else:
            self.emit(FILTER, a=self.value(node))
        self.known.clear()  # registers are dense over the selection, which is a new one now

    def word_comparison(self, node: Typed) -> tuple[Field, int] | None:
        """A field of at most 8 bytes against a constant, which compares as one machine word."""
        if node.op not in ("eq", "ne") or node.args[0].type != "bytes":
            return None
        literal = next((arg for arg in node.args if arg.op == "lit"), None)
        column = next((arg for arg in node.args if arg.op == "col"), None)
        if literal is None or column is None or column.size > 8:
            return None
        assert isinstance(literal.value, bytes)
        return self.field(column), int.from_bytes(literal.value.ljust(8, b"\0"), "little", signed=True)

    def lower(self) -> Lowered:
        for step in self.bound.steps:
            if isinstance(step, BoundFilter):
                self.filter(resolve(step.expr, self.columns))
            elif isinstance(step, BoundMap):
                made = {name: resolve(tree, self.columns) for name, tree in step.columns.items()}
                self.columns = {**self.columns, **made}
            else:
                assert isinstance(step, Project)  # columns that are not read cost nothing
        if len(self.bound.aggregates) > MAX_AGGREGATES:
            raise QueryError(
                f"query {self.bound.query.name!r} has {len(self.bound.aggregates)} aggregates, "
                f"at most {MAX_AGGREGATES} work",
                code="too_complex",
                hint="split it into several queries",
            )
        folds = [self.fold(aggregate) for aggregate in self.bound.aggregates]
        beside = [aggregate.fn for aggregate in self.bound.aggregates if aggregate.fn in BESIDE]
        if len(beside) > MAX_SIDES:
            raise QueryError(
                f"query {self.bound.query.name!r} has {len(beside)} of {' and '.join(BESIDE)}, "
                f"at most {MAX_SIDES} work",
                code="too_complex",
                hint="split it into several queries, or use approx_distinct",
            )
        slots = sum(fold.slots for fold in folds)
        if slots > MAX_SLOTS:
            raise QueryError(
                f"the aggregates of query {self.bound.query.name!r} keep {8 * slots} bytes for each key, "
                f"at most {8 * MAX_SLOTS} work",
                code="too_complex",
                hint="split it into several queries: approx_distinct keeps 1024 bytes each",
            )
        return Lowered(self.code, self.registers, folds, self.key())

    def fold(self, aggregate: BoundAggregate) -> Fold:
        fn, arg = folded(aggregate, None if aggregate.arg is None else resolve(aggregate.arg, self.columns))
        if arg is None:
            return Fold(0, 0, 0)
        number, slots = FOLDS[fn, arg.type]
        return Fold(number, self.value(arg), slots)

    def key(self) -> list[tuple[int, int, int]]:
        fields = self.bound.query.stream.key_fields
        width = sum(field.size for field in fields)
        if width > MAX_KEY_BYTES:
            raise QueryError(
                f"the key of stream {self.bound.query.stream.name!r} has {width} bytes, at most {MAX_KEY_BYTES} work",
                code="too_complex",
                hint="key by a hash or a number of the long field",
            )
        return [(field.offset, field.size, KEY_FORMS.get(field.kind, 0)) for field in fields]


def resolve(node: Typed, columns: dict[str, Typed]) -> Typed:
    """The expression over fields of the row alone: `columns` are what map() made of them."""
    if node.op == "col":
        return columns.get(node.name or "", node)
    return replace(node, args=tuple(resolve(arg, columns) for arg in node.args)) if node.args else node


def can_fail(node: Typed, schema: Schema) -> bool:
    """May the expression lack a value for some row? A u64 field may: past int64 it has none."""
    if node.op == "col":
        return schema.field(node.name or "").kind == "u64"
    safe = node.type in ("bool", "bytes") or node.op == "lit" or (node.type == "f64" and node.op in SAFE_REAL)
    return not safe or any(can_fail(arg, schema) for arg in node.args)


def check_size(bound: BoundQuery) -> None:
    """Refuse what would be too large once map() columns stand in place of their names: it can double each step."""
    sizes: dict[str, int] = {}

    def size(node: Typed) -> int:
        if node.op == "col":
            return sizes.get(node.name or "", 1)
        return 1 + sum(size(arg) for arg in node.args)

    total = 0
    for step in bound.steps:
        if isinstance(step, BoundMap):
            made = {name: size(tree) for name, tree in step.columns.items()}
            sizes.update(made)
            total += sum(made.values())
        elif isinstance(step, BoundFilter):
            total += size(step.expr)
        if total > MAX_NODES:
            raise QueryError(
                f"query {bound.query.name!r} has more than {MAX_NODES} operations, with its columns written out",
                code="too_complex",
                hint="split it into several queries",
            )


def bits(literal: Typed) -> int:
    """A constant as the signed 64-bit pattern of a register."""
    if literal.type == "f64":
        return int(struct.unpack("<q", struct.pack("<d", literal.value))[0])
    assert isinstance(literal.value, int)
    return int(literal.value)


def lower(bound: BoundQuery) -> Lowered:
    """The program of a bound query. Raises QueryError for what the generic variant cannot run."""
    check_size(bound)
    return _Lowering(bound).lower()
