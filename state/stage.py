"""Where the rows of a stage lie: frames in a file, or in memory for an engine without a directory.

A stage file is a sequence of wire frames (docs/protocol.md), each with a CRC: STAGE with what it belongs to, DATA for
each block of rows, EOS with the counts. It is finished when the EOS is whole; anything else that a crash left behind
is told by a CRC or a missing end. Frames are appended by positioned writes after the last whole one: a failed write
leaves the stage as it was.

Assumes: one writer; the directory belongs to one process (the daemon's lock sees to that).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flexstream.errors import StageError
from flexstream.stage_block import Bytes, check_crc
from flexstream.wire import HEADER_BYTES, STAGE_GROUP, FrameType, Header, WireError, frame

SUFFIX = ".stage"
WRITE_BEHIND_BYTES = 8 << 20  # so much is on its way to the disk before finish() waits for it
_SYNC_FILE_RANGE_WRITE = 2


class StageFile:
    """The frames of one stage. `path` None keeps them in memory, or, after `spill`, in a nameless file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size_bytes = 0
        self._fd = -1
        self._kept: list[bytes] = []  # in memory: whole frames
        self._begun = 0  # bytes whose writing to the disk was begun

    @classmethod
    def create(cls, path: Path | None, about: dict[str, Any]) -> StageFile:
        """A new stage. StageError (`disk_full`, `stage_io`) leaves nothing behind."""
        stage = cls(path)
        try:
            if path is not None:
                stage._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            stage.append(_json_frame(FrameType.STAGE, about))
        except OSError as error:
            stage.discard()
            raise io_error("write", path, error) from error
        except StageError:
            stage.discard()
            raise
        return stage

    def append(self, *pieces: Any) -> None:
        """Add one frame, given in pieces. StageError leaves the stage as it was."""
        if self._in_memory:
            data = b"".join(pieces)
            self._kept.append(data)
            self.size_bytes += len(data)
            return
        try:
            self.size_bytes = _write_all(self._fd, [memoryview(piece).cast("B") for piece in pieces], self.size_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)
            raise io_error("write", self.path, error) from error
        if self.size_bytes - self._begun >= WRITE_BEHIND_BYTES:
            _begin_writing(self._fd, self._begun, self.size_bytes - self._begun)
            self._begun = self.size_bytes

    @property
    def _in_memory(self) -> bool:
        return self.path is None and self._fd < 0

    @property
    def in_memory_bytes(self) -> int:
        return self.size_bytes if self._in_memory else 0

    def spill(self) -> None:
        """Move what is in memory to a nameless file; it goes with this object."""
        with tempfile.TemporaryFile(prefix="flexstream-stage-") as made:
            fd = os.dup(made.fileno())
        try:
            _write_all(fd, [memoryview(b"".join(self._kept))], 0)
        except OSError as error:
            os.close(fd)
            raise io_error("spill", Path(tempfile.gettempdir()), error) from error
        self._fd = fd
        self._kept = []

    def finish(self, receipt: dict[str, Any]) -> None:
        """Write the end. With a path the stage survives a power cut when this returns."""
        self.append(_json_frame(FrameType.EOS, receipt))
        if self.path is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise io_error("write", self.path, error) from error
            self.close()  # thousands may wait at a time: readers open it again

    # Reading ------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> tuple[StageFile, dict[str, Any], dict[str, Any]] | None:
        """(stage, about, receipt) of a finished file; None when it was never finished."""
        stage = cls(path)
        fd = stage._open_to_read()
        stage.size_bytes = os.fstat(fd).st_size
        about = receipt = None
        try:
            for position, header in stage._headers(fd):
                if header.type is FrameType.DATA:
                    continue
                payload = stage._read(fd, position + HEADER_BYTES, header.payload_bytes)
                if not check_crc(header, payload):
                    break
                document = json.loads(payload.tobytes())
                if header.type is FrameType.STAGE:
                    about = document
                elif position + HEADER_BYTES + header.payload_bytes == stage.size_bytes:
                    receipt = document if header.type is FrameType.EOS else None
        except (WireError, ValueError, StageError):
            receipt = None
        finally:
            os.close(fd)
        return (stage, about, receipt) if about is not None and receipt is not None else None

    def _open_to_read(self) -> int:
        try:
            return os.dup(self._fd) if self.path is None else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise io_error("read", self.path, error) from error

    def _headers(self, fd: int) -> Iterator[tuple[int, Header]]:
        at = 0
        while at < self.size_bytes:
            header = Header.unpack(self._read(fd, at, HEADER_BYTES).tobytes())
            yield at, header
            at += HEADER_BYTES + header.payload_bytes

    def _read(self, fd: int, position: int, length: int) -> Bytes:
        data = np.empty(length, np.uint8)
        view, at = data.data, 0
        while at < length:
            try:
                n = os.preadv(fd, [view[at:]], position + at)
            except OSError as error:
                raise io_error("read", self.path, error) from error
            if n == 0:
                raise self._damaged(position)
            at += n
        return data

    def blocks(self) -> Iterator[tuple[Header, Bytes]]:
        """The DATA frames in order, each checked. StageError (`stage_damaged`) when one is not what was written."""
        if self._in_memory:
            for data in self._kept:
                header = Header.unpack(data)
                if header.type is FrameType.DATA:
                    yield header, np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
            return
        fd = self._open_to_read()
        try:
            for position, header in self._headers(fd):
                if header.type is FrameType.DATA:
                    payload = self._read(fd, position + HEADER_BYTES, header.payload_bytes)
                    if not check_crc(header, payload):
                        raise self._damaged(position)
                    yield header, payload
        except WireError as error:
            raise self._damaged(self.size_bytes) from error
        finally:
            os.close(fd)

    def verify(self) -> None:
        for _ in self.blocks():
            pass

    def _damaged(self, position: int) -> StageError:
        return StageError(
            f"stage {self.path} is damaged at byte {position}",
            code="stage_damaged",
            hint="the disk lost what was committed: restore the file from a backup and restart",
        )

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Forget the rows and remove the file."""
        self.close()
        self._kept = []
        self.size_bytes = 0
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _json_frame(kind: FrameType, document: dict[str, Any]) -> bytes:
    return frame(kind, STAGE_GROUP, payload=json.dumps(document, separators=(",", ":")).encode(), crc=True)


def _write_all(fd: int, pieces: list[memoryview], position: int) -> int:
    """Write the pieces one after the other from `position` on; returns the position after them."""
    while pieces:
        written = os.pwritev(fd, pieces, position)
        position += written
        while pieces and written >= len(pieces[0]):
            written -= len(pieces[0])
            pieces = pieces[1:]
        if written:
            pieces = [pieces[0][written:], *pieces[1:]]
    return position


def _begin_writing(fd: int, start: int, length: int) -> None:
    """Ask the kernel to begin; a hint, so that finish() has little left to wait for."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).sync_file_range(
            fd, ctypes.c_int64(start), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


def io_error(action: str, path: Path | None, error: OSError) -> StageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StageError(
            f"cannot {action} the stage {path}: {error.strerror}",
            code="disk_full",
            hint="free some space in the daemon's data_dir, then run the batch again: nothing of it was applied",
        )
    return StageError(
        f"cannot {action} the stage {path}: {error.strerror or error}",
        code="stage_io",
        hint="look at the daemon's disk and the directory's permissions; nothing of the batch was applied",
    )
