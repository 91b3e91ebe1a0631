"""Connections that never become one: each is refused with its own code and counted; nobody else notices."""

import json
import random
import socket
import time

import pytest

from flexstream.wire.frames import CONTROL_GROUP, STAGE_GROUP, ErrorCode, FrameType, Header, frame, json_frame
from tests.adversity.rig import (
    GROUPS,
    STREAM,
    RawClient,
    all_of_them,
    closed,
    company,
    data_frame,
    expect_error,
    make_rows,
    read_frame,
    refused,
    serving,
)
from tests.waiting import WAIT_S, wait_until

GOOD = {"versions": [1], "stream": "s", "producer": "p", "epoch": 1}


def hello(group=CONTROL_GROUP, **changes):
    fields = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return json_frame(FrameType.HELLO, group, fields)


def nothing_pending(engine):
    """Refused connections are kept for a moment, so that the peer can read why; then they are gone."""
    wait_until(lambda: engine.status()["connections"]["pending_hello"] == 0, "no pending HELLO")


def raw_hello(payload: bytes, *, kind=FrameType.HELLO, version=1, claimed=None):
    size = len(payload) if claimed is None else claimed
    return Header(kind, CONTROL_GROUP, payload_bytes=size, version=version).pack() + payload


REFUSALS = {
    "an HTTP request": (b"GET / HTTP/1.1\r\nHost: here.example\r\n\r\n", ErrorCode.BAD_MAGIC),
    "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 40, ErrorCode.BAD_MAGIC),
    "zeros": (b"\0" * 32, ErrorCode.BAD_MAGIC),
    "a big-endian magic": (b"SF" + hello()[2:], ErrorCode.BAD_MAGIC),
    "version 2 in the header": (raw_hello(b"{}", version=2), ErrorCode.BAD_VERSION),
    "version 0 in the header": (raw_hello(b"{}", version=0), ErrorCode.BAD_VERSION),
    "only unknown versions offered": (hello(versions=[2, 3]), ErrorCode.BAD_VERSION),
    "no versions": (hello(versions=...), ErrorCode.BAD_VERSION),
    "versions of the wrong type": (hello(versions="1"), ErrorCode.BAD_VERSION),
    "data before HELLO": (data_frame(0, make_rows(1)), ErrorCode.BAD_TYPE),
    "an ACK as first frame": (frame(FrameType.ACK), ErrorCode.BAD_TYPE),
    "a type that does not exist": (b"FS\x01\x63" + b"\0" * 28, ErrorCode.BAD_TYPE),
    "a HELLO of 4097 bytes": (raw_hello(b"", claimed=4097), ErrorCode.BAD_LENGTH),
    "a HELLO of 4 GiB": (raw_hello(b"", claimed=2**32 - 1), ErrorCode.BAD_LENGTH),
    "no JSON": (raw_hello(b"hello!"), ErrorCode.BAD_HELLO),
    "an empty HELLO": (raw_hello(b""), ErrorCode.BAD_HELLO),
    "JSON that is not UTF-8": (raw_hello(b'{"stream":"\xff\xfe"}'), ErrorCode.BAD_HELLO),
    "JSON cut off": (raw_hello(json.dumps(GOOD).encode()[:-1]), ErrorCode.BAD_HELLO),
    "a list": (raw_hello(b"[1,2,3]"), ErrorCode.BAD_HELLO),
    "null": (raw_hello(b"null"), ErrorCode.BAD_HELLO),
    "2000 nested lists": (raw_hello(b"[" * 2000 + b"]" * 2000), ErrorCode.BAD_HELLO),
    "a number of 4000 digits": (raw_hello(b'{"epoch":' + b"9" * 4000 + b"}"), ErrorCode.BAD_VERSION),
    "an unknown stream": (hello(stream="nowhere"), ErrorCode.UNKNOWN_STREAM),
    "a stream that is a list": (hello(stream=["s"]), ErrorCode.UNKNOWN_STREAM),
    "a stream name of lone surrogates": (hello(stream="\ud800"), ErrorCode.UNKNOWN_STREAM),
    "no producer": (hello(producer=...), ErrorCode.BAD_HELLO),
    "an empty producer": (hello(producer=""), ErrorCode.BAD_HELLO),
    "a producer that is an object": (hello(producer={"id": 1}), ErrorCode.BAD_HELLO),
    "a producer of 65 characters": (hello(producer="x" * 65), ErrorCode.BAD_HELLO),
    "a producer of a lone surrogate": (hello(producer="\ud800"), ErrorCode.BAD_HELLO),
    "a producer that moves the cursor": (hello(producer="a\x1b[2Jb"), ErrorCode.BAD_HELLO),
    "a producer of two lines": (hello(producer="a\nb"), ErrorCode.BAD_HELLO),
    "a staging producer of a lone surrogate": (hello(STAGE_GROUP, producer="\ud800"), ErrorCode.BAD_HELLO),
    "an epoch that is text": (hello(epoch="1"), ErrorCode.BAD_HELLO),
    "an epoch of true": (hello(epoch=True), ErrorCode.BAD_HELLO),
    "a negative epoch": (hello(epoch=-1), ErrorCode.BAD_HELLO),
    "an epoch over 63 bits": (hello(epoch=2**63), ErrorCode.BAD_HELLO),
    "an epoch that is NaN": (hello(epoch=float("nan")), ErrorCode.BAD_HELLO),
    "another row size": (hello(row_bytes=31), ErrorCode.SCHEMA_MISMATCH),
    "a row size that is text": (hello(row_bytes="32"), ErrorCode.SCHEMA_MISMATCH),
    "another schema": (hello(schema="0123456789abcdef"), ErrorCode.SCHEMA_MISMATCH),
    "a schema that is an object": (hello(schema={}), ErrorCode.SCHEMA_MISMATCH),
}


def test_each_wrong_greeting_gets_its_own_error_and_is_counted_while_others_send():
    with serving() as engine, company(engine), RawClient(engine) as client, all_of_them() as each:
        for name, (data, code) in REFUSALS.items():
            with each(name):
                refused(engine, client, data, code)
        nothing_pending(engine)


# A data connection's HELLO is read with the session known.
DATA_REFUSALS = {
    "no row size": ({"row_bytes": ...}, 0, ErrorCode.SCHEMA_MISMATCH),
    "no schema": ({"schema": ...}, 0, ErrorCode.SCHEMA_MISMATCH),
    "another row size": ({"row_bytes": 1}, 0, ErrorCode.SCHEMA_MISMATCH),
    "a group past the last": ({}, GROUPS, ErrorCode.WRONG_GROUP),
    "group 65533": ({}, 65533, ErrorCode.WRONG_GROUP),
    "crc that is text": ({"crc": "yes"}, 0, ErrorCode.BAD_HELLO),
    "ack_bytes below 0": ({"ack_bytes": -1}, 0, ErrorCode.BAD_HELLO),
    "ack_bytes that is text": ({"ack_bytes": "1"}, 0, ErrorCode.BAD_HELLO),
    "ack_bytes over 64 bits": ({"ack_bytes": 2**64}, 0, ErrorCode.BAD_HELLO),
    "an unregistered producer": ({"producer": "nobody"}, 0, ErrorCode.NO_SESSION),
    "an older epoch": ({"epoch": 0}, 0, ErrorCode.STALE_EPOCH),
}


def test_each_wrong_greeting_on_a_data_connection_gets_its_own_error():
    with serving() as engine, company(engine), RawClient(engine) as client, all_of_them() as each:
        client.open()
        for name, (changes, group, code) in DATA_REFUSALS.items():
            with each(name):
                refused(engine, client, client.hello(group, **changes), code)
        nothing_pending(engine)
        mine = client.fields["producer"]
        (session,) = [s for s in engine.status()["streams"]["s"]["sessions"] if s["producer"] == mine]
        assert session["connections"] == 0


@pytest.mark.parametrize("token", [None, "", "wrong", "secre", "secret2", 7, ["secret"], "\ud800"])
def test_a_wrong_token_is_refused_before_anything_is_told(token):
    with serving(token="secret") as engine, RawClient(engine) as client:
        document = refused(engine, client, client.hello(token=token, stream="nowhere"), ErrorCode.BAD_TOKEN)
        assert "secret" not in document["message"] + document["hint"]
        client.open(token="secret")


def test_refusals_are_logged_with_the_peer_and_wrong_tokens_slow_their_sender_down(caplog):
    with serving(token="secret") as engine, RawClient(engine) as client:
        waited = []
        engine.acceptor._slowing.failed = lambda peer: waited.append(peer) or 0.0
        refused(engine, client, client.hello(token="wrong"), ErrorCode.BAD_TOKEN)
        refused(engine, client, client.hello(token="secret", stream="nowhere"), ErrorCode.UNKNOWN_STREAM)
        assert waited == ["127.0.0.1"]
        said = [record.fields for record in caplog.records if record.message == "connection_refused"]
        assert [fields["why"] for fields in said] == ["bad_token", "unknown_stream"]
        assert all(fields["peer"].startswith("127.0.0.1:") for fields in said)


def test_a_control_connection_with_an_older_epoch_is_refused_and_the_newer_one_goes_on():
    with serving() as engine, company(engine), RawClient(engine, epoch=5) as client:
        client.open()
        refused(engine, client, client.hello(epoch=4), ErrorCode.STALE_EPOCH)
        (session,) = [s for s in engine.status()["streams"]["s"]["sessions"] if s["epoch"] == 5]
        assert session["state"] == "live"


def test_a_newer_connection_of_a_session_and_group_fences_the_older():
    with serving() as engine, company(engine), RawClient(engine) as client:
        client.open()
        old = client.open(3)
        client.open(3)
        expect_error(old, ErrorCode.FENCED)
        assert closed(engine, "fenced") == 1


def test_sessions_past_the_limit_are_refused():
    with serving(max_sessions=2) as engine, RawClient(engine) as client:
        client.open(producer="a")
        client.open(producer="b")
        refused(engine, client, client.hello(producer="c"), ErrorCode.TOO_MANY_SESSIONS)
        client.open(producer="a", epoch=2)


def test_a_header_byte_by_byte_is_closed_by_the_hello_time_limit():
    with serving(hello_timeout_s=0.5) as engine, company(engine), RawClient(engine) as client:
        sock = client.connect()
        for byte in client.hello():  # far longer than the limit
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.02)
            if closed(engine, "hello_timeout"):
                break
        expect_error(sock, ErrorCode.HELLO_TIMEOUT)
        assert closed(engine, "hello_timeout") == 1
        nothing_pending(engine)


def test_a_silent_connection_is_closed_by_the_hello_time_limit():
    with serving(hello_timeout_s=0.3) as engine, company(engine), RawClient(engine) as client:
        expect_error(client.connect(), ErrorCode.HELLO_TIMEOUT)


@pytest.mark.parametrize("sent", [0, 1, 31, 32, 60])
def test_a_connection_that_closes_before_its_hello_is_whole_is_counted(sent):
    with serving() as engine, company(engine), RawClient(engine) as client:
        sock = client.connect()
        sock.sendall(client.hello()[:sent])
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: closed(engine, "closed before hello") == 1, "the count")
        assert sock.recv(1) == b""
        nothing_pending(engine)


def test_a_hello_with_unknown_fields_is_accepted():
    with serving() as engine, RawClient(engine, future={"x": [1]}, versions=[1, 2]) as client:
        sock = client.connect()
        sock.sendall(client.hello())
        assert read_frame(sock)[0].type is FrameType.ACK


# What a registered control connection may not say.
CONTROL_FAULTS = {
    "a frame of a group": (frame(FrameType.WATERMARK, 3, payload=b"\0"), ErrorCode.WRONG_GROUP),
    "data": (frame(FrameType.DATA, value=0), ErrorCode.BAD_TYPE),
    "a second HELLO": (frame(FrameType.HELLO, payload=b"{}"), ErrorCode.BAD_TYPE),
    "a watermark without a bitmap": (frame(FrameType.WATERMARK, value=5), ErrorCode.BAD_LENGTH),
    "a bitmap that is too long": (frame(FrameType.EOS, payload=b"\0" * 9), ErrorCode.BAD_LENGTH),
    "a marker with payload": (frame(FrameType.MARKER, payload=b"x"), ErrorCode.BAD_LENGTH),
    "noise": (b"\xee" * 32, ErrorCode.BAD_MAGIC),
    "another version": (b"FS\x07\x03" + b"\0" * 28, ErrorCode.BAD_VERSION),
}


def test_each_wrong_frame_on_the_control_connection_gets_its_own_error():
    with serving() as engine, company(engine), all_of_them() as each:
        for name, (data, code) in CONTROL_FAULTS.items():
            with each(name), RawClient(engine) as client:
                before = closed(engine, code.code)
                sock = client.open()
                sock.sendall(data)
                expect_error(sock, code)
                assert closed(engine, code.code) == before + 1


def test_the_schema_in_the_control_ack_is_the_streams():
    with serving() as engine, RawClient(engine) as client:
        client.open(row_bytes=..., schema=...)
        document = json.loads(client.ack_payload)
        assert (document["schema"], document["groups"]) == (STREAM.schema.hash, GROUPS)


ODD_VALUES = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**40, 1.5, float("nan"), float("inf"), "", "s", "1", "\0",
    "\ud800", "\U0001f600", "x" * 300, [], [1], [[1]], {}, {"a": 1}, ...,
)  # fmt: skip


def test_hellos_with_any_values_get_an_answer(seed):
    rng = random.Random(seed)
    wrong = []
    with serving(hello_timeout_s=WAIT_S, max_sessions=64) as engine, RawClient(engine) as client:
        client.open(producer="p")
        for number in range(200):
            fields = dict(client.fields, producer="p")
            for name in rng.sample(sorted(fields), rng.randint(1, 3)):
                fields[name] = rng.choice(ODD_VALUES)
            fields = {name: value for name, value in fields.items() if value is not ...}
            payload = bytearray(json.dumps(fields).encode())
            if rng.random() < 0.2:
                payload[rng.randrange(len(payload))] = rng.randrange(256)
            group = rng.choice((CONTROL_GROUP, 0, 3))
            sock = client.connect()
            sock.sendall(Header(FrameType.HELLO, group, payload_bytes=len(payload)).pack() + payload)
            try:
                assert read_frame(sock)[0].type in (FrameType.ACK, FrameType.ERROR)
            except (AssertionError, EOFError, OSError) as error:
                wrong.append(f"{number}: {group} {bytes(payload)!r}: {error!r}")
                if len(wrong) == 2:
                    break
            finally:
                sock.close()
        assert not wrong, "\n".join(wrong)
