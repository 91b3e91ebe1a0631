"""From what was sampled of the rows to the variant that fits them (Grizzly, section 6). Pure: facts in, decision out.

Predicates are ordered by how many rows they drop for what they cost, then cut into parts that one branch decides
each: a branch near one half is guessed wrong every second time, which costs more than a few predicates. What runs
now is kept unless another choice is clearly better, so that noise does not make it flap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from flexstream.compile.codegen import Pipeline
from flexstream.compile.variant_choices import MISS, PLAIN, Choices, branch_free_from
from flexstream.query.typed import CALENDAR, Typed

BETTER = 0.9  # another order must cost that much of the present one, at most
MAX_DENSE_BYTES = 512 << 10  # as a second-level cache; beyond it the table is better, where keys lie closer together
ROWS_PER_KEY = 4  # in a pane: a key's first row costs more in a dense array than in the table
HOT, NO_LONGER_HOT = 0.5, 0.3
_OPERATOR_COSTS = {  # in cycles, where it is more than one; divisions are by constants
    **dict.fromkeys(("floordiv", "mod", "floor", "floormod"), 4.0),
    **dict.fromkeys(CALENDAR, 10.0),
    **dict.fromkeys(("hash_int", "hash_long", "hash_f32", "hash_f64", "hash_bytes"), 8.0),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the query allows."""

    costs: tuple[float, ...]  # of each predicate that can be reordered, in cycles
    fold_cost: float
    can_mask: bool
    can_be_hot: bool
    dense_bytes: int  # per key of the range; 0: no dense array is possible

    @classmethod
    def of(cls, pipeline: Pipeline) -> Shape:
        return cls(
            tuple(_cost(predicate) for predicate in pipeline.ahead),
            pipeline.fold_cost,
            pipeline.can_mask,
            pipeline.can_be_hot,
            8 * (1 + pipeline.slots) if pipeline.can_be_dense else 0,
        )


def _cost(node: Typed) -> float:
    own = 4.0 if node.type == "bytes" and node.size > 8 else _OPERATOR_COSTS.get(node.op, 1.0)
    return own + sum(_cost(arg) for arg in node.args if arg.op != "lit")


@dataclass(frozen=True, slots=True)
class Facts:
    """A sample of the rows. `rows_per_key`: how many rows a key has in a pane, on average."""

    rows: int
    passed: tuple[float, ...]
    keys: int
    least: int
    most: int
    hottest: float
    rows_per_key: float

    @classmethod
    def of(cls, profiles: Sequence[dict[str, Any]], predicates: int, rows_per_key: float) -> Facts:
        """From what instrumented variants counted on each worker."""
        rows = sum(profile["rows"] for profile in profiles)
        keys = sum(profile["keys"] for profile in profiles)
        buckets = [sum(counts) for counts in zip(*(profile["buckets"] for profile in profiles), strict=True)]
        return cls(
            rows,
            tuple(sum(p["passed"][i] for p in profiles) / max(rows, 1) for i in range(predicates)),
            keys,
            min(profile["least"] for profile in profiles),
            max(profile["most"] for profile in profiles),
            max(buckets) / max(keys, 1),
            rows_per_key,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The choices, the dense range (size 0: none), and why."""

    choices: Choices = PLAIN
    base: int = 0
    size: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def what(self) -> tuple[Choices, int, int]:
        return self.choices, self.base, self.size


def cost(shape: Shape, passed: Sequence[float], parts: Sequence[Sequence[int]], masked: bool) -> float:
    """Cycles that a row costs on average, predicates taken as independent."""
    total, reach = 0.0, 1.0
    for number, part in enumerate(parts):
        share = 1.0
        for predicate in part:
            total += reach * shape.costs[predicate]
            share *= passed[predicate]
        if masked and number == len(parts) - 1:
            return total + reach * shape.fold_cost
        total += reach * MISS * min(share, 1 - share)
        reach *= share
    return total + reach * shape.fold_cost


def best_order(shape: Shape, passed: Sequence[float]) -> tuple[tuple[tuple[int, ...], ...], bool, float]:
    """Parts, whether the last is masked, and the cost of a row."""
    ranked = sorted(range(len(passed)), key=lambda i: ((passed[i] - 1) / shape.costs[i], i))
    found: list[tuple[float, tuple[tuple[int, ...], ...], bool]] = [(shape.fold_cost, (), False)]
    # From the back: the best way through the predicates from `first` on, for a row that has come that far.
    for first in reversed(range(len(ranked))):
        options: list[tuple[float, tuple[tuple[int, ...], ...], bool]] = []
        price, share = 0.0, 1.0
        for last in range(first, len(ranked)):
            price += shape.costs[ranked[last]]
            share *= passed[ranked[last]]
            rest = found[len(ranked) - 1 - last]
            part = tuple(ranked[first : last + 1])
            options.append((price + MISS * min(share, 1 - share) + share * rest[0], (part, *rest[1]), rest[2]))
        if shape.can_mask:
            options.append((price + shape.fold_cost, (tuple(ranked[first:]),), True))
        found.append(min(options, key=lambda option: option[0]))
    least, parts, masked = found[-1]
    return parts, masked, least


def decide(shape: Shape, facts: Facts, now: Decision) -> Decision:
    """The variant for rows of this kind; `now` is what runs, and stays where it is about as good."""
    choices, reasons = now.choices, []
    if shape.costs:
        parts, masked, least = best_order(shape, facts.passed)
        if least < BETTER * cost(shape, facts.passed, *_present(shape, facts, choices)):
            choices = replace(choices, order=parts, masked=masked)
            shares = ", ".join(f"{share:.2f}" for share in facts.passed)
            reasons.append(f"predicates pass {shares} of the rows{', folded without a branch' if masked else ''}")
    base, size = _range(shape, facts, now)
    if size != now.size or base != now.base:
        reasons.append(
            f"keys from {facts.least} to {facts.most}, {facts.rows_per_key:.0f} rows each: dense array"
            if size
            else f"keys from {facts.least} to {facts.most}, {facts.rows_per_key:.1f} rows each: hash table"
        )
    choices = replace(choices, dense=size > 0)
    hot = shape.can_be_hot and facts.hottest >= (NO_LONGER_HOT if choices.hot else HOT)
    if hot != choices.hot:
        choices = replace(choices, hot=hot)
        reasons.append(f"the hottest key has {facts.hottest:.2f} of the rows")
    return Decision(choices, base, size, tuple(reasons))


def _present(shape: Shape, facts: Facts, choices: Choices) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Parts and whether the last is masked. Code without an order decides that by how many rows pass."""
    if choices.order is not None:
        return choices.order, choices.masked
    share = branch_free_from(shape.fold_cost, shape.can_mask)
    if share is not None and prod(facts.passed) > share:
        return (tuple(range(len(shape.costs))),), True
    return tuple((number,) for number in range(len(shape.costs))), False


def _range(shape: Shape, facts: Facts, now: Decision) -> tuple[int, int]:
    """The dense range with a margin; the present one when it holds all keys and is not far too large."""
    if not shape.dense_bytes or not facts.keys or facts.rows_per_key < ROWS_PER_KEY:
        return 0, 0
    span = facts.most - facts.least + 1
    if now.size and now.base <= facts.least and facts.most < now.base + now.size <= now.base + 8 * span + 1024:
        return now.base, now.size
    size = 1 << (span + span // 8).bit_length()
    if size * shape.dense_bytes > MAX_DENSE_BYTES:
        size = span
    if size * shape.dense_bytes > MAX_DENSE_BYTES:
        return 0, 0
    base = facts.least - (size - span) // 2
    if 0 <= facts.least < size:  # keys often begin at 0
        base = 0 if facts.most < size else facts.least
    return max(base, -(1 << 63)), size
