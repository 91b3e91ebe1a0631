"""One dialect of Cython: what looks different is different."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "cython_ext"
SOURCES = sorted(path for path in NATIVE.rglob("*.p*") if path.suffix in (".pyx", ".pxd"))
PROSE = re.compile(r'"""(?s:.*?)"""|"[^"\n]*"|#[^\n]*')

HABITS = {
    "a pointer's star is at the name: Lane *lane": re.compile(r"\b\w+\*+ +[a-z_]\w*\s*[,)=:\n]"),
    "a cast has a space behind it: <uint32_t> n": re.compile(r"<(?:const )?[a-z_]\w*(?: \w+)*(?: ?\*+)?>[\w(&]"),
    "a cast's star has a space before it: <Lane *> memory": re.compile(r"<(?:const )?\w+(?: \w+)*\*+>"),
}


def code(path: Path) -> str:
    """Without comments and texts; lines keep their numbers."""
    return PROSE.sub(lambda found: "\n" * found.group().count("\n"), path.read_text())


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_kept_everywhere(habit: str) -> None:
    assert len(SOURCES) > 60
    outliers = [
        f"{path.relative_to(NATIVE)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(code(path).splitlines(), 1)
        if HABITS[habit].search(line + "\n")
    ]
    assert not outliers, "\n".join(outliers)


@pytest.mark.parametrize(
    ("habit", "line"), list(zip(HABITS, ("cdef Lane* lane", "n = <uint32_t>size", "<Lane*> memory"), strict=True))
)
def test_the_check_sees_an_outlier(habit: str, line: str) -> None:
    assert HABITS[habit].search(line + "\n")


def test_a_native_function_that_python_does_not_see_raises_nothing() -> None:
    """`nogil` without `noexcept` would look for an exception, with the GIL, after every call."""
    found = [
        f"{path.relative_to(NATIVE)}: {line.strip()}"
        for path in SOURCES
        for line in re.findall(r"^\s*cdef [^\n]*\) nogil:?$", code(path), re.M)
    ]
    assert not found, "\n".join(found)
