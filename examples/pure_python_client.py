"""A FlexStream producer in plain Python, written from docs/protocol.md alone: no FlexStream, no numpy.

Usage: python pure_python_client.py host:data_port stream rows [token]
Sends rows with increasing event times and keys 0..999; every other field is 0. The key must be one i64 field.
"""

import json
import re
import socket
import struct
import sys
import uuid

HELLO, DATA, WATERMARK, ACK, EOS, CONTROL = 1, 2, 3, 6, 7, 0xFFFF
HEADER = struct.Struct("<HBBHHIIQQ")


def group_of(key: int, groups: int) -> int:
    h = 42
    for k in (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        h ^= (k << 15 | k >> 17) * 0x1B873593 & 0xFFFFFFFF
        h = ((h << 13 | h >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= 8
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return (h - (1 << 32) if h >> 31 else h) % groups


def size_of(kind: str) -> int:  # bytes[16], i64, timestamp[ms], bool
    bits = re.fullmatch(r"[iuf](\d+)", kind)
    return int(kind[6:-1]) if kind.startswith("bytes") else int(bits[1]) // 8 if bits else 1 if kind == "bool" else 8


def frame(kind: int, group: int, value: int = 0, sequence: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(0x5346, 1, kind, 0, group, len(payload), 0, value, sequence) + payload


def read_ack(sock: socket.socket) -> tuple[int, int, dict]:
    _, _, kind, _, _, size, _, value, sequence = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
    body = sock.recv(size, socket.MSG_WAITALL) if size else b"{}"
    if kind != ACK:
        raise ConnectionError(f"the server answered {body.decode()}")
    return value, sequence, json.loads(body)


def connect(where: str, group: int, hello: dict) -> tuple[socket.socket, int, int, dict]:
    host, _, port = where.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(frame(HELLO, group, payload=json.dumps(hello).encode()))
    return (sock, *read_ack(sock))


def main(where: str, name: str, count: int, token: str | None = None) -> None:
    hello = {"versions": [1], "stream": name, "producer": str(uuid.uuid4()), "epoch": 1, "token": token}
    control, frame_rows, _, about = connect(where, CONTROL, hello)
    stream, groups, offsets, row_bytes = about["stream"], about["groups"], {}, 0
    for field, kind in stream["fields"].items():
        offsets[field] = row_bytes
        row_bytes += size_of(kind)
    hello |= {"row_bytes": row_bytes, "schema": about["schema"], "ack_bytes": 0}
    batches: dict[int, bytearray] = {}
    for i in range(count):
        row = bytearray(row_bytes)
        struct.pack_into("<q", row, offsets[stream["key"][0]], i % 1000)
        struct.pack_into("<q", row, offsets[stream["time"]], i)
        batches.setdefault(group_of(i % 1000, groups), bytearray()).extend(row)
    for group, rows in batches.items():
        sock, _, wanted, _ = connect(where, group, hello)
        for first in range(wanted, len(rows) // row_bytes, frame_rows):
            part = bytes(rows[first * row_bytes : (first + frame_rows) * row_bytes])
            sock.sendall(frame(DATA, group, len(part) // row_bytes, first, part))
        sock.sendall(frame(WATERMARK, group, count - 1) + frame(EOS, group))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # to the end: closing with unread answers would reset the connection
            pass
        sock.close()
    opened = sum(1 << group for group in batches).to_bytes((groups + 7) // 8, "little")
    control.sendall(frame(WATERMARK, CONTROL, max(count - 1, 0), payload=opened) + frame(EOS, CONTROL, payload=opened))
    read_ack(control)
    print(f"sent {count} rows of {row_bytes} bytes to {len(batches)} of {groups} groups of {name!r}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5])
