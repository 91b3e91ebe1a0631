"""The HTTP routes of producers' sessions: who is there, and the end of one that holds or poisons a stream."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from flexstream.catalog.sessions import KINDS
from flexstream.daemon.params import Params

if TYPE_CHECKING:
    from flexstream.daemon.server import Daemon

log = logging.getLogger("flexstream.daemon")


class SessionRoutes:
    def __init__(self, daemon: Daemon) -> None:
        self._engine = daemon.engine

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/streams/{name}/sessions", self.list_sessions, allow_head=False),
            web.delete("/v1/streams/{name}/sessions/{producer}", self.end_session),
        ]

    async def list_sessions(self, request: web.Request) -> web.Response:
        Params(request)
        name = request.match_info["name"]
        sessions = await asyncio.to_thread(self._engine.sessions, name)
        return web.json_response({"stream": name, "sessions": sessions})

    async def end_session(self, request: web.Request) -> web.Response:
        params = Params(request, "kind")
        name, producer = request.match_info["name"], request.match_info["producer"]
        kind = params.choice("kind", "any", ("any", *KINDS))
        wanted: Any = None if kind == "any" else kind
        reply = await asyncio.to_thread(self._engine.end_session, name, producer, wanted)
        log.warning("session_ended_by_order", extra={"fields": {"peer": request.remote, **reply}})
        return web.json_response(reply)
