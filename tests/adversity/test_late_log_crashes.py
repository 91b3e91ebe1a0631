"""The log of late rows, killed in mid-write while queries come and go: each row is for whom it was, at its offset."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from flexstream.results.late_log import LateLog
from tests.unit.results.test_late_log import ROWS, native, opened, seen

NAMES = ("a", "b", "c")


def write_until_killed(directory: Path, begin: int) -> None:
    """Rows x = begin, begin + 1, ...: of query n when x mod (n + 2) is 0. Query c is cancelled now and then."""
    log = LateLog("s", ROWS, directory, retention_bytes=1 << 20)
    for slot, name in enumerate(NAMES):
        log.seat(0, slot, log.open(name, "p"))
    x = begin
    while True:
        xs = range(x, x + 20)
        log.write(0, native(list(xs), [sum(1 << n for n in range(3) if one % (n + 2) == 0) for one in xs]))
        x += 20
        print(x, flush=True)
        if x % 400 == 0:
            log.end(log.open("c", "p"))
            log.seat(0, 2, log.open("c", "p"))


def test_kill_minus_nine_leaves_every_row_with_its_queries_and_its_offset(
    tmp_path: Path, project: Path, seed: int
) -> None:
    rng = random.Random(seed)
    read: dict[str, dict[int, int]] = {name: {} for name in NAMES}
    begin = 0
    child_does = "\n".join(
        [
            "import sys; from pathlib import Path",
            "from tests.adversity.test_late_log_crashes import write_until_killed",
            "write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))",
        ]
    )
    for _ in range(6):
        command = [sys.executable, "-c", child_does, str(tmp_path / "s"), str(begin)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=project)
        assert child.stdout is not None
        assert child.stdout.readline(), "it wrote nothing"
        time.sleep(rng.random())
        os.kill(child.pid, signal.SIGKILL)
        said = [int(line) for line in child.stdout.read().split("\n")[:-1]]
        child.wait()
        child.stdout.close()
        log = opened(tmp_path / "s", retention_bytes=1 << 20)
        for n, name in enumerate(NAMES):
            late = log.open(name, "p")
            xs = seen(late)
            assert all(x % (n + 2) == 0 for x in xs), "a row of somebody else"
            assert xs == sorted({*xs}), "a row that is there twice"
            for offset, x in enumerate(xs, late.first_offset):
                assert read[name].setdefault(offset, x) == x, f"offset {offset} of {name} has another row now"
            if said:
                assert xs[-1] >= said[-1] - 20 - (n + 2), "an acknowledged row is gone"
        begin = max(max(rows.values()) for rows in read.values()) + 1000
        begin -= begin % 20
        log.close()
    assert min(len(rows) for rows in read.values()) > 100
