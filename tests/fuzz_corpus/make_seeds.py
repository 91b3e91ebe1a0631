"""Writes the hand-made seeds of tests/fuzz_corpus/frames: `python -m tests.fuzz_corpus.make_seeds`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from flexstream import Stream
from flexstream.wire.frames import FrameType, Header, frame
from tests.fuzz_corpus.frame_target import SMALL, TEXT, check

FOLDER = Path(__file__).parent / "frames"


def rows(stream: Stream, n: int, groups: int = 1) -> bytes:
    made = np.zeros(n * groups * 4, stream.schema.dtype)
    made["t"] = np.arange(len(made))
    made["k"] = np.arange(len(made)) if stream is SMALL else [b"%d" % i for i in range(len(made))]
    return made[stream.group_of(made, groups) == 0][:n].tobytes()


def data(stream: Stream, n: int, sequence: int, *, crc: bool = False, groups: int = 1) -> bytes:
    return frame(FrameType.DATA, 0, value=n, sequence=sequence, payload=rows(stream, n, groups), crc=crc)


def seeds() -> list[bytes]:
    wm, eos = frame(FrameType.WATERMARK, 0, value=2**64 - 5), frame(FrameType.EOS, 0)
    marker, barrier = frame(FrameType.MARKER, 0, value=9), frame(FrameType.BARRIER, 0, value=1)
    found = [b"", b"\0", b"\0\0", b"\0\0FS"]
    for bits, stream in ((0, SMALL), (8, TEXT)):
        one, two = data(stream, 3, 0), data(stream, 2, 3)
        crc_one, crc_two = data(stream, 3, 0, crc=True), data(stream, 2, 3, crc=True)
        grouped = data(stream, 4, 0, groups=8)
        found += [
            bytes([bits, 7]) + one + wm + two + marker + barrier + eos,
            bytes([bits, 0]) + one + two,
            bytes([bits, 9]) + one + one + two + data(stream, 4, 2),
            bytes([bits | 4, 9]) + one + data(stream, 6, 1),
            bytes([bits, 3]) + data(stream, 1, 1),
            bytes([bits, 3]) + eos + wm,
            bytes([bits, 3]) + one[:-5],
            bytes([bits | 1, 5]) + crc_one + wm + crc_two + eos,
            bytes([bits | 33, 5]) + crc_one + crc_two,
            bytes([bits | 1, 5]) + crc_one[:-1] + b"\xff" + crc_two,
            bytes([bits | 1, 5]) + one,
            bytes([bits, 5]) + crc_one,
            bytes([bits | 16, 5]) + grouped + wm,
            bytes([bits | 16, 5]) + one,
            bytes([bits | 64, 5]) + data(stream, 12, 0),
            bytes([bits | 64, 5]) + data(stream, 60, 0)[:40],
        ]
    head = Header(FrameType.DATA, 0, value=2**64 - 1, payload_bytes=2**32 - 1, sequence=2**64 - 1).pack()
    found += [bytes([0, 1]) + head, bytes([1, 1]) + head, bytes([0, 1]) + frame(FrameType.DATA, 0, value=0)]
    found += [bytes([0, 1]) + frame(kind, 0) for kind in (FrameType.HELLO, FrameType.ACK, FrameType.ERROR)]
    found += [bytes([0, 1]) + frame(FrameType.EOS, 0, payload=b"x"), bytes([0, 1]) + b"FS\x02\x02" + b"\0" * 28]
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for seed in seeds():
        check(seed)
        (FOLDER / hashlib.sha1(seed).hexdigest()[:16]).write_bytes(seed)
    print(f"{len(list(FOLDER.iterdir()))} files in {FOLDER}")
