"""The HTTP routes of staging: what waits, commits, and drops."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from flexstream.daemon.params import Params
from flexstream.daemon.problems import ApiError
from flexstream.ingest.hello import is_name
from flexstream.staging.room import MOST_STAGES
from flexstream.staging.service import COMMIT_WAIT_S
from flexstream.state.stage.applied import DEFAULT_REMEMBER_S

if TYPE_CHECKING:
    from flexstream.daemon.server import Daemon

BODY_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 16 << 20  # receipts of as many tasks as there can be stages: more than other requests have
MAX_BODIES_BYTES = 64 << 20  # of all commits that are being received or wait
MAX_OBJECTS = 2 * MOST_STAGES + 1  # a receipt, and its rows per group, for each stage
MAX_COMMITS = 256  # that are being received, wait for others, or for their rows to be applied
COMMIT_THREADS = 8
MAX_NAME = 256
MAX_REMEMBER_S = 100 * 365 * 86_400.0
FIELDS = frozenset({"sink", "query", "batch", "stages", "stream", "end", "remember_s"})


class StageRoutes:
    """The handlers. The engine's staging does the work, off the event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._engine = daemon.engine
        self._threads = ThreadPoolExecutor(COMMIT_THREADS, "fs-commit")  # a wait here keeps nobody else waiting
        self._commits = 0
        self._body_bytes = 0

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/stages", self.list_stages, allow_head=False),
            web.delete("/v1/stages/{stage}", self.drop_stage),
            web.post("/v1/commits", self.commit),
        ]

    async def list_stages(self, request: web.Request) -> web.Response:
        Params(request)
        staging = self._engine.staging
        text = await asyncio.to_thread(lambda: json.dumps({"stages": staging.stages.list(), **staging.status()}))
        return web.json_response(text=text)

    async def drop_stage(self, request: web.Request) -> web.Response:
        Params(request)
        stage = request.match_info["stage"]
        if len(stage) > MAX_NAME:
            raise ApiError("the stage's name is too long", code="bad_stage", hint="give its UUID")
        return web.json_response(await asyncio.to_thread(self._engine.staging.drop, stage))

    async def commit(self, request: web.Request) -> web.Response:
        Params(request)
        _check_type(request)
        if self._commits >= MAX_COMMITS:
            raise _busy(f"{self._commits} commits are in progress")
        self._commits += 1
        try:
            # A client that goes away does not stop it half-way.
            answer, applied = await asyncio.shield(asyncio.ensure_future(self._begin(request)))
            await asyncio.wait([asyncio.wrap_future(applied)], timeout=COMMIT_WAIT_S)
            return web.json_response(answer)
        finally:
            self._commits -= 1

    async def _begin(self, request: web.Request) -> tuple[dict[str, Any], Future[None]]:
        data = bytearray()
        try:
            await self._receive(request, data)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._commit, data)
        finally:
            self._body_bytes -= len(data)

    async def _receive(self, request: web.Request, data: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    data += chunk
                    self._body_bytes += len(chunk)
                    if len(data) > MAX_BODY_BYTES:
                        raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                    if self._body_bytes > MAX_BODIES_BYTES:
                        raise _busy(f"the commits in progress have {self._body_bytes} bytes")
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive in {BODY_TIMEOUT_S:.0f} s", code="slow_body", hint="send it again"
            ) from None

    def _commit(self, data: bytearray) -> tuple[dict[str, Any], Future[None]]:
        """In a thread of its own, as far as the batch counts."""
        if data.count(b"{") > MAX_OBJECTS:  # before the parser makes something large of it, and holds others up
            raise _too_large(f"more than {MOST_STAGES} receipts")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            hint = "see /openapi.json"
            raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="bad_json", hint=hint) from None
        answer: tuple[dict[str, Any], Future[None]] = self._engine.staging.begin_commit(**_check(body))
        return answer


def _check_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise ApiError(
            f"the body has type {request.content_type}, not application/json",
            code="bad_content_type",
            hint="send JSON with Content-Type: application/json",
        )


def _too_large(what: str) -> ApiError:
    return ApiError(f"the commit has {what}", code="body_too_large", hint='leave "groups" out of the receipts')


def _busy(what: str) -> ApiError:
    return ApiError(f"{what}: the daemon takes no more now", code="too_many_commits", hint="commit again in a while")


def _check(body: Any) -> dict[str, Any]:
    """The arguments of `Staging.commit`. ApiError names the field that is wrong."""
    if not isinstance(body, dict):
        raise _bad("the body", body, 'an object with "sink", "query", "batch" and "stages"')
    unknown = sorted(set(body) - FIELDS)
    if unknown:
        raise _bad("the body", unknown, f"no other fields than {', '.join(sorted(FIELDS))}")
    sink, query, batch = body.get("sink"), body.get("query", ""), body.get("batch")
    if not is_name(sink, MAX_NAME):
        raise _bad("sink", sink, f"a name of 1 to {MAX_NAME} printable characters")
    if query != "" and not is_name(query, MAX_NAME):
        raise _bad("query", query, f"a name of at most {MAX_NAME} printable characters")
    end, stream, receipts = body.get("end", False), body.get("stream"), body.get("stages")
    if not isinstance(end, bool):
        raise _bad("end", end, "true or false")
    if stream is not None and not isinstance(stream, str):
        raise _bad("stream", stream, "a name")
    if not isinstance(receipts, list):
        raise _bad("stages", receipts, "a list of receipts")
    for receipt in receipts:
        if not isinstance(receipt, dict) or not isinstance(receipt.get("stage"), str):
            raise _bad("stages", receipt, 'receipts, each with "stage" and its counts')
        if not _whole(receipt.get("rows")):
            raise _bad("rows", receipt.get("rows"), "the number of rows of the stage")
    if not _whole(batch) and not (batch is None and end and not receipts):
        raise _bad("batch", batch, "a whole number from 0 (null only to end a sink without rows)")
    if end and stream is None and not receipts:
        raise _bad("stream", stream, "the stream on which the sink has ended")
    remember_s = body.get("remember_s", DEFAULT_REMEMBER_S)
    if isinstance(remember_s, bool) or not isinstance(remember_s, int | float) or not 0 < remember_s <= MAX_REMEMBER_S:
        raise _bad("remember_s", remember_s, f"seconds above 0 and up to {MAX_REMEMBER_S:.0f}")
    about = {"sink": sink, "query": query, "batch": batch, "stream": stream}
    return {**about, "receipts": receipts, "end": end, "remember_s": remember_s}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _bad(name: str, value: object, expected: str) -> ApiError:
    return ApiError(f"{name} = {value!r:.80} cannot be used", code="bad_commit", hint=f"give {expected}")
