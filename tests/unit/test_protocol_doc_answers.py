"""What docs/protocol.md says about answers that surprise: acknowledgements, ends, fences, odd frames."""

from __future__ import annotations

import socket

import flexstream as fs
from flexstream.wire import CONTROL_GROUP, ErrorCode, FrameType, frame
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
