"""Producer against a server that behaves, is away, is slow, forgets, refuses and cuts connections."""

import http.server
import json
import re
import socket
import threading
import time

import numpy as np
import pytest

from flexstream.client.producer import Producer, RingFull
from flexstream.errors import BackPressure, ConfigError, ConnectError, ProtocolError, SchemaError
from flexstream.rows.stream import Stream
from flexstream.wire.frames import CONTROL_GROUP, ErrorCode
from tests.ports import quiet_port
from tests.unit.client.fake_server import FakeServer
from tests.waiting import WAIT_S, wait_until

CLICKS = Stream(
    "clicks",
    {"t": "timestamp[ms]", "k": "i64", "v": "f64", "pad": "bytes[7]"},
    key="k",
    time="t",
    max_disorder="5ms",
)


def clicks(n: int, start: int = 0, keys: int = 1000) -> np.ndarray:
    rows = np.zeros(n, CLICKS.schema.dtype)
    rows["t"] = np.arange(start, start + n)
    rows["k"] = np.arange(start, start + n) % keys
    rows["v"] = rows["t"] / 2
    return rows


def check_rows(server: FakeServer, rows: np.ndarray) -> None:
    """Every row once, in its group, in order."""
    ids = CLICKS.group_of(rows, server.groups)
    for group in range(server.groups):
        assert bytes(server.rows[group]) == rows[ids == group].tobytes(), f"group {group}"
    assert server.errors == []


@pytest.fixture
def server():
    with FakeServer(CLICKS) as fake:
        yield fake


def test_rows_arrive_once_in_their_groups_and_the_stream_ends(server):
    rows = clicks(20_000)
    with Producer(server.address, stream="clicks") as producer:
        assert producer.state == "connected"
        assert producer.stream == CLICKS
        for start in range(0, len(rows), 3000):
            producer.send(rows[start : start + 3000])
    assert producer.state == "closed"
    check_rows(server, rows)
    assert server.ended == set(range(8))
    assert server.events[CONTROL_GROUP][-2:] == [("eos", 0), ("bitmap", 0xFF)]
    stats = producer.stats()
    assert (stats["rows"], stats["rows_acked"], stats["reconnects"]) == (20_000, 20_000, 0)


def test_connections_are_opened_only_for_groups_with_rows(server):
    rows = clicks(50, keys=1)
    group = int(CLICKS.group_of(rows[:1], 8)[0])
    with Producer(server.address, stream=CLICKS) as producer:
        producer.send(rows)
        producer.flush(WAIT_S)
        assert producer.stats()["connections"] == 1
    assert server.opened == {group}
    assert server.events[CONTROL_GROUP][-1] == ("bitmap", 1 << group)


def test_a_session_without_rows_ends_properly(server):
    with Producer(server.address, stream="clicks"):
        pass
    assert server.opened == set()
    assert server.events[CONTROL_GROUP] == [("eos", 0), ("bitmap", 0)]


def test_flush_returns_when_the_server_has_every_row(server):
    with Producer(server.address, stream="clicks", linger_ms=10_000) as producer:
        producer.send(clicks(777))
        producer.flush(WAIT_S)
        assert server.total_rows() == 777


def test_rows_that_linger_are_sent_without_a_flush(server):
    with Producer(server.address, stream="clicks", linger_ms=1) as producer:
        producer.send(clicks(3))
        wait_until(lambda: server.total_rows() == 3, "three rows")


def test_without_linger_frames_are_whole_until_the_end_of_the_call(server):
    rows = clicks(3000, keys=1)
    group = int(CLICKS.group_of(rows[:1], 8)[0])
    with Producer(server.address, stream="clicks", linger_ms=0) as producer:
        producer.send(rows)
        wait_until(lambda: server.total_rows() == 3000, "3000 rows")
    sizes = [value for kind, value in server.events[group] if kind == "data"]
    assert sum(sizes) == 3000
    assert len(sizes) <= 50  # 47, and one more for each time that the service thread came in between


def test_a_name_with_several_addresses_is_tried_at_each(server):
    with Producer(f"tcp://localhost:{server.port}", stream="clicks") as producer:
        producer.send(clicks(10))
    check_rows(server, clicks(10))


@pytest.mark.parametrize("crc", [False, True])
def test_crc_is_on_when_asked(server, crc):
    rows = clicks(5000)
    with Producer(server.address, stream="clicks", crc=crc) as producer:
        producer.send(rows)
    assert {hello["crc"] for hello in server.hellos} == {crc}
    check_rows(server, rows)


def test_dicts_and_arrow_are_packed(server):
    pa = pytest.importorskip("pyarrow")
    rows = clicks(10)
    with Producer(server.address, stream="clicks") as producer:
        producer.send([{"t": 0, "k": 0, "v": 0.0, "pad": b""}])
        columns = [pa.array(rows[name][1:]) for name in ("t", "k", "v")]
        columns[0] = columns[0].cast(pa.timestamp("ms"))
        columns.append(pa.array([b"\0" * 7] * 9, pa.binary(7)))
        producer.send(pa.record_batch(columns, names=["t", "k", "v", "pad"]))
    check_rows(server, rows)


def test_rows_that_do_not_fit_are_refused_whole(server):
    with Producer(server.address, stream="clicks") as producer, pytest.raises(SchemaError):
        producer.send(np.zeros(3, [("other", "i8")]))
    assert server.total_rows() == 0


def test_threads_may_send_at_once(server):
    parts = [clicks(5000, start) for start in range(0, 20_000, 5000)]
    with Producer(server.address, stream="clicks") as producer:
        threads = [threading.Thread(target=producer.send, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert server.errors == []
    got = np.concatenate([np.frombuffer(bytes(data), CLICKS.schema.dtype) for data in server.rows.values()])
    assert np.array_equal(np.sort(got, order="t"), np.concatenate(parts))


# ---- watermarks --------------------------------------------------------------------------------------


def test_automatic_watermarks_trail_the_newest_row_by_the_disorder(server):
    with Producer(server.address, stream="clicks", linger_ms=1) as producer:
        producer.send(clicks(100))
        producer.flush(WAIT_S)
        wait_until(lambda: all(99 - 5 in server.watermarks(group) for group in range(8)), "a watermark in every group")
    for group in range(8):
        kinds = [kind for kind, _ in server.events[group]]
        assert kinds.index("data") < kinds.index("watermark")


def test_groups_without_rows_learn_the_watermark_on_the_control_connection(server):
    rows = clicks(20, keys=1)
    group = int(CLICKS.group_of(rows[:1], 8)[0])
    with Producer(server.address, stream="clicks", max_disorder=0, linger_ms=1) as producer:
        producer.send(rows)
        wait_until(lambda: 19 in server.watermarks(CONTROL_GROUP), "the watermark")
    at = server.events[CONTROL_GROUP].index(("watermark", 19))
    assert server.events[CONTROL_GROUP][at + 1] == ("bitmap", 1 << group)


def test_explicit_watermarks_stand_between_the_rows_before_and_after(server):
    with Producer(server.address, stream="clicks", watermark="explicit") as producer:
        producer.send(clicks(10, keys=1))
        producer.watermark(50)
        producer.send(clicks(10, keys=1))
        producer.watermark(40)
        producer.watermark(np.datetime64(60, "ms"))
    group = int(CLICKS.group_of(clicks(1), 8)[0])
    assert server.events[group] == [
        ("data", 10),
        ("watermark", 50),
        ("data", 10),
        ("watermark", 60),
        ("eos", 0),
    ]


def test_a_producer_of_automatic_watermarks_takes_none(server):
    with Producer(server.address, stream="clicks") as producer, pytest.raises(ConfigError, match="its own"):
        producer.watermark(3)


def test_markers_go_to_every_open_connection(server):
    with Producer(server.address, stream="clicks") as producer:
        assert producer.marker() == 0
        producer.send(clicks(1000))
        producer.flush(WAIT_S)
        before = time.time_ns()
        assert producer.marker() == 8
    for group in range(8):
        stamps = [value for kind, value in server.events[group] if kind == "marker"]
        assert len(stamps) == 1
        assert abs(stamps[0] - before) < 60e9


# ---- bad days ----------------------------------------------------------------------------------------


def test_a_connection_cut_in_mid_frame_resumes_at_the_next_row(server):
    server.drop_after = {group: [32 + 31 * 10 + 13, 500, 1] for group in range(8)}
    rows = clicks(8000)
    with Producer(server.address, stream="clicks") as producer:
        producer.send(rows)
        producer.flush(WAIT_S)
    check_rows(server, rows)
    assert producer.stats()["reconnects"] >= 24
    assert {hello["epoch"] for hello in server.hellos} == {1}


def test_all_connections_cut_at_once_while_sending(server):
    rows = clicks(60_000)
    with Producer(server.address, stream="clicks", crc=True) as producer:
        for start in range(0, len(rows), 5000):
            producer.send(rows[start : start + 5000])
            if start % 20_000 == 0:
                server.cut()
    check_rows(server, rows)
    assert producer.stats()["rows_lost_at_most"] == 0


def test_a_server_that_comes_back_without_memory_gets_the_rest(server, caplog):
    first, second = clicks(1000), clicks(1000, 1000)
    with Producer(server.address, stream="clicks") as producer:
        producer.send(first)
        producer.flush(WAIT_S)
        server.forget()
        server.cut()
        producer.send(second)
    check_rows(server, np.concatenate([first, second]))
    assert producer.stats()["rows_lost_at_most"] == 1000
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "has forgotten this session. It had acknowledged 1000 rows in 8 groups" in said
    reached = [str(np.datetime64(int(rows["t"].max()), "ms")) for rows in (first, second)]  # when it came back
    assert any(f"windows that began before {time}" in said for time in reached)


def test_a_server_that_is_away_is_a_state_and_then_an_error_that_names_the_rows():
    server = FakeServer(CLICKS)
    producer = Producer(server.address, stream="clicks", retry_s=0.3, connect_timeout_s=1)
    server.ack = False
    producer.send(clicks(100))
    server.close()
    wait_until(lambda: producer.state == "waiting" or producer.state == "failed", "the loss to be seen")
    wait_until(lambda: producer.state == "failed", "the producer to give up")
    with pytest.raises(ConnectError) as caught:
        producer.send(clicks(1))
    message = str(caught.value)
    assert f"127.0.0.1:{server.port}" in message
    assert re.search(r"the server has not acknowledged \d+ rows \(group 0: rows 0\.\.", message)
    assert "refused" in message
    with pytest.raises(ConnectError):
        producer.close()
    assert producer.state == "closed"
    producer.close()


def test_a_server_that_restarts_on_its_port_is_found_again():
    server = FakeServer(CLICKS, port=quiet_port())
    rows = clicks(2000)
    with Producer(server.address, stream="clicks", retry_s=WAIT_S) as producer:
        producer.send(rows[:1000])
        producer.flush(WAIT_S)
        server.close()
        wait_until(lambda: producer.state == "waiting", "the loss to be seen")
        producer.send(rows[1000:])
        again = FakeServer(CLICKS, port=server.port)
        again.sessions, again.next_row, again.rows = server.sessions, server.next_row, server.rows
        producer.flush(WAIT_S)
        assert producer.state == "connected"
    check_rows(again, rows)
    again.close()


def test_nobody_there_is_an_error_within_the_timeout():
    with socket.socket() as taken:  # bound, so that nobody else can have the port, but it does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match=rf"127\.0\.0\.1:{port} for 0\.2 s.*last error") as caught:
            Producer(f"tcp://127.0.0.1:{port}", stream="clicks", connect_timeout_s=0.2)
    assert caught.value.code == "unreachable"


def test_a_server_that_never_answers_hello_is_an_error_within_the_timeout():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectError, match="the server did not answer HELLO in time"),
    ):
        Producer(f"tcp://127.0.0.1:{silent.getsockname()[1]}", stream="clicks", connect_timeout_s=0.2)


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_STREAM, ErrorCode.BAD_TOKEN, ErrorCode.SCHEMA_MISMATCH])
def test_a_refusal_is_told_and_not_tried_again(server, code):
    server.refuse = code
    with pytest.raises(ProtocolError, match="no: ") as caught:
        Producer(server.address, stream="clicks")
    assert (caught.value.code, caught.value.hint) == (code.code, "try another")
    assert len(server.hellos) == 1


def test_a_refusal_on_a_data_connection_fails_the_producer(server):
    server.refuse_data = ErrorCode.WRONG_GROUP
    producer = Producer(server.address, stream="clicks")
    producer.send(clicks(10))
    wait_until(lambda: producer.state == "failed", "the producer to give up")
    with pytest.raises(ProtocolError) as caught:
        producer.flush(WAIT_S)
    assert caught.value.code == "wrong_group"
    with pytest.raises(ProtocolError):
        producer.close()


def test_a_refusal_that_passes_with_time_is_tried_again(server):
    server.refuse_data = ErrorCode.TOO_MANY_PENDING
    with Producer(server.address, stream="clicks") as producer:
        producer.send(clicks(100))
        wait_until(lambda: producer.state == "waiting", "the loss to be seen")
        server.refuse_data = None
        producer.flush(WAIT_S)
    check_rows(server, clicks(100))


def test_a_forgotten_session_is_registered_again(server):
    with Producer(server.address, stream="clicks") as producer:
        server.sessions.clear()
        producer.send(clicks(100))
        producer.flush(WAIT_S)
    check_rows(server, clicks(100))


def test_a_slow_server_blocks_send_until_it_reads_again(server):
    server.reading.clear()
    rows = clicks(300_000)
    with Producer(server.address, stream="clicks", replay_bytes=65536) as producer:
        thread = threading.Thread(target=producer.send, args=(rows,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        server.reading.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert producer.stats()["waited_s"] > 0
    check_rows(server, rows)


def test_a_slow_server_raises_when_so_chosen_and_says_how_far_it_got(server):
    server.reading.clear()
    rows = clicks(300_000)
    with Producer(server.address, stream="clicks", replay_bytes=65536, on_full="raise") as producer:
        with pytest.raises(BackPressure) as caught:
            producer.send(rows)
        assert isinstance(caught.value, RingFull)
        at = caught.value.accepted
        assert 0 < at < len(rows)
        server.reading.set()
        deadline = time.monotonic() + WAIT_S
        while at < len(rows) and time.monotonic() < deadline:
            try:
                at += producer.send(rows[at : at + 4000])
            except RingFull as full:
                at += full.accepted
                time.sleep(0.001)
    check_rows(server, rows)


def test_close_is_bounded_when_the_last_word_does_not_come(server):
    server.final_ack = False
    producer = Producer(server.address, stream="clicks")
    producer.send(clicks(10))
    with pytest.raises(ConnectError, match="no final ACK"):
        producer.close(timeout=0.3)
    assert producer.state == "closed"


def test_flush_is_bounded_and_names_what_is_missing(server):
    server.ack = False
    producer = Producer(server.address, stream="clicks")
    producer.send(clicks(10, keys=1))
    with pytest.raises(ConnectError, match="has not acknowledged 10 rows"):
        producer.flush(0.2)
    producer.close()


def test_without_a_replay_buffer_nothing_waits_for_acknowledgements(server):
    server.ack = False
    rows = clicks(50_000)
    with Producer(server.address, stream="clicks", replay_bytes=0) as producer:
        producer.send(rows)
        producer.flush(WAIT_S)
    assert {hello["ack_bytes"] for hello in server.hellos} == {0}
    check_rows(server, rows)


def test_a_closed_producer_says_so(server):
    producer = Producer(server.address, stream="clicks")
    producer.close()
    producer.close()
    with pytest.raises(ConnectError, match="closed"):
        producer.send(clicks(1))


def test_a_producer_that_is_dropped_warns(server):
    producer = Producer(server.address, stream="clicks")
    with pytest.warns(ResourceWarning, match="not closed"):
        producer.__del__()
    assert producer.state == "closed"


def test_an_error_in_the_with_block_is_not_hidden(server):
    def fail():
        with Producer(server.address, stream="clicks") as producer:
            producer.send(clicks(10))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    check_rows(server, clicks(10))


@pytest.mark.parametrize(
    "settings", [{"watermark": "sometimes"}, {"on_full": "drop"}, {"linger_ms": -1}, {"replay_bytes": -5}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        Producer("tcp://127.0.0.1:1", stream="clicks", **settings)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", "tcp://h:1/x", "h:1:x"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="not an address"):
        Producer(address, stream="clicks")


# ---- discovery ---------------------------------------------------------------------------------------


class _Control(http.server.BaseHTTPRequestHandler):
    data = ""
    seen: list[tuple[str, str | None]] = []

    def do_GET(self):
        type(self).seen.append((self.path, self.headers.get("Authorization")))
        known = self.path == "/v1/streams/clicks"
        document = (
            {"data": self.data, "groups": 8} if known else {"code": "unknown_stream", "message": "no such stream"}
        )
        body = json.dumps(document).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def control(server):
    _Control.data, _Control.seen = f"0.0.0.0:{server.port}", []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Control) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_the_control_port_tells_where_the_data_port_is(server, control):
    with Producer(control, stream="clicks", token="secret") as producer:
        producer.send(clicks(100))
    check_rows(server, clicks(100))
    assert _Control.seen == [("/v1/streams/clicks", "Bearer secret")]
    assert {hello["token"] for hello in server.hellos} == {"secret"}


def test_an_unknown_stream_is_told_by_the_control_port(server, control):
    with pytest.raises(ProtocolError, match="no such stream") as caught:
        Producer(control, stream="nope")
    assert caught.value.code == "unknown_stream"
