"""Further lanes: a group of one producer served by several workers, through reconnects, moves, splits and their ends.

Results are the oracle's, and every row is counted once, whatever breaks and whenever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import EngineError
from flexstream.nic.balance.split_rule import SplitConfig
from flexstream.testing.fault_proxy import FaultProxy, Faults
from tests.concurrency import test_moves
from tests.concurrency.test_moves import (
    FINISH_S,
    GROUPS,
    STREAM,
    TUMBLING,
    VALUES,
    address,
    assert_right,
    make_rows,
    send_from,
)
from tests.waiting import wait_until

SLIDING = (  # without first and last: a lane is a session of its own, so among equal times the oracle has no order
    STREAM.query("sliding")
    .window(fs.sliding("300ms", every="100ms"))
    .agg(n=fs.count(), total=fs.sum("x"), about=fs.approx_distinct("x"))
)
pytestmark = pytest.mark.time_limit(280)


def serving(workers: int = 2, **options: Any) -> AbstractContextManager[fs.Engine]:
    return test_moves.serving(workers, (TUMBLING, SLIDING, VALUES), **options)


def group_of(rows: np.ndarray) -> int:
    return int(STREAM.group_of(rows[:1], GROUPS)[0])


def hot_group(rows: np.ndarray) -> int:
    return int(np.bincount(STREAM.group_of(rows, GROUPS), minlength=GROUPS).argmax())


def further(producer: fs.Producer) -> int:
    count: int = producer.stats()["further_lanes"]
    return count


def states_of(engine: fs.Engine) -> dict[str, str]:
    return {session["producer"]: session["state"] for session in engine.status()["streams"]["s"]["sessions"]}


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    done, failures = threading.Event(), []

    def guarded() -> None:
        try:
            work(done)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(FINISH_S)
    assert not failures, failures
    assert not thread.is_alive()


def split_at_random(engine: fs.Engine, seed: int, groups: list[int]) -> Callable[[threading.Event], None]:
    """Splits, ends of splits, moves and moves of what is split, one after the other."""
    rng = np.random.default_rng(seed)
    engine.balance.splitter.rule.config = SplitConfig(lanes_wait_s=0.2, lanes_settle_s=0.01)

    def work(done: threading.Event) -> None:
        while not done.is_set():
            group = int(rng.choice(groups))
            workers = [w for w in range(len(engine.workers)) if w != engine.placement()[group]]
            with suppress(EngineError):
                engine.split(group, workers)
            if rng.random() < 0.6:
                engine.unsplit(int(rng.choice(groups)))
            if rng.random() < 0.3:
                engine.move({int(rng.integers(0, GROUPS)): int(rng.integers(0, len(engine.workers)))})

    return work


def send(producer: fs.Producer, rows: np.ndarray, piece: int = 300, pause_s: float = 0.002) -> None:
    for start in range(0, len(rows), piece):
        producer.send(rows[start : start + piece])
        time.sleep(pause_s)


@pytest.mark.parametrize("workers", [2, 3])
def test_one_producer_serves_a_split_group_on_a_lane_for_each_worker(workers: int) -> None:
    rows = make_rows(60_000, 1, keys=1)
    group = group_of(rows)
    with serving(workers) as engine, fs.Producer(address(engine), stream=STREAM, linger_ms=1) as producer:
        send(producer, rows[:5_000])
        split = engine.split(group, range(workers))["split"]
        assert split["workers"] == [split["owner"], *(w for w in range(workers) if w != split["owner"])]
        assert further(producer) == workers - 1
        before = [worker.stats()["rows"] for worker in engine.workers]
        send(producer, rows[5_000:50_000])
        producer.flush(FINISH_S)
        shares = [worker.stats()["rows"] - n for worker, n in zip(engine.workers, before, strict=True)]
        assert min(shares) > sum(shares) / workers / 4, shares
        session = engine.status()["streams"]["s"]["sessions"][0]
        assert (session["connections"], session["further_lanes"]) == (workers, workers - 1)
        engine.unsplit(group)
        wait_until(lambda: further(producer) == 0 and producer.stats()["connections"] == 1, "the lanes' end")
        send(producer, rows[50_000:])
        producer.flush(FINISH_S)
        assert producer.stats()["rows_acked"] == len(rows)
        producer.close(FINISH_S)
        assert_right(engine, rows)


def test_a_producer_may_close_while_its_lanes_are_open_and_the_final_ack_covers_them() -> None:
    rows = make_rows(30_000, 2, keys=1)
    with serving() as engine:
        producer = fs.Producer(address(engine), stream=STREAM, linger_ms=1)
        send(producer, rows[:3_000])
        engine.split(group_of(rows), [0, 1])
        producer.send(rows[3_000:])
        producer.close(FINISH_S)
        assert engine.status()["streams"]["s"]["ledger"]["accepted"] == len(rows)
        assert_right(engine, rows)
        assert engine.status()["streams"]["s"]["sessions"] == []


def test_random_splits_of_the_groups_of_few_producers_change_no_result(seed: int) -> None:
    rows = make_rows(50_000, seed, keys=6)
    parts = [rows[i::2] for i in range(2)]
    groups = sorted({int(g) for g in STREAM.group_of(rows, GROUPS)})
    with serving(3) as engine, in_background(split_at_random(engine, seed, groups)):
        send_from(engine, parts, 250, pause_s=0.01)
        assert_right(engine, rows)
    assert engine.balance.splitter.made > 0


@pytest.mark.parametrize("crc", [False, True])
def test_connections_that_break_anywhere_lose_and_repeat_nothing_on_any_lane(crc: bool, seed: int) -> None:
    """Connections are cut, in mid-frame and in the handshake, lanes like others, while groups are split and joined."""
    rows = make_rows(40_000, seed, keys=2)
    groups = sorted({int(g) for g in STREAM.group_of(rows, GROUPS)})
    faults = Faults(cut="reset" if seed % 2 else "close", cut_after=(1_000, 120_000))
    with serving(session_timeout_s=60.0) as engine, FaultProxy(engine.data_address, seed=seed) as proxy:
        where = f"tcp://{proxy.host}:{proxy.port}"
        options: dict[str, Any] = {"linger_ms": 1, "crc": crc, "replay_bytes": 65_536, "retry_s": FINISH_S}
        producer = fs.Producer(where, stream=STREAM, **options)
        producer.send(rows[:400])
        producer.flush(FINISH_S)
        engine.split(groups[0], [0, 1])
        proxy.faults = faults
        proxy.break_all()
        with in_background(split_at_random(engine, seed, groups)):
            for number, start in enumerate(range(400, len(rows), 400)):
                producer.send(rows[start : start + 400])
                time.sleep(0.01)
                if number % 25 == 24:
                    proxy.break_all()
        proxy.faults = Faults()
        producer.close(FINISH_S)
        stats = producer.stats()
        assert stats["rows_lost_at_most"] == 0
        assert stats["reconnects"] > 0
        assert_right(engine, rows)


def test_lanes_of_a_process_that_is_no_more_hold_nothing() -> None:
    rows = make_rows(8_000, 3, keys=1)
    with serving() as engine:
        first = fs.Producer(address(engine), stream=STREAM, linger_ms=1, producer_id="p", replay_bytes=1 << 20)
        send(first, rows[:4_000])
        engine.split(group_of(rows), [0, 1])
        first.flush(FINISH_S)
        first._live.abort()  # as if killed: no EOS anywhere
        second = fs.Producer(address(engine), stream=STREAM, linger_ms=1, producer_id="p", epoch=2)
        send(second, rows[4_000:])
        second.close(FINISH_S)
        assert_right(engine, rows)


def test_a_session_that_times_out_ends_with_its_lanes() -> None:
    rows = make_rows(4_000, 4, keys=1)
    with serving(session_timeout_s=0.5) as engine:
        producer = fs.Producer(address(engine), stream=STREAM, linger_ms=1)
        send(producer, rows)
        engine.split(group_of(rows), [0, 1])
        producer.flush(FINISH_S)
        producer._live.abort()
        assert_right(engine, rows)
        assert engine.status()["streams"]["s"]["sessions_expired"] == 1


def test_a_producer_without_lanes_is_not_asked_and_not_split() -> None:
    rows = make_rows(2_000, 5, keys=1)
    with serving() as engine, fs.Producer(address(engine), stream=STREAM, linger_ms=1, lanes=0) as producer:
        producer.send(rows)
        producer.flush(FINISH_S)
        assert not engine.lanes.can_open(group_of(rows))
        with pytest.raises(EngineError, match="a connection has one worker"):
            engine.split(group_of(rows), [0, 1])
        assert further(producer) == 0


def test_without_a_free_session_there_is_no_lane_and_no_harm() -> None:
    rows = make_rows(2_000, 6, keys=1)
    with serving(max_sessions=1) as engine:
        with fs.Producer(address(engine), stream=STREAM, linger_ms=1) as producer:
            producer.send(rows)
            producer.flush(FINISH_S)
            with pytest.raises(EngineError, match="a connection has one worker"):
                engine.split(group_of(rows), [0, 1])
            assert (further(producer), producer.state) == (0, "connected")
        assert_right(engine, rows)


def test_idle_producers_with_lanes_stop_counting_and_count_again() -> None:
    rows = make_rows(6_000, 7, keys=1)
    late = rows["t"].max()
    with serving(idle_timeout_s=0.4) as engine:
        quiet = fs.Producer(address(engine), stream=STREAM, linger_ms=1)
        other = fs.Producer(address(engine), stream=STREAM, linger_ms=1, watermark="explicit")
        send(quiet, rows[:3_000])
        engine.split(group_of(rows), [0, 1])
        quiet.flush(FINISH_S)
        wait_until(lambda: "idle" in states_of(engine).values(), "an idle producer")
        engine.unsplit(group_of(rows))  # a lent connection counts whether it is idle or not
        left = iter(np.array_split(rows[3_000:], 60))
        name = quiet.stats()["producer"]

        def is_live() -> bool:
            quiet.send(next(left))
            quiet.flush(FINISH_S)
            return states_of(engine)[name] == "live"

        wait_until(is_live, "a producer that sends again to count")  # for as long as it was not idle again
        for piece in left:
            quiet.send(piece)
        other.watermark(int(late))
        quiet.close(FINISH_S)
        other.close(FINISH_S)
        assert engine.status()["streams"]["s"]["ledger"]["received"] == len(rows)


def test_places_of_sessions_and_lanes_are_used_again_while_groups_move_and_split(seed: int) -> None:
    """What is on its way about a session that has ended must not be taken for the one that has its place now."""
    rows = make_rows(30_000, seed, keys=12)
    groups = sorted({int(g) for g in STREAM.group_of(rows, GROUPS)})
    with serving(2, max_sessions=4) as engine:
        holder = fs.Producer(address(engine), stream=STREAM, watermark="explicit", linger_ms=1)
        with in_background(split_at_random(engine, seed, groups)):
            for start in range(0, len(rows), 600):
                part = rows[start : start + 600]
                holder.watermark(int(part["t"].min()) - 40)
                with fs.Producer(address(engine), stream=STREAM, linger_ms=1, watermark="explicit") as producer:
                    send(producer, part, 200, 0.003)
        holder.close(FINISH_S)
        ledger = engine.status()["streams"]["s"]["ledger"]
        assert ledger["accepted"] == ledger["received"] == len(rows), ledger
        assert_right(engine, rows)


def test_rows_that_must_stay_in_order_are_not_spread_over_lanes() -> None:
    rows = make_rows(4_000, 5, keys=1)
    with test_moves.serving() as engine, fs.Producer(address(engine), stream=STREAM, linger_ms=1) as producer:
        producer.send(rows[:2_000])
        producer.flush(FINISH_S)
        with pytest.raises(EngineError, match=r"ordered needs rows in the order of arrival"):
            engine.split(group_of(rows), range(2))
        producer.send(rows[2_000:])
        producer.flush(FINISH_S)
        assert further(producer) == 0
        producer.close()
        assert_right(engine, rows)
