"""Finds the compiled part, and explains itself when there is none."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import `flexstream.cython_ext.<name>`; ImportError names the commands that build it."""
    full = f"flexstream.cython_ext.{name}"
    try:
        return importlib.import_module(full)
    except ImportError as error:
        raise ImportError(explain(full, error), name=full) from error


def explain(module: str, cause: BaseException) -> str:
    return (
        f"{module} is not compiled for this Python ({cause}). "
        "FlexStream's record path is Cython: run `pip install -e .` in the source tree "
        "(or `scripts/test`, which builds in a private .venv), or install a wheel."
    )
