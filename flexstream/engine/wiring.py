"""How an engine is put together: every part is given what it needs when it is made.

Nothing can be given what is made after it. Where two parts need each other, the earlier one is told of the later one by
a method that says so: the NIC of the workers' cores, and of the acceptor (it says where groups are before there are
workers, and on which sockets to listen); the collector of those who take its reports (most of them wait for it, too).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexstream.balance.door import Balance
from flexstream.balance.group_loads import Loads
from flexstream.balance.mover import Mover
from flexstream.balance.rebalancer import Rebalancer
from flexstream.catalog.registry import Registry
from flexstream.compile.variants import Variants
from flexstream.cython_ext.memory.allocator import Allocator
from flexstream.cython_ext.worker.placement import Placement
from flexstream.cython_ext.worker.reports import ConnectionClosed, Pong, QueryGone, SessionAwake, SessionDone
from flexstream.cython_ext.worker.worker import Worker, make_reader_fd
from flexstream.engine.options import beside
from flexstream.engine.round_trip import RoundTrips
from flexstream.engine.status import group_rows, worker_threads
from flexstream.ingest.acceptor import Acceptor, listen
from flexstream.ingest.hello import Host
from flexstream.ingest.in_process import Feeder
from flexstream.ingest.lane_book import LaneBook
from flexstream.ingest.nic_service import NicService
from flexstream.ingest.session_clock import SessionClock
from flexstream.results.collector import Collector
from flexstream.staging.service import Staging

MOST_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine is given, checked (options.py). `cpus`: a core for each worker; pinned to it, if `pin`."""

    cpus: list[int]
    pin: bool
    groups: int
    address: tuple[str, int] | None
    token: str | None
    nic: str
    data_dir: Path | None
    frame_bytes: int
    state_memory_bytes: int
    busy_poll: bool
    max_sessions: int
    max_pending_hello: int
    hello_timeout_s: float
    idle_timeout_s: float
    session_timeout_s: float
    stage_limit_bytes: int | None
    stage_timeout_s: float
    compile: str
    auto: bool

    @property
    def pinned(self) -> list[int]:
        """Cores that workers have to themselves."""
        return self.cpus if self.pin else []


@dataclass(frozen=True, kw_only=True)
class Parts:
    """An engine's, none of them started but the allocator, and the thread that applies staged rows."""

    registry: Registry
    nic: NicService
    reader_fd: int
    allocator: Allocator
    placement: Placement
    workers: list[Worker]
    collector: Collector
    round_trips: RoundTrips
    lanes: LaneBook
    mover: Mover
    feeder: Feeder
    staging: Staging
    acceptor: Acceptor | None
    balance: Balance
    rebalancer: Rebalancer
    session_clock: SessionClock
    variants: Variants


def wire(given: Settings) -> Parts:
    """Raises EngineError, ConfigError, StageError: a port in use, no such NIC, a damaged journal."""
    groups, max_sessions = given.groups, given.max_sessions
    registry = Registry(groups)
    listener = listen(*given.address) if given.address is not None else None
    nic = NicService(
        given.nic, groups, given.cpus if given.pin else [None] * len(given.cpus),
        given.address[0] if given.address is not None else None, lambda: group_rows(registry.all_streams(), groups),
    )  # fmt: skip
    reader_fd = make_reader_fd()
    with beside(given.pinned):
        allocator = Allocator()
    placement = Placement(list(nic.placement()), len(given.cpus))
    workers = _workers(given, allocator, placement, reader_fd)

    def owners() -> list[int]:
        return list(placement.owners())

    collector = Collector(workers, reader_fd)
    round_trips = RoundTrips(workers, collector.check_alive)
    lanes = LaneBook(registry.all_streams, owners, registry.ordered_queries)
    mover = Mover(
        placement, workers, registry.changing, registry.graph_size,
        lambda timeout: registry.settle(timeout, round_trips.wait_for_workers), nic.follow, max_sessions,
        lanes=lanes, ordered_queries=registry.ordered_queries,
    )  # fmt: skip
    feeder = Feeder(workers, groups, placement, mover.routing, collector.check_alive)
    staging = Staging(
        registry, workers, feeder, round_trips.wait_for_workers, given.data_dir, given.stage_limit_bytes,
        given.stage_timeout_s,
    )  # fmt: skip
    acceptor = None
    if listener is not None:
        host = Host(groups, given.frame_bytes, workers, nic, lanes, staging.port.adopt, registry.port_of, owners)
        acceptor = Acceptor(
            host, listener, token=given.token, hello_timeout_s=given.hello_timeout_s,
            max_pending=given.max_pending_hello,
        )  # fmt: skip
        nic.when_replaced(acceptor.relisten)
    loads = Loads(workers, groups, registry.all_streams, feeder.handed)
    nic.watch_cores(loads.cores)
    balance = Balance(
        loads, mover, owners, collector.latencies, auto=given.auto, lanes=lanes, check_open=registry.check_open
    )
    collector.subscribe(ConnectionClosed, _closed_by(registry, acceptor))
    collector.subscribe(SessionDone, registry.session_ended_in)
    collector.subscribe(SessionAwake, registry.session_awake)
    collector.subscribe(QueryGone, registry.query_gone)
    collector.subscribe(Pong, round_trips.pong)
    return Parts(
        registry=registry, nic=nic, reader_fd=reader_fd, allocator=allocator, placement=placement, workers=workers,
        collector=collector, round_trips=round_trips, lanes=lanes, mover=mover, feeder=feeder, staging=staging,
        acceptor=acceptor, balance=balance, rebalancer=Rebalancer(balance),
        session_clock=SessionClock(workers, registry.by_index, given.idle_timeout_s, given.session_timeout_s),
        variants=Variants(given.compile, threads=lambda: worker_threads(workers)),
    )  # fmt: skip


def start(parts: Parts, given: Settings) -> None:
    """Their threads, beside the workers' cores. Raises EngineError."""
    with beside(given.pinned):
        for worker in parts.workers:
            worker.start()
        parts.collector.start()
        if parts.acceptor is not None:
            parts.acceptor.start()
        parts.nic.start()
        parts.session_clock.start()
        parts.rebalancer.start()


def _workers(given: Settings, allocator: Allocator, placement: Placement, reader_fd: int) -> list[Worker]:
    state_bytes = given.state_memory_bytes // len(given.cpus)
    return [
        Worker(
            index,
            cpu if given.pin else -1,
            allocator,
            placement,
            frame_bytes=given.frame_bytes,
            state_bytes=state_bytes,
            chunk_bytes=min(MOST_CHUNK_BYTES, state_bytes // 4),
            reader_fd=reader_fd,
            busy_poll=given.busy_poll,
        )
        for index, cpu in enumerate(given.cpus)
    ]


def _closed_by(registry: Registry, acceptor: Acceptor | None) -> Callable[[int, ConnectionClosed], None]:
    """What becomes of a socket that a worker gives back."""

    def closed(worker: int, report: ConnectionClosed) -> None:
        if acceptor is None:
            os.close(report.fd)
        else:
            acceptor.connection_closed(registry.by_index[report.stream].port, report)

    return closed
