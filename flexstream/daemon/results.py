"""Streaming a query's results and late rows to an HTTP client, as they are or as they come."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web

from flexstream.daemon.params import MAX_OFFSET
from flexstream.daemon.problems import ApiError
from flexstream.errors import FlexStreamError
from flexstream.results.export import json_lines
from flexstream.state.results.already_logged import column

if TYPE_CHECKING:
    import pyarrow as pa

    from flexstream.daemon.threads import Threads
    from flexstream.results.follow_log import ReadableLog

log = logging.getLogger("flexstream.http")
BATCH_ROWS = 8192
ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
ARROW_TYPE = "application/vnd.apache.arrow.stream"
JSONL_TYPE = "application/x-ndjson"
FORMATS = ("arrow", "jsonl")
WRITE_TIMEOUT_S = 30.0  # for a client to read what it asked for
_LOOK_S = 1.0  # how often a waiting reader looks whether its client is still there


class Readers:
    """Bounds how many result streams are open at once, and ends them all when the daemon stops.

    Followers have three quarters of the places, those of one address half, and one address three quarters in all: who
    wants to read what is there finds one.
    """

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._open: Counter[tuple[str, bool]] = Counter()  # by (peer, whether it follows)
        self.cut = 0  # ended because nobody read what was sent
        self.stopping = asyncio.Event()

    @property
    def open(self) -> int:
        return self._open.total()

    @contextmanager
    def place(self, peer: str, follow: bool) -> Iterator[None]:
        """Raises ApiError: no place is left."""
        theirs = self._open[peer, True] + self._open[peer, False]
        following = sum(count for (_, follows), count in self._open.items() if follows)
        many, half = max(1, self.limit * 3 // 4), max(1, self.limit // 2)
        full = self.open >= self.limit or theirs >= many
        if full or (follow and (following >= many or self._open[peer, True] >= half)):
            raise ApiError(
                f"{self.open} result streams are open already, {theirs} of them to {peer}",
                code="too_many_readers",
                hint="close some (`follow=1` holds one each), or read without follow",
            )
        self._open[peer, follow] += 1
        try:
            yield
        finally:
            self._open[peer, follow] -= 1
            self._open += Counter()  # forgets who has none


class Reply:
    """An HTTP response in one of the formats: the headers, then batch after batch, then the end."""

    def __init__(
        self, request: web.Request, readers: Readers, threads: Threads, form: str, schema: pa.Schema,
        headers: dict[str, str],
    ) -> None:  # fmt: skip
        self._request = request
        self._readers = readers
        self._threads = threads
        self._form = form
        self._schema = schema
        kind = ARROW_TYPE if form == "arrow" else JSONL_TYPE
        self.response = web.StreamResponse(
            headers={**headers, "Content-Type": kind, "Cache-Control": "no-store"}
        )

    async def begin(self) -> None:
        await self.response.prepare(self._request)
        if self._form == "arrow":
            await self._write(self._schema.serialize().to_pybytes())

    async def send(self, batch: pa.RecordBatch) -> None:
        if self._form == "arrow":
            await self._write(batch.serialize().to_pybytes())
        else:
            await self._write(await self._threads.run("reads", json_lines, batch))

    async def _write(self, data: bytes) -> None:
        """TimeoutError: the client does not read."""
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self.response.write(data)

    async def end(self) -> None:
        if self._form == "arrow":
            await self._write(ARROW_END)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self.response.write_eof()

    @property
    def client_is_gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()

    @asynccontextmanager
    async def whole_or_cut(self) -> AsyncIterator[None]:
        """End the reply when all went well. On any error cut the connection instead: the status line is gone
        already, and the client must not take what it has for everything.
        """
        try:
            yield
            await self.end()
        except ConnectionResetError:
            pass  # the client went away
        except TimeoutError:
            self._readers.cut += 1
            unread = {"path": self._request.path, "peer": self._request.remote, "after_s": WRITE_TIMEOUT_S}
            log.warning("result_reader_does_not_read", extra={"fields": unread})
            if self._request.transport is not None:
                self._request.transport.abort()
        except Exception as error:
            fields = {"path": self._request.path, "error": error}
            known = isinstance(error, FlexStreamError)
            log.warning("result_stream_cut", extra={"fields": fields}, exc_info=not known)
            if self._request.transport is not None:
                self._request.transport.close()


async def stream_log(
    request: web.Request,
    results: ReadableLog,
    readers: Readers,
    threads: Threads,
    *,
    offset: int | None,
    limit: int | None,
    form: str,
    follow: bool,
    part: tuple[int, int] = (0, 1),
) -> web.StreamResponse:
    """Send rows from `offset` on (None: the oldest there is); with `follow` wait for more.

    `part` (i, n): of these rows, the ones whose group mod n is i. Offset and limit count all rows.
    """
    if offset is None:
        offset = results.first_offset
    elif offset < results.first_offset:
        await threads.run("reads", results.read, offset, 1)  # raises offset_expired, with what to do
    headers = {
        "X-FlexStream-First-Offset": str(results.first_offset),
        "X-FlexStream-Next-Offset": str(results.next_offset),
        "X-FlexStream-Generation": str(results.generation),
        "X-FlexStream-Generation-Offset": str(results.generation_offset),
    }
    with readers.place(request.remote or "?", follow):
        reply = Reply(request, readers, threads, form, results.schema, headers)
        await reply.begin()
        async with reply.whole_or_cut():
            await _send_rows(reply, results, readers, threads, offset, limit, follow, part)
        return reply.response


async def _send_rows(
    reply: Reply, results: ReadableLog, readers: Readers, threads: Threads, offset: int, limit: int | None,
    follow: bool, part: tuple[int, int],
) -> None:  # fmt: skip
    left = limit if limit is not None else MAX_OFFSET
    loop = asyncio.get_running_loop()
    grown = asyncio.Event()
    remove = results.add_listener(lambda _: _wake(loop, grown))
    try:
        while left > 0:
            grown.clear()
            for batch in await threads.run("reads", results.read, offset, min(left, BATCH_ROWS)):
                await reply.send(batch if part[1] == 1 else await threads.run("reads", of_part, batch, *part))
                offset += batch.num_rows
                left -= batch.num_rows
            if offset < results.next_offset:
                continue
            if not follow or results.closed or readers.stopping.is_set() or reply.client_is_gone:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(grown.wait(), _LOOK_S)
    finally:
        remove()


def of_part(batch: pa.RecordBatch, part: int, parts: int) -> pa.RecordBatch:
    """The rows of groups that belong to a part."""
    import pyarrow as pa

    groups = column(batch.column("group"), np.dtype("<i4"))
    return batch.filter(pa.array(groups % parts == part))


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)
