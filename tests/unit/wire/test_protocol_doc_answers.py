"""What docs/protocol.md says about answers that surprise: acknowledgements, ends, fences, odd frames."""

from __future__ import annotations

import socket
from pathlib import Path

import flexstream as fs
from flexstream import durations
from flexstream.wire.frames import CONTROL_GROUP, ErrorCode, FrameType, frame
from tests.adversity.rig import (
    STREAM,
    RawClient,
    address,
    assert_results,
    bitmap,
    data_frame,
    expect_error,
    make_rows,
    read_frame,
    rows_of_group,
    serving,
)
from tests.waiting import wait_until

G = 3
ROWS = rows_of_group(G, 20, start=0)


def acks(sock: socket.socket) -> list[int]:
    """The row wanted in each ACK until the server closes."""
    found = []
    try:
        while True:
            header, _ = read_frame(sock)
            assert header.type is FrameType.ACK
            found.append(header.sequence)
    except EOFError:
        return found


def end(client: RawClient, control: socket.socket, *groups: int) -> None:
    control.sendall(frame(FrameType.EOS, payload=bitmap(*groups)))
    header, _ = read_frame(control)
    assert (header.type, header.group) == (FrameType.ACK, CONTROL_GROUP)


# -- acknowledgements


def test_all_rows_are_acknowledged_when_a_client_says_eos_and_shuts_its_side_at_once() -> None:
    for _ in range(5):
        with serving() as engine, RawClient(engine) as client:
            control, sock = client.open(), client.open(G)
            sock.sendall(data_frame(G, ROWS) + frame(FrameType.EOS, G))
            sock.shutdown(socket.SHUT_WR)
            assert acks(sock)[-1:] == [20]
            end(client, control, G)
            assert_results(engine, ROWS)


def test_all_rows_are_acknowledged_when_a_client_shuts_its_side_without_eos() -> None:
    with serving() as engine, RawClient(engine) as client:
        client.open()
        sock = client.open(G)
        sock.sendall(data_frame(G, ROWS))
        sock.shutdown(socket.SHUT_WR)
        assert acks(sock)[-1:] == [20]


def test_no_acknowledgement_comes_for_rows_that_were_known_already() -> None:
    with serving() as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        sock.sendall(data_frame(G, ROWS))
        assert read_frame(sock)[0].sequence == 20
        sock.sendall(data_frame(G, ROWS) + frame(FrameType.EOS, G))
        sock.shutdown(socket.SHUT_WR)
        assert acks(sock) == []
        end(client, control, G)
        assert_results(engine, ROWS)


def test_after_a_clean_close_a_producer_knows_that_all_its_rows_arrived() -> None:
    for seed in range(3):
        with serving() as engine:
            producer = fs.Producer(address(engine), stream=STREAM)
            producer.send(make_rows(20_000, seed=seed))
            producer.close()
            stats = producer.stats()
            assert (stats["rows"], stats["rows_acked"]) == (20_000, 20_000)


# -- ends


def test_a_session_that_times_out_before_its_groups_have_ended_gets_no_final_ack() -> None:
    with serving(session_timeout_s=0.3) as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        sock.sendall(data_frame(G, ROWS[:10]))
        assert read_frame(sock)[0].sequence == 10
        sock.close()  # rows 10 to 19 do not come
        control.sendall(frame(FrameType.EOS, payload=bitmap(G)))
        control.shutdown(socket.SHUT_WR)
        assert "group" in expect_error(control, ErrorCode.NO_SESSION)["message"]
        assert engine.status()["streams"]["s"]["sessions_expired"] == 1


def test_a_session_whose_group_ends_in_time_gets_its_final_ack_though_its_side_is_shut() -> None:
    with serving(session_timeout_s=60) as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        sock.sendall(data_frame(G, ROWS[:10]))
        sock.close()
        control.sendall(frame(FrameType.EOS, payload=bitmap(G)))
        control.shutdown(socket.SHUT_WR)
        wait_until(lambda: engine.status()["streams"]["s"]["sessions"][0]["state"] == "ending", "the end")
        wait_until(lambda: engine.status()["connections"]["open"] == 0, "the loss of the connection")
        sock = client.open(G)
        assert client.ack.sequence == 10
        sock.sendall(data_frame(G, ROWS[10:], 10) + frame(FrameType.EOS, G))
        assert read_frame(control)[0].type is FrameType.ACK
        assert_results(engine, ROWS)


def test_nothing_is_read_after_the_control_connections_eos() -> None:
    with serving(session_timeout_s=60) as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        control.sendall(frame(FrameType.EOS, payload=bitmap(G)) + b"not a frame" * 10)
        wait_until(lambda: engine.status()["streams"]["s"]["sessions"][0]["state"] == "ending", "the end")
        control.sendall(b"nor this")
        sock.sendall(data_frame(G, ROWS) + frame(FrameType.EOS, G))
        assert read_frame(control)[0].type is FrameType.ACK
        assert_results(engine, ROWS)


def test_a_session_that_has_ended_is_remembered_with_its_rows_until_a_later_epoch() -> None:
    with serving(session_timeout_s=60) as engine, RawClient(engine) as client:
        for epoch, wanted in ((1, 0), (1, 20), (2, 0), (2, 20)):
            control, sock = client.open(epoch=epoch), client.open(G, epoch=epoch)
            assert client.ack.sequence == wanted
            sock.sendall(data_frame(G, ROWS) + frame(FrameType.EOS, G))
            end(client, control, G)
        assert engine.status()["streams"]["s"]["ledger"]["received"] == 40


def test_a_session_that_has_ended_is_forgotten_after_a_time_and_begins_at_row_0() -> None:
    with serving(session_timeout_s=0.3) as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        sock.sendall(data_frame(G, ROWS) + frame(FrameType.EOS, G))
        end(client, control, G)
        sessions = engine.running()[0][0].sessions
        wait_until(lambda: sessions.find(client.fields["producer"]) is None, "the session to be forgotten")
        early = client.connect()
        early.sendall(client.hello(G))
        expect_error(early, ErrorCode.NO_SESSION)
        client.open()
        client.open(G)
        assert client.ack.sequence == 0


def test_data_connections_go_on_without_their_control_connection_until_the_session_is_forgotten() -> None:
    with serving(session_timeout_s=2) as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        control.close()
        sessions = engine.running()[0][0].sessions
        wait_until(lambda: sessions.find(client.fields["producer"]).broken_at, "the loss")
        sock.sendall(data_frame(G, ROWS))
        assert read_frame(sock)[0].sequence == 20
        expect_error(sock, ErrorCode.NO_SESSION)
        status = engine.status()["streams"]["s"]
        assert (status["sessions_expired"], status["ledger"]["received"]) == (1, 20)


# -- fences


def test_an_old_data_connection_hears_at_once_that_it_is_fenced() -> None:
    with serving() as engine, RawClient(engine) as client:
        client.open()
        old = client.open(G)
        client.open(G)
        expect_error(old, ErrorCode.FENCED)


def test_an_old_control_connection_hears_it_when_it_next_speaks() -> None:
    with serving() as engine, RawClient(engine) as client:
        old, new = client.open(), client.open()
        old.sendall(frame(FrameType.WATERMARK, value=1, payload=bitmap()))
        expect_error(old, ErrorCode.FENCED)
        end(client, new)


# -- odd frames


def test_the_servers_frames_have_no_crc() -> None:
    with serving() as engine, RawClient(engine, crc=True) as client:
        client.open()
        assert (client.ack.flags, client.ack.crc32c) == (0, 0)
        sock = client.open(G)
        assert (client.ack.flags, client.ack.crc32c) == (0, 0)
        sock.sendall(data_frame(G, ROWS, crc=True))
        header, _ = read_frame(sock)
        assert (header.sequence, header.flags, header.crc32c) == (20, 0, 0)


def test_data_without_rows_and_barriers_do_nothing() -> None:
    with serving() as engine, RawClient(engine) as client:
        control, sock = client.open(), client.open(G)
        sock.sendall(data_frame(G, ROWS[:0]) + frame(FrameType.BARRIER, G, value=7))
        control.sendall(frame(FrameType.BARRIER, value=7))
        sock.sendall(data_frame(G, ROWS) + data_frame(G, ROWS[:0], 20) + frame(FrameType.EOS, G))
        end(client, control, G)
        assert_results(engine, ROWS)


def test_data_without_rows_may_not_be_ahead_either() -> None:
    with serving() as engine, RawClient(engine) as client:
        client.open()
        sock = client.open(G)
        sock.sendall(data_frame(G, ROWS[:0], 1))
        expect_error(sock, ErrorCode.SEQUENCE_GAP)


def test_a_hello_that_names_no_stream_is_of_an_unknown_stream() -> None:
    with serving() as engine, RawClient(engine, stream=...) as client:
        sock = client.connect()
        sock.sendall(client.hello())
        expect_error(sock, ErrorCode.UNKNOWN_STREAM)


def test_what_comes_in_one_segment_with_hello_is_read_after_it() -> None:
    with serving() as engine, RawClient(engine) as client:
        control, sock = client.open(), client.connect()
        sock.sendall(client.hello(G) + data_frame(G, ROWS) + frame(FrameType.EOS, G))
        assert [read_frame(sock)[0].sequence for _ in range(2)] == [0, 20]
        end(client, control, G)
        assert_results(engine, ROWS)


def test_watermarks_end_at_the_last_time_there_is() -> None:
    with serving() as engine, RawClient(engine) as client:
        control = client.open()
        for value, wanted in ((-(2**63), -(2**62)), (2**63 - 1, 2**62)):
            control.sendall(frame(FrameType.WATERMARK, value=value, payload=bitmap()))
            wait_until(
                lambda wanted=wanted: engine.status()["streams"]["s"]["watermark"] == {"min": wanted, "max": wanted},
                "the watermark",
            )


def test_durations_are_written_as_the_page_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text("utf-8")
    assert '"max_disorder": "0s"' in page
    assert '"max_disorder": "0ms"' not in page
    for given, written in (("0ms", "0s"), ("1500ms", "1500ms"), ("60s", "1m"), ("86400s", "1d")):
        assert durations.format(durations.parse(given)) == written
