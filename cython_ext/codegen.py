"""From a bound query to the C of its compiled variant. Pure: plan in, text out.

The shape is always the same: branch-free passes that select rows by the filters that cannot fail, then one loop
that finds the row's pane and entry and folds the aggregates. What cannot be finished in line jumps to `stop`
(flexstream_abi.h). Only numbers go from the query into the code: names and byte strings stand in comments, made
harmless, or as lists of numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from flexstream.cython_ext.lowering import FOLDS, KEY_FORMS, can_fail, resolve
from flexstream.expr import Typed
from flexstream.query import BoundFilter, BoundMap, BoundQuery
from flexstream.schema import Field

ENTRY_POINT = "fs_variant_run"
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_REAL_COMPARISONS = {
    "eq": "fs_eq({0}, {1})", "ne": "!fs_eq({0}, {1})", "lt": "fs_lt({0}, {1})", "le": "!fs_lt({1}, {0})",
    "gt": "fs_lt({1}, {0})", "ge": "!fs_lt({0}, {1})",
}  # fmt: skip
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}


@dataclass
class _Block:
    """Statements under way, with the locals that hold what was computed already."""

    lines: list[str] = field(default_factory=list)
    known: dict[Typed, str] = field(default_factory=dict)
    indent: str = "        "

    def add(self, line: str) -> None:
        self.lines.append(self.indent + line)


class _Generator:
    def __init__(self, bound: BoundQuery) -> None:
        self.bound = bound
        self.stream = bound.query.stream
        self.names = 0

    def local(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def field(self, node: Typed) -> Field:
        return self.stream.schema.field(node.name or "")

    # -- expressions

    def value(self, node: Typed, block: _Block) -> str:
        """The C of a local or constant that holds the expression; statements go to the block."""
        if node not in block.known:
            block.known[node] = self.compute(node, block)
        return block.known[node]

    def compute(self, node: Typed, block: _Block) -> str:
        if node.op == "lit":
            return literal(node)
        name = self.local()
        if node.op == "col":
            self.load(node, name, block)
        elif node.op in ("and", "or"):
            self.connective(node, name, block)
        elif node.args[0].type == "bytes":
            same = self.same_bytes(node)
            block.add(f"const int64_t {name} = {same if node.op == 'eq' else f'!{same}'};")
        elif node.op == "cast":
            self.cast(node, name, block)
        else:
            self.operator(node, name, block)
        return name

    def load(self, node: Typed, name: str, block: _Block) -> None:
        source = self.field(node)
        kind = "i64" if source.kind == "timestamp" else source.kind
        of = "double" if node.type == "f64" else "int64_t"
        block.add(f"const {of} {name} = ({of})fs_get_{kind}(row + {source.offset}); /* {comment(source.name)} */")
        if source.kind == "u64":
            block.add(f"if ({name} < 0) goto stop; /* does not fit int64 */")

    def connective(self, node: Typed, name: str, block: _Block) -> None:
        left = self.value(node.args[0], block)
        if not can_fail(node.args[1], self.stream.schema):
            right = self.value(node.args[1], block)
            block.add(f"const int64_t {name} = {left} {'&' if node.op == 'and' else '|'} {right};")
            return
        block.add(f"int64_t {name} = {left};")
        block.add(f"if ({'' if node.op == 'and' else '!'}{name}) {{")
        inner = _Block(block.lines, dict(block.known), block.indent + "    ")
        inner.add(f"{name} = {self.value(node.args[1], inner)};")
        block.add("}")

    def same_bytes(self, node: Typed) -> str:
        left, right = node.args if node.args[0].op != "lit" else reversed(node.args)
        if left.op == "lit":
            return str(int(left.value == right.value))
        source = self.field(left)
        if right.op != "lit":
            return f"(memcmp(row + {source.offset}, row + {self.field(right).offset}, {source.size}) == 0)"
        assert isinstance(right.value, bytes)
        if source.size in (1, 2, 4, 8):
            word = int.from_bytes(right.value.ljust(source.size, b"\0"), "little")
            return f"(fs_get_u{source.size * 8}(row + {source.offset}) == UINT64_C({word}))"
        numbers = ", ".join(str(byte) for byte in right.value)
        return f"(memcmp(row + {source.offset}, (const unsigned char[]){{{numbers}}}, {source.size}) == 0)"

    def cast(self, node: Typed, name: str, block: _Block) -> None:
        argument = self.value(node.args[0], block)
        if node.type == "f64":
            block.add(f"const double {name} = (double){argument};")
            return
        if node.args[0].type == "f64":
            block.add(f"if (!({argument} >= -0x1p63 && {argument} < 0x1p63)) goto stop; /* no integer */")
        block.add(f"const int64_t {name} = (int64_t){argument};")

    def operator(self, node: Typed, name: str, block: _Block) -> None:
        arguments = [self.value(arg, block) for arg in node.args]
        real = node.args[0].type == "f64"
        if node.op in _COMPARISONS:
            template = _REAL_COMPARISONS[node.op] if real else f"{{0}} {_COMPARISONS[node.op]} {{1}}"
            if not real and arguments[0] == arguments[1]:
                template = str(int(node.op in ("eq", "le", "ge")))
            block.add(f"const int64_t {name} = {template.format(*arguments)};")
        elif node.op == "not":
            block.add(f"const int64_t {name} = !{arguments[0]};")
        elif real:
            self.real_operator(node.op, arguments, name, block)
        else:
            self.integer_operator(node, arguments, name, block)

    def real_operator(self, op: str, arguments: list[str], name: str, block: _Block) -> None:
        if op == "div":
            block.add(f"if ({arguments[1]} == 0) goto stop; /* division by zero */")
            block.add(f"const double {name} = {arguments[0]} / {arguments[1]};")
        elif op in ("neg", "abs"):
            function = "-" if op == "neg" else "__builtin_fabs"
            block.add(f"const double {name} = {function}({arguments[0]});")
        else:
            block.add(f"const double {name} = {arguments[0]} {_ARITHMETIC[op]} {arguments[1]};")

    def integer_operator(self, node: Typed, arguments: list[str], name: str, block: _Block) -> None:
        last = node.args[-1]
        constant = last.value if last.op == "lit" else None
        never: tuple[int, ...]
        if node.op in _ARITHMETIC:
            block.add(f"int64_t {name};")
            block.add(f"if (__builtin_{node.op}_overflow({', '.join(arguments)}, &{name})) goto stop; /* overflow */")
            return
        of, value = arguments[-1], arguments[0]
        if node.op in ("neg", "abs"):
            never, why = (-(1 << 63),), "overflow"
            check = f"{of} == INT64_MIN"
            value = f"-{of}" if node.op == "neg" else f"{of} >= 0 ? {of} : -{of}"
        else:
            never, why = (0, -1), "the generic variant decides"
            check = f"{of} == 0 || {of} == -1"
            value += f" {'/' if node.op == 'floordiv' else '%'} {of}"
        if constant in never:  # compilers warn of what is behind such a check
            block.add(f"goto stop; /* {why} */")
            value = "0"
        elif constant is None:
            block.add(f"if ({check}) goto stop; /* {why} */")
        block.add(f"const int64_t {name} = {value};")

    # -- the function

    def filters(self) -> tuple[list[Typed], list[Typed], dict[str, Typed]]:
        """Filters that can run ahead in passes of their own, those that cannot, and the columns map() made."""
        columns: dict[str, Typed] = {}
        ahead: list[Typed] = []
        behind: list[Typed] = []
        for step in self.bound.steps:
            if isinstance(step, BoundMap):
                columns = {**columns, **{name: resolve(tree, columns) for name, tree in step.columns.items()}}
            elif isinstance(step, BoundFilter):
                for part in conjuncts(resolve(step.expr, columns)):
                    (behind if behind or can_fail(part, self.stream.schema) else ahead).append(part)
        return ahead, behind, columns

    def passes(self, ahead: list[Typed]) -> list[str]:
        row_bytes = self.stream.schema.row_bytes
        lines = []
        for number, predicate in enumerate(ahead):
            first = number == 0
            block = _Block()
            kept = self.value(predicate, block)
            lines += [
                f"    /* filter: {comment(show(predicate))} */",
                f"    const uint32_t n{number} = {'n' if first else 'm'};",
                "    m = 0;",
                f"    for (uint32_t k = 0; k < n{number}; k++) {{",
                f"        const uint32_t i = {'k' if first else 'selected[k]'};",
                f"        const unsigned char *row = rows + (size_t)i * {row_bytes};",
                *block.lines,
                "        selected[m] = i;",
                f"        m += {kept} != 0;",
                "    }",
            ]
        return lines

    def find_entry(self, block: _Block) -> None:
        block.add(f"const int64_t time = fs_get_i64(row + {self.stream.time_field.offset});")
        block.add("if (time < pane.start || time >= pane.end) {")
        block.add("    if (time < other.start || time >= other.end) goto stop; /* a third pane, or late */")
        block.add("    const fs_pane_view held = pane;")
        block.add("    pane = other, other = held;")
        block.add("}")
        words = (sum(key.size for key in self.stream.key_fields) + 7) // 8
        block.add(f"uint64_t key[{words}] = {{0}};")
        at = 0
        for key in self.stream.key_fields:
            to = f"(unsigned char *)key + {at}"
            form = {1: "fs_key_f32", 2: "fs_key_f64"}.get(KEY_FORMS.get(key.kind, 0))
            if form:
                block.add(f"{form}({to}, row + {key.offset}); /* key: {comment(key.name)} */")
            elif key.kind == "bool":
                block.add(f"*({to}) = fs_get_bool(row + {key.offset}); /* key: {comment(key.name)} */")
            else:
                block.add(f"memcpy({to}, row + {key.offset}, {key.size}); /* key: {comment(key.name)} */")
            at += key.size
        hashed = "key[0] * FS_GOLDEN" if words == 1 else f"fs_hash_words(key, {words})"
        stride = self.stride(words)
        same = " && ".join(f"entry[{1 + word}] == key[{word}]" for word in range(words))
        block.add(f"uint64_t at = ({hashed}) >> pane.shift;")
        block.add(f"uint64_t *entry = (uint64_t *)(pane.entries + at * {stride});")
        block.add(f"while (entry[0] && !({same})) {{")
        block.add("    at = (at + 1) & pane.mask;")
        block.add(f"    entry = (uint64_t *)(pane.entries + at * {stride});")
        block.add("}")
        block.add("if (!entry[0]) { /* a new key */")
        block.add("    if (*pane.used >= pane.limit) goto stop;")
        block.add("    ++*pane.used;")
        block.add(f"    memcpy(entry, view->empty, {stride});")
        block.add(f"    memcpy(entry + 1, key, {words * 8});")
        block.add("}")

    def stride(self, words: int) -> int:
        slots = sum(FOLDS[self.fold_of(a.fn, a.arg)][1] for a in self.bound.aggregates)
        return 8 * (1 + words + slots)

    def fold_of(self, fn: str, arg: Typed | None) -> tuple[str, str | None]:
        if arg is None:
            return "count", None
        return fn, "f64" if fn in ("avg", "stddev") else arg.type

    def fold(self, block: _Block, values: list[str | None]) -> None:
        words = (sum(key.size for key in self.stream.key_fields) + 7) // 8
        slot = 1 + words
        block.add("entry[0] += 1;")
        for aggregate, value in zip(self.bound.aggregates, values, strict=True):
            fold = self.fold_of(aggregate.fn, aggregate.arg)
            block.add(f"/* {comment(aggregate.name)} = {aggregate.fn} */")
            integer, real = f"(int64_t *)entry + {slot}", f"(double *)entry + {slot}"
            if fold == ("sum", "i64"):
                block.add(f"overflow |= __builtin_add_overflow(*({integer}), {value}, {integer});")
            elif fold in (("sum", "f64"), ("avg", "f64")):
                block.add(f"fs_add_real({real}, {value});")
            elif fold == ("stddev", "f64"):
                block.add(f"fs_add_deviation({real}, {value});")
            elif fold[1] == "i64":
                block.add(f"if ({value} {'<' if fold[0] == 'min' else '>'} *({integer})) *({integer}) = {value};")
            elif fold[1] == "f64":
                order = f"{value}, *({real})" if fold[0] == "min" else f"*({real}), {value}"
                block.add(f"if (fs_lt({order})) *({real}) = {value};")
            slot += FOLDS[fold][1]

    def generate(self) -> str:
        ahead, behind, columns = self.filters()
        block = _Block()
        for predicate in behind:
            block.add(f"/* filter: {comment(show(predicate))} */")
            block.add(f"if (!{self.value(predicate, block)}) {{ dropped++; continue; }}")
        values: list[str | None] = []
        for aggregate in self.bound.aggregates:
            if aggregate.arg is None:
                values.append(None)
                continue
            argument = resolve(aggregate.arg, columns)
            if aggregate.fn in ("avg", "stddev") and argument.type != "f64":
                argument = Typed("cast", "f64", (argument,))
            values.append(self.value(argument, block))
        self.find_entry(block)
        self.fold(block, values)
        selected = ["    uint32_t selected[FS_ABI_BATCH], m = n;"] if ahead else ["    const uint32_t m = n;"]
        return "\n".join(
            [
                '#include "flexstream_abi.h"',
                "",
                f"/* Query {comment(self.bound.query.name)} over stream {comment(self.stream.name)}, "
                f"panes of {self.bound.pane} {self.stream.time_unit}. */",
                f"uint32_t {ENTRY_POINT}(const unsigned char *rows, uint32_t n, fs_view *view)",
                "{",
                *selected,
                "    fs_pane_view pane = view->pane[0], other = view->pane[1];",
                "    uint64_t dropped = 0, overflow = 0;",
                "    uint32_t k = 0, i = 0;",
                *self.passes(ahead),
                "    for (; k < m; k++) {",
                f"        i = {'selected[k]' if ahead else 'k'};",
                f"        const unsigned char *row = rows + (size_t)i * {self.stream.schema.row_bytes};",
                *block.lines,
                "    }",
                "    view->filtered = n - m + dropped;",
                "    view->overflow |= overflow;",
                "    return n;",
                "stop:",
                "    view->filtered = i - k + dropped;",
                "    view->overflow |= overflow;",
                "    return i;",
                "}",
                "",
            ]
        )


def conjuncts(node: Typed) -> list[Typed]:
    return [part for arg in node.args for part in conjuncts(arg)] if node.op == "and" else [node]


def literal(node: Typed) -> str:
    """A constant, spelled by its bits, so that nothing of the query's text gets into the code."""
    if node.type == "f64":
        bits = struct.unpack("<Q", struct.pack("<d", node.value))[0]
        return f"fs_real(UINT64_C({bits}))"
    assert isinstance(node.value, int)
    number = int(node.value)
    return "INT64_MIN" if number == -(1 << 63) else f"INT64_C({number})"


def show(node: Typed, depth: int = 8) -> str:
    """The expression for a comment; what is deeper than that is left out."""
    if node.op == "col":
        return node.name or ""
    if node.op == "lit":
        return repr(node.value)
    return f"{node.op}({', '.join(show(arg, depth - 1) for arg in node.args) if depth else '...'})"


def comment(text: str) -> str:
    """Text that cannot end a comment, nor begin a line, whatever it holds."""
    safe = text[:1000].encode("ascii", "backslashreplace").decode()
    kept = "".join(char if char.isalnum() or char in " _-.,=<>()'" else "." for char in safe)
    return kept if len(kept) <= 200 else kept[:200] + "..."


def generate(bound: BoundQuery) -> str:
    """The C source of the query's compiled variant."""
    return _Generator(bound).generate()
