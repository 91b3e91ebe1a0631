"""The engine's NIC at run time: follows the placement, counts alignment, verifies, and falls back when it must.

The placement is the truth and this only follows it: no method here fails a stream. What a device does not do is
counted as misalignment, shown in status, and said once in the log.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from flexstream.errors import ConfigError
from flexstream.nic.alignment import Alignment, Arrival, passes_device
from flexstream.nic.contract import Nic, NicHealth, NicState, Steering, entries_for
from flexstream.nic.probe import Spec, open_nic
from flexstream.nic.user import UserNic

log = logging.getLogger("flexstream.nic")

CHECK_S = 1.0
NOBODY = -1  # no worker is on the core that serves this queue
DISOBEYED_CHECKS = 3  # in a row: one may have met packets on their way from the table before


class NicService:
    """An engine's NIC: chosen at the start, checked every second, replaced when it fails.

    The engine calls `follow`; the acceptor calls `listeners`, `arrived` and `forget`.

    Raises ConfigError from the constructor when a named implementation cannot be had. Thread-safe.
    """

    def __init__(
        self,
        spec: str,
        groups: int,
        cpus: Sequence[int | None],
        host: str | None,
        group_rows: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._spec = Spec.parse(spec)
        self._cpus = list(cpus)
        self._host = host
        self._group_rows = group_rows
        self._placement = tuple(group % len(self._cpus) for group in range(groups))
        self._lock = threading.RLock()
        self._alignment = Alignment()
        self._nic = open_nic(
            self._spec, groups=groups, cpus=self._cpus, host=host, placement=self._placement, group_rows=group_rows
        )
        self._steering: Steering | None = self._nic.steering()
        self._table: list[int] | None = None  # worker per bucket: who serves the core that its packets come to
        self._actual: tuple[int, ...] = ()
        self._described: dict[str, Any] = {}
        self._changed_at = time.monotonic()
        self._health = self._nic.health()
        self._drift: list[str] = []
        self._follow_error: str | None = None
        self._disobeyed = 0
        self.fallbacks = 0
        self._replaced: Callable[[], object] = lambda: None
        self._worker_cores: Callable[[], Sequence[int | None]] = lambda: self._cpus
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._remember_table()
        fields = {"kind": self._nic.kind, "device": self._nic.device, "passed_over": list(self._nic.passed_over)}
        if self._spec.kind != "user":
            log.info("nic_chosen", extra={"fields": fields})

    # -- those that come after it

    def watch_cores(self, worker_cores: Callable[[], Sequence[int | None]]) -> None:
        """Where workers are now, asked at every check. They are made after this, which says where groups are first."""
        self._worker_cores = worker_cores

    def when_replaced(self, call: Callable[[], object]) -> None:
        """Call it when another implementation took over: `listeners` has another answer. From any thread.

        The acceptor's, which is made after this, as it asks this for listeners.
        """
        self._replaced = call

    # -- the placement

    @property
    def nic(self) -> Nic:
        """The implementation in use."""
        return self._nic

    def placement(self) -> tuple[int, ...]:
        return self._placement

    def follow(self, placement: Sequence[int]) -> str | None:
        """The placement is now this one. Never fails: a device that does not follow costs alignment only.

        Returns why it did not follow.
        """
        with self._lock:
            self._placement = tuple(placement)
            self._disobeyed = 0
            try:
                self._nic.follow(self._placement)
            except (ConfigError, OSError) as error:
                if self._follow_error is None:
                    log.warning("nic_does_not_follow", extra={"fields": {"why": str(error)}})
                self._follow_error = str(error)
                self._table = None
                self._judge_again()
            else:
                self._follow_error = None
                self._remember_table()
            return self._follow_error

    def _remember_table(self) -> None:
        """What the acceptor needs of the device, read here so that accepting never waits for it."""
        self._changed_at = time.monotonic()
        steering = self._steering
        self._table = None
        with contextlib.suppress(ConfigError, OSError):
            self._described = self._nic.describe()
            if steering is not None:
                self._actual = tuple(self._nic.table())
                own = entries_for(self._placement, steering.entries, len(self._cpus))
                queues = self._actual if len(self._actual) == steering.entries else own
                workers = self._worker_of_queue()
                self._table = [workers[queue] if queue < len(workers) else NOBODY for queue in queues]
        self._judge_again()

    def _worker_of_queue(self) -> list[int]:
        """The worker on the core that serves each queue. Queue i is worker i's as long as nothing says otherwise."""
        cores = [None if cpu is None else int(cpu) for cpu in self._cpus]
        found = []
        for queue, cpu in enumerate(self._nic.queue_cpu()):
            if queue < len(cores) and (cpu is None or cores[queue] in (None, cpu)):
                found.append(queue)
            else:
                found.append(cores.index(cpu) if cpu is not None and cpu in cores else NOBODY)
        return found

    def _judge_again(self) -> None:
        # User space's own table is for connections to come; packets of those that are here ask no table.
        table = None if self._nic.kind == "user" else self._table
        self._alignment.judge_again(self._steering, table, self._placement, self._nic.device)

    # -- connections (the acceptor)

    def listeners(self, first: socket.socket) -> list[socket.socket] | None:
        with self._lock:
            found = self._nic.listeners(first)
            self._steering = self._nic.steering()
            self._remember_table()
            return found

    def arrived(self, fd: int, arrival: Arrival) -> tuple[bool, bool]:
        """(aligned, stale) of a new data connection; `forget` must be called before `fd` is closed."""
        passes = passes_device(arrival, self._nic.device)
        return self._alignment.arrived(fd, arrival, self._steering, self._table if passes else None)

    def forget(self, fd: int) -> None:
        self._alignment.forget(fd)

    # -- the check

    def start(self) -> None:
        """Begin the periodic check. Without a data port there is nothing to check."""
        if self._host is not None:
            self._thread = threading.Thread(target=self._watch, name="fs-nic", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        failed = False
        while not self._stop.wait(CHECK_S):
            try:
                self.check()
                failed = False
            except Exception:
                if not failed:
                    log.exception("nic_check_failed")
                failed = True

    def check(self) -> None:
        """Is the device there, does it obey, did somebody else change it? Falls back when it is gone or disobeys."""
        with self._lock:
            if self._closed:
                return
            health = self._ask()
            self._disobeyed = self._disobeyed + 1 if health.state is NicState.DISOBEYED else 0
            self._health = health
            if health.state is NicState.GONE or self._disobeyed >= DISOBEYED_CHECKS:
                self._fall_back(health)

    def _ask(self) -> NicHealth:
        nic = self._nic
        try:
            health = nic.health()
            if health.state is NicState.GONE:
                return health
            if nic.device != self._described.get("device"):
                self._remember_table()  # it was renamed
            self._note_drift(nic.drift())
            self._note_path(nic)
            seen = self._alignment.sample(self._placement, self._changed_at)
            verification = nic.verify(seen)
        except (ConfigError, OSError) as error:
            return NicHealth(NicState.UNVERIFIED, f"the device does not answer: {error}")
        state = NicState(verification.verdict.value)
        if state is NicState.UNVERIFIED and not seen:
            if self._health.state is NicState.VERIFIED:
                return self._health  # nobody is sending: what was seen still stands
            if self._drift:
                return NicHealth(state, "; ".join(self._drift))
            if self._alignment.open():
                return NicHealth(state, "no data has arrived since the table was written")
        return NicHealth(state, verification.reason)

    def _note_path(self, nic: Nic) -> None:
        """Key, table, cores: is any of them another one than those that connections were judged by?"""
        steering = nic.steering()
        cores = list(self._worker_cores())
        if (steering, cores) == (self._steering, self._cpus) and self._table_stands(nic):
            return
        self._steering, self._cpus = steering, cores
        self._doubt()

    def _table_stands(self, nic: Nic) -> bool:
        return self._table is None or tuple(nic.table()) == self._actual

    def _doubt(self) -> None:
        """Something that the path depends on has changed: what was seen before says nothing any more."""
        self._remember_table()
        if self._health.state is NicState.VERIFIED:
            self._health = NicHealth(
                NicState.UNVERIFIED, "its table, its link or a core has changed since it was verified"
            )

    def _note_drift(self, drift: list[str]) -> None:
        if drift == self._drift:
            return
        if drift:
            log.warning("nic_changed_by_somebody_else", extra={"fields": {"what": drift, "device": self._nic.device}})
        self._drift = list(drift)
        self._doubt()

    def _fall_back(self, health: NicHealth) -> None:
        old = self._nic
        why = f"{old.kind}{':' + old.device if old.device else ''}: {health}"
        self._give_back(old)
        notes = [*old.passed_over, why]
        if old.kind == "user":
            new: Nic = UserNic(
                len(self._placement), self._cpus, placement=self._placement, group_rows=self._group_rows,
                no_steering=health.reason,
            )  # fmt: skip
            new.passed_over = tuple(notes)
        else:
            new = open_nic(
                Spec(old.kind, old.device), groups=len(self._placement), cpus=self._cpus, host=self._host,
                placement=self._placement, group_rows=self._group_rows, passed_over=notes, below=old.kind,
            )  # fmt: skip
        self._nic = new
        self._steering = new.steering()
        self._health = new.health()
        self._drift, self._follow_error, self._disobeyed = [], None, 0
        self.fallbacks += 1
        self._remember_table()
        log.warning("nic_fell_back", extra={"fields": {"to": new.kind, "device": new.device, "why": why}})
        self._replaced()

    # -- what others see

    def describe(self) -> dict[str, Any]:
        """What the control handshake says: enough for a producer to choose its ports."""
        return self._described

    def status(self) -> dict[str, Any]:
        health = self._health
        return {
            **self._described,
            "state": health.state.value,
            "state_reason": health.reason,
            "passed_over": list(self._nic.passed_over),
            "drift": list(self._drift),
            "follow_error": self._follow_error,
            "fallbacks": self.fallbacks,
        }

    def connections(self) -> dict[str, Any]:
        return self._alignment.counts()

    # -- the end

    def stop(self) -> None:
        """End the check: afterwards no socket is looked at any more."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def close(self) -> None:
        """Give the device back as it was."""
        self.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._give_back(self._nic)

    def _give_back(self, nic: Nic) -> None:
        """As it was. What could not be put back is in the journal, and said."""
        try:
            nic.close()
        except (ConfigError, OSError) as error:
            fields = {"device": nic.device, "why": str(error), "fix": "run `flexstream nic undo` to try again"}
            log.error("nic_not_restored", extra={"fields": fields})
