"""Hashes, and how many different values HyperLogLog says there are: the oracle's own, value by value."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

BITS = 10
REGISTERS = 1 << BITS
MOST = 65 - BITS  # the rank of a hash whose other bits are all zero
_WORD = (1 << 64) - 1


def word_of(value: Any) -> int:
    """A value's 8 bytes; -0.0 is 0.0, and all NaNs are one."""
    if isinstance(value, float):
        value = math.nan if value != value else value + 0.0
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value) & _WORD


def hash_of(word: int) -> int:
    """splitmix64."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def estimate(values: list[Any]) -> int:
    ranks = [0] * REGISTERS
    for value in values:
        word = hash_of(word_of(value))
        rest = word & ((1 << 64 - BITS) - 1)
        register = word >> 64 - BITS
        ranks[register] = max(ranks[register], 64 - BITS - rest.bit_length() + 1)
    return int(_estimate(Counter(ranks)) + 0.5)


def _estimate(seen: Counter[int]) -> float:
    """Ertl, New cardinality estimation algorithms for HyperLogLog sketches (2017), algorithm 6."""
    if seen[0] == REGISTERS:
        return 0.0
    total = REGISTERS * _tau((REGISTERS - seen[MOST]) / REGISTERS)
    for rank in range(MOST - 1, 0, -1):
        total = 0.5 * (total + seen[rank])
    total += REGISTERS * _sigma(seen[0] / REGISTERS)
    return 0.7213475204444817 * REGISTERS * REGISTERS / total  # 1 / (2 ln 2)


def _sigma(x: float) -> float:
    power, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * power
        power += power
    return total


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    power, total, before = 1.0, 1.0 - x, -1.0
    while total != before:
        x = math.sqrt(x)
        before = total
        power *= 0.5
        total -= (1.0 - x) * (1.0 - x) * power
    return total / 3.0


def in_order(values: list[Any]) -> int:
    """A hash of the values in this order."""
    word = 0
    for value in values:
        word = hash_of(word ^ word_of(value))
    return word
