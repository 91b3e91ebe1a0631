"""FlexStream: keyed, windowed stream processing at the speed of the network.

    import flexstream as fs

Streams, queries and expressions are here at once; Engine and the producers are loaded when first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from flexstream.errors import (
    BackPressure,
    ConfigError,
    ConnectError,
    EngineError,
    FlexStreamError,
    ProtocolError,
    QueryError,
    ResultLogError,
    SchemaError,
)
from flexstream.query.aggregates import (
    Aggregate,
    approx_distinct,
    avg,
    bool_and,
    bool_or,
    count,
    count_if,
    distinct,
    first,
    last,
    max,
    max_by,
    median,
    min,
    min_by,
    mode,
    order_hash,
    stddev,
    sum,
    variance,
)
from flexstream.query.expr import Expr, col, hash, lit, when
from flexstream.query.query import Query
from flexstream.query.windows import WindowSpec, sliding, tumbling
from flexstream.rows.schema import Field, Schema
from flexstream.rows.stream import Stream

if TYPE_CHECKING:
    from flexstream.client.async_producer import AsyncProducer
    from flexstream.client.producer import Producer
    from flexstream.engine.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "AsyncProducer",
    "BackPressure",
    "ConfigError",
    "ConnectError",
    "Engine",
    "EngineError",
    "Expr",
    "Field",
    "FlexStreamError",
    "Producer",
    "ProtocolError",
    "Query",
    "QueryError",
    "ResultLogError",
    "Schema",
    "SchemaError",
    "Stream",
    "WindowSpec",
    "approx_distinct",
    "avg",
    "bool_and",
    "bool_or",
    "col",
    "count",
    "count_if",
    "distinct",
    "first",
    "hash",
    "last",
    "lit",
    "max",
    "max_by",
    "median",
    "min",
    "min_by",
    "mode",
    "order_hash",
    "sliding",
    "stddev",
    "sum",
    "tumbling",
    "variance",
    "when",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is quiet unless asked

_LAZY = {
    "Engine": "flexstream.engine.engine",
    "Producer": "flexstream.client.producer",
    "AsyncProducer": "flexstream.client.async_producer",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'flexstream' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ImportError as error:
        if error.name is not None and error.name.startswith("flexstream.cython_ext"):
            from flexstream import missing_build

            raise ImportError(missing_build.explain(error.name, error), name=error.name) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
