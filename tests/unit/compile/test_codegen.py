"""Generated C: what it holds, that names and constants never become code, that compilers have no complaint."""

from __future__ import annotations

import itertools
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexstream as fs
from flexstream import col, lit
from flexstream.compile.codegen import Pipeline, generate
from flexstream.compile.codegen_expr import comment
from flexstream.compile.fold_table import FOLDS
from flexstream.compile.lowering import KEY_FORMS, lower
from flexstream.compile.toolchain import INCLUDES
from flexstream.compile.variant_choices import PLAIN, Choices
from flexstream.query.expr import PARTS
from flexstream.testing.ysb import YSB_QUERY
from tests.property.checks import random_query, random_stream

COMMENT = re.compile(r"/\*.*?\*/", re.S)
WORDS = set(
    re.findall(
        r"\S+",
        """include flexstream_abi h const double int64_t uint32_t uint64_t size_t unsigned char for while if else goto
        continue return stop rows row n i view pane other held used limit empty start span entries mask
        shift multiplier reach filtered overflow kept keep ahead static inline void load_key masked large later near
        home passes passing
        over_rows over_known in block j first again break all_kept any_overflow overflowed __attribute__ noinline
        always_inline hash_key __builtin_prefetch FS_RARE
        reserved touched touched_limit dense base range off outside fresh count slot FS_USED FS_CACHED
        profile fs_profile passed fs_note_key hot_key hot_count hot_slot some_key is_hot places place p merge_hot int
        fs_bits fs_row value by fs_side_view sides other_sides held_sides side beside word FS_SIDES
        fs_word_of fs_find_beside session sequence
        time key at entry memcpy memcmp INT64_C UINT64_C INT64_MIN FS_GOLDEN fs_view fs_pane_view
        fs_variant_run __builtin_add_overflow __builtin_sub_overflow __builtin_mul_overflow __builtin_fabs fs_real
        fs_eq fs_lt fs_hash_words fs_key_f32 fs_key_f64 0x1p63
        fs_get_i8 fs_get_i16 fs_get_i32 fs_get_i64 fs_get_u8 fs_get_u16 fs_get_u32 fs_get_u64 fs_get_f32 fs_get_f64
        fs_get_bool float fs_floor fs_floormod fs_year fs_month fs_day fs_day_of_week fs_day_of_year fs_is_zero
        fs_hash_int fs_hash_long fs_hash_f32 fs_hash_f64 fs_hash_bytes""",
    )
) | {f"fs_{fold}_{what}" for fold in FOLDS for what in ("update", "merge", "beside")}
WIDE = fs.Stream(
    "wide",
    {
        "t": "timestamp[ms]", "k": "bytes[9]", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "u8": "u8",
        "u16": "u16", "u32": "u32", "u64": "u64", "f32": "f32", "f64": "f64", "on": "bool", "off": "bool",
        "b1": "bytes[1]", "b2": "bytes[2]", "b4": "bytes[4]", "b8": "bytes[8]", "b40": "bytes[40]", "c40": "bytes[40]",
        "at": "timestamp[us]",
    },
    key=["k", "on", "f32"],
    time="t",
)  # fmt: skip
INTEGERS = ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "at"]


def ended(query: fs.Query, **aggregates: Any) -> fs.Query:
    return query.window(fs.sliding("10s", every="4s")).agg(**(aggregates or {"n": fs.count()}))


def operators() -> Iterator[fs.Query]:
    """Queries that reach every operator, type, fold and key form."""
    for number, name in enumerate(INTEGERS):
        x, y = col(name), col(INTEGERS[(number + 1) % len(INTEGERS)])
        query = WIDE.query("q").filter((x > 3) | (y // x < 7)).filter((x == x) & ((x != x + 1) | ~(x < -x)))
        yield ended(query, a=fs.sum(x * y - y), b=fs.min(abs(x)), c=fs.max(x % y), d=fs.avg(x + 0), e=fs.stddev(x / y))
    f, g = col("f32"), col("f64")
    query = WIDE.query("q").filter((f < g) | (f * g + 1.0 >= -g) & (abs(f) != g)).filter((f == f) | (f <= math.nan))
    yield ended(query, a=fs.sum(f.cast("i64")), b=fs.min(g), c=fs.max(f / g), d=fs.stddev(g), e=fs.avg(f - g))
    query = WIDE.query("q").filter((col("on") == col("off")) | (col("on") != lit(True)) & lit(True))
    yield ended(query, n=fs.count(), a=fs.sum(col("on").cast("i64")), b=fs.max(col("off").cast("f64")))
    for name, value in {
        "b1": b"x",
        "b2": b"",
        "b4": b"view",
        "b8": b"\xff" * 8,
        "b40": b"a",
        "k": b"123456789",
    }.items():
        yield ended(WIDE.query("q").filter((col(name) == value) | (lit(value) != col(name))))
    yield ended(WIDE.query("q").filter((col("b40") == col("c40")) & (col("b40") != col("b40"))))
    yield from richer_operators()
    for i in range(12):
        rnd = random.Random(i)
        yield random_query(rnd, random_stream(rnd), "q")


def richer_operators() -> Iterator[fs.Query]:
    for name in [*INTEGERS, "f32", "f64"]:
        kinds = ("i8", "i16", "i32", "u8", "u16", "u32", "u64", "i64", "f32", "f64")
        casts = {f"c{i}": fs.max(col(name).cast(kind)) for i, kind in enumerate(kinds)}
        yield ended(WIDE.query("q"), **casts)
    for unit in ("s", "ms", "us", "ns"):
        for source in (col("at"), col("t"), col("i64").cast("timestamp[s]")):
            parts = {
                f"p{i}": fs.max(getattr(source.cast(f"timestamp[{unit}]"), part)()) for i, part in enumerate(PARTS)
            }
            yield ended(WIDE.query("q").filter(source.day() > 0), **parts)
    hashes = {f"h{i}": fs.max(fs.hash(name)) for i, name in enumerate(WIDE.schema.names) if name != "u64"}
    yield ended(WIDE.query("q").filter(fs.hash(*(n for n in WIDE.schema.names if n != "u64")) % 7 != 3), **hashes)
    yield ended(WIDE.query("q"), a=fs.max(fs.hash(col("f32") * 2, col("i64") + 1, lit(b""), lit(b"ab\0c"), lit(True))))
    for name in ("b1", "b2", "b4", "b8", "b40", "k"):
        width = min(9, WIDE.schema.field(name).size)
        some = [col(name).startswith(b"\xff/*\\\"'\n?"[:n].ljust(n, b"x")) for n in range(width + 1)]
        query = WIDE.query("q").filter(fs.when(some[-1], some[0]).otherwise(~some[1])).filter(some[width // 2])
        yield ended(query, a=fs.sum(fs.when(some[1], 1).when(col(name) == col("b40"), 2).otherwise(3)))
    x, y = col("i64"), col("i32")
    risky = fs.when(y != 0, x // y).when(x > 5, x * x).otherwise(abs(y))
    nested = fs.when(fs.when(x > 1, risky > 2).otherwise(lit(False)), risky + 1).otherwise(
        fs.when(x == y, 7).otherwise(8)
    )
    yield ended(
        WIDE.query("q").filter(risky > 0), a=fs.sum(risky), b=fs.min(nested), c=fs.max(fs.when(x > y, 0.5).otherwise(x))
    )


def hostile() -> Iterator[fs.Query]:
    texts = [
        b"*/ exit(1); /*",
        b"\n#error\n",
        b"\\\n",
        b"??/\n??/",
        b'"; }',
        b"'\\''",
        b"//",
        b"\0\xff\0z",
        b"%s%n",
        b"${x}",
    ]
    for text in texts:
        yield ended(WIDE.query("q").filter((col("b40") == text) | (col("b40") != text)))
        chosen = fs.when(col("b40").startswith(text), fs.hash(lit(text), "b40")).otherwise(fs.hash("b40", lit(text)))
        yield ended(WIDE.query("q").filter(col("c40").startswith(text) | (lit(text) == col("c40"))), a=fs.max(chosen))
    for value in (0, -1, 1, -(2**63), 2**63 - 1, -(2**31), 2**32):
        x = col("i64")
        query = WIDE.query("q").filter((x > value) | (x // value == value) | (x % value == -lit(value)))
        yield ended(
            query, a=fs.sum(x * value), b=fs.min(abs(lit(value)) + x), c=fs.max(lit(value) // x), d=fs.sum(lit(value))
        )
        time, case = lit(value).cast("timestamp[s]"), fs.when(x > value, value).when(x == value, x).otherwise(-x)
        yield ended(
            WIDE.query("q").filter(fs.hash(lit(value), x) != value),
            a=fs.max(case),
            b=fs.max(time.year() + x),
            c=fs.max(lit(value).cast("f32") + x),
            d=fs.max(lit(value).cast("i8") + x),
            e=fs.max(x.cast("timestamp[s]").cast("timestamp[ns]")),
        )
        yield ended(WIDE.query("q").filter((lit(value) // value == value) | (lit(value) - value < value)))
    for real in (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -2.2e-308, 1.7976931348623157e308, 0.1, 2.0**63):
        f = col("f64")
        query = WIDE.query("q").filter((f > real) | (f / real == real) | (lit(real).cast("i64") > 0))
        yield ended(query, a=fs.sum(f * real), b=fs.min(-lit(real)), c=fs.max(abs(lit(real)) + f))
        case = fs.when(f > real, real).when(f == real, f).otherwise(lit(real).cast("f32"))
        yield ended(WIDE.query("q"), a=fs.max(case), b=fs.max(fs.hash(lit(real), f, lit(real).cast("f32"))))
    yield ended(WIDE.query("q").filter(lit(True)).filter(lit(False) | lit(True)).filter(lit(b"a") == lit(b"b")))
    deep: Any = col("i64")
    for _ in range(60):  # as deep as registers allow
        deep = deep + 1
    yield ended(WIDE.query("q"), a=fs.sum(deep))
    nested: Any = col("i64") > 0
    for _ in range(6):
        nested = (col("i64") > 1) | (nested & (col("i32") // col("i64") > 0))
    yield ended(WIDE.query("q").filter(nested))


def choices_of(query: fs.Query, seed: int = 0) -> Iterator[Choices]:
    """The plain variant, then some with everything that the query allows, predicates in any order and parts."""
    yield PLAIN
    yield Choices(dense=True)
    rnd = random.Random(seed)
    numbers = list(range(len(Pipeline(query.bound()).ahead)))
    ways = ((1, 1, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 1, 0), (1, 0, 1, 0))
    for dense, masked, hot, instrumented in ways:
        rnd.shuffle(numbers)
        cuts = sorted({0, *(rnd.randrange(len(numbers) + 1) for _ in range(2)), len(numbers)})
        order = tuple(tuple(numbers[a:b]) for a, b in itertools.pairwise(cuts))
        yield Choices(order, bool(masked), bool(dense), bool(hot), bool(instrumented))


def together(variants: list[tuple[fs.Query, Choices]]) -> str:
    """All variants in one C file, the i-th called variant_i."""
    parts = []
    for i, (query, choices) in enumerate(variants):
        bound = query.bound()
        lower(bound)  # what would not run proves nothing
        names = ("fs_variant_run", "load_key", "hash_key", "merge_hot", "passes", "over_rows", "over_known")
        parts += [f"#define {name} {name}_{i}" for name in names]
        parts += [generate(bound, choices), *(f"#undef {name}" for name in names)]
    return "\n".join(parts)


def variants_of(*queries: fs.Query, most: int = 6) -> list[tuple[fs.Query, Choices]]:
    return [(query, choices) for i, query in enumerate(queries) for choices in list(choices_of(query, i))[:most]]


def cc(tmp_path: Path, code: str, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler on this machine")
    source, target = tmp_path / "variants.c", tmp_path / "out"
    source.write_text(code)
    done = subprocess.run(
        [compiler, "-std=gnu11", "-fno-strict-aliasing", f"-I{INCLUDES}", *flags, "-o", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return target


# -- what it holds


def test_explain_code_is_the_generated_c():
    code = YSB_QUERY.explain("code")
    assert code == generate(YSB_QUERY.bound())
    assert re.findall(r"#include.*", code) == ['#include "flexstream_abi.h"']
    assert "/* filter: " in code
    assert "/* key: campaign_id */" in code


def test_explain_refuses_other_views_and_code_of_what_cannot_run():
    assert YSB_QUERY.explain() == YSB_QUERY.explain("plan")
    with pytest.raises(fs.QueryError, match="no such view"):
        YSB_QUERY.explain("assembler")
    with pytest.raises(fs.QueryError, match="not complete"):
        WIDE.query("q").explain("code")
    tall: Any = col("i64")
    for i in range(100):
        tall = col("i64") * i + tall
    with pytest.raises(fs.QueryError, match="intermediate values"):
        ended(WIDE.query("q"), a=fs.sum(tall)).explain("code")


def test_the_same_query_gives_the_same_code():
    assert [generate(query.bound()) for query in operators()] == [generate(query.bound()) for query in operators()]


def test_an_expression_used_twice_is_computed_once():
    y = col("i64") * 3
    code = ended(WIDE.query("q").filter(y > 5), a=fs.sum(y), b=fs.max(y)).explain("code")
    assert code.count("__builtin_mul_overflow") == 1


def test_what_was_computed_behind_a_decision_is_not_used_outside_of_it():
    ratio = col("i32") // col("i64")
    code = ended(WIDE.query("q").filter((col("i64") == 0) | (ratio > 1)), a=fs.sum(ratio)).explain("code")
    assert code.count(" / ") == 2


def test_a_division_by_a_constant_needs_no_check():
    code = ended(WIDE.query("q"), a=fs.sum(col("i64") // 10)).explain("code")
    assert "the generic variant decides" not in code
    assert "the generic variant decides" in ended(WIDE.query("q"), a=fs.sum(col("i64") // 0)).explain("code")


# -- names and constants are not code


def assert_only_our_words(code: str) -> None:
    for text in COMMENT.findall(code):
        assert "\n" not in text
        assert "\\" not in text
        assert "??" not in text
    bare = COMMENT.sub(" ", code).replace('"flexstream_abi.h"', "")
    assert not set(bare) & set("\"'\\@$`"), bare
    for word in re.findall(r"\w+", bare):
        assert word in WORDS or re.fullmatch(r"v?\d+", word), f"{word!r} in\n{code}"


def test_every_operator_and_every_hostile_constant_is_written_in_our_words():
    for query, choices in variants_of(*operators(), *hostile()):
        assert_only_our_words(generate(query.bound(), choices))


@given(
    text=st.binary(max_size=40),
    number=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(),
    flag=st.booleans(),
)
def test_no_constant_becomes_code(text, number, real, flag):
    query = WIDE.query("q").filter((col("b40") == text) | (col("i64") > number) & (col("on") == lit(flag)))
    query = query.filter(col("f64") * real != real).filter(col("b40").startswith(text) | (fs.hash(lit(text)) > number))
    query = query.filter(fs.when(col("i64") > number, flag).otherwise(fs.hash(lit(real), lit(number), "b40") != 0))
    code = generate(ended(query, a=fs.min(col("f64") + real), b=fs.max(col("i64") - number)).bound())
    assert_only_our_words(code)


@given(st.text(max_size=300))
def test_a_comment_holds_any_text(text):
    kept = comment(text)
    assert re.fullmatch(r"[A-Za-z0-9 _\-.,=<>()']*", kept)
    assert len(kept) <= 203


def test_names_are_in_comments_only():
    """The same query under names that are words of C gives the same code."""
    names = ["int", "goto", "stop", "row", "return", "define", "v1", "entry", "INT64_MIN", "main"]

    def made(a: str, b: str, c: str, d: str, e: str) -> str:
        stream = fs.Stream(f"{a}.-_", {a: "timestamp[s]", b: "i32", c: "i64", d: "bytes[4]"}, key=b, time=a)
        query = stream.query(f"{b}.--").filter((col(c) > 3) & (col(d) == b"view")).map(**{e: col(c) * 2})
        query = query.filter(col(d).startswith(b"v") | (fs.hash(a, d, c) > 0) | (col(a).year() > 2000))
        query = query.window(fs.tumbling("10s")).agg(**{f"{e}_": fs.sum(e)})
        return COMMENT.sub("", generate(query.bound()))

    assert made(*names[:5]) == made(*names[5:]) == made("a", "b", "c", "d", "e")


@pytest.mark.time_limit(400)
def test_no_compiler_warning_for_any_of_them(tmp_path):
    code = together(variants_of(*operators(), *hostile(), most=2))
    cc(tmp_path, code, "-O2", "-c", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-missing-prototypes")


# -- sanitizers

HARNESS = r"""
#include <stdio.h>
#include <stdlib.h>

typedef struct { uint32_t offset, size, form; } key_part;
typedef struct {
    fs_variant run;
    const char *rows;
    uint32_t n, row_bytes, time_offset, words, stride;
    int64_t pane;
    const key_part *key;
    const uint64_t *empty;
} variant_case;
enum { CAPACITY = 64, RANGE = 200, TOUCHED = 8 };

static void check(int number, const variant_case *c) {
    FILE *file = fopen(c->rows, "rb");
    size_t size = (size_t)c->n * c->row_bytes;
    unsigned char *rows = malloc(size);
    if (!file || fread(rows, 1, size, file) != size) abort();
    fclose(file);
    fs_view view = {0};
    uint32_t used[2] = {0, 0}, reserved[2] = {0, 0}, touched[2][TOUCHED];
    fs_profile profile = {0};
    uint32_t dense_words = c->stride / 8 - c->words;
    for (int p = 0; p < 2; p++) {
        view.pane[p].start = -p * c->pane;
        view.pane[p].span = c->pane;
        view.pane[p].entries = calloc(CAPACITY, c->stride);
        view.pane[p].mask = CAPACITY - 1;
        view.pane[p].shift = 58;
        view.pane[p].limit = CAPACITY / 2;
        view.pane[p].multiplier = FS_GOLDEN;
        view.pane[p].reach = CAPACITY;
        view.pane[p].used = &used[p];
        view.pane[p].reserved = &reserved[p];
        view.pane[p].dense = calloc(RANGE, 8 * dense_words);
        view.pane[p].base = -100;
        view.pane[p].range = RANGE;
        view.pane[p].touched = touched[p];
        view.pane[p].touched_limit = TOUCHED;
    }
    uint32_t side_used[2][FS_SIDES] = {{0}};
    for (int s = 0; s < 2 * FS_SIDES; s++) {
        fs_side_view *side = &view.side[s / FS_SIDES][s % FS_SIDES];
        *side = (fs_side_view){calloc(CAPACITY, 8 * (c->words + 3)), CAPACITY - 1, FS_GOLDEN, CAPACITY, 58,
                               CAPACITY / 2, &side_used[s / FS_SIDES][s % FS_SIDES]};
    }
    view.empty = c->empty;
    view.profile = &profile;
    uint64_t finished = 0, filtered = 0, left = 0, calls = 0;
    for (uint32_t at = 0; at < c->n;) {
        uint32_t n = c->n - at < FS_ABI_BATCH ? c->n - at : FS_ABI_BATCH;
        unsigned char *batch = malloc((size_t)n * c->row_bytes);
        memcpy(batch, rows + (size_t)at * c->row_bytes, (size_t)n * c->row_bytes);
        view.passing = calls++ % 2 * 1024;
        uint32_t some = c->run(batch, n, &view);
        if (some > n || view.filtered > some) abort();
        finished += some, filtered += view.filtered, at += some;
        if (some < n) at += 1, left += 1; /* the generic variant's turn */
        for (int p = 0; p < 2; p++)
            if (used[p] + reserved[p] > CAPACITY / 2 || reserved[p] > TOUCHED) abort();
        free(batch);
    }
    if (finished + left != c->n) abort();
    printf("%d %llu %llu\n", number, (unsigned long long)finished, (unsigned long long)filtered);
    uint64_t counted = 0;
    for (int p = 0; p < 2; p++) {
        for (uint32_t e = 0; e < CAPACITY; e++)
            counted += *(uint64_t *)(view.pane[p].entries + (size_t)e * c->stride) & ~FS_USED;
        for (uint32_t e = 0; e < RANGE; e++)
            counted += view.pane[p].dense[(size_t)e * dense_words] & ~FS_USED;
        free(view.pane[p].entries), free(view.pane[p].dense);
    }
    if (counted != finished - filtered) abort();
    for (int s = 0; s < 2 * FS_SIDES; s++) free(view.side[s / FS_SIDES][s % FS_SIDES].entries);
    free(rows);
}
"""


def hostile_rows(query: fs.Query, n: int, seed: int) -> bytes:
    """Bytes of any kind; times mostly within two panes, keys of a few rows, numbers at their limits."""
    import numpy as np

    rng = np.random.default_rng(seed)
    schema, stream = query.stream.schema, query.stream
    raw = rng.integers(0, 256, (n, schema.row_bytes), np.uint8)
    raw[rng.random(n) < 0.3] = 0
    raw[rng.random(n) < 0.1] = 255
    rows = raw.reshape(-1).view(schema.dtype)
    for field in schema:
        if field.name == stream.time:
            near = rng.integers(-query.bound().windower.pane, query.bound().windower.pane, n)
            rows[field.name] = np.where(rng.random(n) < 0.98, near, rows[field.name])
        elif field.name in stream.key and field.kind in ("i16", "i32", "i64"):
            rows[field.name] = rng.integers(90, 104, n)  # in and out of the harness's dense range
        elif field.name in stream.key:
            rows[field.name] = rows[field.name][rng.integers(0, 3, n)]
        elif field.kind in ("i64", "timestamp"):
            special = rng.choice(np.array([-(2**63), 2**63 - 1, 0, -1, 1, 7], np.int64), n)
            rows[field.name] = np.where(rng.random(n) < 0.6, special, rows[field.name])
        elif field.kind in ("f32", "f64"):
            special = rng.choice(np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 2.0**63, 1e-310, 3.5]), n)
            rows[field.name] = np.where(rng.random(n) < 0.6, special.astype(rows[field.name].dtype), rows[field.name])
    return rows.tobytes()


def harness_case(number: int, query: fs.Query, rows: Path, n: int) -> str:
    stream, bound = query.stream, query.bound()
    words = (sum(key.size for key in stream.key_fields) + 7) // 8
    empty = [1 << 63, *[0] * words]
    for fold in lower(bound).folds:
        name = next(known.name for known in FOLDS.values() if known.number == fold.fold)
        start = {
            "min_i": 2**63 - 1,
            "max_i": 2**63,
            "min_f": 0x7FF8 << 48,
            "max_f": 0xFFF0 << 48,
        }.get(name, 0)
        if name in ("first", "last"):
            empty += [0, 2**63 - 1 if name == "first" else 2**63, 0, 0]
        elif name.startswith(("min_by", "max_by")):
            empty += [2**63 - 1 if name.startswith("min") else 2**63] * 2
        else:
            empty += [start] * fold.slots
    key = ", ".join(f"{{{f.offset}, {f.size}, {KEY_FORMS.get(f.kind, 0)}}}" for f in stream.key_fields)
    return (
        f'check({number}, &(variant_case){{fs_variant_run_{number}, "{rows}", {n}, {stream.schema.row_bytes}, '
        f"{stream.time_field.offset}, {words}, {8 * len(empty)}, {bound.windower.pane}, "
        f"(const key_part[]){{{key}, {{0, 0, 0}}}}, "
        f"(const uint64_t[]){{{', '.join(f'{value}u' for value in empty)}}}}});"
    )


@pytest.mark.time_limit(400)
def test_the_sanitizers_have_nothing_to_report(tmp_path):
    tiny = fs.Stream("tiny", {"t": "timestamp[s]", "k": "u8"}, key="k", time="t")
    huge = fs.Stream(
        "huge", {"k": "bytes[3]", "pad": "bytes[2000]", "t": "timestamp[s]", "x": "u64"}, key="k", time="t"
    )
    whole = fs.Stream("whole", {"t": "timestamp[s]", "k": "i16", "x": "i32", "y": "f64"}, key="k", time="t")
    masked = whole.query("q").filter((col("x") > 0) & (col("y") > 0.0) & (col("x") % 2 == lit(0) + 0))
    folds = {"n": fs.count(), "a": fs.sum("x"), "b": fs.min("x"), "c": fs.max("x")}
    queries = [
        *operators(),
        *hostile(),
        masked.window(fs.tumbling("1000s")).agg(**folds),
        whole.query("q").filter((col("x") > 0) & (col("y") > 0.0)).window(fs.tumbling("1000s")).agg(**folds),
        whole.query("q").window(fs.tumbling("1000s")).agg(**folds, d=fs.sum("y"), e=fs.variance("y"), f=fs.min("y")),
        masked.window(fs.tumbling("1000s")).agg(f=fs.first("x"), l=fs.last("x"), d=fs.approx_distinct("x")),
        whole.query("q").window(fs.tumbling("1000s")).agg(f=fs.first("y"), l=fs.last("x"), c=fs.count_if(col("x") > 1)),
        whole.query("q").window(fs.tumbling("1000s")).agg(d=fs.approx_distinct("y"), l=fs.last(col("x") > 1)),
        masked.window(fs.tumbling("99s")).agg(a=fs.min_by("x", "y"), b=fs.max_by("y", "x"), c=fs.bool_or(col("x") > 1)),
        whole.query("q").window(fs.tumbling("99s")).agg(a=fs.max_by("y", "y"), b=fs.min_by("x", "t")),
        masked.window(fs.tumbling("99s")).agg(a=fs.distinct(col("x") % 5), n=fs.count(), b=fs.distinct(col("y") > 1)),
        masked.window(fs.tumbling("99s")).agg(a=fs.mode(col("x") % 5), b=fs.median("y"), c=fs.mode("y")),
        tiny.query("q").window(fs.tumbling("1000s")).agg(n=fs.count()),
        huge.query("q").filter(col("pad") != b"x").window(fs.tumbling("1000s")).agg(n=fs.count(), a=fs.sum("x")),
    ]
    calls, variants = [], variants_of(*queries, most=1)
    variants += [(query, list(choices_of(query, i))[1 + i % 8]) for i, query in enumerate(queries[:-8])][::2]
    variants += [(query, choices) for query in queries[-8:] for choices in list(choices_of(query))[1:]]
    for i, (query, _) in enumerate(variants):
        n = 1200
        (tmp_path / f"rows{i}").write_bytes(hostile_rows(query, n, i))
        calls.append(harness_case(i, query, tmp_path / f"rows{i}", n))
    code = together(variants) + HARNESS + "int main(void) {\n" + "\n".join(calls) + "\nreturn 0;\n}\n"
    checks = "-fsanitize=address,undefined,float-cast-overflow,float-divide-by-zero"
    try:
        program = cc(tmp_path, code, "-O0", "-w", checks, "-fno-sanitize-recover=all")
    except AssertionError as error:
        if "asan" in str(error) or "ubsan" in str(error):
            pytest.skip(f"the compiler has no sanitizers here: {error}")
        raise
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stderr == ""
    finished = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(finished) == len(variants)
    assert sum(finished) > 500 * len(finished)  # most rows went through compiled code
