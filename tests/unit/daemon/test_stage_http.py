"""Commits over HTTP: what is wrong with a body is named, and what fits goes to the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
import pytest

from flexstream.daemon import stages
from flexstream.daemon.server import Daemon
from flexstream.errors import StageError
from tests.unit.daemon.fake_engine import FakeEngine
from tests.waiting import WAIT_S

GOOD = {"sink": "s", "query": "q", "batch": 0, "stages": [{"stage": "a", "rows": 1}]}
BAD: dict[str, tuple[Any, str]] = {
    "not an object": ([], "the body"),
    "no sink": ({**GOOD, "sink": None}, "sink"),
    "an empty sink": ({**GOOD, "sink": ""}, "sink"),
    "a long sink": ({**GOOD, "sink": "x" * 257}, "sink"),
    "a sink of a lone surrogate": ({**GOOD, "sink": "\ud800"}, "sink"),
    "a sink that moves the cursor": ({**GOOD, "sink": "\x1b[2J"}, "sink"),
    "a query of two lines": ({**GOOD, "query": "a\nb"}, "query"),
    "a query that is a number": ({**GOOD, "query": 7}, "query"),
    "no batch": ({**GOOD, "batch": None}, "batch"),
    "a batch below 0": ({**GOOD, "batch": -1}, "batch"),
    "a batch that is true": ({**GOOD, "batch": True}, "batch"),
    "a batch in words": ({**GOOD, "batch": "1"}, "batch"),
    "no stages": ({**GOOD, "stages": None}, "stages"),
    "stages that are names": ({**GOOD, "stages": ["a"]}, "stages"),
    "a receipt without rows": ({**GOOD, "stages": [{"stage": "a"}]}, "rows"),
    "a receipt with half a row": ({**GOOD, "stages": [{"stage": "a", "rows": 0.5}]}, "rows"),
    "end in words": ({**GOOD, "end": "yes"}, "end"),
    "an end of nothing": ({**GOOD, "stages": [], "end": True}, "stream"),
    "a memory in words": ({**GOOD, "remember_s": "1 day"}, "remember_s"),
    "a memory of nothing": ({**GOOD, "remember_s": 0}, "remember_s"),
    "a memory for ever": ({**GOOD, "remember_s": 1e300}, "remember_s"),
    "a misspelt field": ({**GOOD, "stagess": []}, "stagess"),
}


class FakeStaging:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.locked = threading.Event()  # clear: commits wait for a lock
        self.locked.set()
        self.applied: Future[None] = Future()
        self.applied.set_result(None)

    def begin_commit(self, **arguments: Any) -> tuple[dict[str, Any], Future[None]]:
        self.locked.wait(WAIT_S)
        self.calls.append(arguments)
        if arguments["receipts"] and arguments["receipts"][0]["stage"] == "missing":
            raise StageError("stage missing is not here", code="unknown_stage", hint="run the batch again")
        if arguments["receipts"] and arguments["receipts"][0]["stage"] == "full":
            raise StageError("no room", code="disk_full")
        return {"applied": True, "rows": 1, "duplicate": False}, self.applied

    def drop(self, stage: str) -> dict[str, Any]:
        return {"stage": stage, "dropped": False, "was": "unknown"}


def served(use: Callable[[aiohttp.ClientSession, FakeStaging], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.staging = FakeStaging()  # type: ignore[attr-defined]
        daemon = Daemon(engine)
        engine.staging.replay = engine.staging.only_queries = lambda given: None  # type: ignore[attr-defined]
        await daemon.start()
        host, port = daemon.control_address
        try:
            async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
                await use(session, engine.staging)  # type: ignore[attr-defined]
        finally:
            await daemon.stop()

    asyncio.run(main())


def test_every_wrong_body_is_refused_by_name() -> None:
    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        for case, (body, name) in BAD.items():
            async with session.post("/v1/commits", json=body) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (400, "bad_commit"), case
                assert name in error["message"], (case, error)
                assert error["hint"]
        assert staging.calls == []

    served(use)


def test_what_fits_is_committed_and_refusals_have_their_status() -> None:
    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        async with session.post("/v1/commits", json=GOOD) as reply:
            assert (reply.status, await reply.json()) == (200, {"applied": True, "rows": 1, "duplicate": False})
        async with session.post(
            "/v1/commits", json={"sink": "s", "batch": None, "stages": [], "stream": "x", "end": True}
        ) as reply:
            assert reply.status == 200
        for stage, status in (("missing", 409), ("full", 507)):
            async with session.post("/v1/commits", json={**GOOD, "stages": [{"stage": stage, "rows": 0}]}) as reply:
                assert reply.status == status
        async with session.post("/v1/commits", data=b"{", headers={"Content-Type": "application/json"}) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "bad_json")
        async with session.post("/v1/commits", data=b"a=1") as reply:
            assert reply.status == 415
        async with session.delete("/v1/stages/whatever") as reply:
            assert (await reply.json())["was"] == "unknown"
        async with session.delete("/v1/stages/" + "x" * 300) as reply:
            assert reply.status == 400

    served(use)


def test_a_commit_of_many_tasks_is_larger_than_other_bodies_may_be() -> None:
    many = [{"stage": f"{i}", "rows": 1, "groups": {str(g): 1 for g in range(128)}} for i in range(2000)]

    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        async with session.post("/v1/commits", json={**GOOD, "stages": many}) as reply:
            assert reply.status == 200
        assert len(staging.calls[0]["receipts"]) == 2000

    served(use)


async def post(session: aiohttp.ClientSession, body: Any) -> tuple[int, Any]:
    async with session.post("/v1/commits", json=body) as reply:
        return reply.status, await reply.json()


async def healthy(session: aiohttp.ClientSession) -> bool:
    async with session.get("/healthz", timeout=aiohttp.ClientTimeout(WAIT_S)) as reply:
        return reply.status == 200


async def under_way(session: aiohttp.ClientSession, count: int, body: Any = GOOD) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(post(session, body)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def many_connections(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(session._base_url, connector=aiohttp.TCPConnector(limit=0))


@pytest.mark.parametrize("wait", ["for each other", "for their rows"])
def test_commits_that_wait_keep_nothing_else_waiting(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "COMMIT_WAIT_S", WAIT_S)

    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        if wait == "for each other":
            staging.locked.clear()
        else:
            staging.applied = Future()
        async with many_connections(session) as many:
            tasks = await under_way(many, 100)
            if wait == "for their rows":
                while len(staging.calls) < 100:
                    await asyncio.sleep(0.01)
            for _ in range(5):
                assert await healthy(session)
            assert not any(task.done() for task in tasks)
            staging.locked.set()
            if not staging.applied.done():
                staging.applied.set_result(None)
            assert {status for status, _ in await asyncio.gather(*tasks)} == {200}

    served(use)


def test_more_commits_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MAX_COMMITS", 5)

    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        staging.locked.clear()
        async with many_connections(session) as many:
            tasks = await under_way(many, 20)
            refused = 0
            while refused < 15:
                refused = sum(task.done() for task in tasks)
                await asyncio.sleep(0.01)
            staging.locked.set()
            answers = await asyncio.gather(*tasks)
        assert sorted(status for status, _ in answers) == [200] * 5 + [503] * 15
        assert {body["error"]["code"] for status, body in answers if status == 503} == {"too_many_commits"}
        assert (await post(session, GOOD))[0] == 200

    served(use)


def test_a_body_that_no_commit_can_need_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MAX_BODY_BYTES", 200_000)
    monkeypatch.setattr(stages, "MAX_BODIES_BYTES", 150_000)
    monkeypatch.setattr(stages, "MAX_OBJECTS", 21)

    async def use(session: aiohttp.ClientSession, staging: FakeStaging) -> None:
        status, body = await post(session, {**GOOD, "query": "q" * 300_000})
        assert (status, body["error"]["code"]) in ((413, "body_too_large"), (503, "too_many_commits"))
        status, body = await post(session, {**GOOD, "query": "q" * 180_000})
        assert (status, body["error"]["code"]) == (503, "too_many_commits")
        status, body = await post(session, {**GOOD, "stages": [{"stage": "a", "rows": 1}] * 30})
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert staging.calls == []
        assert (await post(session, {**GOOD, "stages": [{"stage": "a", "rows": 1}] * 20}))[0] == 200

    served(use)


@pytest.mark.parametrize("path", ["/v1/stages", "/v1/commits"])
def test_the_token_guards_stages_too(path: str) -> None:
    async def main() -> None:
        daemon = Daemon(FakeEngine(), token="secret")
        await daemon.start()
        host, port = daemon.control_address
        try:
            method = "GET" if "stages" in path else "POST"
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, f"http://{host}:{port}{path}") as reply,
            ):
                assert reply.status == 401
        finally:
            await daemon.stop()

    asyncio.run(main())
