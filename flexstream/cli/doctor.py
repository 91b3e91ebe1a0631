"""flexstream doctor: what this machine offers, what it lacks, and how to fix that."""

from __future__ import annotations

from typing import Any

import typer

from flexstream.cli.machine import Check, examine
from flexstream.cli.output import AsJson, emit, say

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "info": "info"}


def doctor(as_json: AsJson = False) -> None:
    """Check cores, limits, ports, socket buffers, clock, network devices and Java. Changes nothing.

    Exits with 1 if something keeps the daemon from running.

    Example: flexstream doctor
    """
    checks = examine()
    failed = [check for check in checks if check.state == "fail"]
    if as_json:
        emit({"ok": not failed, "checks": [_plain(check) for check in checks]})
    else:
        for check in checks:
            say(f"{MARKS[check.state]}  {check.name:14s} {check.found}")
            if check.advice and check.state != "ok":
                say(f"      {'':14s} -> {check.advice}")
        warned = sum(check.state == "warn" for check in checks)
        say(f"{len(failed)} things to fix, {warned} to improve")
    raise typer.Exit(1 if failed else 0)


def _plain(check: Check) -> dict[str, Any]:
    return {"name": check.name, "state": check.state, "found": check.found, "advice": check.advice}
