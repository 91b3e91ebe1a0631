"""A TCP proxy that misbehaves on purpose: put it between a producer and an engine and see what survives.

    with FaultProxy(engine.data_address, Faults(cut="reset", cut_after=(100, 5000)), seed=7) as proxy:
        with Producer(f"tcp://{proxy.host}:{proxy.port}", stream="ads") as producer: ...

What happens to a connection depends only on the seed and on its number in order of arrival: where it is cut and
into which pieces its bytes fall; when they pass is up to the machine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: no waiting, so close() sends RST
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Faults:
    """What to do to connections. The default does nothing.

    delay_s: before each piece, in both directions. piece_bytes: forward 1 to so many bytes at a time.
    cut: how a connection ends after a number of bytes to the server that is drawn from `cut_after`: "reset"
    (RST to both), "close" (FIN to both; in mid-frame if it falls there), "half_close" (FIN to the server, which
    may still answer; the client's bytes vanish). flip_after: a bit of a byte that is drawn from this range of
    positions is flipped. first, count: the numbers of the connections that this happens to.
    """

    delay_s: float = 0.0
    piece_bytes: int | None = None
    cut: Literal["reset", "close", "half_close"] | None = None
    cut_after: tuple[int, int] = (0, 65536)
    flip_after: tuple[int, int] | None = None
    first: int = 0
    count: int | None = None

    def touches(self, number: int) -> bool:
        return number >= self.first and (self.count is None or number < self.first + self.count)


class _Link:
    """One connection through the proxy: two sockets and the two tasks that pump between them."""

    def __init__(self, client: socket.socket, server: socket.socket, plan: Faults, rng: random.Random) -> None:
        self.client, self.server, self.plan, self.rng = client, server, plan, rng
        self.cut_at = rng.randint(*plan.cut_after) if plan.cut else None
        self.flip_at = rng.randint(*plan.flip_after) if plan.flip_after else None
        self.tasks: list[asyncio.Task[None]] = []

    def end(self, *, reset: bool) -> None:
        for sock in (self.client, self.server):
            if reset and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.close()


class FaultProxy:
    """Listens on 127.0.0.1 and forwards to `upstream`. `faults` may be changed at any time, for new connections.

    pause() holds all bytes back until resume(), or only the server's answers; break_all() ends every connection
    there is, with RST or FIN, and what was held back is lost.
    """

    def __init__(self, upstream: tuple[str, int], faults: Faults | None = None, *, seed: int = 0) -> None:
        self.upstream, self.faults, self.seed = upstream, faults or Faults(), seed
        self.connections = 0
        self.cuts = 0
        self.flips = 0
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._stop.set)
        self._thread.join(timeout=5)

    def pause(self, *, only_answers: bool = False) -> None:
        for to_server in (False,) if only_answers else (False, True):
            self._call(self._flowing[to_server].clear)

    def resume(self) -> None:
        for flowing in self._flowing.values():
            self._call(flowing.set)

    def break_all(self, *, reset: bool = True) -> None:
        """Ends the connections there are now; returns when that is done."""
        done = threading.Event()
        self._call(lambda: self._end_all(reset=reset))
        self._call(done.set)
        done.wait(5)

    def _call(self, what: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(what)

    def outgoing(self, client: socket.socket, number: int) -> socket.socket:
        """The socket that connection `number` leaves by; one may bind it to another source."""
        return socket.socket()

    async def _serve(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._flowing = {to_server: asyncio.Event() for to_server in (False, True)}
        for flowing in self._flowing.values():
            flowing.set()
        accepting = loop.create_task(self._accept())
        self._ready.set()
        await self._stop.wait()
        accepting.cancel()
        self._listener.close()
        self._end_all(reset=True)

    def _end_all(self, *, reset: bool) -> None:
        for link in list(self._links):
            self._cut(link, reset=reset)

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            number, self.connections = self.connections, self.connections + 1
            server = self.outgoing(client, number)
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await self._loop.sock_connect(server, self.upstream)
            except OSError:  # nobody there: the client sees that too
                client.close()
                server.close()
                continue
            plan = self.faults if self.faults.touches(number) else Faults()
            link = _Link(client, server, plan, random.Random(f"{self.seed}/{number}"))
            self._links.add(link)
            link.tasks = [
                self._loop.create_task(self._pump(link, client, server, to_server=True)),
                self._loop.create_task(self._pump(link, server, client, to_server=False)),
            ]

    async def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        passed = 0
        try:
            while data := await self._loop.sock_recv(source, _READ_BYTES):
                for piece in self._pieces(link, data):
                    await self._flowing[to_server].wait()
                    if link.plan.delay_s:
                        await asyncio.sleep(link.plan.delay_s)
                    if to_server and link.cut_at is not None and passed + len(piece) >= link.cut_at:
                        await self._loop.sock_sendall(sink, self._flipped(link, piece, passed)[: link.cut_at - passed])
                        return self._end_early(link)
                    await self._loop.sock_sendall(sink, self._flipped(link, piece, passed) if to_server else piece)
                    passed += len(piece)
            sink.shutdown(socket.SHUT_WR)  # one side is done; the other may go on
            if all(task.done() or task is asyncio.current_task() for task in link.tasks):
                self._cut(link, reset=False, counted=False)
        except OSError:
            self._cut(link, reset=True, counted=False)

    def _pieces(self, link: _Link, data: bytes) -> list[bytes]:
        pieces = []
        while link.plan.piece_bytes and data:
            n = link.rng.randint(1, link.plan.piece_bytes)
            pieces.append(data[:n])
            data = data[n:]
        return pieces or [data]

    def _flipped(self, link: _Link, piece: bytes, passed: int) -> bytes:
        if link.flip_at is None or not passed <= link.flip_at < passed + len(piece):
            return piece
        self.flips += 1
        changed = bytearray(piece)
        changed[link.flip_at - passed] ^= 1 << link.rng.randrange(8)
        return bytes(changed)

    def _end_early(self, link: _Link) -> None:
        if link.plan.cut == "half_close":
            self.cuts += 1
            link.server.shutdown(socket.SHUT_WR)
        else:
            self._cut(link, reset=link.plan.cut == "reset")

    def _cut(self, link: _Link, *, reset: bool, counted: bool = True) -> None:
        if link in self._links:
            self._links.discard(link)
            self.cuts += counted
            for task in link.tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            link.end(reset=reset)
