"""One Spark session for all tests, and the daemons they write to."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.spark.rig import Daemon, serving

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYTHONPATH"] = str(PROJECT)  # for Spark's Python workers: the tree under test, not an installed one

CONFS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",  # failures are expected here, and each test looks at the error itself
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "America/St_Johns",  # half an hour off: a mix-up of zones shows
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.python.worker.reuse": "true",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("time_limit") is None:
                item.add_marker(pytest.mark.time_limit(600))  # seconds, but a busy machine may take minutes


def need_spark() -> None:
    """These tests are worth nothing when they are skipped, so what is missing is a failure that says what to do."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.fail("Spark needs Java 17 and there is none: apt-get install default-jre-headless", pytrace=False)
    try:
        import pyspark  # noqa: F401
    except ImportError:
        pytest.fail("there is no pyspark: pip install 'flexstream[spark]', or use scripts/test spark", pytrace=False)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need_spark()
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2,3]").appName("flexstream-tests")  # a task may fail twice
    for name, value in CONFS.items():
        builder = builder.config(name, value)
    session = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate()
    from flexstream.spark import configure

    yield configure(session)
    session.stop()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with the stream and the query of the rig."""
    with serving(tmp_path / "daemon") as running:
        yield running


@pytest.fixture(scope="session")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests of what is refused: no row is ever applied there."""
    with serving(tmp_path_factory.mktemp("refusing")) as running:
        yield running
        assert running.ledger()["accepted"] == 0
