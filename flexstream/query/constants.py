"""What an operator makes of constants, as workers compute it."""

from __future__ import annotations

import math
import struct
from datetime import date

from flexstream.query.typed import CALENDAR, I64_MAX, I64_MIN, RANGES, Typed

Value = int | float | bool | bytes
ORDER = {"eq": (0,), "ne": (-1, 1), "lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (0, 1)}
_CYCLE_DAYS = 146_097  # of 400 years, after which the calendar begins anew
_FIRST = date(1970, 1, 1).toordinal()


def evaluate(node: Typed) -> Value | None:
    """An operator whose arguments are constants. None: no value, or not worth it."""
    values = [arg.value for arg in node.args]
    kind = node.args[0].type
    first, last = values[0], values[-1]
    if node.op == "not":
        return not first
    if node.op == "if":
        return values[1] if first else values[2]
    if node.op in ORDER:
        return _compare(first, last) in ORDER[node.op]
    if isinstance(first, bytes):
        return _of_bytes(node.op, first, last)
    if kind == "bool" and node.op in ("and", "or"):
        return (first and last) if node.op == "and" else (first or last)
    assert not isinstance(last, bytes)
    assert first is not None
    assert last is not None
    if node.op == "cast":
        return _cast(first, node.type)
    if node.op == "round_f32":
        return _round_f32(first)
    if node.op.startswith("hash_"):
        return _hash(node.op, first, int(last))
    return _real(node.op, float(first), float(last)) if kind == "f64" else _integer(node.op, int(first), int(last))


def _compare(first: Value | None, last: Value | None) -> int:
    """-1, 0 or 1; NaN is the greatest, and equal to itself."""
    if isinstance(first, float) and isinstance(last, float) and (math.isnan(first) or math.isnan(last)):
        return math.isnan(first) - math.isnan(last)
    return (first > last) - (first < last)  # type: ignore[operator]


def _of_bytes(op: str, first: bytes, last: Value | None) -> Value | None:
    if op == "startswith" and isinstance(last, bytes):
        return first.startswith(last)
    if op == "hash_bytes" and isinstance(last, int):
        trimmed = first.rstrip(b"\0")
        whole = len(trimmed) // 4 * 4
        words = [int.from_bytes(trimmed[at : at + 4], "little") for at in range(0, whole, 4)]
        return murmur3([*words, *(byte - 256 if byte > 127 else byte for byte in trimmed[whole:])], len(trimmed), last)
    return None


def _cast(value: int | float, to: str) -> int | float | None:
    if to == "f64":
        return float(value)
    if isinstance(value, float) and not -(2.0**63) <= value < 2.0**63:
        return None
    return int(value)


def _round_f32(value: int | float) -> float | None:
    if isinstance(value, int) and abs(value) > 1 << 53:  # through a double it would be rounded twice
        return None
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def _real(op: str, first: float, last: float) -> float | None:
    if op == "div":
        return None if last == 0 else first / last
    try:
        return {"add": first + last, "sub": first - last, "mul": first * last, "neg": -first, "abs": abs(first)}.get(op)
    except OverflowError:
        return None


def _integer(op: str, first: int, last: int) -> int | None:
    found: int | None
    if op in CALENDAR:
        return calendar(op, first)
    if op.startswith("fit_"):
        least, most = RANGES[op.removeprefix("fit_")]
        return first if least <= first <= most else None
    if op in ("floor", "floormod"):
        return first // last if op == "floor" else first % last
    if op in ("floordiv", "mod"):
        if last == 0:
            return None
        quotient = abs(first) // abs(last) * (1 if (first < 0) == (last < 0) else -1)  # cut towards zero
        found = quotient if op == "floordiv" else first - quotient * last
    else:
        table = {"add": first + last, "sub": first - last, "mul": first * last, "neg": -first, "abs": abs(first)}
        found = table.get(op)
    return found if found is not None and I64_MIN <= found <= I64_MAX else None


def calendar(part: str, days: int) -> int:
    """A part of the day that is so many days after 1970-01-01."""
    cycles, rest = divmod(days, _CYCLE_DAYS)
    day = date.fromordinal(_FIRST + rest)
    if part == "year":
        return day.year + 400 * cycles
    if part == "day_of_week":
        return day.isoweekday() % 7 + 1  # Sunday is 1
    return day.timetuple().tm_yday if part == "day_of_year" else int(getattr(day, part))


def _hash(op: str, value: int | float, seed: int) -> int:
    if op == "hash_int":
        return murmur3([int(value)], 4, seed)
    if op in ("hash_f32", "hash_f64"):
        value = math.nan if math.isnan(value) else value + 0.0  # one NaN, one zero
        layout = "<f" if op == "hash_f32" else "<d"
        bits = int.from_bytes(struct.pack(layout, value), "little")
        return murmur3([bits] if op == "hash_f32" else [bits, bits >> 32], struct.calcsize(layout), seed)
    return murmur3([int(value), int(value) >> 32], 8, seed)


def murmur3(words: list[int], size: int, seed: int) -> int:
    """Murmur3 (x86, 32 bits) of 32-bit words, as a signed number. Spark makes a word of each byte of a tail."""
    low = 0xFFFFFFFF
    found = seed & low
    for word in words:
        word = (word & low) * 0xCC9E2D51 & low
        word = (word << 15 | word >> 17) * 0x1B873593 & low
        found ^= word
        found = ((found << 13 | found >> 19) & low) * 5 + 0xE6546B64 & low
    found ^= size
    found = (found ^ found >> 16) * 0x85EBCA6B & low
    found = (found ^ found >> 13) * 0xC2B2AE35 & low
    found ^= found >> 16
    return found - (1 << 32) if found >> 31 else found
