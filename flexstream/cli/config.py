"""flexstream config check: every setting, its value, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from flexstream.addresses import join_address
from flexstream.cli.output import emit, say, table
from flexstream.cli.serve import takes_settings
from flexstream.daemon.config import Resolved, resolve

app = typer.Typer(help="Check the daemon's settings.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Check the daemon's settings."""


def check(**given: Any) -> None:
    """Explain each setting: its value, and whether it came from a flag, the environment, the file or the
    default.

    Exits with 1 if `flexstream serve` would refuse them.

    Example: FLEXSTREAM_WORKERS=2 flexstream config check --config flexstream.toml
    """
    as_json = bool(given.pop("as_json"))
    file = given.pop("config")
    found = resolve(given, file=file)
    if as_json:
        emit(
            {
                "file": str(found.file) if found.file else None,
                "settings": {name: _plain(item) for name, item in found.settings.items()},
                "problems": [problem.to_dict() for problem in found.problems],
                "warnings": found.warnings,
            }
        )
    else:
        say(f"file: {found.file or 'none (looked for ./flexstream.toml, /etc/flexstream/flexstream.toml)'}")
        rows = [
            {"name": name, "value": _value(item), "source": item.source, "help": item.setting.help}
            for name, item in found.settings.items()
        ]
        say(table(rows, {"name": "SETTING", "value": "VALUE", "source": "FROM", "help": "MEANING"}))
        for warning in found.warnings:
            say(f"warning: {warning}")
        for problem in found.problems:
            say(f"problem: {problem.message} ({problem.hint})")
        say("these settings are fine" if not found.problems else f"{len(found.problems)} problems")
    raise typer.Exit(1 if found.problems else 0)


takes_settings(check, "Print one JSON object.")
app.command("check")(check)


def _value(item: Resolved) -> str:
    if item.error is not None:
        return f"{item.raw!r} (not usable)"
    value = item.value
    if isinstance(value, tuple):
        return join_address(*value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(item: Resolved) -> dict[str, Any]:
    value = item.value
    if isinstance(value, tuple):
        value = join_address(*value)
    elif isinstance(value, Path):
        value = str(value)
    return {"value": value, "source": item.source, "help": item.setting.help}
