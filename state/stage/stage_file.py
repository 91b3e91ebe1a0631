"""Where the rows of a stage lie: frames in a file, or in memory for an engine without a directory.

A stage file is a sequence of wire frames (docs/protocol.md), each with a CRC: STAGE with what it belongs to, DATA for
each block of rows, EOS with the counts. It is finished when the EOS is whole; anything else that a crash left behind
is told by a CRC or a missing end. Frames are appended by positioned writes after the last whole one: a failed write
leaves the stage as it was. In a file each frame begins at a page (4096 bytes; zeros fill the rest of the last one), and
is written and read past the page cache.

Assumes: one writer; the directory belongs to one process (the daemon's lock sees to that).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flexstream.errors import StageError
from flexstream.state.stage.direct_io import (
    PAGE_BYTES,
    Bytes,
    SparePages,
    in_pages,
    open_direct,
    page_memory,
    read_pages,
    whole_pages,
    write_pages,
)
from flexstream.wire.frames import HEADER_BYTES, STAGE_GROUP, FrameType, Header, WireError, frame
from flexstream.wire.stage_block import check_crc

SUFFIX = ".stage"
KEPT_FRAME_BYTES = 64  # what a frame in memory takes besides its bytes


class StageFile:
    """The frames of one stage. `path` None keeps them in memory, or, after `spill`, in a nameless file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size_bytes = 0  # what it takes: in a file with what fills the pages
        self._fd = -1
        self._kept: list[bytes] = []  # in memory: whole frames

    @classmethod
    def create(cls, path: Path | None, about: dict[str, Any]) -> StageFile:
        """A new stage. StageError (`disk_full`, `stage_io`) leaves nothing behind."""
        stage = cls(path)
        try:
            if path is not None:
                stage._fd = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
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
        self.append_pages(*in_pages(*pieces))

    def append_pages(self, memory: Bytes, size: int) -> None:
        """Add one frame: the first `size` bytes of `memory`, which is of whole pages. Errors as above."""
        if self._in_memory:
            self._kept.append(memory[:size].tobytes())
            self.size_bytes += self.cost_of(size)
            return
        used = whole_pages(size)
        memory[size:used] = 0
        try:
            write_pages(self._fd, memory[:used], self.size_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)
            raise io_error("write", self.path, error) from error
        self.size_bytes += used

    def cost_of(self, size: int) -> int:
        """What a frame of so many bytes takes."""
        return size + KEPT_FRAME_BYTES if self._in_memory else whole_pages(size)

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
        end = 0
        try:
            for data in self._kept:
                memory, _ = in_pages(data)
                write_pages(fd, memory, end)
                end += len(memory)
        except OSError as error:
            os.close(fd)
            raise io_error("spill", Path(tempfile.gettempdir()), error) from error
        self._fd = fd
        self._kept = []
        self.size_bytes = end

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
                payload = stage._payload(fd, position, header, page_memory)
                if not check_crc(header, payload):
                    break
                document = json.loads(payload.tobytes())
                if header.type is FrameType.STAGE:
                    about = document
                elif position + _pages_of(header) == stage.size_bytes:
                    receipt = document if header.type is FrameType.EOS else None
        except (WireError, ValueError, StageError):
            receipt = None
        finally:
            os.close(fd)
        return (stage, about, receipt) if about is not None and receipt is not None else None

    def _open_to_read(self) -> int:
        try:
            return os.dup(self._fd) if self.path is None else open_direct(self.path, os.O_RDONLY)
        except OSError as error:
            raise io_error("read", self.path, error) from error

    def _headers(self, fd: int) -> Iterator[tuple[int, Header]]:
        at, page = 0, page_memory(PAGE_BYTES)
        while at < self.size_bytes:
            self._read(fd, page, at, HEADER_BYTES)
            header = Header.unpack(page[:HEADER_BYTES].tobytes())
            yield at, header
            at += _pages_of(header)

    def _payload(self, fd: int, position: int, header: Header, memory: Callable[[int], Bytes]) -> Bytes:
        size = HEADER_BYTES + header.payload_bytes
        into = memory(size)
        self._read(fd, into[: whole_pages(size)], position, size)
        return into[HEADER_BYTES:size]

    def _read(self, fd: int, memory: Bytes, position: int, wanted: int) -> None:
        try:
            n = read_pages(fd, memory, position, wanted)
        except OSError as error:
            raise io_error("read", self.path, error) from error
        if n < wanted:
            raise self._damaged(position)

    def blocks(self, memory: Callable[[int], Bytes] = page_memory) -> Iterator[tuple[Header, Bytes]]:
        """The DATA frames in order, each checked. StageError (`stage_damaged`) when one is not what was written.

        `memory` gives whole pages for so many bytes; what is yielded lies in them.
        """
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
                    payload = self._payload(fd, position, header, memory)
                    if not check_crc(header, payload):
                        raise self._damaged(position)
                    yield header, payload
        except WireError as error:
            raise self._damaged(self.size_bytes) from error
        finally:
            os.close(fd)

    def verify(self) -> None:
        spare = SparePages()
        for _, payload in self.blocks(spare.take):
            spare.give(payload)

    def _damaged(self, position: int) -> StageError:
        return StageError(
            f"stage {self.path} is damaged at byte {position}",
            code="stage_damaged",
            hint="the disk lost committed rows: restore the file from a backup and restart the daemon",
        )

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def move(self, folder: Path) -> None:
        """Into another folder, which is made. StageError leaves it where it was."""
        assert self.path is not None
        try:
            folder.mkdir(exist_ok=True, mode=0o750)
            self.path = self.path.rename(folder / self.path.name)
        except OSError as error:
            raise io_error("move", self.path, error) from error

    def discard(self) -> None:
        """Forget the rows and remove the file."""
        self.close()
        self._kept = []
        self.size_bytes = 0
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _json_frame(kind: FrameType, document: dict[str, Any]) -> bytes:
    return frame(kind, STAGE_GROUP, payload=json.dumps(document, separators=(",", ":")).encode(), crc=True)


def _pages_of(header: Header) -> int:
    return whole_pages(HEADER_BYTES + header.payload_bytes)


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
        hint="check the daemon's disk and the permissions of the directory; nothing of the batch was applied",
    )
