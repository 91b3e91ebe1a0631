"""The result log on bad days: killed in mid-write, cut at any byte, damaged, out of disk."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from flexstream.errors import ResultLogError
from flexstream.state.results.result_log import ResultLog

SCHEMA = pa.schema([("key", pa.int64()), ("pad", pa.binary(100))])

CHILD = """
import sys
from pathlib import Path
import pyarrow as pa
from flexstream.state.results.result_log import ResultLog

schema = pa.schema([("key", pa.int64()), ("pad", pa.binary(100))])
log = ResultLog(Path(sys.argv[1]), schema, segment_bytes=1 << 20)
offset = log.next_offset
while True:
    keys = pa.array(range(offset, offset + 2000), pa.int64())
    pad = pa.array([b"x" * 100] * 2000, pa.binary(100))
    log.append(pa.RecordBatch.from_arrays([keys, pad], schema=schema))
    offset += 2000
    print(offset, flush=True)
"""


def rows(first: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(range(first, first + count), pa.int64()), pa.array([b"y" * 100] * count, pa.binary(100))],
        schema=SCHEMA,
    )


def fill(log: ResultLog) -> None:
    while True:
        log.append(rows(log.next_offset, 500))


def keys(log: ResultLog) -> list[int]:
    batches = log.read(log.first_offset, max_rows=1 << 30)
    return [key for batch in batches for key in batch.column("key").to_pylist()]


def test_kill_minus_nine_in_mid_write_loses_no_acknowledged_row_and_repeats_none(tmp_path: Path) -> None:
    seed = int(os.environ.get("FLEXSTREAM_SEED", "7"))
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            acknowledged = int(child.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.2))
            os.kill(child.pid, signal.SIGKILL)
            acknowledged = max([acknowledged, *(int(line) for line in child.stdout if line.endswith("\n"))])
        with ResultLog(tmp_path, SCHEMA) as log:
            assert log.next_offset >= acknowledged
            assert log.next_offset % 2000 == 0
            assert keys(log) == list(range(log.next_offset))


def test_a_file_cut_at_any_byte_reopens_at_its_last_whole_batch_and_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ends = []
    with ResultLog(whole, SCHEMA) as log:
        ends.append(log.bytes)
        for first in (0, 3, 6):
            log.append(rows(first, 3))
            ends.append(log.bytes)
    [file] = whole.glob("*.arrow")
    for cut in [*range(0, ends[1], 97), ends[1], *range(ends[1] + 1, ends[-1], 131), ends[-1] - 1]:
        directory = tmp_path / f"cut{cut}"
        shutil.copytree(whole, directory)
        os.truncate(directory / file.name, cut)
        expected = 3 * sum(1 for end in ends[1:] if end <= cut)
        with ResultLog(directory, SCHEMA) as log:
            assert log.next_offset == expected, f"cut at {cut}"
            assert log.append(rows(expected, 2)) == expected
            assert keys(log) == list(range(expected + 2))


def test_a_tail_of_zeros_or_of_flipped_bits_is_cut(tmp_path: Path) -> None:
    for name, damage in {"zeros": b"\0" * 200, "flipped": b"\xaa" * 200}.items():
        directory = tmp_path / name
        with ResultLog(directory, SCHEMA) as log:
            log.append(rows(0, 5))
            good = log.bytes
            log.append(rows(5, 5))
        [file] = directory.glob("*.arrow")
        with file.open("r+b") as stream:
            stream.seek(-300, os.SEEK_END)  # in the body of the last batch: only its CRC can tell
            stream.write(damage)
        with ResultLog(directory, SCHEMA) as log:
            assert (log.next_offset, log.bytes) == (5, good)


def test_damage_in_an_old_segment_is_an_error_not_a_silent_loss(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SCHEMA, segment_bytes=2000) as log:
        for first in range(0, 60, 10):
            log.append(rows(first, 10))
    oldest = min(tmp_path.glob("*.arrow"))
    with oldest.open("r+b") as stream:
        stream.seek(-300, os.SEEK_END)
        stream.write(b"\xaa" * 100)
    with ResultLog(tmp_path, SCHEMA) as log:
        with pytest.raises(ResultLogError) as caught:
            log.read(0)
        assert caught.value.code == "log_damaged"
        assert str(oldest) in str(caught.value)
        assert log.read(50)[0].column("key").to_pylist() == list(range(50, 60))


def test_a_file_size_limit_fails_the_append_and_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = ResultLog(tmp_path, SCHEMA)
    log.append(rows(0, 10))
    before = (log.next_offset, log.bytes)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.bytes + 700, old[1]))
    try:
        for _ in range(2):
            with pytest.raises(ResultLogError) as caught:
                log.append(rows(10, 1000))
            assert caught.value.code == "disk_full"
            assert log.error
            assert (log.next_offset, log.bytes) == before
            assert keys(log) == list(range(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert log.append(rows(10, 1000)) == 10
    assert log.error is None
    log.close()
    with ResultLog(tmp_path, SCHEMA) as again:
        assert keys(again) == list(range(1010))


@pytest.mark.root
def test_a_full_disk_fails_the_append_and_the_retry_works_once_there_is_room(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "flexstream-test", str(mount)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs ({made.stderr.strip()}): run as root with CAP_SYS_ADMIN")
    try:
        (mount / "ballast").write_bytes(b"b" * (256 << 10))
        log = ResultLog(mount / "q", SCHEMA, segment_bytes=200_000)
        with pytest.raises(ResultLogError) as caught:
            fill(log)
        appended = log.next_offset
        assert caught.value.code == "disk_full"
        assert appended > 0
        (mount / "ballast").unlink()
        assert log.append(rows(appended, 500)) == appended
        assert keys(log) == list(range(appended + 500))
        log.close()
        with ResultLog(mount / "q", SCHEMA) as again:
            assert keys(again) == list(range(appended + 500))
    finally:
        subprocess.run(["umount", str(mount)], check=True)
