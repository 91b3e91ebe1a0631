"""Streaming a query's results and late rows to an HTTP client, as they are or as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web

from flexstream.daemon.params import MAX_OFFSET
from flexstream.daemon.problems import ApiError
from flexstream.errors import FlexStreamError
from flexstream.sinks import json_lines
from flexstream.state.known import column

if TYPE_CHECKING:
    import pyarrow as pa

    from flexstream.state.result_log import ResultLog

log = logging.getLogger("flexstream.http")
BATCH_ROWS = 8192
ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
ARROW_TYPE = "application/vnd.apache.arrow.stream"
JSONL_TYPE = "application/x-ndjson"
FORMATS = ("arrow", "jsonl")
_LOOK_S = 1.0  # how often a waiting reader looks whether its client is still there


class Readers:
    """Bounds how many result streams are open at once, and ends them all when the daemon stops."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self.open = 0
        self.stopping = asyncio.Event()

    def __enter__(self) -> Readers:
        if self.open >= self.limit:
            raise ApiError(
                f"{self.open} result streams are open already",
                code="too_many_readers",
                hint="close some (`follow=1` holds one each), or read without follow",
            )
        self.open += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.open -= 1


class Reply:
    """An HTTP response in one of the formats: the headers, then batch after batch, then the end."""

    def __init__(self, request: web.Request, form: str, schema: pa.Schema, headers: dict[str, str]) -> None:
        self._request = request
        self._form = form
        self._schema = schema
        kind = ARROW_TYPE if form == "arrow" else JSONL_TYPE
        self.response = web.StreamResponse(
            headers={**headers, "Content-Type": kind, "Cache-Control": "no-store"}
        )

    async def begin(self) -> None:
        await self.response.prepare(self._request)
        if self._form == "arrow":
            await self.response.write(self._schema.serialize().to_pybytes())

    async def send(self, batch: pa.RecordBatch) -> None:
        if self._form == "arrow":
            await self.response.write(batch.serialize().to_pybytes())
        else:
            await self.response.write(await asyncio.to_thread(json_lines, batch))

    async def end(self) -> None:
        if self._form == "arrow":
            await self.response.write(ARROW_END)
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
        except Exception as error:
            fields = {"path": self._request.path, "error": error}
            known = isinstance(error, FlexStreamError)
            log.warning("result_stream_cut", extra={"fields": fields}, exc_info=not known)
            if self._request.transport is not None:
                self._request.transport.close()


async def stream_log(
    request: web.Request,
    results: ResultLog,
    readers: Readers,
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
        await asyncio.to_thread(results.read, offset, 1)  # raises offset_expired, with what to do
    headers = {
        "X-FlexStream-First-Offset": str(results.first_offset),
        "X-FlexStream-Next-Offset": str(results.next_offset),
        "X-FlexStream-Generation": str(results.generation),
        "X-FlexStream-Generation-Offset": str(results.generation_offset),
    }
    with readers:
        reply = Reply(request, form, results.schema, headers)
        await reply.begin()
        async with reply.whole_or_cut():
            await _send_rows(reply, results, readers, offset, limit, follow, part)
        return reply.response


async def _send_rows(
    reply: Reply, results: ResultLog, readers: Readers, offset: int, limit: int | None, follow: bool,
    part: tuple[int, int],
) -> None:  # fmt: skip
    left = limit if limit is not None else MAX_OFFSET
    loop = asyncio.get_running_loop()
    grown = asyncio.Event()
    remove = results.add_listener(lambda _: _wake(loop, grown))
    try:
        while left > 0:
            grown.clear()
            for batch in await asyncio.to_thread(results.read, offset, min(left, BATCH_ROWS)):
                await reply.send(batch if part[1] == 1 else await asyncio.to_thread(of_part, batch, *part))
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
