"""From the address that a user gives to the data port. Only the standard library; one GET."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from flexstream.addresses import join_address, split_address
from flexstream.errors import ConfigError, ConnectError, FlexStreamError, ProtocolError

_ANY_HOSTS = {"0.0.0.0", "::", ""}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a producer connects: `host:port` is the control port (HTTP), `tcp://host:port` the data port itself."""

    host: str
    port: int
    direct: bool = False

    @classmethod
    def parse(cls, text: str, *, direct: bool = False) -> Address:
        rest = text.strip()
        for scheme, is_direct in (("tcp://", True), ("http://", False)):
            if rest.startswith(scheme):
                rest, direct = rest[len(scheme) :].rstrip("/"), is_direct
        try:
            host, port = split_address(f"127.0.0.1{rest}" if rest.startswith(":") else rest)
        except ValueError:
            host, port = "", 0
        if not port or "/" in rest:
            raise ConfigError(
                f"{text!r} is not an address",
                code="bad_address",
                hint="give host:port of the control port (7401), or tcp://host:port of the data port (7400)",
            )
        return cls(host, port, direct)

    def __str__(self) -> str:
        return ("tcp://" if self.direct else "") + join_address(self.host, self.port)


def find_data_port(control: Address, stream: str, token: str | None, timeout_s: float) -> Address:
    """Ask the control port for the data port of a stream.

    Raises ConnectError when nobody answers, ProtocolError when the answer is a refusal (its `code` is the
    server's) or not FlexStream's.
    """
    path = f"/v1/streams/{quote(stream, safe='')}"
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(control.host, control.port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        status, body = answer.status, answer.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectError(
            f"no answer from the control port {control} (GET {path}): {error or type(error).__name__}",
            hint="is the daemon running there? `flexstream serve` listens on 127.0.0.1:7401",
        ) from error
    finally:
        connection.close()
    if status != 200:
        raise _refusal(control, path, status, body)
    try:
        data = Address.parse(json.loads(body)["data"], direct=True)
    except (ValueError, KeyError, TypeError, AttributeError, FlexStreamError) as error:
        raise ProtocolError(
            f"{control} answered GET {path}, but not with the description of a stream",
            code="bad_answer",
            hint="is this a FlexStream control port? tcp://host:port names a data port directly",
        ) from error
    return Address(control.host, data.port, True) if data.host in _ANY_HOSTS else data


def _refusal(control: Address, path: str, status: int, body: bytes) -> FlexStreamError:
    document: Any = {}
    try:
        document = json.loads(body)
        document = document.get("error", document)
    except (ValueError, AttributeError):
        pass
    if not isinstance(document, dict):
        document = {}
    code = {401: "bad_token", 403: "bad_token", 404: "unknown_stream"}.get(status)
    message = document.get("message") or f"HTTP status {status}"
    kind = ConnectError if status >= 500 else ProtocolError
    return kind(
        f"{control} refused GET {path}: {message}",
        code=document.get("code") or code,
        hint=document.get("hint"),
    )
