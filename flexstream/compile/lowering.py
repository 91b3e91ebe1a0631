"""From a bound query to the generic variant's operator program (program.pxd). Pure: plan in, numbers out.

Conjunctions become one FILTER after the other, so that a later predicate sees only the rows that passed the
earlier ones. Within a run of steps without a filter, equal sub-expressions are computed once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from flexstream.compile.fold_table import folded
from flexstream.compile.registers import Instruction, allocate
from flexstream.cython_ext.expressions.program import MAX_REGISTERS, Op
from flexstream.cython_ext.operators.table import MAX_AGGREGATES, MAX_KEY_WORDS, MAX_SIDES, MAX_SLOTS, KeyForm
from flexstream.errors import QueryError
from flexstream.query.aggregates import FUNCTIONS
from flexstream.query.analysis import can_fail, check_size, resolve
from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.plan.nodes import Filter, Map, Project
from flexstream.query.plan.stages import BoundQuery
from flexstream.query.typed import Typed
from flexstream.rows.schema import Field

MAX_KEY_BYTES = 8 * MAX_KEY_WORDS
BESIDE = [record.name for record in FUNCTIONS.values() if record.beside]

LOADS = {
    "i8": Op.LOAD_I8, "i16": Op.LOAD_I16, "i32": Op.LOAD_I32, "i64": Op.LOAD_I64,
    "u8": Op.LOAD_U8, "u16": Op.LOAD_U16, "u32": Op.LOAD_U32, "u64": Op.LOAD_U64,
    "f32": Op.LOAD_F32, "f64": Op.LOAD_F64, "bool": Op.LOAD_BOOL, "timestamp": Op.LOAD_I64,
}  # fmt: skip
OPERATORS = {
    ("add", "i64"): Op.ADD_I, ("sub", "i64"): Op.SUB_I, ("mul", "i64"): Op.MUL_I,
    ("floordiv", "i64"): Op.FLOORDIV_I, ("mod", "i64"): Op.MOD_I, ("neg", "i64"): Op.NEG_I, ("abs", "i64"): Op.ABS_I,
    ("add", "f64"): Op.ADD_F, ("sub", "f64"): Op.SUB_F, ("mul", "f64"): Op.MUL_F, ("div", "f64"): Op.DIV_F,
    ("neg", "f64"): Op.NEG_F, ("abs", "f64"): Op.ABS_F,
    ("eq", "i64"): Op.EQ_I, ("ne", "i64"): Op.NE_I, ("lt", "i64"): Op.LT_I, ("le", "i64"): Op.LE_I,
    ("gt", "i64"): Op.GT_I, ("ge", "i64"): Op.GE_I, ("eq", "bool"): Op.EQ_I, ("ne", "bool"): Op.NE_I,
    ("eq", "f64"): Op.EQ_F, ("ne", "f64"): Op.NE_F, ("lt", "f64"): Op.LT_F, ("le", "f64"): Op.LE_F,
    ("gt", "f64"): Op.GT_F, ("ge", "f64"): Op.GE_F,
    ("and", "bool"): Op.AND, ("or", "bool"): Op.OR, ("not", "bool"): Op.NOT,
}  # fmt: skip
CALLS = {
    ("round_f32", "f64"): Op.ROUND_F32, ("round_f32", "i64"): Op.I_TO_F32, ("floor", "i64"): Op.FLOOR,
    ("floormod", "i64"): Op.FLOORMOD, ("year", "i64"): Op.YEAR, ("month", "i64"): Op.MONTH, ("day", "i64"): Op.DAY,
    ("day_of_week", "i64"): Op.DAY_OF_WEEK, ("day_of_year", "i64"): Op.DAY_OF_YEAR,
    ("hash_int", "i64"): Op.HASH_INT, ("hash_int", "bool"): Op.HASH_INT, ("hash_long", "i64"): Op.HASH_LONG,
    ("hash_f32", "f64"): Op.HASH_F32, ("hash_f64", "f64"): Op.HASH_F64,
}  # fmt: skip
FITS = {"i8": (8, 1), "i16": (16, 1), "i32": (32, 1), "u8": (8, 0), "u16": (16, 0), "u32": (32, 0), "u64": (63, 0)}
KEY_FORMS = {"f32": KeyForm.KEY_F32, "f64": KeyForm.KEY_F64, "bool": KeyForm.KEY_BOOL}  # of all others KEY_RAW


@dataclass(frozen=True, slots=True)
class Fold:
    """One aggregate: which fold, over which register, in how many 8-byte slots of an entry."""

    fold: int
    register: int
    slots: int
    by: int = 0  # the register that decides, where one does


@dataclass(frozen=True, slots=True)
class Lowered:
    instructions: list[Instruction]
    registers: int
    folds: list[Fold]
    key: list[tuple[int, int, int]]  # offset, size, form


class _Lowering:
    def __init__(self, bound: BoundQuery) -> None:
        self.bound = bound
        self.layout = bound.layout
        self.schema = bound.layout.schema
        self.code: list[Instruction] = []
        self.values = 0
        self.known: dict[Typed, int] = {}
        self.columns: dict[str, Typed] = {}  # what map() made, over fields of the row

    def emit(
        self, op: int, dst: int = 0, a: int = 0, b: int = 0, offset: int = 0, size: int = 0,
        imm: int = 0, constant: bytes | None = None,
    ) -> int:  # fmt: skip
        self.code.append((op, dst, a, b, offset, size, imm, constant))
        return dst

    def new_register(self) -> int:
        """A value that nothing has written yet; which register it gets is decided when all are known."""
        self.values += 1
        return self.values - 1

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
            return self.emit(Op.CONSTANT, self.new_register(), imm=bits(node))
        if node.op in ("eq", "ne") and node.args[0].type == "bytes":
            return self.compare_bytes(node)
        if node.op == "startswith":
            return self.compare_prefix(node)
        if node.op in ("and", "or"):
            return self.connective(node)
        if node.op == "if":
            return self.conditional(node)
        if node.op == "hash_bytes":
            return self.hash_bytes(node)
        if node.op in ("floor", "floormod"):
            divisor = node.args[1].value
            assert isinstance(divisor, int)
            assert divisor > 0
            return self.emit(CALLS[node.op, "i64"], self.new_register(), self.value(node.args[0]), imm=divisor)
        arguments = [self.value(arg) for arg in node.args]
        if node.op == "cast":
            source = node.args[0].type
            if source == node.type or {source, node.type} == {"bool", "i64"}:
                return arguments[0]
            return self.emit(Op.I_TO_F if node.type == "f64" else Op.F_TO_I, self.new_register(), arguments[0])
        if node.op.startswith("fit_"):
            width, signed = FITS[node.op.removeprefix("fit_")]
            return self.emit(Op.FIT, self.new_register(), arguments[0], signed, size=width)
        right = arguments[1] if len(arguments) > 1 else 0
        of = (node.op, node.args[0].type)
        return self.emit(OPERATORS.get(of) or CALLS[of], self.new_register(), arguments[0], right)

    def connective(self, node: Typed) -> int:
        """`&` and `|`: a right side without a value does not count where the left side decides."""
        left = self.value(node.args[0])
        right = self.value_unless(left, int(node.op == "or"), node.args[1])
        return self.emit(OPERATORS[node.op, "bool"], self.new_register(), left, right)

    def conditional(self, node: Typed) -> int:
        condition, then, otherwise = node.args
        chosen = self.value(condition)
        first, second = self.value_unless(chosen, 0, then), self.value_unless(chosen, 1, otherwise)
        return self.emit(Op.SELECT, self.new_register(), chosen, first, size=second)

    def value_unless(self, decided: int, by: int, node: Typed) -> int:
        """The expression's register; where the register `decided` equals `by`, its failures do not count."""
        if not can_fail(node, self.schema):
            return self.value(node)
        saved = self.emit(Op.BAD_SAVE, self.new_register())
        known = dict(self.known)
        found = self.value(node)
        self.known = known  # what was computed under the mask may lack its failures elsewhere
        self.emit(Op.BAD_MASK, a=decided, b=saved, imm=by)
        return found

    def compare_prefix(self, node: Typed) -> int:
        arg, prefix = node.args
        assert isinstance(prefix.value, bytes)
        dst = self.new_register()
        if isinstance(arg.value, bytes):
            return self.emit(Op.CONSTANT, dst, imm=int(arg.value.startswith(prefix.value)))
        return self.emit(Op.BYTES_EQ, dst, offset=self.field(arg).offset, size=len(prefix.value), constant=prefix.value)

    def hash_bytes(self, node: Typed) -> int:
        value, seed = node.args[0], self.value(node.args[1])
        if isinstance(value.value, bytes):
            return self.emit(Op.HASH_BYTES, self.new_register(), b=seed, size=len(value.value), constant=value.value)
        field = self.field(value)
        return self.emit(Op.HASH_BYTES, self.new_register(), b=seed, offset=field.offset, size=field.size)

    def compare_bytes(self, node: Typed) -> int:
        left, right = node.args
        if left.op == "lit":
            left, right = right, left
        dst = self.new_register()
        if left.op == "lit":
            equal = left.value == right.value
            return self.emit(Op.CONSTANT, dst, imm=int(equal == (node.op == "eq")))
        field = self.field(left)
        if right.op == "lit":
            assert isinstance(right.value, bytes)
            self.emit(Op.BYTES_EQ, dst, offset=field.offset, size=field.size, constant=right.value)
        else:
            other = self.field(right)
            if field.size > other.size:
                field, other = other, field
            excess = other.size - field.size  # which must be padding
            self.emit(Op.BYTES_EQ_FIELD, dst, b=excess, offset=field.offset, size=field.size, imm=other.offset)
        return dst if node.op == "eq" else self.emit(Op.NOT, self.new_register(), dst)

    def filter(self, node: Typed) -> None:
        if node.op == "and":
            for part in node.args:
                self.filter(part)
            return
        word = self.word_comparison(node)
        if word is not None:
            field, value = word
            op = Op.FILTER_BYTES_NE if node.op == "ne" else Op.FILTER_BYTES_EQ
            size = node.args[1].size if node.op == "startswith" else field.size
            self.emit(op, offset=field.offset, size=size, imm=value)
        else:
            self.emit(Op.FILTER, a=self.value(node))
        self.known.clear()  # registers are dense over the selection, which is a new one now

    def word_comparison(self, node: Typed) -> tuple[Field, int] | None:
        """At most 8 bytes of a field against a constant, which compare as one machine word."""
        if node.op not in ("eq", "ne", "startswith") or node.args[0].type != "bytes":
            return None
        literal = next((arg for arg in node.args if arg.op == "lit"), None)
        column = next((arg for arg in node.args if arg.op == "col"), None)
        if literal is None or column is None:
            return None
        if (literal.size if node.op == "startswith" else column.size) > 8:
            return None
        assert isinstance(literal.value, bytes)
        return self.field(column), int.from_bytes(literal.value.ljust(8, b"\0"), "little", signed=True)

    def lower(self) -> Lowered:
        for step in self.bound.steps:
            if isinstance(step, Filter):
                self.filter(resolve(step.typed, self.columns))
            elif isinstance(step, Map):
                made = {name: resolve(tree, self.columns) for name, tree in step.typed.items()}
                self.columns = {**self.columns, **made}
            else:
                assert isinstance(step, Project)  # columns that are not read cost nothing
        if len(self.bound.aggregates) > MAX_AGGREGATES:
            raise QueryError(
                f"query {self.bound.query.name!r} has {len(self.bound.aggregates)} aggregates; "
                f"the limit is {MAX_AGGREGATES}",
                code="too_complex",
                hint="split it into several queries",
            )
        folds = [self.fold(aggregate) for aggregate in self.bound.aggregates]
        beside = [aggregate.fn for aggregate in self.bound.aggregates if aggregate.function.beside]
        if len(beside) > MAX_SIDES:
            raise QueryError(
                f"query {self.bound.query.name!r} has {len(beside)} of {', '.join(BESIDE[:-1])} and {BESIDE[-1]}; "
                f"the limit is {MAX_SIDES}",
                code="too_complex",
                hint="split it into several queries, or use approx_distinct",
            )
        slots = sum(fold.slots for fold in folds)
        if slots > MAX_SLOTS:
            raise QueryError(
                f"the aggregates of query {self.bound.query.name!r} keep {8 * slots} bytes for each key; "
                f"the limit is {8 * MAX_SLOTS}",
                code="too_complex",
                hint="split it into several queries: approx_distinct keeps 1024 bytes each",
            )
        read = [register for fold in folds if fold.slots for register in (fold.register, fold.by)]
        code, places, registers = allocate(self.code, read)
        if registers > MAX_REGISTERS:
            raise QueryError(
                f"query {self.bound.query.name!r} needs {registers} intermediate values at once; "
                f"the limit is {MAX_REGISTERS}",
                code="too_complex",
                hint="split it into several queries",
            )
        at = iter(places)
        folds = [replace(fold, register=next(at), by=next(at)) if fold.slots else fold for fold in folds]
        return Lowered(code, registers, folds, self.key())

    def fold(self, aggregate: BoundAggregate) -> Fold:
        fold, argument, by = folded(aggregate, self.columns)
        register = 0 if argument is None else self.value(argument)
        return Fold(fold.number, register, fold.slots, register if by is None else self.value(by))

    def key(self) -> list[tuple[int, int, int]]:
        fields = self.layout.key_fields
        width = sum(field.size for field in fields)
        if width > MAX_KEY_BYTES:
            raise QueryError(
                f"the key of stream {self.layout.of!r} has {width} bytes; the limit is {MAX_KEY_BYTES}",
                code="too_complex",
                hint="use a hash of the long field, or a number for it, as the key",
            )
        return [(field.offset, field.size, KEY_FORMS.get(field.kind, KeyForm.KEY_RAW)) for field in fields]


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
