"""The arithmetic of windows (window_times.h): every value of a small type, the edges of the large one, under UBSan."""

import subprocess
from pathlib import Path

import pytest

from flexstream.rows.layout import SPAN_LIMIT

HERE = Path(__file__).parents[3]
PROGRAM = HERE / "native/window_times.c"
INCLUDES = HERE.parent / "cython_ext/includes"
FLAGS = ["-O1", "-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]


def run(tmp_path, source, *defines):
    program = tmp_path / "window_times"
    built = subprocess.run(
        ["gcc", *FLAGS, *defines, f"-I{source.parent}", f"-I{INCLUDES}", str(PROGRAM), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("defines", [["-DFS_MOMENT=int8_t"], []], ids=["every 8-bit value", "64-bit edges and random"])
def test_every_end_is_what_wide_arithmetic_says_and_no_sum_leaves_the_type(tmp_path, defines):
    done = run(tmp_path, INCLUDES / "window_times.h", *defines)
    assert done.returncode == 0, done.stdout + done.stderr
    checked, wrong = (int(word) for word in done.stdout.split() if word.isdigit())
    assert checked > 1_000_000
    assert wrong == 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("before == earliest ? before", "before < earliest ? before"),  # first_end one slide late
        ("(sizeof(FS_MOMENT) * 8 - 4)", "(sizeof(FS_MOMENT) * 8 - 2)"),  # spans as long as times
        ("rest < 0 ? (FS_MOMENT)(rest + step) : rest", "rest"),  # floor towards zero
    ],
)
def test_the_check_finds_a_mistake(tmp_path, right, wrong):
    text = (INCLUDES / "window_times.h").read_text()
    assert right in text
    broken = tmp_path / "window_times.h"
    broken.write_text(text.replace(right, wrong))
    assert run(tmp_path, broken, "-DFS_MOMENT=int8_t").returncode != 0


def test_python_knows_the_same_limit():
    assert SPAN_LIMIT == 1 << 64 - 4
    assert "FS_MOMENT) * 8 - 4" in (INCLUDES / "window_times.h").read_text()
