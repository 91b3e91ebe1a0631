"""Expressions as Spark columns: bigint, double, boolean or binary, and null where a row has no value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flexstream.query.typed import CALENDAR, RANGES, Typed
from flexstream.spark import types

if TYPE_CHECKING:
    from pyspark.sql import Column

I64_MIN = -(2**63)
CYCLE_DAYS = 146_097  # of 400 years, after which the calendar begins anew
_CAN_FAIL = ("div", "floordiv", "mod")
_FAIL_ON_INTEGERS = ("add", "sub", "mul", "neg", "abs")
_HASHED_AS = {"hash_int": "int", "hash_long": "bigint", "hash_f32": "float", "hash_f64": "double"}
_CALENDAR: dict[str, Any] = {
    "year": F.year, "month": F.month, "day": F.dayofmonth, "day_of_week": F.dayofweek, "day_of_year": F.dayofyear,
}  # fmt: skip


class Columns:
    """The columns that a step sees: field or mapped column -> Spark column; those in `fallible` may be null."""

    def __init__(self, names: dict[str, str], fallible: set[str]) -> None:
        self.names = names
        self.fallible = fallible

    def can_fail(self, tree: Typed) -> bool:
        """Whether a row can make this expression impossible to compute, so that its column may be null."""
        if tree.op == "col":
            return tree.name in self.fallible
        if tree.op in _CAN_FAIL or (tree.op in _FAIL_ON_INTEGERS and tree.type == "i64") or tree.op.startswith("fit_"):
            return True
        if tree.op == "cast" and tree.type == "i64" and tree.args[0].type == "f64":
            return True
        return any(self.can_fail(arg) for arg in tree.args)

    def translate(self, tree: Typed) -> Column:
        if tree.op == "col":
            assert tree.name is not None
            return F.col(self.names[tree.name])
        if tree.op == "lit":
            return _literal(tree)
        if tree.op in ("and", "or"):
            return self._connective(tree)
        if tree.op.startswith("hash_"):
            return self._hash(tree)
        arguments = [self.translate(arg) for arg in tree.args]
        if tree.op == "if":
            return self._conditional(tree, *arguments)
        if tree.op in ("cast", "not", "neg", "abs"):
            return _unary(tree, arguments[0])
        if tree.op in CALENDAR:
            return _calendar(tree.op, arguments[0])
        if tree.op.startswith("fit_"):
            least, most = RANGES[tree.op.removeprefix("fit_")]
            return F.when((arguments[0] >= F.lit(least)) & (arguments[0] <= F.lit(most)), arguments[0])
        if tree.op == "round_f32":
            return arguments[0].cast("float").cast("double")
        return _binary(tree, *arguments)

    def _conditional(self, tree: Typed, condition: Column, then: Column, otherwise: Column) -> Column:
        """A condition that fails, fails the whole: to Spark it would be one that does not hold."""
        if self.can_fail(tree.args[0]):
            return F.when(condition, then).when(~condition, otherwise)
        return F.when(condition, then).otherwise(otherwise)

    def _hash(self, tree: Typed) -> Column:
        """The whole chain at once. Spark skips a null, but here it fails the row."""
        chain = [tree]
        while chain[-1].args[1].op.startswith("hash_"):
            chain.append(chain[-1].args[1])
        values = []
        for link in reversed(chain):
            value = self.translate(link.args[0])
            if link.op == "hash_bytes" or link.args[0].type == "bool":
                values.append(value)
            else:
                values.append(value.cast(_HASHED_AS[link.op]))
        found = F.hash(*values).cast("bigint")
        fallible = [value for value, link in zip(values, reversed(chain), strict=True) if self.can_fail(link.args[0])]
        for value in fallible:
            found = F.when(value.isNotNull(), found)
        return found

    def _connective(self, tree: Typed) -> Column:
        """The right side counts only when the left does not decide; a left side that fails, fails the whole."""
        left, right = self.translate(tree.args[0]), self.translate(tree.args[1])
        if not self.can_fail(tree.args[0]):
            return left & right if tree.op == "and" else left | right
        if tree.op == "and":
            return F.when(left, right).otherwise(left)
        return F.when(~left, right).otherwise(left)


def _literal(tree: Typed) -> Column:
    if isinstance(tree.value, bytes):
        return F.lit(tree.value.rstrip(b"\0"))
    if tree.type == "i64":
        return F.lit(tree.value).cast("bigint")
    return F.lit(float(tree.value) if tree.type == "f64" else tree.value)  # type: ignore[arg-type]


def _calendar(part: str, days: Column) -> Column:
    """Of days since 1970, within the first cycle of 400 years: further ones may be past Spark's dates."""
    cycles = types.floor_div(days, CYCLE_DAYS)
    found = _CALENDAR[part](F.date_from_unix_date((days - cycles * CYCLE_DAYS).cast("int"))).cast("bigint")
    return found + cycles * 400 if part == "year" else found


def _unary(tree: Typed, argument: Column) -> Column:
    source = tree.args[0].type
    if tree.op == "not":
        return ~argument
    if tree.op == "cast":
        if tree.type == "i64" and source == "f64":
            fits = (argument >= F.lit(-(2.0**63))) & (argument < F.lit(2.0**63))
            return F.when(fits, argument).cast("bigint")
        return argument.cast("int").cast("double") if source == "bool" else argument.cast(_CASTS[tree.type])
    made: Any = -argument if tree.op == "neg" else F.abs(argument)
    if tree.type == "i64":
        return F.when(argument != F.lit(I64_MIN), made)
    return made


_CASTS = {"i64": "bigint", "f64": "double"}
_PLAIN: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_CHECKED: dict[str, Any] = {"add": F.try_add, "sub": F.try_subtract, "mul": F.try_multiply}


def _binary(tree: Typed, left: Column, right: Column) -> Column:
    if tree.op in ("floor", "floormod"):
        divisor = tree.args[1].value
        assert isinstance(divisor, int)
        return types.floor_div(left, divisor) if tree.op == "floor" else F.pmod(left, F.lit(divisor).cast("bigint"))
    if tree.op == "startswith":
        assert isinstance(tree.args[1].value, bytes)
        return F.substring(left, 1, len(tree.args[1].value)) == right
    if tree.op == "div":
        return F.try_divide(left, right)
    if tree.op == "mod":
        return F.when(right != 0, left % right)
    if tree.op == "floordiv":  # towards zero, as Spark's div
        fits = (right != 0) & ~((left == F.lit(I64_MIN)) & (right == -1))
        return F.when(fits, F.call_function("div", left, right))
    if tree.type == "i64" and tree.op in _CHECKED:
        return _CHECKED[tree.op](left, right)
    return _PLAIN[tree.op](left, right)
