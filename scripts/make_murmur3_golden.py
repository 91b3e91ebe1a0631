"""Ask a real Spark for `hash(key...)` and `pmod(hash(key...), G)` of many keys, and write them down.

    SPARK_LOCAL_IP=127.0.0.1 python scripts/make_murmur3_golden.py tests/data/murmur3_golden.json

Needs pyspark 4 and Java 17; shares no code with flexstream, on purpose. The output is committed, and
tests/unit/cython_ext/wire/test_murmur3.py compares our hash with it bit by bit. Run it again only to add cases.

Values in the file: ints as numbers, floats as the hex of their little-endian bits (so that NaN payloads
survive), bytes as hex without padding, bools as 0/1, timestamps as counts of their unit. Unsigned types,
which Spark lacks, are widened as documented: u8 and u16 to int, u32 to bigint.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from typing import Any

SEED = 20240607
GROUPS = (1, 2, 7, 16, 100, 128, 1000, 65535)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECONDS = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}


def integers(bits: int, signed: bool, rng: random.Random) -> list[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = {low, low + 1, 0, 1, 2, high - 1, high, 42} | ({-1, -2, -42} if signed else set())
    return sorted(edges) + [rng.randint(low, high) for _ in range(24)]


def timestamps(unit: str, rng: random.Random) -> list[int]:
    multiplier, divisor = MICROSECONDS[unit]
    # Years 69 to 3870, which Python's datetime holds; nanoseconds end earlier.
    span = min(60_000_000_000_000_000 * divisor // multiplier, 2**63 - 1)
    edges = [-span, -1001, -1000, -999, -1, 0, 1, 999, 1000, 1001, span]
    return edges + [rng.randint(-span, span) for _ in range(24)]


def floats(code: str, rng: random.Random) -> list[str]:
    whole = {"<f": "<I", "<d": "<Q"}[code]
    nans = {
        "<f": [0x7FC00000, 0xFFC00000, 0x7FC01234, 0x7F800001, 0xFFFFFFFF],
        "<d": [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000001234, 0x7FF0000000000001, 2**64 - 1],
    }[code]
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1e-30,
        -1e30,
        3.4e38,
        float("inf"),
        float("-inf"),
        1.401298464324817e-45,
    ]
    values += [rng.uniform(-1e6, 1e6) for _ in range(24)]
    if code == "<d":
        values += [5e-324, 1.7976931348623157e308, 0.1]
    return [struct.pack(code, value).hex() for value in values] + [
        struct.pack(whole, bits).hex() for bits in nans
    ]


def byte_strings(rng: random.Random) -> list[str]:
    out = [
        b"",
        b"view",
        b"click",
        b"purchase",
        "Grüße".encode(),
        "\U0001f600".encode(),
        b"\xff" * 5,
        b"a\0b",
        b"\0\0x",
    ]
    for length in range(18):
        for _ in range(3):
            value = bytes(rng.randrange(256) for _ in range(length))
            out.append(value.rstrip(b"\0"))
        out.append(bytes(rng.randrange(128, 256) for _ in range(length)))
    return [value.hex() for value in out]


def to_spark(kind: str, value: Any) -> Any:
    """The Python object that Spark gets for a value of the file."""
    if kind.startswith("timestamp"):
        multiplier, divisor = MICROSECONDS[kind[10:-1]]
        return EPOCH + timedelta(microseconds=value * multiplier // divisor)
    if kind.startswith("f"):
        return struct.unpack("<f" if kind == "f32" else "<d", bytes.fromhex(value))[0]
    if kind == "bytes[20]":
        return bytearray.fromhex(value)
    return bool(value) if kind == "bool" else value


def make_cases(rng: random.Random) -> list[tuple[list[str], list[list[Any]]]]:
    pools: dict[str, list[Any]] = {
        "i8": integers(8, True, rng),
        "i16": integers(16, True, rng),
        "i32": integers(32, True, rng),
        "i64": integers(64, True, rng),
        "u8": integers(8, False, rng),
        "u16": integers(16, False, rng),
        "u32": integers(32, False, rng),
        "bool": [0, 1],
        "timestamp[s]": timestamps("s", rng),
        "timestamp[ms]": timestamps("ms", rng),
        "timestamp[us]": timestamps("us", rng),
        "timestamp[ns]": timestamps("ns", rng),
        "f32": floats("<f", rng),
        "f64": floats("<d", rng),
        "bytes[20]": byte_strings(rng),
    }
    cases = [([kind], [[value] for value in pool]) for kind, pool in pools.items()]
    composites = [
        ["i64", "i32"],
        ["i32", "i64"],
        ["bytes[20]", "i64"],
        ["i64", "bytes[20]"],
        ["f64", "f32"],
        ["bool", "u8", "i16"],
        ["timestamp[ms]", "i64"],
        ["timestamp[ns]", "bytes[20]", "u32"],
        ["bytes[20]", "bytes[20]"],
        ["i8", "u16", "f64"],
    ]
    for kinds in composites:
        cases.append((kinds, [[rng.choice(pools[kind]) for kind in kinds] for _ in range(24)]))
    return cases


def spark_types() -> dict[str, Any]:
    from pyspark.sql import types as t

    out = {
        "i8": t.ByteType(),
        "i16": t.ShortType(),
        "i32": t.IntegerType(),
        "i64": t.LongType(),
        "u8": t.IntegerType(),
        "u16": t.IntegerType(),
        "u32": t.LongType(),
        "bool": t.BooleanType(),
        "f32": t.FloatType(),
        "f64": t.DoubleType(),
        "bytes[20]": t.BinaryType(),
    }
    return out | {f"timestamp[{unit}]": t.TimestampType() for unit in MICROSECONDS}


def ask(spark: Any, kinds: list[str], rows: list[list[Any]]) -> list[list[Any]]:
    from pyspark.sql import types as t

    types = spark_types()
    names = [f"k{i}" for i in range(len(kinds))]
    schema = t.StructType([t.StructField(name, types[kind]) for name, kind in zip(names, kinds, strict=True)])
    data = [tuple(to_spark(kind, value) for kind, value in zip(kinds, row, strict=True)) for row in rows]
    hashed = f"hash({', '.join(names)})"
    wanted = [f"{hashed} AS h", *(f"pmod({hashed}, {g}) AS g{g}" for g in GROUPS)]
    frame = spark.createDataFrame(data, schema).coalesce(1).selectExpr(*wanted)
    return [list(row) for row in frame.collect()]


def check_claims(spark: Any) -> dict[str, bool]:
    """What the documentation says about Spark, asked of Spark."""
    row = spark.sql(
        "SELECT hash(CAST('view' AS BINARY)) = hash('view') AS binary_equals_string,"
        " hash(CAST('\u00fc\u00df\u20ac' AS BINARY)) = hash('\u00fc\u00df\u20ac')"
        " AS non_ascii_binary_equals_string,"
        " hash(-0.0D) = hash(0.0D) AND hash(CAST(-0.0 AS FLOAT)) = hash(CAST(0.0 AS FLOAT)) AS one_zero,"
        " hash(CAST('NaN' AS DOUBLE)) = hash(-CAST('NaN' AS DOUBLE)) AS one_nan,"
        " hash(timestamp_millis(-1)) = hash(-1000L) AS timestamp_is_long_of_microseconds,"
        " hash(1Y) = hash(1) AND hash(1S) = hash(1) AND hash(true) = hash(1) AS small_ints_are_ints,"
        " hash(1, 2L) = hash(1, 2L, NULL) AS null_passes_the_seed_on"
    ).first()
    instant = spark._jvm.java.time.Instant.ofEpochSecond(0, -1)  # 1 ns before 1970
    micros = spark._jvm.org.apache.spark.sql.catalyst.util.DateTimeUtils.instantToMicros(instant)
    return {
        **row.asDict(),
        "nanoseconds_are_floored": micros == -1,
        "nan_payloads_do_not_matter": nans_agree(spark),
    }


def nans_agree(spark: Any) -> bool:
    """Through Parquet, because NaN payloads do not survive Python -> JVM."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    f32 = np.array([0x7FC00000, 0xFFC01234, 0x7F800001, 0xFFFFFFFF], dtype="<u4").view("<f4")
    f64 = np.array([0x7FF8 << 48, 0xFFF8 << 48 | 99, 0x7FF0 << 48 | 1, 2**64 - 1], dtype="<u8").view("<f8")
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"f": pa.array(f32), "d": pa.array(f64)}), f"{folder}/nan.parquet")
        frame = spark.read.parquet(f"{folder}/nan.parquet")
        rows = frame.selectExpr("hash(f)", "hash(d)", "hash(f, d)").collect()
    return len({tuple(row) for row in rows}) == 1


def main(path: str) -> None:
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    try:
        cases: list[dict[str, Any]] = []
        for kinds, rows in make_cases(random.Random(SEED)):
            answers = ask(spark, kinds, rows)
            cases.append(
                {
                    "types": kinds,
                    "keys": rows,
                    "hash": [a[0] for a in answers],
                    "groups": [a[1:] for a in answers],
                }
            )
        body = {
            "spark": spark.version,
            "seed": SEED,
            "group_counts": GROUPS,
            "claims": check_claims(spark),
            "cases": cases,
        }
    finally:
        spark.stop()
    with open(path, "w") as out:
        json.dump(body, out, separators=(",", ":"))
        out.write("\n")
    print(f"{sum(len(case['keys']) for case in cases)} keys of {len(cases)} kinds -> {path}")


if __name__ == "__main__":
    main(sys.argv[1])
