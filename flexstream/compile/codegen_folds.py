"""The folds of a compiled variant as C: a row into an entry's slots, and places of a hot key into its entry.

`slot` is the first slot of the entry's aggregates, `at` where this one's begin. Values are names of locals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Fold = tuple[str, str | None]


def updates(fold: Fold, at: int, value: str | None, masked: bool, overflowed: str = "") -> list[str]:
    """The statements that fold a row in. `masked`: `keep` is 0 for a row that counts as nothing. `overflowed`: the
    label to go to when an integer sum does; without one `overflow` tells."""
    integer, real = f"(int64_t *)slot + {at}", f"(double *)slot + {at}"
    if fold == ("sum", "i64"):
        added = f"(keep ? {value} : 0)" if masked else value
        sums = f"__builtin_add_overflow(*({integer}), {added}, {integer})"
        return [f"if (FS_RARE({sums})) goto {overflowed};" if overflowed else f"overflow |= {sums};"]
    if fold in (("sum", "f64"), ("avg", "f64")):
        return [f"fs_add_real({real}, {value});"]
    if fold == ("stddev", "f64"):
        return [f"fs_add_deviation({real}, {value});"]
    guard = "if (keep) " if masked else ""
    if fold[0] in ("first", "last"):
        bits = f"fs_bits({value})" if fold[1] == "f64" else f"(uint64_t){value}"
        return [f"{guard}fs_{fold[0]}(slot + {at}, {bits}, time, view->session, view->sequence + i);"]
    if fold[0] == "approx_distinct":
        bits = f"fs_value_bits({value})" if fold[1] == "f64" else f"(uint64_t){value}"
        return [f"{guard}fs_sketch_add((unsigned char *)(slot + {at}), {bits});"]
    if fold[1] == "i64":
        also = "keep & " if masked else ""
        order = "<" if fold[0] == "min" else ">"
        return [f"if ({also}({value} {order} *({integer}))) *({integer}) = {value};"]
    if fold[1] == "f64":
        order = f"{value}, *({real})" if fold[0] == "min" else f"*({real}), {value}"
        return [f"if (fs_lt({order})) *({real}) = {value};"]
    return []


@dataclass(frozen=True, slots=True)
class Merge:
    """Statements of merge_hot: `each` for every place; `before` and `behind` all of them."""

    each: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)


def merging(fold: Fold, at: int) -> Merge:
    into, source = f"slot + {at}", f"place + {1 + at}"
    if fold == ("sum", "i64"):
        total = f"__builtin_add_overflow(*((int64_t *){into}), total{at}, (int64_t *){into})"
        return Merge(
            [f"total{at} += *((int64_t *){source});"],
            [f"    int64_t total{at} = 0;"],
            [f"    overflow |= {total};"],
        )
    if fold in (("sum", "f64"), ("avg", "f64")):
        return Merge(
            [
                f"fs_add_real((double *){into}, *((double *){source}));",
                f"*((double *){into} + 1) += *((double *){source} + 1);",
            ]
        )
    if fold == ("stddev", "f64"):
        return Merge([f"fs_merge_deviation((double *){into}, (double *){source});"])
    if fold[0] in ("first", "last"):
        held = f"place[{1 + at}], (int64_t)place[{2 + at}], place[{3 + at}], place[{4 + at}]"
        return Merge([f"fs_{fold[0]}({into}, {held});"])
    if fold[1] is None:
        return Merge()
    kind, least = "int64_t" if fold[1] == "i64" else "double", fold[0] == "min"
    new, old = f"*(({kind} *){source})", f"*(({kind} *){into})"
    low, high = (new, old) if least else (old, new)
    return Merge([f"if ({f'{low} < {high}' if kind == 'int64_t' else f'fs_lt({low}, {high})'}) {old} = {new};"])
