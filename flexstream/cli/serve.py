"""flexstream serve: run the daemon. Its options are the settings of flexstream.daemon.config, one for one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flexstream.daemon.config import SETTINGS, resolve


def serve(**given: Any) -> None:
    """Run the daemon until SIGTERM or Ctrl-C, then drain and stop.

    A flag beats the environment (FLEXSTREAM_*), which beats flexstream.toml; `flexstream config check` explains.

    Example: flexstream serve --workers 2 --data-dir /var/lib/flexstream
    """
    as_json = bool(given.pop("as_json"))
    file = given.pop("config")
    resolution = resolve(given, file=file)
    config = resolution.config()
    for warning in resolution.warnings:
        typer.echo(f"flexstream: {warning}", err=True)

    from flexstream.daemon.service import serve as run

    raise typer.Exit(run(config, as_json=as_json))


def settings_signature(json_help: str) -> inspect.Signature:
    """The settings as options, so that a setting cannot exist without its flag."""
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(
            "config",
            kind,
            default=None,
            annotation=Annotated[Path | None, typer.Option("--config", help="Settings file.")],
        )
    ]
    for setting in SETTINGS.values():
        default = "systemd's or ~/.local/state/flexstream" if setting.name == "data_dir" else setting.default
        text = f"{setting.help}  [default: {'none' if default is None else default}]"
        option = typer.Option(setting.flag, help=text[0].upper() + text[1:], show_default=False)
        annotation = Annotated[str | None, option]
        options.append(inspect.Parameter(setting.name, kind, default=None, annotation=annotation))
    as_json = Annotated[bool, typer.Option("--json", help=json_help)]
    options.append(inspect.Parameter("as_json", kind, default=False, annotation=as_json))
    return inspect.Signature(options)


def takes_settings(command: Callable[..., None], json_help: str) -> None:
    """Give a command of `**given` the options of all settings, `--config` and `--json`."""
    signature = settings_signature(json_help)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}


takes_settings(serve, "Print ready and stopped as JSON lines.")
