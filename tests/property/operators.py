"""One stream with every type, rows at the edges of all of them, and expressions that reach every operator on it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

import flexstream as fs
from flexstream import col, lit
from flexstream.query.expr import PARTS
from tests.property.checks import INTEGER_CASTS, UNITS

STREAM = fs.Stream(
    "s",
    {"k": "i32", "a": "i64", "b": "i32", "u": "u64", "w": "u32", "h": "u16", "c": "u8", "d": "i8", "e": "i16",
     "f": "f64", "g": "f32", "on": "bool", "x": "bytes[1]", "y": "bytes[4]", "z": "bytes[13]",
     "ts": "timestamp[s]", "tms": "timestamp[ms]", "tus": "timestamp[us]", "tns": "timestamp[ns]", "t": "timestamp[s]"},
    key="k",
    time="t",
)  # fmt: skip
TIMES = ("ts", "tms", "tus", "tns")
PER_SECOND = dict(zip(UNITS, (1, 10**3, 10**6, 10**9), strict=True))
DAY = 86_400
SECONDS = [  # days around which calendars go wrong
    0, -1, 1, -DAY, DAY - 1, 951_782_399, 951_782_400, 951_868_800,  # 2000-02-28 to 03-01
    -2_203_977_600, -2_203_891_201, -2_203_891_200, 4_107_542_400, 4_107_456_000,  # 1900 and 2100, no leap years
    1_709_164_800, 1_709_251_199, 1_709_251_200, 1_735_603_200, 1_735_689_599, 1_735_689_600,  # 2024 and its end
]  # fmt: skip
FAR_SECONDS = [
    -62_135_596_800, -62_135_596_801, -62_167_219_200, -62_167_219_201, -62_162_035_201,  # years 1, 0 and before
    253_402_300_799, 253_402_300_800, -93_724_128_000,
]  # fmt: skip
INTEGERS = [
    0, 1, -1, 2, -7, 127, 128, -128, -129, 255, 256, 32_767, 32_768, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31),
    -(2**31) - 1, 2**32 - 1, 2**32, 2**24 + 1, 2**53 + 1, 2**62 + 2**37 + 1, 2**63 - 1, -(2**63), 7 * 10**17,
]  # fmt: skip
REALS = [
    0.0, -0.0, 1.0, -2.5, 127.9, 128.0, -128.9, 255.9, 256.0, -0.9, -1.0, 2.0**31, 2.0**32 - 0.5, 2.0**63, -(2.0**63),
    1e300, -1e300, 1e-300, 3.4028235677973366e38, 0.1, 16_777_217.0, math.nan, math.inf, -math.inf,
]  # fmt: skip
BYTES = [b"", b"a", b"ab", b"abc", b"abcd", b"a\0b", b"\0", b"\0b", b"\xff\x80", b"abcdefghijklm", b"abcde"]


def make_rows(n: int = 600, seed: int = 7, *, far: bool = True) -> np.ndarray:
    """Every row has a key of its own. Without `far`, times are such that Spark's microseconds hold them."""
    rnd = random.Random(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["k"] = np.arange(n)
    for field in STREAM.schema:
        if field.name in ("k", "t"):
            continue
        if field.unit is not None:
            rows[field.name] = [_time(rnd, PER_SECOND[field.unit], far) for _ in range(n)]
        elif field.kind == "bytes":
            rows[field.name] = [rnd.choice(BYTES)[: field.size] for _ in range(n)]
        elif field.kind == "bool":
            rows[field.name] = [rnd.random() < 0.5 for _ in range(n)]
        elif field.kind in ("f32", "f64"):
            with np.errstate(over="ignore"):
                rows[field.name] = np.array([rnd.choice(REALS) for _ in range(n)]).astype(field.numpy)
        else:
            limits = np.iinfo(field.numpy)
            known = [value for value in (*INTEGERS, 2**63, 2**64 - 1) if limits.min <= value <= limits.max]
            rows[field.name] = np.array([rnd.choice(known) for _ in range(n)], field.numpy)
    return rows


def _time(rnd: random.Random, per_second: int, far: bool) -> int:
    kind = rnd.random()
    if far and kind < 0.1:
        return rnd.choice((-(2**63), 2**63 - 1, rnd.randint(-(2**63), 2**63 - 1)))
    known = SECONDS + (FAR_SECONDS if per_second <= 10**6 else [])
    second = rnd.choice(known) if kind < 0.7 else rnd.randint(-4 * 10**9, 7 * 10**9)
    return second * per_second + rnd.choice((0, 0, per_second - 1, rnd.randrange(per_second)))


def parts() -> list[Any]:
    return [getattr(col(name), part)() for name in TIMES for part in PARTS]


def hashes() -> list[Any]:
    """Those that always have a value."""
    plain = [fs.hash(field.name) for field in STREAM.schema if field.kind not in ("u64", "timestamp")]
    several = [
        fs.hash("tus"), fs.hash("tns"), fs.hash("b", "z"), fs.hash("f", "g", "on", "y", "a"), fs.hash(col("g") * 2),
        fs.hash("a", lit(7)), fs.hash(lit(b"ab"), "x"), fs.hash(lit(b"")), fs.hash(lit(True), lit(0.5), "z"),
        fs.hash(fs.hash("a")), fs.hash(col("tus").year()), fs.hash(col("b") == 1), fs.hash(col("a").cast("f32")),
    ]  # fmt: skip
    return plain + several


def conditions() -> list[Any]:
    """True or false, with and without a value for every row."""
    y, z, x = col("y"), col("z"), col("x")
    prefixes = [
        y.startswith(b"a"),
        y.startswith("ab"),
        y.startswith(b"abcd"),
        z.startswith(b"abcdefghi"),
        x.startswith(b"a"),
    ]
    prefixes += [
        z.startswith(b"abc"),
        y.startswith(b"a\0b"),
        y.startswith(b"a\0"),
        y.startswith(b""),
        ~z.startswith(b"\0"),
    ]
    same = [y == z, z == y, x == z, x != y, y != z, lit(b"abcd").startswith(b"ab"), z == b"abcdefghijklm"]
    chosen = [
        fs.when(col("on"), col("a") > 0).otherwise(col("b") > 0),
        fs.when(col("b") == 0, False).when(col("on"), col("a") // col("b") > 1).otherwise(True),
        fs.when(col("a") // col("b") > 1, True).otherwise(False),
        fs.when(y == b"a", z.startswith(b"a")).otherwise(x == b"a"),
        ~fs.when(col("f") > 1.0, col("on")).otherwise(~col("on")),
        fs.hash("a", "z") % 3 == 1,
        col("tms").day_of_week() > 5,
        (col("ts").hour() >= 8) & (col("ts").hour() < 17),
    ]
    return prefixes + same + chosen


def fallible() -> Iterator[Any]:
    """Numbers that some rows do not have."""
    for name in ("a", "b", "u", "w", "h", "c", "d", "e", "f", "g"):
        yield from (col(name).cast(kind) for kind in (*INTEGER_CASTS, "f32", "f64"))
    yield from (col("on").cast(kind) for kind in ("i8", "u64", "f32"))
    for name in TIMES:
        yield from (col(name).cast(f"timestamp[{unit}]").cast("i64") for unit in UNITS)
        yield col(name).cast("i32")
        yield fs.hash(name)
    yield from (col("a").cast(f"timestamp[{unit}]").month() for unit in UNITS)
    a, b, f = col("a"), col("b"), col("f")
    yield fs.when(b != 0, a // b).otherwise(0)
    yield fs.when(b != 0, a // b).when(a > 0, a * 3).otherwise(-a)
    yield fs.when(a + 1 > 0, 1).otherwise(2)
    yield fs.when(col("u") > 5, f).otherwise(a)
    yield fs.when(col("on"), fs.when(a > 0, 100 // b).otherwise(b.cast("i8"))).otherwise(abs(a)) + 1
    yield fs.when(col("on"), col("tms")).otherwise(col("tus").cast("timestamp[ms]")).cast("i64")
    yield fs.when(f > 0.5, f).otherwise(col("g")).cast("i16")
    yield fs.hash(a * 2, col("u").cast("i64"), "z")
    yield fs.when(fs.hash("a") % 2 == 0, col("c")).otherwise(col("d"))
