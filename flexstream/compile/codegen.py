"""From a bound query to the C of a compiled variant. Pure: plan and choices in, text out.

The shape is always the same, one loop over the rows of a batch: the filters that cannot fail, in the chosen order;
those that can, as written; the arguments of the aggregates; the row's pane and entry; the folds. What cannot be
finished in line jumps to `stop` (flexstream_abi.h). Rows and, where the table is large, entries are prefetched:
one pass over rows that come from memory is what hand-written code would do too, and it waits for memory alone.
The loop stands there once and is compiled for a large table, for a small one, and, where a dropped row may be folded
as nothing, without the filters' branches: which of them runs is decided batch by batch. A dense variant has a shorter
loop before it (codegen_dense.py).
"""

from __future__ import annotations

from flexstream.compile.codegen_dense import KnownRows, body_indent
from flexstream.compile.codegen_expr import Block, Expressions, comment, conjuncts, show
from flexstream.compile.codegen_folds import merge_places, update
from flexstream.compile.fold_table import folded
from flexstream.compile.variant_choices import PLAIN, Choices, branch_free_from
from flexstream.cython_ext.operators.compiled_variant import MAX_PREDICATES
from flexstream.query.analysis import can_fail, resolve
from flexstream.query.expr import Typed
from flexstream.query.plan.nodes import Filter, Map
from flexstream.query.plan.stages import BoundQuery
from flexstream.rows.schema import Field

ENTRY_POINT = "fs_variant_run"
ROWS_AHEAD_BYTES = 4096  # what of the rows is fetched ahead; measured, with rows that come from memory
ENTRIES_AHEAD = 32
SAMPLE_EVERY = 16
MAX_HOT_SLOTS = 32
PLACES = 4  # for the rows of a hot key, in turn
_INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "timestamp")


class Pipeline:
    """The parts of a query that its code is made of, over fields of the row alone."""

    def __init__(self, bound: BoundQuery) -> None:
        self.bound = bound
        self.layout = bound.layout
        self.ahead: list[Typed] = []  # predicates that always have a value: any order will do
        self.behind: list[Typed] = []  # the rest, from the first that may fail on: in the order written
        columns: dict[str, Typed] = {}
        for step in bound.steps:
            if isinstance(step, Map):
                columns = {**columns, **{name: resolve(tree, columns) for name, tree in step.typed.items()}}
            elif isinstance(step, Filter):
                for part in conjuncts(resolve(step.typed, columns)):
                    fails = bool(self.behind) or can_fail(part, self.layout.schema)
                    (self.behind if fails or len(self.ahead) == MAX_PREDICATES else self.ahead).append(part)
        found = [folded(aggregate, columns) for aggregate in bound.aggregates]
        self.folds = [fold for fold, _, _ in found]
        self.arguments = [argument for _, argument, _ in found]
        self.deciders = [by for _, _, by in found]
        self.key_words = (sum(key.size for key in self.layout.key_fields) + 7) // 8
        self.slots = sum(fold.slots for fold in self.folds)
        self.beside = any(fold.has("SIDE") for fold in self.folds)

    @property
    def whole_key(self) -> Field | None:
        """The key, when it is one integer."""
        first, *others = self.layout.key_fields
        return first if not others and first.kind in _INTEGERS else None

    @property
    def can_be_dense(self) -> bool:
        """Not with tables beside the pane's own, whose counts are in its entries alone."""
        return self.whole_key is not None and not self.beside

    @property
    def can_be_hot(self) -> bool:
        """May a batch's rows be added up apart? Not where that could pass int64, and the sum in order does not; nor
        where the places would be large."""
        if self.slots > MAX_HOT_SLOTS or self.beside:
            return False
        pairs = zip(self.folds, self.arguments, strict=True)
        return all(not fold.has("OVERFLOWS") or (of is not None and self._is_narrow(of)) for fold, of in pairs)

    def _is_narrow(self, node: Typed) -> bool:
        """A number of at most 32 bits."""
        if node.op == "cast":
            return node.args[0].type == "bool"
        return node.op == "col" and self.layout.schema.field(node.name or "").size <= 4

    @property
    def fold_cost(self) -> float:
        """Cycles to fold a row in, about."""
        return 6.0 + 3.0 * self.slots

    @property
    def can_mask(self) -> bool:
        """May a dropped row be folded as nothing? Not into reals, whose sums would remember it."""
        whole = all(fold.has("MASKS") for fold in self.folds)
        trees = [tree for tree in (*self.arguments, *self.deciders) if tree is not None]
        safe = not any(can_fail(tree, self.layout.schema) for tree in trees)
        return bool(self.ahead) and not self.behind and whole and safe


class _Generator:
    def __init__(self, pipeline: Pipeline, choices: Choices) -> None:
        self.pipeline, self.choices = pipeline, choices
        self.layout = pipeline.layout
        self.row_bytes = self.layout.schema.row_bytes
        self.expressions = Expressions(self.layout)
        self.dense = choices.dense and pipeline.can_be_dense
        self.masked = choices.masked and pipeline.can_mask
        self.stride = 8 * (1 + pipeline.key_words + pipeline.slots)
        self.dense_words = 1 + pipeline.slots
        self.hot = choices.hot and pipeline.can_be_hot
        share = branch_free_from(pipeline.fold_cost, pipeline.can_mask)
        undecided = choices.order is None and not (self.masked or self.hot or choices.instrumented)
        self.masked_from = share if undecided else None  # the share of rows that pass, from which on no branch is best
        self.keeps = self.masked or self.masked_from is not None  # dropped rows may come to the folds
        self.drops = bool(pipeline.ahead or pipeline.behind)
        self.in_runs = self.dense and not (self.hot or choices.instrumented)

    # -- the key

    def key_functions(self) -> list[str]:
        lines = ["static inline void load_key(const unsigned char *row, uint64_t *key)", "{"]
        lines += [f"    key[{word}] = 0;" for word in range(self.pipeline.key_words)]
        at = 0
        for key in self.layout.key_fields:
            to, what = f"(unsigned char *)key + {at}", f"/* key: {comment(key.name)} */"
            form = {"f32": "fs_key_f32", "f64": "fs_key_f64"}.get(key.kind)
            if form:
                lines.append(f"    {form}({to}, row + {key.offset}); {what}")
            elif key.kind == "bool":
                lines.append(f"    *({to}) = fs_get_bool(row + {key.offset}); {what}")
            else:
                lines.append(f"    memcpy({to}, row + {key.offset}, {key.size}); {what}")
            at += key.size
        words = self.pipeline.key_words
        hashed = "key[0] * multiplier" if words == 1 else f"fs_hash_words(key, {words}, multiplier)"
        function = "static inline uint64_t hash_key(const uint64_t *key, uint64_t multiplier)"
        return [*lines, "}", "", f"{function} {{ return {hashed}; }}", ""]

    def key_value(self, row: str = "row") -> str:
        key = self.pipeline.whole_key
        assert key is not None
        kind = "i64" if key.kind == "timestamp" else key.kind
        return f"(int64_t)fs_get_{kind}({row} + {key.offset})"

    # -- filters

    def order(self) -> list[list[Typed]]:
        ahead = self.pipeline.ahead
        parts = self.choices.order
        if parts is None or sorted(number for part in parts for number in part) != list(range(len(ahead))):
            return [[predicate] for predicate in ahead]
        return [[ahead[number] for number in part] for part in parts if part]

    def all_of(self, predicates: list[Typed], block: Block) -> str:
        for predicate in predicates:
            block.add(f"/* filter: {comment(show(predicate))} */")
        return " & ".join(f"({self.expressions.value(predicate, block)} != 0)" for predicate in predicates)

    def passing_function(self) -> list[str]:
        """For rows to come: whether their entries will be needed."""
        block = Block(indent="    ")
        kept = self.all_of(self.pipeline.ahead, block)
        block.add(f"return {kept};")
        return ["static inline int64_t passes(const unsigned char *row)", "{", *block.lines, "}", ""]

    def filters(self, block: Block) -> None:
        parts = self.order()
        for number, part in enumerate(parts):
            kept = self.all_of(part, block)
            if self.masked_from is not None:
                block.add(f"int64_t keep = {kept};" if number == 0 else f"keep &= {kept};")
                block.add("if (!masked && !keep) continue;")
            elif self.masked and number == len(parts) - 1:
                block.add(f"const int64_t keep = {kept};")
            else:
                block.add(f"if (!({kept})) continue;")
        for predicate in self.pipeline.behind:
            block.add(f"/* filter: {comment(show(predicate))} */")
            block.add(f"if (!{self.expressions.value(predicate, block)}) continue;")

    def sample(self, block: Block) -> None:
        inner = Block(block.lines, {}, block.indent + "    ")
        block.add(f"if (i % {SAMPLE_EVERY} == 0) {{")
        inner.add("fs_profile *profile = view->profile;")
        inner.add("profile->rows += 1;")
        passed = ["1"]
        for number, predicate in enumerate(self.pipeline.ahead):
            value = self.expressions.value(predicate, inner)
            passed.append(f"({value} != 0)")
            inner.add(f"profile->passed[{number}] += {passed[-1]};")
        inner.add(f"if ({' & '.join(passed)}) {{")
        inner.add(f"    uint64_t key[{self.pipeline.key_words}];")
        inner.add("    load_key(row, key);")
        value = self.key_value() if self.pipeline.whole_key is not None else "0"
        inner.add(f"    fs_note_key(profile, {value}, hash_key(key, FS_GOLDEN));")
        inner.add("}")
        block.add("}")

    # -- state

    @property
    def rows_ahead(self) -> int:
        """From a row to what is to be fetched when it is read."""
        return max(2, ROWS_AHEAD_BYTES // self.row_bytes) * self.row_bytes + self.first_offset()

    def prefetch(self, block: Block) -> None:
        block.add(f"__builtin_prefetch(row + {self.rows_ahead});")
        if self.dense:
            return  # at most as large as a second-level cache: to fetch entries would cost more than it saves
        block.add(f"if (large && i + {ENTRIES_AHEAD} < n) {{ /* fetch the entry of a later row */")
        block.add(f"    const unsigned char *later = row + {ENTRIES_AHEAD * self.row_bytes};")
        block.add(f"    uint64_t key[{self.pipeline.key_words}];")
        block.add("    load_key(later, key);")
        passes = "passes(later)" if self.pipeline.ahead else "1"  # to the first entry if not: a branch would cost more
        block.add(f"    const uint64_t near = (hash_key(key, pane.multiplier) >> pane.shift) & -(uint64_t){passes};")
        block.add(f"    __builtin_prefetch(pane.entries + near * {self.stride}, 1);")
        block.add("}")

    def first_offset(self) -> int:
        """Of what every row is asked for: the time and, before it, the first predicate's fields."""
        fields = [self.layout.time_field.offset]
        if self.order():
            fields = [self.layout.schema.field(name).offset for name in _names(self.order()[0][0])] or fields
        return min(fields) & ~63 if self.row_bytes > 64 else 0

    def unless_kept(self, block: Block, indent: str = "    ") -> None:
        if self.keeps:
            block.add(f"{indent}if (!keep) continue;")

    def find_pane(self, block: Block) -> None:
        block.add(f"const int64_t time = fs_get_i64(row + {self.layout.time_field.offset});")
        block.add("if (FS_RARE((uint64_t)time - (uint64_t)pane.start >= pane.span)) {")
        self.unless_kept(block)
        block.add("    if ((uint64_t)time - (uint64_t)other.start >= other.span) goto stop; /* a third, or late */")
        if self.hot:
            block.add("    if (hot_count) overflow |= merge_hot(places, hot_count, hot_slot, view->empty);")
            block.add("    hot_count = 0;")
        block.add("    const fs_pane_view held = pane;")
        block.add("    pane = other, other = held;")
        if self.pipeline.beside:
            block.add("    const fs_side_view *held_sides = sides;")
            block.add("    sides = other_sides, other_sides = held_sides;")
        block.add("}")

    def find_entry(self, block: Block) -> None:
        """Leaves `count` and `slot`: an entry's first word and the first slot of its aggregates."""
        words = self.pipeline.key_words
        other = " || ".join(f"entry[{1 + word}] != key[{word}]" for word in range(words))
        if not self.hot:
            block.add(f"uint64_t key[{words}];")
            block.add("load_key(row, key);")
        block.add("uint64_t at = hash_key(key, pane.multiplier) >> pane.shift;")
        block.add(f"uint64_t *entry = (uint64_t *)(pane.entries + at * {self.stride});")
        block.add(f"while (FS_RARE(({other}) && entry[0])) {{")
        block.add("    at = (at + 1) & pane.mask;")
        block.add(f"    entry = (uint64_t *)(pane.entries + at * {self.stride});")
        block.add("}")
        block.add("if (FS_RARE(!entry[0])) { /* a new key */")
        self.unless_kept(block)
        block.add("    if (*pane.used + *pane.reserved >= pane.limit) goto stop;")
        block.add("    const uint64_t home = hash_key(key, pane.multiplier) >> pane.shift;")
        block.add("    if (((at - home) & pane.mask) > pane.reach) goto stop; /* the table needs another multiplier */")
        block.add("    ++*pane.used, fresh++;")
        block.add(f"    memcpy(entry, view->empty, {self.stride});")
        block.add(f"    memcpy(entry + 1, key, {words * 8});")
        block.add("}")

    def find(self, block: Block) -> None:
        if self.dense:
            self.find_dense(block)
            return
        self.find_entry(block)
        block.add(f"count = entry, slot = entry + {1 + self.pipeline.key_words};")

    def find_beside(self, block: Block, values: list[tuple[str | None, str | None]]) -> None:
        """Leaves `beside`: the row's entries in the side tables. All are found before anything is counted."""
        words, number = self.pipeline.key_words, 0
        if not self.pipeline.beside:
            return
        block.add(f"uint64_t *beside[FS_SIDES], word[{words + 1}];")
        block.add(f"memcpy(word, key, {8 * words});")
        for fold, (value, _) in zip(self.pipeline.folds, values, strict=True):
            if fold.has("SIDE"):
                block.add(f"word[{words}] = fs_word_of({value}, {int(fold.has('REAL'))});")
                behind = int(fold.has("RANKED"))
                block.add(f"beside[{number}] = fs_find_beside(&sides[{number}], word, {words + 1}, {behind});")
                block.add(f"if (FS_RARE(!beside[{number}])) goto stop;")
                number += 1

    def find_hot(self, block: Block) -> None:
        """Rows of the batch's hot key go to several places in turn: no row waits for the one before it."""
        words = self.pipeline.key_words
        same = " & ".join(f"(key[{word}] == hot_key[{word}])" for word in range(words))
        block.add(f"uint64_t key[{words}];")
        block.add("load_key(row, key);")
        block.add(f"const int is_hot = {same};")
        block.add("if (is_hot && hot_count) {")
        block.add(f"    count = places[i % {PLACES}], slot = count + 1;")
        block.add("} else {")
        inner = Block(block.lines, block.known, block.indent + "    ")
        self.find(inner)
        inner.add("if (is_hot) hot_count = count, hot_slot = slot;")
        block.add("}")

    def find_dense(self, block: Block) -> None:
        block.add(f"const uint64_t off = (uint64_t){self.key_value()} - pane.base;")
        full = "*pane.reserved >= pane.touched_limit || *pane.used + *pane.reserved >= pane.limit"
        place = f"off * {self.dense_words}"
        block.add(f"if (off < pane.range && !(FS_RARE(!pane.dense[{place}]) && ({full}))) {{")
        block.add(f"    count = pane.dense + {place}, slot = count + 1;")
        block.add("    if (FS_RARE(!*count)) { /* a new key */")
        self.unless_kept(block, "        ")
        block.add("        pane.touched[(*pane.reserved)++] = (uint32_t)off, fresh++;")
        block.add("        *count = FS_USED;")
        if self.pipeline.slots:
            first = 1 + self.pipeline.key_words
            block.add(f"        memcpy(slot, view->empty + {first}, {8 * self.pipeline.slots});")
        block.add("    }")
        block.add("} else { /* outside of the range, or no room for another key: the table, which can grow */")
        inner = Block(block.lines, block.known, block.indent + "    ")
        inner.add("outside += off >= pane.range && pane.range != 0;")
        self.find_entry(inner)
        inner.add(f"count = entry, slot = entry + {1 + self.pipeline.key_words};")
        block.add("}")

    def fold(self, block: Block, values: list[tuple[str | None, str | None]], overflowed: str = "") -> None:
        block.add(f"*count += {'keep' if self.keeps else '1'};")
        at, number = 0, 0
        pipeline = self.pipeline
        for aggregate, fold, (value, by) in zip(pipeline.bound.aggregates, pipeline.folds, values, strict=True):
            block.add(f"/* {comment(aggregate.name)} = {aggregate.fn} */")
            if fold.has("SIDE"):
                entry, word = f"beside[{number}]", f"fs_word_of({value}, {int(fold.has('REAL'))})"
                block.add(f"fs_{fold.name}_beside(slot + {at}, {entry}, {entry} + {2 + pipeline.key_words}, {word});")
                number += 1
            else:
                for line in update(fold, at, value, by, self.keeps, overflowed):
                    block.add(line)
            at += fold.slots

    def merge_function(self) -> list[str]:
        """What the places hold goes to the entry, and they begin anew."""
        each, behind = merge_places(self.pipeline.folds)
        words, width = self.pipeline.key_words, 1 + self.pipeline.slots
        return [
            f"static uint64_t merge_hot(uint64_t places[{PLACES}][{width}], uint64_t *count, uint64_t *slot, "
            "const uint64_t *empty)",
            "{",
            "    uint64_t overflow = 0;",
            f"    for (int p = 0; p < {PLACES}; p++) {{",
            "        uint64_t *place = places[p];",
            "        *count += place[0];",
            *(f"        {line}" for line in each),
            "    }",
            *(f"    {line}" for line in behind),
            f"    for (int p = 0; p < {PLACES}; p++) {{",
            "        places[p][0] = 0;",
            f"        memcpy(places[p] + 1, empty + {1 + words}, {8 * self.pipeline.slots});",
            "    }",
            "    return overflow;",
            "}",
            "",
        ]

    def hot_locals(self) -> list[str]:
        """The hot key of a batch is the one that two of three of its rows have, if there is one."""
        words, width = self.pipeline.key_words, 1 + self.pipeline.slots
        return [
            f"    uint64_t places[{PLACES}][{width}], hot_key[{words}], some_key[{words}];",
            "    uint64_t *hot_count = 0, *hot_slot = 0;",
            f"    load_key(rows + (size_t)(n / 2) * {self.row_bytes}, hot_key);",
            f"    load_key(rows + (size_t)(n - 1) * {self.row_bytes}, some_key);",
            f"    if (memcmp(hot_key, some_key, {8 * words}) != 0) load_key(rows, hot_key);",
            f"    for (int p = 0; p < {PLACES}; p++) {{",
            "        places[p][0] = 0;",
            f"        memcpy(places[p] + 1, view->empty + {1 + words}, {8 * self.pipeline.slots});",
            "    }",
        ]

    # -- runs of known keys

    def known_body(self) -> list[str]:
        block = Block(indent=body_indent(self.row_bytes))
        self.filters(block)
        values = self.values(block)
        block.add(f"const int64_t time = fs_get_i64(row + {self.layout.time_field.offset});")
        block.add("if (FS_RARE((uint64_t)time - (uint64_t)pane.start >= pane.span)) goto stop;")
        block.add(f"const uint64_t off = (uint64_t){self.key_value()} - pane.base;")
        block.add("if (FS_RARE(off >= pane.range)) goto stop;")
        block.add(f"uint64_t *count = pane.dense + off * {self.dense_words}, *slot = count + 1;")
        block.add("if (FS_RARE(!*count)) goto stop; /* a new key */")
        self.fold(block, values, "overflowed")
        return block.lines

    def known_rows(self) -> KnownRows:
        kept = ("keep" if self.keeps else "1") if self.drops else None
        sums = any(fold.has("OVERFLOWS") for fold in self.pipeline.folds)
        return KnownRows(self.known_body(), self.row_bytes, self.rows_ahead, self.masked_from is not None, kept, sums)

    # -- the function

    def values(self, block: Block) -> list[tuple[str | None, str | None]]:
        """Of the aggregates' arguments, and of what decides, as the bits of a register."""

        def bits(tree: Typed | None) -> str | None:
            if tree is None:
                return None
            value = self.expressions.value(tree, block)
            return f"fs_bits({value})" if tree.type == "f64" else f"(uint64_t){value}"

        pipeline = self.pipeline
        return [(bits(argument), bits(by)) for argument, by in zip(pipeline.arguments, pipeline.deciders, strict=True)]

    @property
    def masked_parameter(self) -> str:
        return ", const int masked" if self.masked_from is not None else ""

    def body(self) -> list[str]:
        block = Block()
        self.prefetch(block)
        if self.choices.instrumented:
            self.sample(block)
        self.filters(block)
        values = self.values(block)
        self.find_pane(block)
        block.add("uint64_t *count, *slot;")
        if self.hot:
            self.find_hot(block)
        else:
            self.find(block)
        self.find_beside(block, values)
        self.fold(block, values)
        block.add(f"kept += {'keep' if self.keeps else '1'};")
        return block.lines

    def run_function(self) -> list[str]:
        """The loop; `masked` and `large` are constants wherever it is called."""
        known = self.known_rows() if self.in_runs else None
        beside = self.pipeline.beside
        hot = ["    if (hot_count) overflow |= merge_hot(places, hot_count, hot_slot, view->empty);"]
        return [
            *(known.function() if known else []),
            "static inline __attribute__((always_inline)) uint32_t over_rows(const unsigned char *rows, uint32_t n,",
            f"    fs_view *view{self.masked_parameter}{'' if self.dense else ', const int large'})",
            "{",
            "    fs_pane_view pane = view->pane[0], other = view->pane[1];",
            *(["    const fs_side_view *sides = view->side[0], *other_sides = view->side[1];"] if beside else []),
            "    uint64_t kept = 0, overflow = 0, outside = 0, fresh = 0;",
            "    uint32_t i = 0;",
            *(self.hot_locals() if self.hot else []),
            *(["    uint32_t again = 0; /* the row from which on known keys are looked for */"] if known else []),
            "    for (; i < n; i++) {",
            *(known.call() if known else []),
            f"        const unsigned char *row = rows + (size_t)i * {self.row_bytes};",
            *self.body(),
            "    }",
            "stop:",
            *(hot if self.hot else []),
            "    view->filtered = i - kept;",
            "    view->overflow |= overflow;",
            "    view->outside = outside;",
            "    view->fresh = fresh;",
            "    return i;",
            "}",
            "",
        ]

    def entry_point(self) -> list[str]:
        lines, run, small = [], "return over_rows(rows, n, view", ""
        if not self.dense:
            lines.append(f"    const int large = (view->pane[0].mask + 1) * {self.stride} > FS_CACHED;")
            small = "!large && "
        last = "" if self.dense else ", 0"
        branch = ""
        if self.masked_from is not None:
            least = round(self.masked_from * 1024)
            lines.append(f"    if ({small}view->passing > {least}) {run}, 1{last});")
            branch = ", 0"
        if not self.dense:
            lines.append(f"    if (large) {run}{branch}, 1);")
        lines.append(f"    {run}{branch}{last});")
        return [f"uint32_t {ENTRY_POINT}(const unsigned char *rows, uint32_t n, fs_view *view)", "{", *lines, "}", ""]

    def generate(self) -> str:
        return "\n".join(
            [
                '#include "flexstream_abi.h"',
                "",
                *self.key_functions(),
                *(self.passing_function() if self.pipeline.ahead else []),
                *(self.merge_function() if self.hot else []),
                f"/* Query {comment(self.pipeline.bound.query.name)} over stream {comment(self.layout.of)}, "
                f"panes of {self.pipeline.bound.windower.pane} {self.layout.time_unit}. */",
                f"/* Variant: {comment(str(self.choices))} */",
                *self.run_function(),
                *self.entry_point(),
            ]
        )


def _names(node: Typed) -> list[str]:
    if node.op == "col":
        return [node.name or ""]
    return [name for arg in node.args for name in _names(arg)]


def generate(bound: BoundQuery, choices: Choices = PLAIN) -> str:
    """The C source of a compiled variant of the query. Choices that the query does not allow are left out."""
    return _Generator(Pipeline(bound), choices).generate()
