"""The HTTP API: what it answers, what it refuses, and how it says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest

import flexstream as fs
from flexstream.daemon.catalog import Catalog
from flexstream.daemon.http_port import FIRST_REQUEST_S, IDLE_S
from flexstream.daemon.problems import ApiError
from flexstream.daemon.results import Readers
from flexstream.daemon.server import Daemon
from flexstream.errors import ConfigError
from flexstream.ingest.pace import Slowing
from tests.unit.daemon.fake_engine import ADS, VIEWS, FakeEngine
from tests.waiting import WAIT_S

Scenario = Callable[[aiohttp.ClientSession, FakeEngine, Daemon], Awaitable[None]]


@asynccontextmanager
async def served(engine: FakeEngine, headers: dict[str, str] | None, **options: Any) -> AsyncIterator[Any]:
    daemon = Daemon(engine, **options)
    await daemon.start()
    assert daemon.control_address is not None
    base = f"http://127.0.0.1:{daemon.control_address[1]}"
    try:
        async with aiohttp.ClientSession(base, headers=headers) as session:
            yield session, daemon
    finally:
        if "close" not in engine.calls:
            await daemon.stop()


def run(
    scenario: Scenario, *, engine: FakeEngine | None = None, headers: Any = None, **options: Any
) -> FakeEngine:
    engine = engine or FakeEngine()

    async def main() -> None:
        async with served(engine, headers, **options) as (session, daemon):
            await scenario(session, engine, daemon)

    asyncio.run(main())
    return engine


async def get(session: aiohttp.ClientSession, path: str, status: int = 200) -> Any:
    async with session.get(path) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json(content_type=None)


async def post(session: aiohttp.ClientSession, path: str, body: Any, status: int = 201) -> Any:
    async with session.post(path, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def until(true: Callable[[], Any]) -> None:
    """With a deadline for machines with far too much to do."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


BEARER = {"Authorization": "Bearer secret"}


def views() -> Any:
    return json.loads(VIEWS.to_json())


def test_a_stream_is_added_listed_and_shown_with_what_a_producer_needs() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert (await get(session, "/v1/streams")) == {"streams": []}
        added = await post(session, "/v1/streams", ADS.to_dict())
        assert added == {
            "stream": ADS.to_dict(),
            "groups": 8,
            "data": "127.0.0.1:7400",
            "schema_hash": ADS.schema.hash,
        }
        assert await get(session, "/v1/streams/ads") == added
        assert await get(session, "/v1/streams") == {"streams": [added]}
        await post(session, "/v1/streams", ADS.to_dict(), 200)
        assert engine.calls == ["add ads"]

    run(scenario)


def test_a_wildcard_data_address_is_told_as_the_address_that_the_client_reached() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        engine.data_address = ("0.0.0.0", 7400)
        await post(session, "/v1/streams", ADS.to_dict())
        assert (await get(session, "/v1/streams/ads"))["data"] == "127.0.0.1:7400"

    run(scenario)


def test_another_definition_of_a_known_stream_or_query_is_a_conflict() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        changed = {**ADS.to_dict(), "max_disorder": "5s"}
        error = (await post(session, "/v1/streams", changed, 409))["error"]
        assert error["code"] == "stream_exists"
        other = ADS.query("ysb").window(fs.tumbling("1s")).agg(m=fs.count()).to_dict()
        assert (await post(session, "/v1/queries", other, 409))["error"]["code"] == "query_exists"
        third = {**views(), "name": "third", "streams": {"ads": changed}}
        assert (await post(session, "/v1/queries", third, 400))["error"]["code"] == "stream_mismatch"

    run(scenario)


def test_a_query_brings_its_stream_is_listed_shown_and_cancelled() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert (await post(session, "/v1/queries", views()))["created"] is True
        assert (await post(session, "/v1/queries", views(), 200))["created"] is False
        [listed] = (await get(session, "/v1/queries"))["queries"]
        assert (listed["name"], listed["stream"], listed["state"]) == ("ysb", "ads", "running")
        shown = await get(session, "/v1/queries/ysb")
        assert fs.Query.from_json(json.dumps(shown["plan"])).to_json() == VIEWS.to_json()
        assert shown["explain"]
        async with session.delete("/v1/queries/ysb") as reply:
            assert await reply.json() == {"name": "ysb", "cancelled": True}
        assert (await get(session, "/v1/queries/ysb", 404))["error"]["code"] == "unknown_query"
        assert engine.calls == ["add ads", "submit ysb", "cancel ysb"]

    run(scenario)


def test_a_plan_of_version_1_is_the_same_query_and_is_shown_as_version_2() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        old = json.loads((Path(__file__).parents[1] / "query/plan/version_1/ysb.json").read_text())
        added = await post(session, "/v1/queries", old)
        assert (added["created"], added["plan"]["version"]) == (True, 2)
        assert (await post(session, "/v1/queries", added["plan"], 200))["created"] is False
        assert (await post(session, "/v1/queries", old, 200))["created"] is False
        shown = await get(session, "/v1/queries/ysb")
        assert fs.Query.from_dict(shown["plan"]) == fs.Query.from_dict(old)
        bad = {**added["plan"], "name": "bad", "nodes": [*added["plan"]["nodes"], {"id": 9, "op": "join", "in": [4]}]}
        error = (await post(session, "/v1/queries", bad, 400))["error"]
        assert error["message"] == "query 'bad': node 9 has the op 'join', which there is not"

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/streams", {"name": "x"}, 400, "lacks"),
        ("/v1/streams", [1], 400, "object"),
        ("/v1/queries", {"name": "q"}, 400, "lacks"),
        ("/v1/queries", {"name": "q", "stream": ADS.to_dict()}, 400, "not complete"),
        ("/v1/nothing", {}, 404, "openapi.json"),
        ("/v1/status", {}, 405, "use GET"),
    ],
)
def test_bad_bodies_and_paths_get_a_code_a_message_and_a_hint(
    path: str, body: Any, status: int, words: str
) -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        error = (await post(session, path, body, status))["error"]
        assert set(error) == {"code", "message", "hint"}
        assert words in f"{error['message']} {error['hint']}"

    run(scenario)


def test_a_body_must_be_json_and_small() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/streams", data=b"{", headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "bad_json")
        async with session.post("/v1/streams", data=b"[" * 900, headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "bad_json")
        async with session.post("/v1/streams", data=b"{}", headers={"Content-Type": "text/plain"}) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (415, "bad_content_type")
        async with session.post("/v1/streams", data=b"x" * 5000, headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (413, "body_too_large")

    run(scenario, max_body_bytes=1000)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("offset=-1", "offset = '-1'"),
        ("offset=x", "offset = 'x'"),
        ("offset=99999999999999999999", "offset = "),
        ("limit=0", "limit = '0'"),
        ("format=csv", "format = 'csv'"),
        ("follow=maybe", "follow = 'maybe'"),
        ("ofset=1", "did you mean offset"),
        ("offset=1&offset=2", "given twice"),
        ("parts=0", "parts = '0'"),
        ("parts=3&part=3", "part = '3'"),
        ("part=1", "part = '1'"),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_the_fix(query: str, words: str) -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        error = (await get(session, f"/v1/queries/ysb/results?{query}", 400))["error"]
        assert error["code"] == "bad_parameter"
        assert words in f"{error['message']} {error['hint']}"
        assert error["hint"]

    run(scenario)


def test_results_come_as_an_arrow_stream_from_an_offset_with_a_limit() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.emit("ysb", 20_000)
        engine.emit("ysb", 5)
        async with session.get("/v1/queries/ysb/results?offset=10&limit=19000") as reply:
            assert reply.content_type == "application/vnd.apache.arrow.stream"
            assert reply.headers["X-FlexStream-Next-Offset"] == "20005"
            table = pa.ipc.open_stream(await reply.read()).read_all()
        assert table.schema.equals(VIEWS.result_schema())
        assert table.column("campaign_id").to_pylist() == list(range(10, 19_010))
        async with session.get("/v1/queries/ysb/results") as reply:
            assert pa.ipc.open_stream(await reply.read()).read_all().num_rows == 20_005
        async with session.get("/v1/queries/ysb/results?offset=99999") as reply:
            assert pa.ipc.open_stream(await reply.read()).read_all().num_rows == 0

    run(scenario)


def test_parts_divide_the_results_by_group_and_offsets_count_all_of_them() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.emit("ysb", 20_000)
        seen = []
        for part in range(3):
            async with session.get(f"/v1/queries/ysb/results?offset=10&limit=9000&parts=3&part={part}") as reply:
                table = pa.ipc.open_stream(await reply.read()).read_all()
            groups = table.column("group").to_pylist()
            assert {group % 3 for group in groups} == {part}
            seen += table.column("campaign_id").to_pylist()
        assert sorted(seen) == list(range(10, 9_010))
        async with session.get("/v1/queries/ysb/results?format=jsonl&limit=5&parts=4&part=2") as reply:
            assert [json.loads(line)["group"] for line in (await reply.text()).splitlines()] == [2]

    run(scenario)


def test_results_come_as_json_lines() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.emit("ysb", 3)
        async with session.get("/v1/queries/ysb/results?format=jsonl&offset=2") as reply:
            assert reply.content_type == "application/x-ndjson"
            [line] = (await reply.text()).splitlines()
        assert json.loads(line) == {
            "window_start": "1970-01-01T00:00:00.002",
            "window_end": "1970-01-01T00:00:00.002",
            "campaign_id": 2,
            "n": 2,
            "group": 2,
            "revision": 2,
            "complete": True,
        }

    run(scenario)


def test_following_gives_old_rows_then_new_ones_up_to_the_last_that_draining_makes() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.emit("ysb", 2)
        async with session.get("/v1/queries/ysb/results?format=jsonl&follow=1") as reply:
            seen = [json.loads(await reply.content.readline())["campaign_id"] for _ in range(2)]
            engine.emit("ysb", 1)
            seen.append(json.loads(await reply.content.readline())["campaign_id"])
            assert seen == [0, 1, 2]
            assert daemon.readers.open == 1
            engine.before_drain = lambda: engine.emit("ysb", 1)
            await daemon.stop()
            assert json.loads(await reply.content.read())["campaign_id"] == 3
        assert daemon.readers.open == 0

    run(scenario)


def test_a_follower_that_goes_away_frees_its_place() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        daemon.readers.limit = 1
        reply = await session.get("/v1/queries/ysb/results?follow=1")
        error = (await get(session, "/v1/queries/ysb/results", 503))["error"]
        assert error["code"] == "too_many_readers"
        reply.close()
        for _ in range(100):
            if daemon.readers.open == 0:
                break
            await asyncio.sleep(0.05)
        async with session.get("/v1/queries/ysb/results") as again:
            assert again.status == 200

    run(scenario)


def test_followers_that_never_read_keep_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexstream.daemon.results.WRITE_TIMEOUT_S", 0.2)

    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        daemon.readers.limit = 8
        assert daemon.control_address is not None
        silent = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection(*daemon.control_address, limit=1024)
            silent.append((reader, writer))
            writer.write(b"GET /v1/queries/ysb/results?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: daemon.readers.open == 4)  # half of the places are for followers of one address
        async with session.get("/v1/queries/ysb/results?follow=1") as reply:
            assert (await reply.json())["error"]["code"] == "too_many_readers"
        async with session.get("/v1/queries/ysb/results") as reply:
            assert reply.status == 200
        for _ in range(200):
            engine.emit("ysb", 8000)  # far more than the sockets hold
        await until(lambda: daemon.readers.open == 0)
        assert daemon.readers.cut == 4
        async with session.get("/v1/queries/ysb/results?limit=10") as reply:
            assert reply.status == 200
            await reply.read()
        assert (await get(session, "/v1/status"))["daemon"]["result_readers_cut"] == 4
        for _, writer in silent:
            writer.close()

    run(scenario)


def test_those_who_follow_leave_places_for_those_who_read_what_is_there() -> None:
    readers = Readers(limit=8)
    with ExitStack() as places:
        for number in range(6):
            places.enter_context(readers.place(f"peer {number % 3}", follow=True))
        with pytest.raises(ApiError, match="already open"), readers.place("another", follow=True):
            pass
        with readers.place("another", follow=False):
            assert readers.open == 7
    assert readers.open == 0


def test_connections_that_ask_for_nothing_are_bounded_counted_and_ended() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        daemon.port._most = 8
        async with session.get("/healthz", headers=BEARER) as reply:
            assert reply.status == 200
        assert daemon.control_address is not None
        silent = [await asyncio.open_connection(*daemon.control_address) for _ in range(20)]
        silent[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n")
        await until(lambda: daemon.port.closed["too_many"] >= 14)
        assert daemon.port.open <= 6  # three quarters
        for _ in range(3):  # the connection that has asked for something is not the one that goes
            status = await (await session.get("/v1/status", headers=BEARER)).json()
        assert status["daemon"]["http_connections"] <= 6
        page = await (await session.get("/metrics", headers=BEARER)).text()
        assert 'flexstream_http_connections_closed_total{reason="too_many"}' in page
        daemon.port.sweep(time.monotonic() + FIRST_REQUEST_S + 1)
        assert daemon.port.closed["no_request"] == 5
        await until(lambda: daemon.port.open == 1)
        daemon.port.sweep(time.monotonic() + IDLE_S + 1)
        assert daemon.port.closed["idle"] == 1
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()

    run(scenario, token="secret")


def test_who_finds_no_place_is_told_so() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        daemon.port._most = 1
        follower = await session.get("/v1/queries/ysb/results?follow=1")
        assert daemon.control_address is not None
        reader, writer = await asyncio.open_connection(*daemon.control_address)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        writer.close()
        follower.close()

    run(scenario)


def test_a_plan_of_too_many_values_is_refused_and_one_that_takes_long_holds_nobody_up() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        wide = {**views(), "filter": [{"op": "col", "name": "x"}] * 5000}
        assert (await post(session, "/v1/queries", wide, 413))["error"]["code"] == "plan_too_large"
        await post(session, "/v1/queries", views())
        reading, go_on = threading.Event(), threading.Event()

        def slow(text: str) -> fs.Query:
            reading.set()
            assert go_on.wait(60)
            return VIEWS

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs.Query, "from_json", staticmethod(slow))
            submitted = asyncio.create_task(post(session, "/v1/queries", views(), 200))
            await until(reading.is_set)
            for path in ("/healthz", "/readyz", "/v1/status", "/metrics", "/v1/queries/ysb"):
                async with session.get(path) as reply:
                    assert reply.status == 200
            go_on.set()
            await submitted

    run(scenario)


def test_an_offset_that_retention_removed_is_gone_not_empty() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        engine.log_options = {"retention_bytes": 100_000}
        await post(session, "/v1/queries", views())
        for _ in range(20):
            engine.emit("ysb", 1000)
        error = (await get(session, "/v1/queries/ysb/results?offset=0", 410))["error"]
        assert error["code"] == "offset_expired"
        first = engine.result_log("ysb").first_offset
        assert str(first) in error["hint"]
        async with session.get("/v1/queries/ysb/results") as reply:
            table = pa.ipc.open_stream(await reply.read()).read_all()
        assert table.column("campaign_id")[0].as_py() == first

    run(scenario)


def test_late_rows_are_readable_and_an_empty_late_output_has_its_columns() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        async with session.get("/v1/queries/ysb/late") as reply:
            empty = pa.ipc.open_stream(await reply.read()).read_all()
        assert empty.schema.names == ["event_time", "campaign_id", "event_type", "watermark"]
        engine.emit_late("ysb", [0, 1, 2, 3])
        engine.emit_late("ysb", [4, 5])
        async with session.get("/v1/queries/ysb/late?format=jsonl&offset=3&limit=2") as reply:
            rows = [json.loads(line) for line in (await reply.text()).splitlines()]
        assert [row["campaign_id"] for row in rows] == [3, 4]

    run(scenario)


def test_a_token_is_needed_on_every_path_when_there_is_one() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        daemon.access.slowing = Slowing(rate=1e9)
        for route in daemon.app.router.routes():
            path = route.resource.canonical.replace("{name}", "x") if route.resource else "/"
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
                async with session.request(route.method, path, headers=headers) as reply:
                    assert reply.status == 401, path
                    assert reply.headers["WWW-Authenticate"] == "Bearer"
                    assert (await reply.json())["error"]["code"] == "bad_token"
        async with session.get("/healthz", headers={"Authorization": "Bearer secret"}) as reply:
            assert reply.status == 200

    run(scenario, token="secret")


def test_wrong_tokens_are_logged_with_the_peer_counted_and_answered_ever_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        waited: list[float] = []
        slowing = Slowing(rate=1000.0, burst=2)
        daemon.access.slowing.failed = lambda peer: waited.append(slowing.failed(peer)) or waited[-1]  # type: ignore[method-assign, func-returns-value]
        for _ in range(4):
            await get(session, "/v1/status", 401)
        assert waited[:2] == [0.0, 0.0]
        status = await (await session.get("/v1/status", headers=BEARER)).json()
        assert status["daemon"]["authentication_failures"] == 4
        fields = [record.fields for record in caplog.records if record.message == "authentication_failed"]  # type: ignore[attr-defined]
        assert fields == [{"peer": "127.0.0.1", "method": "GET", "path": "/v1/status", "given": False}] * 4

    run(scenario, token="secret")


def test_a_peer_that_fails_waits_ever_longer_up_to_a_limit_and_others_do_not() -> None:
    now = [0.0]
    slowing = Slowing(rate=1.0, burst=3, most_s=2.0, peers=2, clock=lambda: now[0])
    assert [slowing.failed("a") for _ in range(7)] == [0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0]
    assert slowing.failed("b") == 0.0
    now[0] = 4.0
    assert [slowing.failed("a") for _ in range(3)] == [0.0, 0.0, 1.0]
    slowing.failed("c")
    slowing.failed("d")
    assert slowing.failed("a") == 0.0, "of many peers the last are remembered"


def test_replies_name_no_version_and_leave_a_browser_nothing_to_guess() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        for headers, status in ((None, 401), (BEARER, 200)):
            async with session.get("/healthz", headers=headers) as reply:
                assert reply.status == status
                assert reply.headers["Server"] == "flexstream"
                for name in ("X-Content-Type-Options", "Content-Security-Policy", "X-Frame-Options"):
                    assert reply.headers[name]
        assert daemon.control_address is not None
        reader, writer = await asyncio.open_connection(*daemon.control_address)
        writer.write(b"no HTTP at all\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.")
        assert b"aiohttp" not in answer
        assert b"Python" not in answer
        writer.close()

    run(scenario, token="secret")


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_request_without_a_host_is_refused(token: str | None) -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert daemon.control_address is not None
        reader, writer = await asyncio.open_connection(*daemon.control_address)
        writer.write(b"GET /healthz HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n")
        answer = await reader.read()
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert b"no_host" in answer
        writer.close()

    run(scenario, token=token)


@pytest.mark.parametrize("token", [None, "secret"])
def test_pages_of_other_sites_change_nothing(token: str | None) -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert daemon.control_address is not None
        own = f"http://127.0.0.1:{daemon.control_address[1]}"
        for headers, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-site"}, 403),
            ({"Origin": own, "Sec-Fetch-Site": "same-origin"}, 201),
            ({}, 200),
        ):
            async with session.post("/v1/streams", json=ADS.to_dict(), headers={**BEARER, **headers}) as reply:
                assert reply.status == status, headers
        async with session.delete("/v1/queries/x", headers={**BEARER, "Origin": "https://evil.example"}) as reply:
            assert (await reply.json())["error"]["code"] == "bad_origin"
        async with session.get("/healthz", headers={**BEARER, "Origin": "https://evil.example"}) as reply:
            assert reply.status == 200

    run(scenario, token=token)


def test_without_a_token_a_foreign_host_header_is_refused() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        for host, status in (
            ("evil.example", 403),
            ("localhost:7401", 200),
            ("[::1]:1", 200),
            ("127.0.0.1", 200),
        ):
            async with session.get("/healthz", headers={"Host": host}) as reply:
                assert reply.status == status, host

    run(scenario)


def test_health_and_readiness_follow_the_engine() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert await get(session, "/healthz") == {"status": "ok", "engine": "running"}
        assert await get(session, "/readyz") == {"ready": True, "reason": None}
        engine.state = "draining"
        assert (await get(session, "/healthz"))["engine"] == "draining"
        assert "draining" in (await get(session, "/readyz", 503))["reason"]
        engine.state = "failed"
        assert (await get(session, "/healthz", 503))["status"] == "failed"

    run(scenario)


def test_health_is_told_while_all_other_threads_are_busy_and_is_asked_once_for_all() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        go_on, asked, well = threading.Event(), [], engine.health()
        waiting = [asyncio.create_task(asyncio.to_thread(go_on.wait, 60)) for _ in range(200)]
        try:
            await get(session, "/healthz")
            engine.health = lambda: asked.append(1) or {**well, "problem": go_on.wait(60) and None}  # type: ignore[method-assign, func-returns-value]
            both = [asyncio.create_task(get(session, path)) for path in ("/healthz", "/readyz", "/healthz")]
            while not asked:
                await asyncio.sleep(0.01)
        finally:
            go_on.set()
        await asyncio.gather(*both, *waiting)
        assert len(asked) < 3

    run(scenario)


def test_a_problem_is_told_by_health_and_readiness() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        ill = {**engine.health(), "problem": "the data port has not answered for 5 s"}
        engine.health = lambda: ill  # type: ignore[method-assign]
        told = await get(session, "/healthz", 503)
        assert told == {"status": "failed", "engine": "running", "problem": "the data port has not answered for 5 s"}
        assert "data port" in (await get(session, "/readyz", 503))["reason"]

    run(scenario)


def test_health_that_cannot_be_told_is_a_problem_and_not_the_end_of_asking() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        good, engine.health = engine.health, lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        assert "ZeroDivisionError" in (await get(session, "/healthz", 503))["problem"]
        assert "ZeroDivisionError" in (await get(session, "/readyz", 503))["reason"]
        engine.health = good  # type: ignore[method-assign]
        await get(session, "/healthz")

    run(scenario)


def test_a_daemon_whose_workers_wait_for_room_is_alive_but_not_ready() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        engine.not_ready = "results of query ysb cannot be written: the disk is full"
        await get(session, "/healthz")
        assert await get(session, "/readyz", 503) == {"ready": False, "reason": engine.not_ready}
        engine.not_ready = None
        await get(session, "/readyz")

    run(scenario)


def test_status_nic_and_placement_are_shown() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        status = await get(session, "/v1/status")
        assert status["state"] == "running"
        assert status["daemon"]["version"] == fs.__version__
        assert (await get(session, "/v1/nic"))["nic"]["kind"] == "user"
        placement = await get(session, "/v1/rebalance")
        assert placement["automatic"] is False
        assert placement["placement"] == [0, 1] * 4
        assert [worker["groups"] for worker in placement["workers"]] == [4, 4]

    run(scenario)


def test_a_bug_in_a_handler_is_an_error_500_and_the_daemon_goes_on() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        good, engine.status = engine.status, lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        error = (await get(session, "/v1/status", 500))["error"]
        assert error["code"] == "internal"
        assert "ZeroDivisionError" in error["message"]
        engine.status = good  # type: ignore[method-assign]
        await get(session, "/v1/status")

    run(scenario)


def test_a_status_that_fails_takes_neither_health_nor_what_producers_ask_for_with_it() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.status = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        for path in ("/healthz", "/readyz", "/v1/streams", "/v1/streams/ads"):
            await get(session, path)

    run(scenario)


def test_names_that_no_text_can_hold_take_no_page_down() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        odd = engine.status()
        for of in ("sessions", "held_by"):
            odd["streams"]["ads"][of][0]["producer"] = "sink:\ud800"
        engine.status = lambda: odd  # type: ignore[method-assign]
        for path in ("/v1/status", "/healthz"):
            await get(session, path)
        async with session.get("/metrics") as reply:
            assert reply.status == 200
            assert 'flexstream_session_epoch{stream="ads",producer="sink:?"} 1' in await reply.text()

    run(scenario)


def test_streams_and_queries_come_back_after_a_restart(tmp_path: Path) -> None:
    async def first(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        await post(session, "/v1/queries", {**views(), "name": "gone"})
        async with session.delete("/v1/queries/gone") as reply:
            assert reply.status == 200
        engine.emit("ysb", 7)

    run(first, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))

    async def second(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert list(engine.streams) == ["ads"]
        assert list(engine.queries) == ["ysb"]
        async with session.get("/v1/queries/ysb/results?offset=5") as reply:
            assert pa.ipc.open_stream(await reply.read()).read_all().column("n").to_pylist() == [5, 6]

    run(second, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))


def test_producers_that_were_there_are_expected_after_a_restart(tmp_path: Path) -> None:
    async def first(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())
        engine.registered = [("p1", 1), ("p2", 7)]
        deadline = time.monotonic() + WAIT_S
        while Catalog(tmp_path).sessions != {"ads": [("p1", 1), ("p2", 7)]}:  # after a crash, too
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        engine.registered = [("p2", 7)]

    run(first, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))

    async def second(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert engine.expected == {"ads": [("p2", 7)]}
        assert list(engine.queries) == ["ysb"]

    run(second, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))


def test_one_query_that_cannot_come_back_does_not_keep_the_daemon_away_and_is_not_forgotten(
    tmp_path: Path,
) -> None:
    async def first(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        await post(session, "/v1/queries", views())

    run(first, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))
    [segment] = (tmp_path / "results" / "ysb").iterdir()
    segment.rename(segment.with_name(f"{7:020d}.arrow"))

    async def second(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        failed = (await get(session, "/v1/status"))["daemon"]["catalog_failed"]
        assert "renamed" in failed["query ysb"]
        await post(session, "/v1/queries", {**views(), "name": "new"})

    run(second, engine=FakeEngine(tmp_path), catalog=Catalog(tmp_path))
    assert set(Catalog(tmp_path).queries) == {"ysb", "new"}


def test_a_query_is_undone_when_the_catalog_cannot_be_written(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)

    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        catalog.path = tmp_path / "missing" / "catalog.json"
        error = (await post(session, "/v1/queries", views(), 507))["error"]
        assert error["code"] == "catalog_io"
        assert engine.queries == {}

    run(scenario, catalog=catalog)


def test_a_port_in_use_is_named() -> None:
    async def scenario(session: aiohttp.ClientSession, engine: FakeEngine, daemon: Daemon) -> None:
        assert daemon.control_address is not None
        with pytest.raises(ConfigError, match=f"127.0.0.1:{daemon.control_address[1]}.*in use"):
            await Daemon(FakeEngine(), control=daemon.control_address).start()

    run(scenario)
