"""The producer for asyncio (and uvloop): the same session, with every wait awaitable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from flexstream.client.producer import Producer
from flexstream.errors import ConnectError
from flexstream.rows.stream import Stream

T = TypeVar("T")


class AsyncProducer:
    """A Producer for asyncio: `async with AsyncProducer(address, stream=...) as producer: await producer.send(rows)`.

    Takes the arguments of Producer. Packing, partitioning and sending run on one thread of its own, in the
    order of the calls, mostly without the GIL: the event loop goes on. `await send` returns when the rows are
    taken, so back-pressure suspends the task that sends, and only that one. With `on_full="raise"` it raises
    RingFull instead.

    Cancelling a `send` stops the waiting, not the sending: rows already handed over still go out, exactly
    once.
    """

    def __init__(self, address: str, *, stream: str | Stream, **settings: Any) -> None:
        self._make = partial(Producer, address, stream=stream, **settings)
        self._producer: Producer | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flexstream-async")

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _live(self) -> Producer:
        if self._producer is None:
            raise ConnectError("the producer is not open", code="closed", hint="use `async with`, or `await open()`")
        return self._producer

    async def open(self) -> AsyncProducer:
        """Connect and register the session; `async with` does it. Raises as Producer does."""
        if self._producer is None:
            self._producer = await self._call(self._make)
        return self

    @property
    def stream(self) -> Stream:
        return self._live.stream

    @property
    def groups(self) -> int:
        return self._live.groups

    @property
    def state(self) -> str:
        """As Producer.state; "connecting" before open()."""
        return self._producer.state if self._producer else "connecting"

    async def send(self, rows: Any, *, missing: Any = None) -> int:
        """Producer.send. Do not change `rows` before it returns."""
        return await self._call(partial(self._live.send, rows, missing=missing))

    async def watermark(self, time: Any) -> None:
        await self._call(partial(self._live.watermark, time))

    async def marker(self) -> int:
        return await self._call(self._live.marker)

    async def flush(self, timeout: float | None = None) -> None:
        await self._call(partial(self._live.flush, timeout))

    async def close(self, timeout: float = 30.0) -> None:
        """Producer.close: end of stream, and the wait for the server's last word."""
        await self._end(partial(self._live.close, timeout))

    async def _end(self, work: Callable[[], None]) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._call(work)
        finally:
            self._thread.shutdown(wait=False)

    def stats(self) -> dict[str, Any]:
        return self._live.stats()

    async def __aenter__(self) -> AsyncProducer:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(partial(self._live.__exit__, kind, error, trace))
