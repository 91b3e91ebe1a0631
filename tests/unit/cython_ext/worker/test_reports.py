"""Every report that a worker makes is a type of its own, named as the message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from flexstream.cython_ext.worker import reports

# Memory that Python had lent: what it tells is for the worker's own face.
INTERNAL = {"GIVEN_BACK"}


def test_there_is_a_type_for_every_message_that_python_gets(project: Path) -> None:
    declared = (project / "cython_ext/memory/messages.pxd").read_text().partition("cdef enum Report:")[2]
    messages = set(re.findall(r"^    (\w+) = \d+", declared, re.M))
    assert len(messages) > 5
    types = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper() for kind in get_args(reports.Report)}
    assert types == messages - INTERNAL
