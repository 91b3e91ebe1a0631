"""Expressions of a bound query as C: statements that leave each value in a local, computed once.

Only numbers go from the query into the code: names and byte strings stand in comments, made harmless, or as lists
of numbers. What has no value for a row jumps to `stop` (flexstream_abi.h).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from flexstream.query.analysis import can_fail
from flexstream.query.typed import CALENDAR, RANGES, Typed
from flexstream.rows.layout import RowLayout
from flexstream.rows.schema import Field

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_REAL_COMPARISONS = {
    "eq": "fs_eq({0}, {1})", "ne": "!fs_eq({0}, {1})", "lt": "fs_lt({0}, {1})", "le": "!fs_lt({1}, {0})",
    "gt": "fs_lt({1}, {0})", "ge": "!fs_lt({0}, {1})",
}  # fmt: skip
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_HASHES = ("hash_int", "hash_long", "hash_f32", "hash_f64", "hash_bytes")
_CALLS = ("floor", "floormod", *CALENDAR, *_HASHES)  # functions of flexstream_abi.h, fs_ before the name


@dataclass
class Block:
    """Statements under way, with the locals that hold what was computed already."""

    lines: list[str] = field(default_factory=list)
    known: dict[Typed, str] = field(default_factory=dict)
    indent: str = "        "

    def add(self, line: str) -> None:
        self.lines.append(self.indent + line)


class Expressions:
    """Names every local once, so that blocks may stand inside one another."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.names = 0

    def local(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def field(self, node: Typed) -> Field:
        return self.layout.schema.field(node.name or "")

    def value(self, node: Typed, block: Block) -> str:
        """The C of a local or constant that holds the expression; statements go to the block."""
        if node not in block.known:
            block.known[node] = self.compute(node, block)
        return block.known[node]

    def compute(self, node: Typed, block: Block) -> str:
        if node.op == "lit":
            return literal(node)
        name = self.local()
        if node.op == "col":
            self.load(node, name, block)
        elif node.op in ("and", "or"):
            self.connective(node, name, block)
        elif node.op == "if":
            self.conditional(node, name, block)
        elif node.op in _CALLS:
            self.call(node, name, block)
        elif node.op == "startswith":
            block.add(f"const int64_t {name} = {self.same_prefix(node)};")
        elif node.args[0].type == "bytes":
            same = self.same_bytes(node)
            block.add(f"const int64_t {name} = {same if node.op == 'eq' else f'!{same}'};")
        elif node.op == "cast":
            self.cast(node, name, block)
        elif node.op.startswith("fit_"):
            self.fit(node, name, block)
        else:
            self.operator(node, name, block)
        return name

    def load(self, node: Typed, name: str, block: Block) -> None:
        source = self.field(node)
        kind = "i64" if source.kind == "timestamp" else source.kind
        of = "double" if node.type == "f64" else "int64_t"
        block.add(f"const {of} {name} = ({of})fs_get_{kind}(row + {source.offset}); /* {comment(source.name)} */")
        if source.kind == "u64":
            block.add(f"if ({name} < 0) goto stop; /* does not fit int64 */")

    def connective(self, node: Typed, name: str, block: Block) -> None:
        left = self.value(node.args[0], block)
        if not can_fail(node.args[1], self.layout.schema):
            right = self.value(node.args[1], block)
            block.add(f"const int64_t {name} = {left} {'&' if node.op == 'and' else '|'} {right};")
            return
        block.add(f"int64_t {name} = {left};")
        block.add(f"if ({'' if node.op == 'and' else '!'}{name}) {{")
        inner = Block(block.lines, dict(block.known), block.indent + "    ")
        inner.add(f"{name} = {self.value(node.args[1], inner)};")
        block.add("}")

    def conditional(self, node: Typed, name: str, block: Block) -> None:
        condition, then, otherwise = node.args
        chosen = self.value(condition, block)
        of = "double" if node.type == "f64" else "int64_t"
        if not any(can_fail(side, self.layout.schema) for side in (then, otherwise)):
            sides = f"{self.value(then, block)} : {self.value(otherwise, block)}"
            block.add(f"const {of} {name} = {chosen} ? {sides};")
            return
        block.add(f"{of} {name};")
        block.add(f"if ({chosen}) {{")
        inner = Block(block.lines, dict(block.known), block.indent + "    ")
        inner.add(f"{name} = {self.value(then, inner)};")
        block.add("} else {")
        inner = Block(block.lines, dict(block.known), block.indent + "    ")
        inner.add(f"{name} = {self.value(otherwise, inner)};")
        block.add("}")

    def call(self, node: Typed, name: str, block: Block) -> None:
        if node.op == "hash_bytes":
            value, seed = node.args
            size = value.size if value.op == "col" else len(_bytes(value))
            first = f"row + {self.field(value).offset}" if value.op == "col" else _array(_bytes(value))
            arguments = [first, str(size), self.value(seed, block)]
        else:
            arguments = [self.value(arg, block) for arg in node.args]
        what = f" /* {comment(value.name or '')} */" if node.op == "hash_bytes" and value.op == "col" else ""
        block.add(f"const int64_t {name} = fs_{node.op}({', '.join(arguments)});{what}")

    def same_prefix(self, node: Typed) -> str:
        value, prefix = node.args
        if value.op == "lit":
            return str(int(_bytes(value).startswith(_bytes(prefix))))
        return _same(self.field(value).offset, _bytes(prefix))

    def same_bytes(self, node: Typed) -> str:
        left, right = node.args if node.args[0].op != "lit" else reversed(node.args)
        if left.op == "lit":
            return str(int(left.value == right.value))
        source = self.field(left)
        if right.op == "lit":
            return _same(source.offset, _bytes(right).ljust(source.size, b"\0"))
        other = self.field(right)
        if source.size > other.size:
            source, other = other, source
        same = f"memcmp(row + {source.offset}, row + {other.offset}, {source.size}) == 0"
        if source.size == other.size:
            return f"({same})"
        padding = f"fs_is_zero(row + {other.offset + source.size}, {other.size - source.size})"
        return f"({same} && {padding})"

    def cast(self, node: Typed, name: str, block: Block) -> None:
        argument = self.value(node.args[0], block)
        if node.type == "f64":
            block.add(f"const double {name} = (double){argument};")
            return
        if node.args[0].type == "f64":
            block.add(f"if (!({argument} >= -0x1p63 && {argument} < 0x1p63)) goto stop; /* no integer */")
        block.add(f"const int64_t {name} = (int64_t){argument};")

    def fit(self, node: Typed, name: str, block: Block) -> None:
        argument = self.value(node.args[0], block)
        kind = node.op.removeprefix("fit_")
        least, most = RANGES[kind]
        above = "" if kind == "u64" else f" || {argument} > INT64_C({most})"
        block.add(f"if ({argument} < INT64_C({least}){above}) goto stop; /* not in {kind} */")
        block.add(f"const int64_t {name} = {argument};")

    def operator(self, node: Typed, name: str, block: Block) -> None:
        arguments = [self.value(arg, block) for arg in node.args]
        real = node.args[0].type == "f64"
        if node.op in _COMPARISONS:
            template = _REAL_COMPARISONS[node.op] if real else f"{{0}} {_COMPARISONS[node.op]} {{1}}"
            if not real and arguments[0] == arguments[1]:
                template = str(int(node.op in ("eq", "le", "ge")))
            block.add(f"const int64_t {name} = {template.format(*arguments)};")
        elif node.op == "not":
            block.add(f"const int64_t {name} = !{arguments[0]};")
        elif node.op == "round_f32":
            block.add(f"const double {name} = (double)(float){arguments[0]};")
        elif real:
            self.real_operator(node.op, arguments, name, block)
        else:
            self.integer_operator(node, arguments, name, block)

    def real_operator(self, op: str, arguments: list[str], name: str, block: Block) -> None:
        if op == "div":
            block.add(f"if ({arguments[1]} == 0) goto stop; /* division by zero */")
            block.add(f"const double {name} = {arguments[0]} / {arguments[1]};")
        elif op in ("neg", "abs"):
            function = "-" if op == "neg" else "__builtin_fabs"
            block.add(f"const double {name} = {function}({arguments[0]});")
        else:
            block.add(f"const double {name} = {arguments[0]} {_ARITHMETIC[op]} {arguments[1]};")

    def integer_operator(self, node: Typed, arguments: list[str], name: str, block: Block) -> None:
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


def conjuncts(node: Typed) -> list[Typed]:
    return [part for arg in node.args for part in conjuncts(arg)] if node.op == "and" else [node]


def _bytes(node: Typed) -> bytes:
    assert isinstance(node.value, bytes)
    return node.value


def _array(value: bytes) -> str:
    return f"(const unsigned char[]){{{', '.join(map(str, value or bytes(1)))}}}"


def _same(offset: int, value: bytes) -> str:
    """Whether the bytes of the row from `offset` on are these."""
    if len(value) in (1, 2, 4, 8):
        return f"(fs_get_u{len(value) * 8}(row + {offset}) == UINT64_C({int.from_bytes(value, 'little')}))"
    return f"(memcmp(row + {offset}, {_array(value)}, {len(value)}) == 0)"


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
