"""HTTP routes of the balance: what the balancer sees and has done, and orders, which go to `engine.balance`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from flexstream.daemon.params import Params
from flexstream.daemon.problems import ApiError
from flexstream.rows.schema import near_names

if TYPE_CHECKING:
    from flexstream.balance.door import Balance
    from flexstream.daemon.server import Daemon

MOST_HISTORY = 256


class RebalanceRoutes:
    """The handlers. `read_json` is how a body is read, with its limits."""

    def __init__(self, daemon: Daemon, read_json: Callable[[web.Request], Awaitable[Any]]) -> None:
        self._daemon = daemon
        self._read_json = read_json

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/rebalance", self.show, allow_head=False),
            web.get("/v1/rebalance/history", self.history, allow_head=False),
            web.post("/v1/rebalance/plan", self.plan),
            web.post("/v1/rebalance/apply", self.apply),
            web.post("/v1/rebalance/auto", self.auto),
            web.post("/v1/rebalance/freeze", self.freeze),
            web.post("/v1/rebalance/move", self.move),
            web.post("/v1/rebalance/split", self.split),
            web.post("/v1/rebalance/unsplit", self.unsplit),
            web.post("/v1/rebalance/drain", self.drain),
            web.post("/v1/rebalance/add", self.add),
        ]

    @property
    def _balance(self) -> Balance:
        return self._daemon.engine.balance

    async def _body(self, request: web.Request, **wanted: type) -> dict[str, Any]:
        """The body's fields, all of them there and of their type. bool is no whole number here."""
        body = await self._optional(request, **wanted)
        for name in wanted:
            if name not in body:
                raise ApiError(f"the body has no {name!r}", code="bad_body", hint=_example(wanted))
        return body

    async def _optional(self, request: web.Request, **known: type) -> dict[str, Any]:
        Params(request)
        body = await self._read_json(request)
        if not isinstance(body, dict):
            raise ApiError("the body must be a JSON object", code="bad_body", hint=_example(known))
        for name, value in body.items():
            if name not in known:
                hint = near_names(str(name)[:64], list(known)) if known else "send {}"
                raise ApiError(f"unknown field {str(name)[:64]!r} in the body", code="bad_body", hint=hint)
            if type(value) is not known[name]:
                problem = f"{name} = {str(value)[:64]!r} is not {_NAMES[known[name]]}"
                raise ApiError(problem, code="bad_body", hint=_example(known))
        return body

    async def show(self, request: web.Request) -> web.Response:
        Params(request)
        status = await self._daemon.engine_status()
        placement = list(status.get("placement", []))
        workers = [
            {"worker": worker["worker"], "cpu": worker.get("cpu"), "groups": placement.count(worker["worker"])}
            for worker in status.get("workers", [])
        ]
        known = {"automatic": False, "workers": workers, **status.get("rebalance", {})}
        return web.json_response({**known, "placement": placement})

    async def history(self, request: web.Request) -> web.Response:
        limit = Params(request, "limit").whole("limit", None, lowest=1, highest=MOST_HISTORY) or MOST_HISTORY
        return web.json_response({"history": await asyncio.to_thread(self._balance.history, limit)})

    async def plan(self, request: web.Request) -> web.Response:
        await self._optional(request)
        return web.json_response(await asyncio.to_thread(self._balance.plan))

    async def apply(self, request: web.Request) -> web.Response:
        await self._optional(request)
        return web.json_response(await asyncio.to_thread(self._balance.apply))

    async def auto(self, request: web.Request) -> web.Response:
        body = await self._body(request, on=bool)
        return web.json_response(await asyncio.to_thread(self._balance.set_auto, body["on"]))

    async def freeze(self, request: web.Request) -> web.Response:
        body = await self._optional(request, groups=list, on=bool)
        groups, on = body.get("groups"), body.get("on", True)
        return web.json_response(await asyncio.to_thread(self._balance.freeze, groups, on))

    async def move(self, request: web.Request) -> web.Response:
        body = await self._body(request, group=int, worker=int)
        return web.json_response(await asyncio.to_thread(self._balance.move, body["group"], body["worker"]))

    async def split(self, request: web.Request) -> web.Response:
        body = await self._body(request, group=int, workers=list)
        return web.json_response(await asyncio.to_thread(self._balance.split, body["group"], body["workers"]))

    async def unsplit(self, request: web.Request) -> web.Response:
        body = await self._body(request, group=int)
        return web.json_response(await asyncio.to_thread(self._balance.unsplit, body["group"]))

    async def drain(self, request: web.Request) -> web.Response:
        body = await self._body(request, worker=int)
        return web.json_response(await asyncio.to_thread(self._balance.drain, body["worker"]))

    async def add(self, request: web.Request) -> web.Response:
        body = await self._body(request, worker=int)
        return web.json_response(await asyncio.to_thread(self._balance.add, body["worker"]))


_NAMES = {int: "a whole number", bool: "true or false", list: "a list"}
_SAMPLES = {int: "0", bool: "true", list: "[0]"}


def _example(fields: dict[str, type]) -> str:
    return "send {" + ", ".join(f'"{name}": {_SAMPLES[kind]}' for name, kind in fields.items()) + "}"
