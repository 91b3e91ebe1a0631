"""flexstream nic: the receive side of this machine and of the daemon: show, plan, apply, undo, watch, set, grant.

`show` asks a running daemon first; everything else works on this machine's own device, without a daemon and through
the code that the daemon itself uses.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from flexstream.cli.nic_grant import grant
from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, note, say
from flexstream.errors import ConfigError, ConnectError

app = typer.Typer(
    help="Show and change this machine's receive side: from RSS table to core.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Device = Annotated[str | None, typer.Argument(help="A network device; by default the one of the default route.")]
Workers = Annotated[
    str, typer.Option("--workers", help="Number of workers, or the cores to pin them to (0,1), or auto.")
]
Groups = Annotated[int, typer.Option("--groups", min=1, help="Key groups of the engine.")]
ChannelCount = Annotated[
    str, typer.Option("--channels", help="Receive queues: a number, auto (one per worker) or keep.")
]


app.command("grant")(grant)


@app.callback()
def _group() -> None:
    """Show and change this machine's receive side: from RSS table to core."""


@app.command("show")
def show(
    device: Device = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    groups: Groups = 128,
    workers: Workers = "auto",
    as_json: AsJson = False,
) -> None:
    """Show how connections reach workers: the NIC of a running daemon, and this machine's device: table, key, queues,
    interrupts, cores, and every problem with its fix. Changes nothing and needs no privilege.

    Example: flexstream nic show eth0
    """
    reply: dict[str, Any] | None = None
    if device is None:
        try:
            reply = connect(url, token_file).get("/v1/nic")
        except ConnectError as error:
            if url != DEFAULT_URL:
                raise
            if not as_json:
                note(f"no daemon at {url} ({error.code}): showing this machine's own device")
    if reply is not None:
        if as_json:
            emit(reply)
        else:
            _say_daemon(reply)
        return
    name = _device(device)
    document, text = _look(name, groups, _cpus(workers))
    if as_json:
        emit({"daemon": None, **document})
    else:
        say(text)
    if not document["present"]:
        raise typer.Exit(1)


def _say_daemon(reply: dict[str, Any]) -> None:
    for key, value in reply["nic"].items():
        if key not in ("findings", "capabilities", "table"):
            say(f"{key:14s} {value if isinstance(value, str) else json.dumps(value)}")
    for capability in reply["nic"].get("capabilities") or ():
        if not capability["present"]:
            say(f"cannot         {capability['name']}: {capability['reason']}")
    for finding in reply["nic"].get("findings") or ():
        say(f"{finding['level']}: {finding['what']}\n  fix: {finding['fix']}")


def _look(device: str, groups: int, cpus: list[int | None]) -> tuple[dict[str, Any], str]:
    from flexstream.cli.nic_text import describe_device
    from flexstream.nic.device.facts import read_facts
    from flexstream.nic.device.journal import DeviceLock
    from flexstream.nic.device.link_settings import read_link
    from flexstream.nic.device.queue_counters import queue_packets
    from flexstream.nic.rss.transport import RssTransport

    transport = RssTransport(device)
    try:
        facts = read_facts(device, transport=transport)
        packets = queue_packets(transport, facts.queues) if facts.present else None
    finally:
        transport.close()
    link = read_link(device) if facts.present else {}
    findings, held_by = facts.findings(cpus), DeviceLock(device).holder()
    steering = facts.steering(groups)
    document = {
        **facts.to_dict(),
        "held_by": held_by,
        "queue_packets": packets,
        "link": link,
        "aligned": not isinstance(steering, str),
        "alignment_reason": steering if isinstance(steering, str) else None,
        "findings": [finding.to_dict() for finding in findings],
    }
    return document, describe_device(facts, link, findings, groups, held_by, packets)


@app.command("plan")
def plan(
    device: Device = None,
    workers: Workers = "auto",
    groups: Groups = 128,
    channels: ChannelCount = "auto",
    script: Annotated[bool, typer.Option("--script", help="Print the plan as a shell script.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change on a device. Changes nothing.

    Example: flexstream nic plan eth0 --workers 0,1 --script
    """
    from flexstream.nic.device.changes import needed
    from flexstream.nic.device.changes import script as as_script
    from flexstream.nic.device.settings import Settings

    name = _device(device)
    facts, changes = _plan(name, _cpus(workers), groups, channels)
    settings = Settings()
    try:
        text = as_script(changes, settings, name)
    finally:
        settings.close()
    different = needed(changes)
    if as_json:
        emit(
            {
                "device": name,
                "changes": [_plain(change) for change in changes],
                "different": len(different),
                "no_table": facts.no_table(),
                "may_apply": facts.net_admin,
                "script": text,
            }
        )
        return
    if script:
        say(text.rstrip())
        return
    for change in changes:
        say(_shown(change))
    if facts.no_table() is not None:
        say(f"{name}: {facts.no_table()}")
    say(f"{name}: {len(different)} settings differ" + ("" if changes else "; nothing to do"))
    if not facts.net_admin:
        note("to apply this you need CAP_NET_ADMIN and a writable /proc/irq: run `flexstream nic apply` as root")


@app.command("apply")
def apply(
    device: Device = None,
    workers: Workers = "auto",
    groups: Groups = 128,
    channels: ChannelCount = "auto",
    as_json: AsJson = False,
) -> None:
    """Apply what `plan` shows. Every change is on disk before it is made, and `undo` takes all of them back.

    Example: flexstream nic apply eth0 --workers 0,1
    """
    from flexstream.nic.device.apply import apply_plan

    name, cpus = _device(device), _cpus(workers)
    done = apply_plan(name, lambda: _plan(name, cpus, groups, channels)[1])
    if as_json:
        emit({"device": name, "changed": [_plain(change) for change in done.changed], "problems": list(done.problems)})
    else:
        for change in done.changed:
            say(_shown(change))
        for problem in done.problems:
            note(problem)
        say(f"{name}: {len(done.changed)} settings written; `flexstream nic undo {name}` takes them back")
    raise typer.Exit(1 if done.problems else 0)


@app.command("undo")
def undo(device: Device = None, as_json: AsJson = False) -> None:
    """Take back what `apply` or a killed daemon changed. Without a device: on all devices that have a journal.

    Example: flexstream nic undo
    """
    from flexstream.nic.device.apply import undo_device
    from flexstream.nic.device.journal import devices_with_journals, foreign_journals

    names = devices_with_journals() if device is None else [device]
    results = {name: undo_device(name) for name in names}
    foreign = [f"{path} is not trusted, and nothing in it was undone: {why}" for path, why in foreign_journals()]
    left = [change for found in results.values() for undone in found for change in undone.left]
    if as_json:
        emit(
            {
                "devices": {
                    name: [
                        {
                            "owner": undone.owner,
                            "undone": [_plain(change) for change in undone.undone],
                            "left": [_plain(change) for change in undone.left],
                            "problems": list(undone.problems),
                            "dropped": list(undone.dropped),
                            "stale": undone.stale,
                        }
                        for undone in found
                    ]
                    for name, found in results.items()
                },
                "foreign": foreign,
            }
        )
    else:
        for name, found in results.items():
            for undone in found:
                for change in reversed(undone.undone):
                    say(_shown(change.reversed()))
                if undone.stale is not None:
                    say(f"{name}: the journal is stale and was removed: {undone.stale}")
                for line in undone.dropped:
                    say(f"{name}: {line}")
                for problem in undone.problems:
                    note(problem)
        for line in foreign:
            note(line)
        if foreign:
            note("the service puts its own changes back when it starts and stops; root reads only root's")
        elif not any(results.values()):
            say("nothing to undo")
    raise typer.Exit(1 if left or foreign else 0)


@app.command("watch")
def watch(
    device: Device = None,
    back: Annotated[bool, typer.Option("--put-back", help="Put back what was changed.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between two checks.")] = 2.0,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Stop after this many checks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report when somebody changes what the path from key to core depends on: table, key, hash, channels, interrupts,
    link. With `--count`, exits with 1 if something changed.

    Example: flexstream nic watch eth0 --put-back
    """
    from flexstream.nic.device.apply import Watch

    name = _device(device)
    watcher = Watch(name, put_back=back)
    if not as_json:
        note(f"watching {name} every {interval:g} s{', putting changes back' if back else ''}; press Ctrl-C to stop")
    seen = 0
    while True:
        look = watcher.look()
        seen += bool(look.drift)
        if as_json:
            emit({"device": name, "drift": list(look.drift), "put_back": [_plain(change) for change in look.put_back]})
        else:
            for line in look.news:
                say(f"{name}: {line}")
            for change in look.put_back:
                say(f"{name}: put back {_shown(change)}")
        for problem in look.problems:
            note(f"{name}: {problem}")
        if count is not None:
            count -= 1
            if count == 0:
                raise typer.Exit(1 if seen else 0)
        time.sleep(interval)


@app.command("set")
def set_one(
    where: Annotated[str, typer.Argument(help='A setting: "eth0 table", "eth0 ring rx", "irq 38 cpus", ...')],
    value: Annotated[str, typer.Argument(help="Its new value, as `nic plan` prints it.")],
    as_json: AsJson = False,
) -> None:
    """Change one setting of the machine. The journal records it, as it does for `apply`.

    Example: flexstream nic set "eth0 table" 0,1,0,1
    """
    from flexstream.nic.contract import Change
    from flexstream.nic.device.apply import apply_plan
    from flexstream.nic.device.settings import Settings, check_value

    check_value(where, value)
    settings = Settings()
    try:
        old = settings.read(where)
    finally:
        settings.close()
    name = _device_of_interrupt(int(where.split()[1])) if where.startswith("irq ") else where.split()[0]
    done = apply_plan(name, lambda: [Change(where, old, value)])
    if as_json:
        emit({"changed": [_plain(change) for change in done.changed], "problems": list(done.problems)})
    else:
        for change in done.changed:
            say(_shown(change))
        for problem in done.problems:
            note(problem)
    raise typer.Exit(1 if done.problems else 0)


def _device_of_interrupt(irq: int) -> str:
    from flexstream.nic.device.devices import device_names
    from flexstream.nic.device.interrupts import own_interrupts

    found = next((name for name in device_names() if irq in own_interrupts(name)), None)
    if found is None:
        raise ConfigError(
            f"interrupt {irq} does not belong to a network device",
            code="nic_setting",
            hint="`flexstream nic show` shows them",
        )
    return found


def _plan(device: str, cpus: list[int | None], groups: int, channels: str) -> tuple[Any, list[Any]]:
    from flexstream.nic.device.changes import Wish
    from flexstream.nic.device.changes import plan as make_plan
    from flexstream.nic.device.facts import read_facts

    facts = read_facts(device)
    wish = Wish(tuple(cpus), groups, channels=_channels(channels, len(cpus)), without_rps=facts.no_table() is None)
    return facts, make_plan(facts, wish)


def _channels(text: str, workers: int) -> int | None:
    if text == "keep":
        return None
    if text == "auto":
        return workers
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f"--channels {text!r} cannot be used", code="bad_option", hint="give a number, auto or keep")


def _cpus(workers: str) -> list[int | None]:
    from flexstream.daemon.config import SETTINGS
    from flexstream.engine.options import worker_cores

    try:
        return list(worker_cores(SETTINGS["workers"].parse(workers)))
    except ValueError as error:
        raise ConfigError(f"--workers {workers!r} cannot be used", code="bad_option", hint=f"give {error}") from None


def _device(given: str | None) -> str:
    if given is not None:
        return given
    from flexstream.nic.device.link_settings import discover
    from flexstream.nic.probe import default_device

    found = default_device()
    if found is None:
        names = ", ".join(device.name for device in discover()[0]) or "none but loopback"
        raise ConfigError(
            "there is no default route to choose a device by",
            code="nic_device",
            hint=f"name one; this machine has: {names}",
        )
    return found


def _plain(change: Any) -> dict[str, str]:
    return {"where": change.where, "old": change.old, "new": change.new}


def _shown(change: Any) -> str:
    from flexstream.nic.device.settings import shorten

    if change.old == change.new:
        return f"{change.where}: {shorten(change.new)} (written again)"
    return f"{change.where}: {shorten(change.old) or 'none'} -> {shorten(change.new) or 'none'}"
