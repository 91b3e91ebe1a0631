"""Numbers that native code and Python both have: Python reads them from native code, and where it may not they agree.

Rows, queries and frames are described without native code, so that a tree that was not built can say so; generated C
has the header's numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexstream.cython_ext.expressions import program
from flexstream.cython_ext.operators import compiled_variant, table
from flexstream.cython_ext.wire import murmur3
from flexstream.query.typed import HASH_SEED
from flexstream.rows.stream import MAX_KEY_FIELDS


def test_what_python_says_without_native_code_is_what_native_code_says() -> None:
    assert murmur3.MAX_KEY_FIELDS == MAX_KEY_FIELDS
    assert murmur3.SEED == HASH_SEED


def test_generated_code_and_the_engine_have_the_same_limits() -> None:
    assert compiled_variant.ABI_BATCH == program.BATCH
    assert compiled_variant.ABI_SIDES == table.MAX_SIDES


def test_opcodes_have_names_and_no_number_twice() -> None:
    assert len(program.Op.__members__) == len({int(op) for op in program.Op}) > 60
    assert program.Op.HASH_BYTES == 115


def test_no_number_of_native_code_is_written_again_in_the_compiler(project: Path) -> None:
    """A name that native code exports is imported, not assigned."""
    exported = {"Op", "KeyForm", "MAX_REGISTERS", "MAX_AGGREGATES", "MAX_SIDES", "MAX_SLOTS", "MAX_PREDICATES"}
    exported |= set(program.Op.__members__) | set(table.KeyForm.__members__)
    sources = sorted((project / "flexstream/compile").glob("*.py"))
    assert len(sources) > 10
    again = {
        (path.name, name)
        for path in sources
        for name in re.findall(r"^([A-Z_0-9]+)\s*=", path.read_text(), re.M)
        if name in exported
    }
    assert not again


@pytest.mark.parametrize(
    ("number", "home"),
    [("0xcc9e2d51", "murmur3.h"), ("0xc2b2ae35", "murmur3.h"), ("uint64_max / groups", "scatter.h")],
)
def test_a_hash_and_a_fast_remainder_are_written_once(project: Path, number: str, home: str) -> None:
    sources = [path for path in (project / "cython_ext").rglob("*.*") if path.suffix in (".pyx", ".pxd", ".h")]
    assert [path.name for path in sources if number in path.read_text().lower()] == [home]
