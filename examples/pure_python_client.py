"""A FlexStream producer in plain Python, written from docs/protocol.md alone: no FlexStream, no numpy.

Usage: python pure_python_client.py host:data_port stream rows [token]
Sends rows with increasing event times and keys 0..999; every other field is 0. The key must be one i64 field.
"""

import json
import socket
import struct
import sys
import uuid

HELLO, DATA, WATERMARK, ACK, EOS, CONTROL = 1, 2, 3, 6, 7, 0xFFFF
SIZES = {
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "f32": 4,
    "f64": 8,
    "bool": 1,
}


def murmur3(value: int, seed: int = 42) -> int:
    h = seed
    for k in (value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        h ^= (k << 15 | k >> 17) * 0x1B873593 & 0xFFFFFFFF
        h = ((h << 13 | h >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h = ((h ^ 8) ^ (h ^ 8) >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


def frame(kind: int, group: int, value: int = 0, sequence: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack("<HBBHHIIQQ", 0x5346, 1, kind, 0, group, len(payload), 0, value, sequence) + payload


def read_ack(sock: socket.socket) -> tuple[int, int, dict]:
    head = sock.recv(32, socket.MSG_WAITALL)
    if len(head) < 32:
        raise ConnectionError("the server closed the connection")
    _, _, kind, _, _, size, _, value, sequence = struct.unpack("<HBBHHIIQQ", head)
    body = sock.recv(size, socket.MSG_WAITALL) if size else b"{}"
    if kind != ACK:
        raise ConnectionError(f"the server answered {body.decode()}")
    return value, sequence, json.loads(body)


def connect(address: tuple[str, int], group: int, hello: dict) -> tuple[socket.socket, int, int, dict]:
    sock = socket.create_connection(address, timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(frame(HELLO, group, payload=json.dumps(hello).encode()))
    return (sock, *read_ack(sock))


def main(where: str, name: str, count: int, token: str | None = None) -> None:
    host, _, port = where.rpartition(":")
    hello = {"versions": [1], "stream": name, "producer": str(uuid.uuid4()), "epoch": 1, "token": token}
    control, frame_rows, _, about = connect((host, int(port)), CONTROL, hello)
    stream, groups = about["stream"], about["groups"]
    offsets, row_bytes = {}, 0
    for field, kind in stream["fields"].items():
        offsets[field] = row_bytes
        row_bytes += SIZES.get(kind) or (8 if kind[0] == "t" else int(kind[6:-1]))  # timestamp[..], bytes[n]
    key, time = offsets[stream["key"][0]], offsets[stream["time"]]
    hello |= {"row_bytes": row_bytes, "schema": about["schema"], "ack_bytes": 0}

    batches: dict[int, bytearray] = {}
    for i in range(count):
        row = bytearray(row_bytes)
        struct.pack_into("<q", row, key, i % 1000)
        struct.pack_into("<q", row, time, i)
        batches.setdefault(murmur3(i % 1000) % groups, bytearray()).extend(row)

    opened = sum(1 << group for group in batches).to_bytes((groups + 7) // 8, "little")
    for group, rows in batches.items():
        sock, _, wanted, _ = connect((host, int(port)), group, hello)
        for first in range(wanted, len(rows) // row_bytes, frame_rows):
            part = bytes(rows[first * row_bytes : (first + frame_rows) * row_bytes])
            sock.sendall(frame(DATA, group, len(part) // row_bytes, first, part))
        sock.sendall(frame(WATERMARK, group, max(count - 1, 0)) + frame(EOS, group))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # to the end: closing with unread answers would reset the connection
            pass
        sock.close()
    control.sendall(frame(WATERMARK, CONTROL, max(count - 1, 0), payload=opened))
    control.sendall(frame(EOS, CONTROL, payload=opened))
    read_ack(control)
    print(f"sent {count} rows of {row_bytes} bytes to {len(batches)} of {groups} groups of {name!r}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5])
