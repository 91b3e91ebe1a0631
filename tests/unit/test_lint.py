"""Lint and types are tests: what ruff or mypy would say is said here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def check(command: list[str], project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing(project: Path) -> None:
    check(["ruff", "check", "--quiet", "--output-format", "concise", "."], project)


@pytest.mark.slow
def test_mypy_finds_nothing_in_the_package(project: Path) -> None:
    check(["mypy"], project)


@pytest.mark.slow
def test_mypy_finds_nothing_in_scripts_and_benchmarks(project: Path) -> None:
    check(["mypy", "benchmarks", "scripts"], project)
