"""FlexStream and Spark: executors as producers, results back, and the same query on a cluster. See docs/spark.md.

Needs `pip install flexstream[spark]`: pyspark 4 and Java 17. Nothing of it is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexstream.spark.datasource import FlexStreamDataSource
    from flexstream.spark.session import configure
    from flexstream.spark.shipping import ship
    from flexstream.spark.sink import finish
    from flexstream.spark.translate import to_spark
    from flexstream.spark.types import result_schema

__all__ = ["FlexStreamDataSource", "configure", "finish", "result_schema", "ship", "to_spark"]

_LAZY = {
    "FlexStreamDataSource": "flexstream.spark.datasource",
    "configure": "flexstream.spark.session",
    "finish": "flexstream.spark.sink",
    "result_schema": "flexstream.spark.types",
    "ship": "flexstream.spark.shipping",
    "to_spark": "flexstream.spark.translate",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'flexstream.spark' has no attribute {name!r}")
    try:
        globals()[name] = value = getattr(importlib.import_module(module), name)
        return value
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] in ("pyspark", "py4j"):
            raise ImportError(
                "flexstream.spark needs pyspark 4: pip install 'flexstream[spark]' (and Java 17)", name=error.name
            ) from error
        raise
