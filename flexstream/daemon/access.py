"""Who may ask the daemon for something: token, host and origin of a request, and the headers of every reply."""

from __future__ import annotations

import asyncio
import hmac
import logging
from urllib.parse import urlsplit

from aiohttp import web, web_response

from flexstream.addresses import is_loopback, split_address
from flexstream.daemon.problems import ApiError
from flexstream.ingest.pace import Slowing

log = logging.getLogger("flexstream.http")
READING = ("GET", "HEAD", "OPTIONS")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# What a port scan need not know. aiohttp has no other way for the replies that it makes before there is a request.
web_response.SERVER_SOFTWARE = "flexstream"


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: nothing here is for a browser to guess at, frame or keep."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


class Access:
    """Checks requests. A peer that fails again and again waits for its refusals."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self.slowing = Slowing()
        self.failures = 0

    async def check(self, request: web.Request) -> None:
        """Raises ApiError."""
        if "Host" not in request.headers:
            raise ApiError("the request has no Host header", code="no_host", hint="send HTTP/1.1 with a Host header")
        if self._token is not None:
            await self._check_token(request, self._token)
        else:
            self._check_host(request)
        if request.method not in READING:
            self._check_origin(request)

    async def _check_token(self, request: web.Request, token: str) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
        if scheme.lower() == "bearer" and same:
            return
        peer = request.remote or "?"
        self.failures += 1
        fields = {"peer": peer, "method": request.method, "path": request.path, "given": bool(given)}
        log.warning("authentication_failed", extra={"fields": fields})
        await asyncio.sleep(self.slowing.failed(peer))
        raise ApiError(
            "the token is missing or wrong",
            code="bad_token",
            hint="send `Authorization: Bearer TOKEN` (the CLI: --token-file FILE)",
        )

    def _check_host(self, request: web.Request) -> None:
        """Without a token only this machine may ask, by a local name: no web page can rebind its own."""
        try:
            host, _ = split_address(request.headers["Host"], 0)
        except ValueError:
            host = ""
        if not is_loopback(host):
            raise ApiError(
                f"the Host header names {request.host[:100]!r}, not this machine",
                code="bad_host",
                hint="use 127.0.0.1 or localhost, or give the daemon a --token-file",
            )

    def _check_origin(self, request: web.Request) -> None:
        """A page of another site, in a browser that can reach the daemon, changes nothing."""
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = origin is not None and urlsplit(origin).netloc != request.headers["Host"]
        if foreign or site not in ("none", "same-origin"):
            raise ApiError(
                f"the request comes from another site ({str(origin)[:100]!r}, {site[:32]!r})",
                code="bad_origin",
                hint="web pages may not change anything here; use the command line or a program",
            )
