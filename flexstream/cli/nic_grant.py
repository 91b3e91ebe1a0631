"""flexstream nic grant: root lets a service write the files of its device, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexstream.cli.output import AsJson, emit, note, say
from flexstream.errors import ConfigError


def grant(
    group: Annotated[str, typer.Argument(help="The service's group, such as flexstream.")],
    device: Annotated[str | None, typer.Argument(help="A network device; by default the one in the settings.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The daemon's flexstream.toml.")] = None,
    back: Annotated[bool, typer.Option("--take-back", help="Give all such files back to root.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a group write a device's interrupt affinities, RPS and XPS, so that the daemon needs no CAP_DAC_OVERRIDE.

    The systemd drop-in runs this as root before the daemon starts, and with --take-back after it stops.

    Example: flexstream nic grant flexstream eth0
    """
    from flexstream.nic.device import grant as grants

    number = grants.group_id(group)
    if back:
        done, where = grants.take_back(number), "they belong to root again"
    else:
        if device is None:
            device, why = _device_of(config)
            if device is None:
                say(f"nothing to grant: {why}")
                return
        done, where = grants.grant(device, number), f"group {group} may write them"
    if as_json:
        emit({"device": device, "files": [str(path) for path in done.files], "problems": list(done.problems)})
    else:
        for problem in done.problems:
            note(problem)
        say(f"{len(done.files)} files{f' of {device}' if device else ''}: {where}")
    raise typer.Exit(1 if done.problems else 0)


def _device_of(config: Path | None) -> tuple[str | None, str]:
    """The device that a daemon with these settings would take."""
    from flexstream.daemon.config import resolve
    from flexstream.nic.probe import Spec, listening_device

    settings = resolve(file=config).settings
    for name in ("nic", "data"):
        if (problem := settings[name].error) is not None:
            raise ConfigError(problem.message, code="bad_setting", hint=problem.hint)
    spec = Spec.parse(settings["nic"].value)
    if spec.kind == "user":
        return None, "nic = user does not touch a device"
    if spec.device is not None:
        return spec.device, ""
    return listening_device(settings["data"].value[0])
