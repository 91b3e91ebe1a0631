"""The functions of Spark that aggregates' records name are there."""

from __future__ import annotations

import pytest
from pyspark.sql import functions

from flexstream.query.aggregates import FUNCTIONS


@pytest.mark.parametrize("record", [record for record in FUNCTIONS.values() if record.spark], ids=lambda r: r.name)
def test_spark_has_the_function_that_a_record_names(record):
    assert callable(getattr(functions, record.spark))
