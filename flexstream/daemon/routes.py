"""The HTTP routes: what each request asks of the engine, and the JSON that comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from flexstream.addresses import join_address
from flexstream.daemon import metrics, openapi
from flexstream.daemon.nic_details import nic_details
from flexstream.daemon.params import MAX_PARTS, Params
from flexstream.daemon.problems import ApiError
from flexstream.daemon.rebalance_routes import RebalanceRoutes
from flexstream.daemon.results import FORMATS, stream_log
from flexstream.daemon.session_routes import SessionRoutes
from flexstream.errors import SchemaError
from flexstream.query.query import Query
from flexstream.rows.schema import near_names
from flexstream.rows.stream import Stream

if TYPE_CHECKING:
    from flexstream.daemon.server import Daemon
    from flexstream.results.follow_log import ReadableLog

BODY_TIMEOUT_S = 10.0
MAX_PLAN_VALUES = 8192  # of a plan in JSON: objects, lists and what is in them
WILDCARDS = ("0.0.0.0", "::")


class Routes:
    """The handlers. They hold no state of their own: that is the daemon's and the engine's."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._engine = daemon.engine

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/streams", self.list_streams, allow_head=False),
            web.post("/v1/streams", self.add_stream),
            web.get("/v1/streams/{name}", self.show_stream, allow_head=False),
            web.get("/v1/queries", self.list_queries, allow_head=False),
            web.post("/v1/queries", self.submit_query),
            web.get("/v1/queries/{name}", self.show_query, allow_head=False),
            web.delete("/v1/queries/{name}", self.cancel_query),
            web.get("/v1/queries/{name}/results", self.results, allow_head=False),
            web.get("/v1/queries/{name}/late", self.late, allow_head=False),
            web.get("/v1/nic", self.nic, allow_head=False),
            *SessionRoutes(self._daemon).table(),
            *RebalanceRoutes(self._daemon, self._json).table(),
            web.get("/v1/status", self.status, allow_head=False),
            web.get("/healthz", self.health, allow_head=False),
            web.get("/readyz", self.ready, allow_head=False),
            web.get("/metrics", self.metrics, allow_head=False),
            web.get("/openapi.json", self.openapi, allow_head=False),
        ]

    # Streams ------------------------------------------------------------------------------------------------

    def _stream_reply(self, request: web.Request, stream: Stream) -> dict[str, Any]:
        return {
            "stream": stream.to_dict(),
            "groups": self._engine.groups,
            "data": self._data_address(request),
            "schema_hash": stream.schema.hash,
        }

    def _data_address(self, request: web.Request) -> str | None:
        address = self._engine.data_address
        if address is None:
            return None
        host, port = address
        if host in WILDCARDS and request.transport is not None:
            host = request.transport.get_extra_info("sockname")[0]  # the address at which the client reached us
        return join_address(host, port)

    async def list_streams(self, request: web.Request) -> web.Response:
        Params(request)
        streams = dict(self._engine.streams)
        return web.json_response({"streams": [self._stream_reply(request, stream) for stream in streams.values()]})

    async def add_stream(self, request: web.Request) -> web.Response:
        Params(request)
        stream = await self._daemon.threads.run("changes", Stream.from_dict, await self._json(request))
        known = self._engine.streams.get(stream.name)
        if known is not None and known != stream:
            raise ApiError(
                f"there is a stream {stream.name!r} already, with another definition",
                code="stream_exists",
                hint="give the new one another name",
            )
        if known is None:
            await self._daemon.add_stream(stream)
        reply = self._stream_reply(request, stream)
        return web.json_response(reply, status=201 if known is None else 200)

    async def show_stream(self, request: web.Request) -> web.Response:
        Params(request)
        name = request.match_info["name"]
        stream = self._engine.streams.get(name)
        if stream is None:
            raise ApiError(
                f"there is no stream {name[:64]!r}",
                code="unknown_stream",
                hint=_near(name, self._engine.streams, "POST /v1/streams adds one"),
            )
        return web.json_response(self._stream_reply(request, stream))

    # Queries ------------------------------------------------------------------------------------------------

    def _query(self, request: web.Request) -> Query:
        name = request.match_info["name"]
        query = self._engine.queries.get(name)
        if query is None:
            raise ApiError(
                f"there is no query {name[:64]!r}",
                code="unknown_query",
                hint=_near(name, self._engine.queries, "POST /v1/queries submits one"),
            )
        return query

    async def list_queries(self, request: web.Request) -> web.Response:
        Params(request)
        status = await self._daemon.engine_status()
        queries = [
            {"name": name, **status.get("queries", {}).get(name, {"stream": query.stream.name})}
            for name, query in dict(self._engine.queries).items()
        ]
        return web.json_response({"queries": queries})

    async def submit_query(self, request: web.Request) -> web.Response:
        Params(request)
        query, text = await self._daemon.threads.run("changes", read_plan, await self._json(request))
        known = self._engine.queries.get(query.name)
        if known is not None and await self._daemon.threads.run("changes", known.to_json) != text:
            raise ApiError(
                f"there is a query {query.name!r} already, with another plan",
                code="query_exists",
                hint="cancel it first, or give the new one another name",
            )
        stream = self._engine.streams.get(query.stream.name)
        if stream is not None and stream != query.stream:
            raise SchemaError(
                f"query {query.name!r} was built on another definition of stream {stream.name!r}",
                code="stream_mismatch",
                hint=f"build it on the one that GET /v1/streams/{stream.name} shows",
            )
        if known is None:
            await self._daemon.submit_query(query)
        body = {"name": query.name, "created": known is None, "plan": query.to_dict()}
        return web.json_response(body, status=201 if known is None else 200)

    async def show_query(self, request: web.Request) -> web.Response:
        Params(request)
        query = self._query(request)
        status = await self._daemon.engine_status()
        state = status.get("queries", {}).get(query.name, {})
        plan, explained = await self._daemon.threads.run("status", lambda: (query.to_dict(), query.explain()))
        return web.json_response({"name": query.name, **state, "plan": plan, "explain": explained})

    async def cancel_query(self, request: web.Request) -> web.Response:
        Params(request)
        query = self._query(request)
        await self._daemon.cancel_query(query.name)
        return web.json_response({"name": query.name, "cancelled": True})

    async def results(self, request: web.Request) -> web.StreamResponse:
        return await self._log(request, self._engine.result_log, "parts", "part")

    async def late(self, request: web.Request) -> web.StreamResponse:
        return await self._log(request, self._engine.late_log)

    async def _log(self, request: web.Request, log_of: Callable[[str], ReadableLog], *more: str) -> web.StreamResponse:
        params = Params(request, "offset", "limit", "format", "follow", *more)
        query = self._query(request)
        parts = params.whole("parts", 1, lowest=1, highest=MAX_PARTS) or 1
        part = params.whole("part", 0, highest=parts - 1) or 0
        return await stream_log(
            request,
            await self._daemon.threads.run("reads", log_of, query.name),
            self._daemon.readers,
            self._daemon.threads,
            offset=params.whole("offset", None),
            limit=params.whole("limit", None, lowest=1),
            form=params.choice("format", "arrow", FORMATS),
            follow=params.flag("follow"),
            part=(part, parts),
        )

    # The machine, and how it does ---------------------------------------------------------------------------

    async def nic(self, request: web.Request) -> web.Response:
        Params(request)
        status = await self._daemon.engine_status()
        details = await self._daemon.threads.run("status", nic_details, self._engine)
        return web.json_response({"nic": {**status.get("nic", {}), **details}, "groups": status.get("groups")})

    async def status(self, request: web.Request) -> web.Response:
        Params(request)
        return web.json_response(await self._daemon.status())

    async def health(self, request: web.Request) -> web.Response:
        """Alive: the event loop runs and the engine answers and has not failed."""
        Params(request)
        health = await self._daemon.health()
        problem = health["problem"]
        body = {"status": "failed" if problem else "ok", "engine": health["state"]}
        if problem:
            body["problem"] = problem
        return web.json_response(body, status=503 if problem else 200)

    async def ready(self, request: web.Request) -> web.Response:
        """Ready: the catalog is back, the daemon is not stopping, and what is sent now would be worked off."""
        Params(request)
        health = await self._daemon.health()
        not_running = None if health["state"] == "running" else f"the engine is {health['state']}"
        reason = self._daemon.not_ready or health["problem"] or not_running or health["not_ready"]
        return web.json_response({"ready": reason is None, "reason": reason}, status=503 if reason else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        Params(request)
        status = await self._daemon.status()
        text = await self._daemon.threads.run("status", metrics.render, status)
        return web.Response(body=text.encode("utf-8", "replace"), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        Params(request)
        return web.json_response(openapi.document())

    async def _json(self, request: web.Request) -> Any:
        if request.content_type != "application/json":  # also keeps out forms that a web page may send
            raise ApiError(
                f"the body's type is {request.content_type}",
                code="bad_content_type",
                hint="send JSON with Content-Type: application/json",
            )
        try:
            body = await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
            return json.loads(body)
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive in {BODY_TIMEOUT_S:.0f} s", code="slow_body", hint="send it again"
            ) from None
        except (ValueError, RecursionError) as error:
            problem = f"the body is not JSON: {str(error)[:200]}"
            raise ApiError(problem, code="bad_json", hint="see /openapi.json") from None


def read_plan(body: Any) -> tuple[Query, str]:
    """The query of a body, and its text. Its cost grows faster than its size, hence the bound. Raises QueryError."""
    count, left = 0, [body]
    while left and count <= MAX_PLAN_VALUES:
        value = left.pop()
        count += 1
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    if left:
        raise ApiError(
            f"the plan has more than {MAX_PLAN_VALUES} values",
            code="plan_too_large",
            hint="make several queries of it; a long list of alternatives is a column that the producer computes",
        )
    query = Query.from_json(json.dumps(body))
    query.bound()
    return query, query.to_json()


def _near(name: str, known: Mapping[str, object], otherwise: str) -> str:
    return near_names(name[:64], list(known)) if known else otherwise
