"""Key -> group -> port -> bucket -> worker, end to end: aligned when it can be, and never a row lost when it cannot."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.daemon.metrics import render
from flexstream.errors import ConfigError
from flexstream.nic import NicHealth, NicState, UserNic, Verdict, Verification, probe
from flexstream.nic.bpf import reuseport
from flexstream.nic.rss import ports as ports_module
from flexstream.testing.fault_proxy import FaultProxy
from tests.property.checks import FINISH_S, as_rows, assert_ledger
from tests.waiting import WAIT_S, wait_until

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")


def make_engine(**options: Any) -> fs.Engine:
    engine = fs.Engine(
        **({"workers": 3, "listen": "127.0.0.1:0", "pin": False, "compile": "off", "balance": "off"} | options)
    )
    engine.submit(STREAM.query("q").window(fs.tumbling("10s")).agg(n=fs.count()))
    return engine


def address(where: tuple[str, int] | None) -> str:
    assert where is not None
    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    return f"tcp://{host}:{where[1]}"


def producer_of(engine: fs.Engine, **options: Any) -> fs.Producer:
    return fs.Producer(address(engine.data_address), stream="s", **options)


def rows(keys: int, start: int = 0) -> np.ndarray:
    made = np.zeros(keys, STREAM.schema.dtype)
    made["k"] = np.arange(start, start + keys)
    return made


def assert_all_rows(engine: fs.Engine, expected: dict[int, int]) -> None:
    """Every row was counted exactly once."""
    engine.finish(timeout=FINISH_S)
    found: dict[int, int] = {}
    for row in as_rows(engine.results("q")):
        found[row["k"]] = found.get(row["k"], 0) + row["n"]
    assert found == expected
    assert_ledger(engine.status(), "s", sum(expected.values()))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_several_producers_land_every_group_at_its_worker(listen: str) -> None:
    with make_engine(listen=listen) as engine:
        producers = [producer_of(engine) for _ in range(3)]
        for producer in producers:
            producer.send(rows(1000))
            producer.flush(WAIT_S)
        status = engine.status()
        connections = status["connections"]
        assert connections["aligned"] == connections["open"] == 3 * 128
        assert connections["misaligned"] == 0
        assert connections["alignment"] == 1.0
        assert status["nic"]["kind"] == "user"
        assert status["nic"]["aligned"] is True
        for producer in producers:
            stats = producer.stats()
            assert (stats["aligned_connections"], stats["unaligned_connections"]) == (128, 0)
            assert stats["not_aligned_because"] is None
        page = render(status)
        assert "flexstream_alignment_ratio 1.0" in page
        assert "flexstream_connections_aligned_total 384" in page
        sent = 3

        def verified() -> bool:
            """Only data that comes some time after the table was written says something about it."""
            nonlocal sent
            producers[0].send(rows(1000))
            producers[0].flush(WAIT_S)
            sent += 1
            engine.nic.check()
            return engine.status()["nic"]["state"] == "verified"

        wait_until(verified, "a verified device")
        assert 'flexstream_nic_state{kind="user",device="",state="verified"} 1' in render(engine.status())
        for producer in producers:
            producer.close()
        assert_all_rows(engine, dict.fromkeys(range(1000), sent))


def test_behind_nat_sockets_are_handed_over_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with make_engine() as engine, caplog.at_level(logging.INFO, "flexstream"):
        assert engine.data_address is not None
        with FaultProxy(engine.data_address) as proxy:  # another port on the way out: NAT
            with fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream="s") as producer:
                producer.send(rows(500))
                producer.flush(WAIT_S)
                stats = producer.stats()
                assert "NAT" in stats["not_aligned_because"]
            connections = engine.status()["connections"]
            assert connections["behind_nat"] > 0
            assert (
                connections["aligned"] + connections["misaligned"]
                == stats["aligned_connections"] + stats["unaligned_connections"]
            )
            assert_all_rows(engine, dict.fromkeys(range(500), 1))
        assert sum(record.message == "behind_nat" for record in caplog.records) == 1


class AddressPool(FaultProxy):
    """NAT that keeps ports and deals addresses out in turn."""

    def outgoing(self, client: socket.socket, number: int) -> socket.socket:
        leaving = socket.socket()
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        leaving.bind((f"127.0.0.{2 + number % 3}", client.getpeername()[1]))
        return leaving


def test_an_address_pool_that_keeps_ports_is_nat_not_an_old_table(caplog: pytest.LogCaptureFixture) -> None:
    with make_engine() as engine, caplog.at_level(logging.INFO, "flexstream"):
        assert engine.data_address is not None
        with AddressPool(engine.data_address) as proxy:
            with fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream="s") as producer:
                producer.send(rows(500))
                producer.flush(WAIT_S)
                assert "NAT" in producer.stats()["not_aligned_because"]
            connections = engine.status()["connections"]
            assert connections["behind_nat"] > 0
            assert connections["steered_by_old_table"] == 0
            assert_all_rows(engine, dict.fromkeys(range(500), 1))
        assert sum(record.message == "behind_nat" for record in caplog.records) == 1


def test_a_new_key_is_survived_and_learnt_by_the_next_connection() -> None:
    with make_engine() as engine, producer_of(engine, linger_ms=1) as producer:
        one_each = rows(5000)
        groups = STREAM.group_of(one_each, 128)

        def send(*wanted: int) -> None:
            for group in wanted:
                producer.send(one_each[groups == group][:1])
                producer.flush(WAIT_S)

        send(0, 1)
        assert engine.status()["connections"]["alignment"] == 1.0
        nic = engine.nic.nic
        assert isinstance(nic, UserNic)
        assert nic._steering is not None
        nic._steering = replace(nic._steering, key=bytes(reversed(nic._steering.key)))  # as if by ethtool -X ... hkey
        engine.nic.follow(engine.placement())
        engine.nic.check()
        late = range(2, 128)
        send(*late)
        connections = engine.status()["connections"]
        assert connections["aligned"] + connections["misaligned"] == 128
        assert connections["behind_nat"] == 0
        assert connections["steered_by_old_table"] == 1, "the first one that went astray learnt the new key"
        assert connections["misaligned"] <= connections["steered_by_old_table"]


def test_no_free_port_costs_alignment_never_the_connection(tmp_path, monkeypatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        (tmp_path / "range").write_text(f"{taken} {taken}")
        monkeypatch.setattr(ports_module, "_RANGE_FILE", tmp_path / "range")
        with make_engine() as engine:
            with producer_of(engine) as producer:
                producer.send(rows(800))
                producer.flush(WAIT_S)
                assert producer.stats()["aligned_connections"] < 128
            assert_all_rows(engine, dict.fromkeys(range(800), 1))


def test_a_kernel_without_the_program_serves_with_one_listener(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(reuseport, "attach_table", refuse)
    with make_engine() as engine:
        with producer_of(engine) as producer:
            producer.send(rows(300))
            producer.flush(WAIT_S)
            assert "SO_REUSEPORT" in producer.stats()["not_aligned_because"]
        nic = engine.status()["nic"]
        assert nic["aligned"] is False
        assert "Protocol not available" in nic["reason"]
        assert engine.status()["connections"]["alignment"] == 0.0
        assert_all_rows(engine, dict.fromkeys(range(300), 1))


def test_a_second_engine_on_the_same_port_is_refused() -> None:
    with make_engine() as engine:
        assert engine.data_address is not None
        with pytest.raises(fs.EngineError, match="cannot listen"):
            make_engine(listen=f"127.0.0.1:{engine.data_address[1]}")


class Device(UserNic):
    """A device that takes every table and does what it likes: the user NIC's table, and no listener for it."""

    kind = "kernel"
    says = NicHealth(NicState.DISOBEYED, "bucket 3 went to core 0, not to core 1")

    def __init__(self, device: str, *, groups: int) -> None:
        super().__init__(groups, [None] * 3)
        self.device = device

    @classmethod
    def probe(cls, device: str) -> str | None:
        return None

    def listeners(self, first: socket.socket) -> list[socket.socket] | None:
        return None

    def health(self) -> NicHealth:
        return self.says

    def verify(self, connections: object) -> Verification:
        return Verification(Verdict(self.says.state.value), self.says.reason)

    def close(self) -> None:
        if self.says.state is NicState.GONE:
            raise ConfigError("no such device", code="nic", hint=None)


@pytest.mark.parametrize(
    "says",
    [NicHealth(NicState.DISOBEYED, "bucket 3 went to core 0, not to core 1"), NicHealth(NicState.GONE, "unplugged")],
    ids=["disobeyed", "gone"],
)
def test_a_device_that_disobeys_or_vanishes_is_left_and_every_record_kept(
    says: NicHealth, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(probe._CLASSES, "kernel", (__name__, "Device"))
    monkeypatch.setattr(Device, "says", NicHealth(NicState.VERIFIED, "all is well"))
    with make_engine(nic="kernel:made0") as engine, caplog.at_level(logging.INFO, "flexstream"):
        first = producer_of(engine)
        first.send(rows(400))
        first.flush(WAIT_S)
        assert engine.status()["nic"]["kind"] == "kernel"
        assert engine.status()["nic"]["device"] == "made0"
        monkeypatch.setattr(Device, "says", says)
        wait_until(lambda: (engine.nic.check(), engine.status()["nic"]["kind"] == "user")[1], "steering in user space")
        nic = engine.status()["nic"]
        assert nic["fallbacks"] == 1
        assert says.reason in nic["passed_over"][-1]
        # Listeners per worker, on the port that was open all along.
        wait_until(lambda: engine.status()["nic"]["aligned"], "aligned connections")
        first.send(rows(400))
        with producer_of(engine) as second:
            second.send(rows(400))
            second.flush(WAIT_S)
            assert second.stats()["unaligned_connections"] == 0
        first.close()
        assert_all_rows(engine, dict.fromkeys(range(400), 3))
    assert sum(record.message == "nic_fell_back" for record in caplog.records) == 1


def test_listeners_that_disobey_are_given_up_too(monkeypatch) -> None:
    with make_engine() as engine:
        disobeyed = Verification(Verdict.DISOBEYED, "40 of 40 came through another listener")
        monkeypatch.setattr(UserNic, "verify", lambda self, connections: disobeyed)
        wait_until(lambda: (engine.nic.check(), engine.status()["nic"]["fallbacks"])[1], "a fallback")
        monkeypatch.undo()
        nic = engine.status()["nic"]
        assert nic["aligned"] is False
        assert "40 of 40" in nic["reason"]
        with producer_of(engine) as producer:
            producer.send(rows(300))
        assert_all_rows(engine, dict.fromkeys(range(300), 1))


def test_a_table_that_cannot_be_written_is_misalignment_not_failure(monkeypatch) -> None:
    with make_engine() as engine:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        monkeypatch.setattr(reuseport, "attach_table", refuse)
        engine.nic.follow(engine.placement())
        assert "no memory" in engine.status()["nic"]["follow_error"]
        with producer_of(engine) as producer:
            producer.send(rows(100))
        monkeypatch.undo()
        engine.nic.follow(engine.placement())
        assert engine.status()["nic"]["follow_error"] is None
        assert_all_rows(engine, dict.fromkeys(range(100), 1))


def test_what_cannot_be_had_is_refused_at_the_start_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nosuchdev0"):
        make_engine(nic="ethtool:nosuchdev0")
    with pytest.raises(fs.EngineError, match="names no NIC"):
        make_engine(nic="hardware")
    with make_engine(nic="auto") as engine:
        assert "loopback" in engine.status()["nic"]["passed_over"][0]
