"""Groups on the move under load: results are the oracle's whatever moves, whenever, and however it is interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.balance.mover import STEPS
from flexstream.errors import EngineError
from flexstream.testing import run
from tests.property.checks import as_rows, assert_balances, assert_same_results
from tests.waiting import wait_until

GROUPS = 16
FINISH_S = 120.0
STREAM = fs.Stream(
    "s", {"t": "timestamp[ms]", "k": "i32", "x": "i64", "y": "f64"}, key="k", time="t", max_disorder="40ms"
)
TUMBLING = (
    STREAM.query("tumbling")
    .window(fs.tumbling("250ms"))
    .agg(n=fs.count(), total=fs.sum("x"), least=fs.min("y"), most=fs.max("x"), mean=fs.avg("y"), spread=fs.stddev("y"))
)
SLIDING = (
    STREAM.query("sliding")
    .window(fs.sliding("300ms", every="100ms"))
    .agg(n=fs.count(), total=fs.sum("x"), first=fs.first("x"), last=fs.last("y"), about=fs.approx_distinct("x"))
)
VALUES = (
    STREAM.query("values")
    .window(fs.sliding("300ms", every="100ms"))
    .agg(n=fs.count(), x=fs.distinct(col("x") % 50), often=fs.mode(col("x") % 7), y=fs.median("y"), z=fs.median("x"))
)
ORDERED = STREAM.query("ordered").window(fs.tumbling("250ms")).agg(n=fs.count(), order=fs.order_hash("x"))
SPLITTABLE = (TUMBLING, SLIDING, VALUES)
QUERIES = (*SPLITTABLE, ORDERED)

pytestmark = pytest.mark.time_limit(280)


def make_rows(n: int, seed: int, keys: int = 300) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"] = 1_000_000 + np.arange(n) // 8 - rng.integers(0, 40, n)
    rows["k"] = rng.integers(0, keys, n)
    rows["x"] = rng.integers(-1000, 1000, n)
    rows["y"] = rng.normal(size=n).round(3)
    return rows


@contextmanager
def serving(workers: int = 2, queries: tuple[fs.Query, ...] = QUERIES, **options: Any) -> Iterator[fs.Engine]:
    settings: dict[str, Any] = {"groups": GROUPS, "listen": "127.0.0.1:0", "pin": False, "max_sessions": 16}
    settings["balance"] = "off"  # only what a test moves
    with fs.Engine(workers, **settings | options) as engine:
        for query in queries:
            engine.submit(query)
        yield engine


def address(engine: fs.Engine) -> str:
    assert engine.data_address is not None
    return "tcp://{}:{}".format(*engine.data_address)


@contextmanager
def moving(engine: fs.Engine, seed: int, most: int = 6) -> Iterator[list[int]]:
    """Random groups to random workers, one order after the other, until the block ends."""
    done, count, failures = threading.Event(), [0], []
    rng = np.random.default_rng(seed)

    def move() -> None:
        try:
            while not done.is_set():
                groups = rng.choice(GROUPS, int(rng.integers(1, most)), replace=False)
                moves = engine.move({int(g): int(rng.integers(0, len(engine.workers))) for g in groups})
                count[0] += len(moves)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield count
    finally:
        done.set()
        thread.join(FINISH_S)
    assert not failures, failures
    assert not thread.is_alive()


def send_from(
    engine: fs.Engine,
    parts: list[np.ndarray],
    piece: int,
    producers: list[fs.Producer] | None = None,
    close: bool = True,
    pause_s: float = 0.0,
) -> None:
    """One TCP producer per part, side by side, so that no watermark passes another's rows.

    With a pause after each piece they stay in step: the parts must be of the same size.
    """
    producers = producers or [fs.Producer(address(engine), stream=STREAM, linger_ms=1) for _ in parts]
    gate = threading.Barrier(len(parts))

    def produce(producer: fs.Producer, rows: np.ndarray) -> None:
        gate.wait(FINISH_S)
        for start in range(0, len(rows), piece):
            producer.send(rows[start : start + piece])
            if pause_s:
                time.sleep(pause_s)
                gate.wait(FINISH_S)
        if close:
            producer.close(timeout=FINISH_S)
        else:
            producer.flush(FINISH_S)

    threads = [threading.Thread(target=produce, args=pair) for pair in zip(producers, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FINISH_S)
        assert not thread.is_alive()


def assert_right(engine: fs.Engine, rows: np.ndarray, producers: int = 1) -> None:
    """`producers`: they registered one after the other, and had every so-many-th row each."""
    engine.finish(timeout=FINISH_S)
    sessions = [i % producers for i in range(len(rows))]
    for query in (engine.queries[query.name] for query in QUERIES if query.name in engine.queries):
        assert_same_results(query, as_rows(engine.results(query.name)), run(query, rows, sessions=sessions).windows)
    status = engine.status()
    ledger = status["streams"]["s"]["ledger"]
    assert ledger["received"] == ledger["accepted"] == len(rows)
    for query in status["queries"].values():
        assert query["open_windows"] == 0
        assert_balances(query["ledger"], "accepted")
        assert (query["ledger"]["late"], query["ledger"]["rejected"], query["ledger"]["in_flight"]) == (0, 0, 0)


@pytest.mark.parametrize("workers", [2, 3])
def test_random_moves_under_producers_change_no_result(workers: int, seed: int) -> None:
    rows = make_rows(48_000, seed)
    with serving(workers) as engine:
        with moving(engine, seed) as count:
            send_from(engine, [rows[i::3] for i in range(3)], 500)
        assert_right(engine, rows, 3)
        assert count[0] > 0, "nothing moved"
        assert {move.state for move in engine.mover.history} == {"moved"}


def test_random_moves_under_feeding_change_no_result(seed: int) -> None:
    rows = make_rows(48_000, seed)
    with serving(compile="off") as engine:
        with moving(engine, seed):
            for start in range(0, len(rows), 300):
                engine.feed("s", rows[start : start + 300])
        assert_right(engine, rows)


def test_a_group_goes_there_and_back_again_while_its_window_is_open(seed: int) -> None:
    rows = make_rows(40_000, seed, keys=40)
    with serving() as engine:
        before = engine.placement()
        for start in range(0, len(rows), 500):
            engine.feed("s", rows[start : start + 500])
            engine.move({g: 1 - w for g, w in enumerate(engine.placement())})
        assert_right(engine, rows)
        assert engine.mover.moved == GROUPS * 80
        assert engine.placement() == before


def test_late_rows_update_windows_that_fired_on_another_worker(seed: int) -> None:
    query = STREAM.query("late").window(fs.tumbling("100ms"), allowed_lateness="10s").agg(n=fs.count())
    rng = np.random.default_rng(seed)
    with fs.Engine(2, groups=GROUPS, pin=False, balance="off") as engine:
        engine.submit(query)
        counts: dict[tuple[int, int], int] = {}
        for step in range(30):
            rows = np.zeros(200, STREAM.schema.dtype)
            rows["t"] = rng.integers(0, (step + 1) * 100, 200)
            rows["k"] = rng.integers(0, 30, 200)
            engine.feed("s", rows, watermark=step * 100)
            engine.move({int(g): int(rng.integers(0, 2)) for g in rng.choice(GROUPS, 5, replace=False)})
            for t, k in zip(rows["t"].tolist(), rows["k"].tolist(), strict=True):
                counts[t // 100 * 100, k] = counts.get((t // 100 * 100, k), 0) + 1
        engine.finish(timeout=FINISH_S)
        newest: dict[tuple[int, int], tuple[int, int]] = {}
        revisions: dict[tuple[int, int], list[int]] = {}
        for row in as_rows(engine.results("late")):
            window = row["window_start"], row["k"]
            newest[window] = max(newest.get(window, (-1, 0)), (row["revision"], row["n"]))
            revisions.setdefault(window, []).append(row["revision"])
        assert {window: n for window, (_, n) in newest.items()} == counts
        assert all(len(set(found)) == len(found) for found in revisions.values()), "a revision came twice"
        assert any(max(found) > 0 for found in revisions.values())


def test_a_producer_that_reconnects_or_stalls_in_mid_frame_moves_with_its_group() -> None:
    from flexstream.testing.fault_proxy import FaultProxy

    rows = make_rows(60_000, 11)
    with serving(session_timeout_s=30.0) as engine, FaultProxy(engine.data_address, seed=11) as proxy:
        producer = fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream=STREAM, linger_ms=1, retry_s=FINISH_S)
        with moving(engine, 11):
            for number, start in enumerate(range(0, len(rows), 1_500)):
                if number % 10 == 5:
                    proxy.break_all()
                producer.send(rows[start : start + 1_500])
            producer.close(timeout=FINISH_S)
        assert_right(engine, rows)


def test_nothing_fires_before_the_old_owner_has_drained() -> None:
    """Rows fed before the move wait at the old owner; the watermark behind them is at the new owner already."""
    rows = make_rows(400_000, 21, keys=60)
    with serving(listen=None, compile="off") as engine:
        for turn in range(4):
            part = rows[turn * 100_000 : (turn + 1) * 100_000]
            engine.feed("s", part, watermark=False)  # a backlog on both workers
            mover = threading.Thread(target=engine.move, args=({g: 1 - w for g, w in enumerate(engine.placement())},))
            mover.start()
            engine.feed("s", part[:0], watermark=int(part["t"].max()) - 40)
            mover.join(FINISH_S)
        engine.finish(timeout=FINISH_S)
        expected = pairs(rows["t"] // 250 * 250, rows["k"])
        found = {(row["window_start"], row["k"]): row["n"] for row in as_rows(engine.results("tumbling"))}
        assert found == expected
        assert engine.status()["queries"]["tumbling"]["ledger"]["late"] == 0


def pairs(starts: np.ndarray, keys: np.ndarray) -> dict[tuple[int, int], int]:
    found, counts = np.unique(np.stack([starts, keys.astype(np.int64)]), axis=1, return_counts=True)
    return {(int(start), int(key)): int(n) for start, key, n in zip(*found, counts, strict=True)}


def test_the_next_row_wanted_moves_with_a_group_that_has_no_connection_now() -> None:
    from tests.adversity import rig

    rows = rig.rows_of_group(3, 50)
    with rig.serving(workers=2, session_timeout_s=30.0) as engine, rig.RawClient(engine) as client:
        control = client.open()
        sock = client.open(3)
        sock.sendall(rig.data_frame(3, rows[:30]))
        wait_until(lambda: engine.status()["streams"]["s"]["ledger"]["received"] == 30, "the rows")
        sock.close()
        wait_until(lambda: engine.status()["connections"]["open"] == 0, "the connection's end")
        for _ in range(3):
            engine.move({3: 1 - engine.placement()[3]})
        client.open(3)
        assert client.ack.sequence == 30
        control.close()


def test_a_socket_handed_to_the_old_owner_finds_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptor's look at the placement may be old: every worker forwards what is not its own."""
    rows = make_rows(20_000, 5)
    with serving(3) as engine:
        stale = engine.placement()
        engine.move({g: (w + 1) % 3 for g, w in enumerate(stale)})
        monkeypatch.setattr(engine.acceptor.host, "placement", lambda: stale)
        send_from(engine, [rows], 2_000)
        monkeypatch.undo()
        assert_right(engine, rows)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("step", [step for step in STEPS if step not in ("drain", "adopt")])
def test_a_move_interrupted_after_any_step_loses_and_repeats_nothing(step: str) -> None:
    """The mover's thread dies there: the group has one owner, rows go on, and a later move settles it."""
    rows = make_rows(30_000, 3)

    def stop_here(reached: str) -> None:
        if reached == step:
            raise Interrupted(step)

    with serving() as engine:
        engine.feed("s", rows[:10_000])
        engine.mover.interrupt = stop_here
        before = engine.placement()
        with suppress(Interrupted):
            engine.move({g: 1 - w for g, w in enumerate(before)})
        engine.mover.interrupt = lambda reached: None
        moved = engine.placement()
        assert moved == (before if step in ("flag", "grace") else [1 - w for w in before])
        engine.feed("s", rows[10_000:20_000])
        engine.move({g: 1 - w for g, w in enumerate(moved)})
        engine.feed("s", rows[20_000:])
        assert_right(engine, rows)
        states = [move.state for move in engine.mover.history]
        assert states.count("moved") >= GROUPS


def test_a_nic_that_refuses_its_table_costs_alignment_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(20_000, 9)

    with serving() as engine:
        monkeypatch.setattr(engine.mover, "_follow", lambda owners: "no such device")
        engine.feed("s", rows[:10_000])
        moves = engine.move({0: 1, 1: 0, 2: 1})
        assert all("no such device" in (move.error or "") and move.state == "moved" for move in moves)
        assert engine.mover.nic_errors == 1
        engine.feed("s", rows[10_000:])
        assert_right(engine, rows)


def test_what_does_not_exist_is_not_moved() -> None:
    with serving() as engine:
        with pytest.raises(EngineError, match="group 16 must be from 0 to 15"):
            engine.move({16: 0})
        with pytest.raises(EngineError, match="worker 2 must be from 0 to 1"):
            engine.move({0: 2})
        assert engine.move({0: engine.placement()[0]}) == []


def test_a_worker_that_sleeps_is_at_a_quiescent_point() -> None:
    """Grace does not wait for traffic: with nobody sending, a move is over at once, and so are a hundred."""
    with serving(3, listen=None) as engine:
        wait_until(lambda: engine.status()["workers"], "workers")
        for _ in range(100):
            engine.move({g: (w + 1) % 3 for g, w in enumerate(engine.placement())})
        assert engine.mover.moved == 100 * GROUPS


def test_a_group_served_by_two_workers_gives_the_same_results(seed: int) -> None:
    """Four producers; their hottest groups are split, joined, moved and split again while rows arrive."""
    rows = make_rows(48_000, seed, keys=20)
    parts = [rows[i::4] for i in range(4)]
    with serving(queries=SPLITTABLE) as engine:
        producers = [fs.Producer(address(engine), stream=STREAM, linger_ms=1) for _ in parts]
        for producer, part in zip(producers, parts, strict=True):
            producer.send(part[:2_000])
        for producer in producers:
            producer.flush(FINISH_S)
        hot = int(STREAM.group_of(rows[:1], GROUPS)[0])
        engine.mover.split(hot, 1 - engine.placement()[hot])
        done, failures = threading.Event(), []
        rng = np.random.default_rng(seed)

        def split_and_join() -> None:
            try:
                while not done.is_set():
                    group = int(rng.integers(0, GROUPS))
                    with suppress(EngineError):
                        engine.mover.split(group, 1 - engine.placement()[group])
                    if rng.random() < 0.5:
                        engine.mover.unsplit(int(rng.integers(0, GROUPS)))
                    if rng.random() < 0.3:
                        engine.move({int(rng.integers(0, GROUPS)): int(rng.integers(0, 2))})
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=split_and_join)
        thread.start()
        send_from(engine, [part[2_000:] for part in parts], 500, producers)
        done.set()
        thread.join(FINISH_S)
        assert not failures, failures
        assert_right(engine, rows, 4)


def test_a_group_served_by_three_workers_gives_the_same_results(seed: int) -> None:
    rows = make_rows(40_000, seed, keys=3)
    parts = [rows[i::4] for i in range(4)]
    with serving(3, queries=SPLITTABLE) as engine:
        producers = [fs.Producer(address(engine), stream=STREAM, linger_ms=1) for _ in parts]
        for producer, part in zip(producers, parts, strict=True):
            producer.send(part[:2_000])
        for producer in producers:
            producer.flush(FINISH_S)
        group = int(STREAM.group_of(rows[:1], GROUPS)[0])
        split = engine.mover.split(group, [w for w in range(3) if w != engine.placement()[group]])
        assert len(split.workers) == 3
        assert split.connections in (2, 3)
        before = [worker.stats()["rows"] for worker in engine.workers]
        send_from(engine, [part[2_000:6_000] for part in parts], 500, producers, close=False)
        assert all(worker.stats()["rows"] > n for worker, n in zip(engine.workers, before, strict=True))
        engine.move({group: (engine.placement()[group] + 1) % 3})
        assert engine.mover.splits() == []
        send_from(engine, [part[6_000:] for part in parts], 500, producers)
        assert_right(engine, rows, 4)


def test_one_connection_alone_is_not_split() -> None:
    rows = make_rows(1_000, 1, keys=1)
    with serving(queries=SPLITTABLE) as engine, fs.Producer(address(engine), stream=STREAM, linger_ms=1) as producer:
        producer.send(rows)
        producer.flush(FINISH_S)
        group = int(STREAM.group_of(rows[:1], GROUPS)[0])
        with pytest.raises(EngineError, match="a connection has one worker"):
            engine.mover.split(group, 1 - engine.placement()[group])
        assert engine.mover.splits() == []


def test_a_query_that_comes_while_a_group_is_split_ends_the_split() -> None:
    rows = make_rows(20_000, 2, keys=5)
    with serving(queries=SPLITTABLE) as engine:
        producers = [fs.Producer(address(engine), stream=STREAM, linger_ms=1) for _ in range(2)]
        for number, producer in enumerate(producers):
            producer.send(rows[: len(rows) // 2][number::2])
            producer.flush(FINISH_S)
        group = int(STREAM.group_of(rows[:1], GROUPS)[0])
        engine.mover.split(group, 1 - engine.placement()[group])
        assert [split.group for split in engine.mover.splits()] == [group]
        engine.submit(STREAM.query("another").window(fs.tumbling("1s")).agg(n=fs.count()))
        assert engine.mover.splits() == []
        for number, producer in enumerate(producers):
            producer.send(rows[len(rows) // 2 :][number::2])
            producer.flush(FINISH_S)
        for producer in producers:
            producer.close(timeout=FINISH_S)
        assert_right(engine, rows, 2)


def test_a_group_whose_rows_need_their_order_is_not_split() -> None:
    rows = make_rows(1_000, 1, keys=1)
    group = int(STREAM.group_of(rows[:1], GROUPS)[0])
    with serving() as engine:
        producers = [fs.Producer(address(engine), stream=STREAM, linger_ms=1) for _ in range(2)]
        for number, producer in enumerate(producers):
            producer.send(rows[number::2])
            producer.flush(FINISH_S)
        with pytest.raises(EngineError, match="ordered needs rows in the order of arrival"):
            engine.mover.split(group, 1 - engine.placement()[group])
        engine.cancel("ordered")
        engine.mover.split(group, 1 - engine.placement()[group])
        engine.submit(STREAM.query("again").window(fs.tumbling("250ms")).agg(order=fs.order_hash("x")))
        assert engine.mover.splits() == [], "it was joined before the query came"
        for producer in producers:
            producer.close(timeout=FINISH_S)
        assert_right(engine, rows, 2)


def test_a_backlog_and_what_comes_behind_it_stay_in_order_over_a_move() -> None:
    """The old owner has fed rows to work off, the new one gets more: it must not begin with these."""
    rows = make_rows(240_000, 31, keys=30)
    with serving(2, (ORDERED,), listen=None, compile="off") as engine:
        for start in range(0, len(rows), 40_000):
            before = engine.placement()
            engine.feed("s", rows[start : start + 35_000], watermark=False)
            mover = threading.Thread(target=engine.move, args=({g: 1 - w for g, w in enumerate(before)},))
            mover.start()
            wait_until(lambda before=before: engine.placement()[-1] != before[-1], "the move")
            engine.feed("s", rows[start + 35_000 : start + 40_000], watermark=False)
            mover.join(FINISH_S)
        assert_right(engine, rows)
