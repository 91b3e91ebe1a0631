"""A small client of the daemon's HTTP API, on the standard library alone. The CLI speaks through this.

client = Client("127.0.0.1:7401")
client.get("/v1/status")["state"]
for row in client.rows("ysb", follow=True): ...
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from flexstream.addresses import CONTROL_PORT, join_address, split_address
from flexstream.errors import ConfigError, ConnectError, FlexStreamError

if TYPE_CHECKING:
    import pyarrow as pa


class Client:
    """A daemon's control port. `address` is "host:port" or "http://host:port". Each call uses a connection of its own.

    Errors that the daemon reports come back as FlexStreamError with its code, message and hint;
    ConnectError means that it could not be asked at all.
    """

    def __init__(self, address: str = "", *, token: str | None = None, timeout_s: float = 10.0) -> None:
        text = address.removeprefix("http://").rstrip("/") or f"127.0.0.1:{CONTROL_PORT}"
        try:
            self.host, self.port = split_address(text, CONTROL_PORT)
        except ValueError as error:
            raise ConfigError(f"{address!r} is not the address of a daemon", hint=f"give {error}") from None
        self.token = token
        self._timeout_s = timeout_s

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def get(self, path: str, **params: object) -> Any:
        return self._json("GET", _with(path, params))

    def post(self, path: str, body: Any) -> Any:
        return self._json("POST", path, json.dumps(body).encode())

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def probe(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET whose refusal is an answer too (/readyz)."""
        with self._request("GET", path) as reply:
            return reply.status, _decode(reply.read())

    def rows(self, query: str, *, late: bool = False, **params: object) -> Iterator[dict[str, Any]]:
        """Result rows (or the late ones) as dicts, in order; with follow=True until the daemon stops."""
        for line in self.lines(query, late=late, **params):
            yield json.loads(line)

    def lines(self, query: str, *, late: bool = False, **params: object) -> Iterator[str]:
        """The same as JSON lines, unparsed. ConnectError when the reply is cut before its end."""
        path = _with(_results(query, late), {**params, "format": "jsonl"})
        with self._request("GET", path, endless=bool(params.get("follow"))) as reply:
            self._check(reply)
            rest = b""
            while data := self._read_some(reply):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8")
            if rest:
                raise self._cut(EOFError("in the middle of a row"))

    def batches(self, query: str, *, late: bool = False, **params: object) -> Iterator[pa.RecordBatch]:
        """The same as Arrow record batches."""
        import pyarrow as pa

        path = _with(_results(query, late), {**params, "format": "arrow"})
        with self._request("GET", path, endless=bool(params.get("follow"))) as reply:
            self._check(reply)
            try:
                with pa.ipc.open_stream(reply) as reader:
                    yield from reader
            except (pa.ArrowException, OSError, http.client.HTTPException) as error:
                raise self._cut(error) from error

    # --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _request(
        self, method: str, path: str, body: bytes | None = None, *, endless: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            if endless and connection.sock is not None:
                connection.sock.settimeout(None)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error
        try:
            yield reply
        finally:
            reply.close()
            connection.close()

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        with self._request(method, path, body) as reply:
            self._check(reply)
            try:
                return _decode(reply.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._cut(error) from error

    def _check(self, reply: http.client.HTTPResponse) -> None:
        if reply.status < 400:
            return
        body = _decode(reply.read())
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict):
            raise ConnectError(
                f"{self.address} answered {reply.status} {reply.reason}, which no FlexStream daemon would",
                code="not_a_daemon",
                hint="is --url the daemon's control port (7401), not its data port?",
            )
        message = str(error.get("message"))
        raise FlexStreamError(message, code=str(error.get("code")), hint=error.get("hint"))

    def _read_some(self, reply: http.client.HTTPResponse) -> bytes:
        # Not readline(): it takes a chunked reply that was cut for one that ended.
        try:
            return reply.read1(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            raise self._cut(error) from error

    def _unreachable(self, error: Exception) -> ConnectError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConnectError(
            f"no daemon answers at {self.address}: {reason}",
            code="unreachable",
            hint="start one with `flexstream serve`, or give --url HOST:PORT",
        )

    def _cut(self, error: BaseException) -> ConnectError:
        return ConnectError(
            f"the reply from {self.address} ended early: {error or type(error).__name__}",
            code="reply_cut",
            hint="the daemon stopped, or retention removed the rows meanwhile; its log says which",
        )


def _results(query: str, late: bool) -> str:
    return f"/v1/queries/{quote(query, safe='')}/{'late' if late else 'results'}"


def _with(path: str, params: dict[str, object]) -> str:
    given = {name: int(v) if isinstance(v, bool) else v for name, v in params.items() if v is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
