"""One guest for all tests of this folder, and a summary of what was seen in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nic_in_loop.machine import Guest, booted_guest
from tests.nic_in_loop.served import wait_for_launcher

_facts: list[str] = []


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    """While it lives this thread is in its private network; so it ends with its module, not with the session."""
    with booted_guest() as booted:
        wait_for_launcher(booted)
        yield booted


@pytest.fixture(scope="session")
def facts() -> list[str]:
    """Lines for the end of the run: the numbers behind the green dots."""
    return _facts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _facts:
        terminalreporter.section("NIC in the loop: what was seen")
        for line in _facts:
            terminalreporter.write_line(line)
