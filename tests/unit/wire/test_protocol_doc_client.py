"""The foreign client of examples/, written from the page alone, is understood by the server and by the engine."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np

from flexstream.rows.stream import Stream
from flexstream.wire.frames import CONTROL_GROUP
from tests.unit.client.fake_server import FakeServer

CLIENT = Path(__file__).parents[3] / "examples" / "pure_python_client.py"
STREAM = Stream(
    "clicks",
    {"event_time": "timestamp[ms]", "page": "bytes[5]", "key": "i64", "value": "f32"},
    key="key",
    time="event_time",
)


def run_client(port: int, rows: int) -> str:
    command = [sys.executable, "-I", str(CLIENT), f"127.0.0.1:{port}", "clicks", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_rows(n: int) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["event_time"] = np.arange(n)
    rows["key"] = np.arange(n) % 1000
    return rows


def test_it_shares_no_code_with_the_package():
    tree = ast.parse(CLIENT.read_text("utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= set(sys.stdlib_module_names)
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_its_rows_arrive_in_the_groups_where_they_belong():
    rows = expected_rows(5000)
    with FakeServer(STREAM, groups=5) as server:
        assert "sent 5000 rows of 25 bytes to 5 of 5 groups" in run_client(server.port, 5000)
        ids = STREAM.group_of(rows, 5)
        for group in range(5):
            assert bytes(server.rows[group]) == rows[ids == group].tobytes()
        assert server.errors == []
        assert server.events[CONTROL_GROUP][-2:] == [("eos", 0), ("bitmap", 0b11111)]


def test_the_engine_counts_its_rows():
    from flexstream.engine import engine as engine_module
    from flexstream.query.aggregates import count
    from flexstream.query.windows import tumbling

    query = STREAM.query("per_key").window(tumbling("1s")).agg(n=count())
    with engine_module.Engine(workers=1, groups=16, listen="127.0.0.1:0", pin=False) as engine:
        engine.add(STREAM)
        engine.submit(query)
        run_client(engine.data_address[1], 5000)
        engine.finish(20)
        batches = list(engine.results("per_key"))
        assert sum(sum(batch.column("n").to_pylist()) for batch in batches) == 5000
        assert sum(batch.num_rows for batch in batches) == 5000
