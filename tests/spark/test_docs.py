"""docs/spark.md: every Python block runs, top to bottom, against a daemon and a session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.spark.rig import GROUPS, Daemon
from tests.waiting import wait_until


def put_clicks(folder: Path, files: int, start: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(start)
    for i in range(files):
        at = start + i * 60_000 + np.sort(rng.integers(0, 60_000, 1_000))
        table = pa.table(
            {
                "at": pa.array(at).cast(pa.timestamp("ms", tz="UTC")),
                "user": rng.integers(0, 20, 1_000),
                "page": pa.array(["/index", "/buy"] * 500),
                "ms": pa.array(rng.integers(1, 200, 1_000), pa.int32()),
            }
        )
        pq.write_table(table, folder / f"{i}.parquet", coerce_timestamps="ms")


def test_every_python_block_runs(spark: Any, daemon: Daemon, project: Path, tmp_path: Path, capsys: Any) -> None:
    put_clicks(tmp_path / "clicks", 3, 0)
    put_clicks(tmp_path / "incoming", 2, 600_000)
    put_clicks(tmp_path / "more", 3, 1_200_000)
    page = project / "docs" / "spark.md"
    text = page.read_text()
    names: dict[str, Any] = {"spark": spark, "__name__": "spark.md"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) >= 5
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        code = block[1].replace("127.0.0.1:7401", daemon.endpoint).replace("/data/", f"{tmp_path}/")
        exec(compile("\n" * line + code, str(page), "exec"), names)
    assert names["shipped"].rows == 3_000
    assert "3,000 rows of 3 files" in capsys.readouterr().out
    # Then: the batch, the two files of the stream and the three shipped ones are in the windows, as Spark counts them.
    assert daemon.late("clicks") == 0
    folders = [str(tmp_path / name) for name in ("clicks", "incoming", "more")]
    expected = names["slow"].to_spark(spark.read.parquet(*folders), groups=GROUPS).toArrow()
    slow = spark.read.format("flexstream").option("endpoint", daemon.endpoint).option("query", "slow")
    wait_until(lambda: slow.load().count() >= expected.num_rows, "all windows")
    found = slow.load().toArrow()
    order = [("window_start", "ascending"), ("user", "ascending")]
    assert found.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
