"""The folds of a compiled variant as C: a row into an entry's slots, and places of a hot key into its entry.

`slot` is the first slot of the entry's aggregates, `at` where this one's begin. Values are names of locals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexstream.compile.fold_table import Fold


def updates(fold: Fold, at: int, value: str | None, real: bool, masked: bool, overflowed: str = "") -> list[str]:
    """The statements that fold a row in; `real`: the value is a double. `masked`: `keep` is 0 for a row that counts as
    nothing. `overflowed`: the label to go to when an integer sum does; without one `overflow` tells."""
    name = fold.name
    integer, double = f"(int64_t *)slot + {at}", f"(double *)slot + {at}"
    if name == "count":
        return []
    if name == "sum_i":
        added = f"(keep ? {value} : 0)" if masked else value
        sums = f"__builtin_add_overflow(*({integer}), {added}, {integer})"
        return [f"if (FS_RARE({sums})) goto {overflowed};" if overflowed else f"overflow |= {sums};"]
    if name in ("sum_f", "avg"):
        return [f"fs_add_real({double}, {value});"]
    if name == "stddev":
        return [f"fs_add_deviation({double}, {value});"]
    guard = "if (keep) " if masked else ""
    if name in ("first", "last"):
        bits = f"fs_bits({value})" if real else f"(uint64_t){value}"
        return [f"{guard}fs_{name}(slot + {at}, {bits}, time, view->session, view->sequence + i);"]
    if name in ("approx_i", "approx_f"):
        bits = f"fs_value_bits({value})" if fold.has("REAL") else f"(uint64_t){value}"
        return [f"{guard}fs_sketch_add((unsigned char *)(slot + {at}), {bits});"]
    if name in ("min_i", "max_i"):
        also = "keep & " if masked else ""
        order = "<" if name == "min_i" else ">"
        return [f"if ({also}({value} {order} *({integer}))) *({integer}) = {value};"]
    if name in ("min_f", "max_f"):
        order = f"{value}, *({double})" if name == "min_f" else f"*({double}), {value}"
        return [f"if (fs_lt({order})) *({double}) = {value};"]
    raise ValueError(f"no code is known for fold {name}")


@dataclass(frozen=True, slots=True)
class Merge:
    """Statements of merge_hot: `each` for every place; `before` and `behind` all of them."""

    each: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)


def merging(fold: Fold, at: int) -> Merge:
    into, source, name = f"slot + {at}", f"place + {1 + at}", fold.name
    if name == "count":
        return Merge()
    if name == "sum_i":
        total = f"__builtin_add_overflow(*((int64_t *){into}), total{at}, (int64_t *){into})"
        return Merge(
            [f"total{at} += *((int64_t *){source});"],
            [f"    int64_t total{at} = 0;"],
            [f"    overflow |= {total};"],
        )
    if name in ("sum_f", "avg"):
        return Merge(
            [
                f"fs_add_real((double *){into}, *((double *){source}));",
                f"*((double *){into} + 1) += *((double *){source} + 1);",
            ]
        )
    if name == "stddev":
        return Merge([f"fs_merge_deviation((double *){into}, (double *){source});"])
    if name in ("first", "last"):
        held = f"place[{1 + at}], (int64_t)place[{2 + at}], place[{3 + at}], place[{4 + at}]"
        return Merge([f"fs_{name}({into}, {held});"])
    if name in ("min_i", "max_i", "min_f", "max_f"):
        kind, least = "int64_t" if name.endswith("_i") else "double", name.startswith("min")
        new, old = f"*(({kind} *){source})", f"*(({kind} *){into})"
        low, high = (new, old) if least else (old, new)
        return Merge([f"if ({f'{low} < {high}' if kind == 'int64_t' else f'fs_lt({low}, {high})'}) {old} = {new};"])
    raise ValueError(f"no places of a hot key are known for fold {name}")
