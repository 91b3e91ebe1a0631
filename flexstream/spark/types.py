"""Which Spark type holds which FlexStream type, both ways, and how a Spark column becomes a field's value.

Spark has no unsigned integers and no fixed-size bytes: u8, u16, u32 and u64 are the next wider type (u64 is
decimal(20,0)), bytes[N] is binary without its trailing NULs. Timestamps are instants in microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flexstream.errors import SchemaError
from flexstream.rows.schema import Field, FieldType, near_names
from flexstream.rows.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import Column

    from flexstream.query.query import Query

_INTEGRAL = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
_NATURAL: dict[str, T.DataType] = {
    "i8": T.ByteType(), "i16": T.ShortType(), "i32": T.IntegerType(), "i64": T.LongType(),
    "u8": T.ShortType(), "u16": T.IntegerType(), "u32": T.LongType(), "u64": T.DecimalType(20, 0),
    "f32": T.FloatType(), "f64": T.DoubleType(), "bool": T.BooleanType(),
    "timestamp": T.TimestampType(), "bytes": T.BinaryType(),
}  # fmt: skip
_LONGEST = 2**63 - 1
EPOCH_NTZ = "TIMESTAMP_NTZ'1970-01-01 00:00:00'"


def natural_type(kind: str) -> T.DataType:
    """The Spark type that a field of that kind has when it comes out of FlexStream."""
    return _NATURAL[kind]


def result_type(arrow: str) -> T.DataType:
    """The Spark type of a result column, whose Arrow type is given as text."""
    if arrow.startswith("fixed_size_binary"):
        return _NATURAL["bytes"]
    return _NATURAL[FieldType.parse(arrow).kind]


def result_schema(query: Query) -> T.StructType:
    """The schema that a query's results have in Spark, from the source and from `to_spark` alike."""
    bound = query.bound()
    nullable = {aggregate.name for aggregate in bound.aggregates if aggregate.function.nullable}
    return T.StructType(
        [T.StructField(name, result_type(kind), name in nullable) for name, kind in bound.result_fields]
    )


def late_schema(stream: Stream) -> T.StructType:
    """The schema of rows that came too late: the stream's, and the watermark that had passed them."""
    rows = [T.StructField(field.name, natural_type(field.kind), False) for field in stream.schema]
    return T.StructType([*rows, T.StructField("watermark", T.TimestampType(), False)])


def accepts(field: Field, given: T.DataType) -> bool:
    """Whether a column of that Spark type can be sent as this field. Values are checked again when packed."""
    bits = _INTEGRAL.get(type(given))
    if field.kind == "timestamp":
        return bits is not None or isinstance(given, T.TimestampType | T.TimestampNTZType)
    if field.kind == "bytes":
        return isinstance(given, T.StringType | T.BinaryType)
    if field.kind == "bool":
        return isinstance(given, T.BooleanType)
    if field.kind == "f64":
        return isinstance(given, T.FloatType | T.DoubleType) or (bits or 64) <= 32
    if field.kind == "f32":
        return isinstance(given, T.FloatType) or (bits or 64) <= 16
    if field.kind == "u64":
        return bits is not None or given == _NATURAL["u64"]
    return bits is not None and bits <= _INTEGRAL[type(_NATURAL[field.kind])]


def check_columns(stream: Stream, given: T.StructType, *, extra_allowed: bool = False) -> None:
    """Raises SchemaError unless rows of these columns are rows of the stream: by name, in any order."""
    names = [column.name for column in given]
    missing = [name for name in stream.schema.names if name not in names]
    if missing:
        raise SchemaError(
            f"the frame does not have {', '.join(missing)}, which stream {stream.name!r} has",
            code="unknown_field",
            hint=f"{near_names(missing[0], names)} (upper and lower case matter)",
        )
    extra = [name for name in names if name not in stream.schema]
    if extra and not extra_allowed:
        listed = ", ".join(repr(name) for name in extra)
        raise SchemaError(
            f"the frame has columns that stream {stream.name!r} does not have: {', '.join(extra)}",
            code="unknown_field",
            hint=f"drop them before writing: df.drop({listed})",
        )
    for field in stream.schema:
        _check_column(stream, field, given[field.name].dataType)


def _check_column(stream: Stream, field: Field, given: T.DataType) -> None:
    if accepts(field, given):
        return
    raise SchemaError(
        f"column {field.name!r} is {given.simpleString()} in the frame, but {field.type} in stream "
        f"{stream.name!r}, which takes {natural_type(field.kind).simpleString()}",
        code="bad_types",
        hint=f"write {_cast(field, given)}",
    )


def _cast(field: Field, given: T.DataType) -> str:
    name, target = field.name, natural_type(field.kind).simpleString()
    if isinstance(given, T.DecimalType) and given.scale and field.kind[0] in "iu":
        whole = f"(col({name!r}) * {10**given.scale}).cast({target!r})"
        return f".withColumn({name!r}, {whole} to keep its {given.scale} decimals, or .cast({target!r}) to drop them)"
    return f".withColumn({name!r}, col({name!r}).cast({target!r}))"


def check_results(query: str, given: T.StructType, has: T.StructType) -> None:
    """Raises SchemaError unless the columns that `.schema(...)` asks for are columns of the results."""
    known = {field.name: field.dataType for field in has}
    for field in given:
        if field.name not in known:
            raise SchemaError(
                f"the results of query {query!r} have no column {field.name!r}",
                code="unknown_field",
                hint=f"{near_names(field.name, list(known))}; leave .schema() out: the query knows its columns",
            )
        if field.dataType != known[field.name]:
            raise SchemaError(
                f"column {field.name!r} of query {query!r} is {known[field.name].simpleString()}, but .schema() says "
                f"{field.dataType.simpleString()}",
                code="bad_types",
                hint="leave .schema() out: the query knows its columns; cast after the load",
            )


# -- a Spark column as expressions see it: bigint, double, boolean or binary; null when the value does not fit


def field_value(column: Column, given: T.DataType, field: Field) -> Column:
    if field.kind == "timestamp":
        return _units(column, given, field)
    if field.kind == "bytes":
        return unpadded(column.cast("binary"))
    if field.kind == "bool":
        return column
    if field.kind in ("f32", "f64"):
        return column.cast("double")
    if isinstance(given, T.DecimalType):
        return F.when(column <= F.lit(_LONGEST), column).cast("bigint")
    return column.cast("bigint")


def _units(column: Column, given: T.DataType, field: Field) -> Column:
    if type(given) in _INTEGRAL:
        return column.cast("bigint")
    if isinstance(given, T.TimestampNTZType):  # taken as UTC, whatever the session's zone
        micros = F.call_function("div", column - F.expr(EPOCH_NTZ), F.expr("INTERVAL '0.000001' SECOND"))
    else:
        micros = F.unix_micros(column)
    if field.unit == "ns":
        return F.try_multiply(micros, F.lit(1000))
    return micros if field.unit == "us" else floor_div(micros, 1000 if field.unit == "ms" else 1_000_000)


def floor_div(column: Column, divisor: int) -> Column:
    """Towards minus infinity, unlike Spark's `div`."""
    whole = F.call_function("div", column, F.lit(divisor).cast("bigint"))
    return F.when(column % divisor < 0, whole - 1).otherwise(whole)


def instant(units: Column, unit: str) -> Column:
    """A timestamp of a count of units since 1970; nanoseconds are cut to microseconds."""
    if unit == "ns":
        return F.timestamp_micros(floor_div(units, 1000))
    return {"s": F.timestamp_seconds, "ms": F.timestamp_millis, "us": F.timestamp_micros}[unit](units)


def unpadded(column: Column) -> Column:
    """Binary without its trailing NULs. Through hex digits: Spark's rtrim is for text, and would misread others."""
    trimmed = F.unhex(F.regexp_replace(F.hex(column), "(00)+$", ""))
    return F.when(F.substring(column, -1, 1) == F.lit(b"\0"), trimmed).otherwise(column)


def not_null(column: Column, given: T.StructField, stream: Stream) -> Column:
    """Rows have no nulls: a null ends the Spark query as it would end the sink's task."""
    if not given.nullable:
        return column
    rule = f"rows of stream {stream.name!r} have no nulls: fill or drop it"
    message = f"column {given.name!r} is null in a row, and {rule}"
    return F.coalesce(column, F.raise_error(F.lit(message)).cast(given.dataType))


def arrow_for_spark(batch: Any, schema: T.StructType) -> Any:
    """A result batch with the Arrow types that Spark expects for `schema`. Raises SchemaError when one is too fine."""
    import pyarrow as pa

    columns = []
    for field in schema:
        column = batch.column(field.name)
        target = _ARROW[type(field.dataType)]()
        if pa.types.is_fixed_size_binary(column.type):
            column = pa.array([value.rstrip(b"\0") for value in column.to_pylist()], pa.binary())
        elif column.type != target:
            try:
                column = column.cast(target)
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"column {field.name!r} is {column.type} and does not fit Spark's {field.dataType.simpleString()}:"
                    f" {error}",
                    code="lossy_cast",
                    hint="Spark's timestamps are microseconds: use windows of whole microseconds",
                ) from error
        columns.append(column)
    return pa.record_batch(columns, schema=arrow_schema(schema))


def arrow_schema(schema: T.StructType) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(f.name, _ARROW[type(f.dataType)](), nullable=f.nullable) for f in schema])


def _arrow_types() -> dict[type[T.DataType], Any]:
    import pyarrow as pa

    return {
        T.ByteType: pa.int8, T.ShortType: pa.int16, T.IntegerType: pa.int32, T.LongType: pa.int64,
        T.FloatType: pa.float32, T.DoubleType: pa.float64, T.BooleanType: pa.bool_, T.BinaryType: pa.binary,
        T.DecimalType: lambda: pa.decimal128(20, 0), T.TimestampType: lambda: pa.timestamp("us", tz="UTC"),
    }  # fmt: skip


_ARROW = _arrow_types()
