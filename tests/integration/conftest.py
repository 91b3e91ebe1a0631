"""A small engine for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flexstream as fs
from tests.integration.small_engine import STREAM


@pytest.fixture
def engine() -> Iterator[fs.Engine]:
    with fs.Engine(groups=4, pin=False) as engine:
        engine.add(STREAM)
        yield engine
