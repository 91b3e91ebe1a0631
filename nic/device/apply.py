"""`apply`, `undo` and `watch` of a device from the command line: one owner at a time, journal first, problems told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.contract import Change
from flexstream.nic.device.changes import Applied, Undone, undo_journal
from flexstream.nic.device.facts import Facts, read_facts
from flexstream.nic.device.journal import DeviceLock, Journal, left_behind
from flexstream.nic.device.settings import Settings
from flexstream.nic.drift import differences, put_back


@dataclass(frozen=True, slots=True)
class Done:
    """What was written, and what was refused."""

    changed: tuple[Change, ...]
    problems: tuple[str, ...]


def apply_plan(device: str, plan: Callable[[], Sequence[Change]], *, folder: Path | None = None) -> Done:
    """Apply a plan, and plan once more when it began with the channels: queues and interrupts are others then.

    Raises ConfigError before the first change when the device is in use or no journal can be kept. A change that is
    refused is a problem in the result; the others are made all the same.
    """
    lock, settings = DeviceLock(device), Settings()
    lock.take()
    try:
        wanted = list(plan())
        if not wanted:
            return Done((), ())
        applied = Applied(settings, _journal(device, folder))
        changed: list[Change] = []
        problems: list[str] = []
        channels = [change for change in wanted if " channels " in change.where]
        if channels:
            _each(applied, channels, changed, problems)
            wanted = [change for change in plan() if " channels " not in change.where]
        _each(applied, wanted, changed, problems)
        applied.forget_unchanged()
        return Done(tuple(changed), tuple(problems))
    finally:
        settings.close()
        lock.release()


def _journal(device: str, folder: Path | None) -> Journal:
    """The journal of an earlier `apply` goes on: its first values are still those to go back to."""
    settings = Settings()
    try:
        for journal in left_behind(device, folder, owner="apply"):
            if journal.is_stale():
                undo_journal(journal, settings)
            else:
                return journal
    finally:
        settings.close()
    return Journal.create(device, "apply", folder)


def _each(applied: Applied, changes: Sequence[Change], changed: list[Change], problems: list[str]) -> None:
    for change in changes:
        try:
            applied.change(change)
        except ConfigError as error:
            problems.append(str(error))
        else:
            changed.append(change)


def undo_device(device: str, *, folder: Path | None = None) -> list[Undone]:
    """Undo every journal of a device, the daemon's first. Raises ConfigError while a daemon runs on it."""
    journals = left_behind(device, folder)
    if not journals:
        return []
    lock, settings = DeviceLock(journals[0].origin.now().device), Settings()  # it may have another name by now
    lock.take()
    try:
        return [undo_journal(journal, settings) for journal in journals]
    finally:
        settings.close()
        lock.release()


@dataclass(frozen=True, slots=True)
class Look:
    """One look of `watch`: all that differs, what of it is new, what was put back."""

    drift: tuple[str, ...]
    news: tuple[str, ...]
    put_back: tuple[Change, ...] = ()
    problems: tuple[str, ...] = ()


class Watch:
    """Compares a device with how it was when this was made, or when its drift was last put back.

    Raises ConfigError for a device that is not there, and for putting back behind the back of a daemon, whose own moves
    are changes of the table too.
    """

    def __init__(self, device: str, *, put_back: bool = False) -> None:
        self._device = device
        self._put_back = put_back
        self._reference = read_facts(device)
        self._seen: tuple[str, ...] = ()
        if not self._reference.present:
            raise ConfigError(f"there is no device {device}", code="nic_device", hint="`ip link` shows the devices")
        self._lock = DeviceLock(device)
        if put_back and (holder := self._lock.holder()) is not None:
            raise ConfigError(
                f"{device} belongs to the flexstream daemon with process id {holder}, which writes the table itself",
                code="nic_busy",
                hint="watch without --put-back; `flexstream status` shows what the daemon itself found changed",
            )

    def look(self) -> Look:
        now = read_facts(self._device)
        drift = tuple(differences(self._reference, now))
        news = tuple(line for line in drift if line not in self._seen)
        if not drift and self._seen:
            news = ("as it was",)
        self._seen = drift
        if not drift or not self._put_back or not now.present:
            return Look(drift, news)
        try:
            self._lock.take()  # a daemon may have come since: its moves are changes of the table, and are its own
        except ConfigError as error:
            return Look(drift, news, problems=(f"nothing was put back: {error.message}",) if news else ())
        try:
            return self._written_back(drift, news, now)
        finally:
            self._lock.release()

    def _written_back(self, drift: tuple[str, ...], news: tuple[str, ...], now: Facts) -> Look:
        written, problems = [], []
        settings = Settings()
        try:
            for change in put_back(self._reference, now):
                try:
                    settings.write(change.where, change.new)
                except ConfigError as error:
                    problems.append(str(error))
                else:
                    written.append(change)
        finally:
            settings.close()
        self._seen = tuple(differences(self._reference, read_facts(self._device)))
        return Look(drift, news, tuple(written), tuple(problems))
