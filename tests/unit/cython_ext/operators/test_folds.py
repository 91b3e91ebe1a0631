"""The lists of folds (folds.h): one in the wrong list, or without a function that its flags promise, is not built."""

import subprocess
from pathlib import Path

import pytest

INCLUDES = Path(__file__).parents[4] / "cython_ext/includes"
HEADERS = ("murmur3.h", "flexstream_abi.h", "folds.h", "fold_calls.h")


def build(tmp_path, *changes):
    """What a compiler says to the folds with the changes made in them."""
    for name in HEADERS:
        text = (INCLUDES / name).read_text()
        for right, wrong in changes:
            assert name != "folds.h" or text.count(right) == 1, right
            text = text.replace(right, wrong) if name == "folds.h" else text
        (tmp_path / name).write_text(text)
    (tmp_path / "all.c").write_text('#include "fold_calls.h"\n')
    flags = ["-std=gnu11", "-Wall", "-Wno-unused-function", "-Werror", "-fsyntax-only"]
    command = ["gcc", *flags, str(tmp_path / "all.c")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_folds_as_they_are_build(tmp_path):
    assert build(tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("X(sum_f, 2, 2, 0)", "X(sum_f, 2, 2, FS_INVERTIBLE)", "sum_f is in the wrong list"),
        ("X(count, 0, 0, FS_INVERTIBLE | FS_MASKS)", "X(count, 0, 0, FS_MASKS)", "count is not FS_INVERTIBLE"),
        ("fs_sum_i_take_out(", "fs_sum_i_takes_out(", "fs_sum_i_take_out"),
        ("X(min_i, 3, 1, FS_MASKS)", "X(min_i, 3, 1, FS_SIDE)", "min_i is in the wrong list"),
        ("X(mode_i, 26, 4, FS_SIDE | FS_COUNTED)", "X(mode_i, 26, 4, FS_COUNTED)", "mode_i is not FS_SIDE"),
        ("fs_median_i_value(uint64_t *slot, uint64_t before", "fs_median_x_value(uint64_t *slot, uint64_t before",
         "fs_median_i_value"),
    ],
)  # fmt: skip
def test_a_fold_whose_flags_and_functions_do_not_agree_is_not_built(tmp_path, right, wrong, said):
    done = build(tmp_path, (right, wrong))
    assert done.returncode != 0
    assert said in done.stderr
