"""flexstream rebalance, and its HTTP routes, against a real daemon with rows on their way."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flexstream as fs
from flexstream.cli import main
from flexstream.client.http import Client
from flexstream.errors import FlexStreamError
from flexstream.testing.ysb import YSB_QUERY, expected_views, generate
from tests.unit.daemon.test_daemon_engine import Served, serve
from tests.waiting import wait_until

GROUPS = 16
pytestmark = pytest.mark.time_limit(200)


class Daemon:
    """A daemon with two workers, and the command line pointed at it."""

    def __init__(self, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
        self.served = served
        self.client: Client = served.client
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["rebalance", *arguments, "--url", self.served.ready["control"]])
        said = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, said.err + said.out
        return said.err if code else said.out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def placement(self) -> list[int]:
        found: list[int] = self.client.get("/v1/rebalance")["placement"]
        return found


OPTIONS = ("--workers", "2", "--pin", "false", "--balance", "off", "--compile", "off")


@pytest.fixture
def daemon(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Daemon]:
    with serve(project, tmp_path, *OPTIONS) as served:
        yield Daemon(served, capsys)


@pytest.fixture(scope="module")
def untouched(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests that are refused whatever they ask for."""
    with serve(project, tmp_path_factory.mktemp("data"), *OPTIONS) as served:
        yield served


@pytest.fixture
def refusing(untouched: Served, capsys: pytest.CaptureFixture[str]) -> Daemon:
    return Daemon(untouched, capsys)


def test_everything_can_be_ordered_while_rows_arrive_and_no_result_knows_of_it(daemon: Daemon) -> None:
    rows = generate(120_000, 20, 1, 2_000)
    daemon.client.post("/v1/queries", YSB_QUERY.to_dict())
    done, ordered = threading.Event(), threading.Event()

    def produce() -> None:
        with fs.Producer(daemon.served.ready["control"], stream="ads", linger_ms=1) as producer:
            for start in range(0, len(rows), 300):
                producer.send(rows[start : start + 300])
                producer.marker()
                # Rows must arrive until all is ordered, however long that takes: the fewer are left, the slower.
                time.sleep(0.002 if ordered.is_set() else 0.002 + 0.4 * (start / len(rows)) ** 4)
        done.set()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        wait_until(lambda: any(daemon.client.get("/v1/status")["streams"]["ads"]["groups"]), "rows")
        moved = daemon("move", "3", "0")
        assert "group 3 to worker 0" in moved
        assert "moved 1 group in " in moved
        assert "p99 latency during the move: " in moved
        drained = daemon.json("drain", "0")
        assert daemon.placement() == [1] * GROUPS
        assert len(drained["moved"]) > GROUPS // 2
        assert all(move["state"] == "moved" and move["took_ms"] > 0 for move in drained["moved"])
        assert drained["took_ms"] > 0
        assert "plan" in drained
        added = daemon.json("add", "0")
        assert 0 in daemon.placement()
        assert added["worker_percent_after"]
        assert "imbalance" in daemon("apply") or daemon.json("apply")["moved"] == []
        assert daemon("auto", "on").startswith("automatic moves are on")
        assert daemon.json("status")["automatic"] is True
        assert daemon("auto", "off").startswith("automatic moves are off")
    finally:
        ordered.set()
        thread.join(120)
    assert done.is_set()
    expected = expected_views(rows)
    assert daemon.served.views(rows=len(expected)) == expected
    history = daemon.json("history", "--limit", "256")["history"]
    orders = [entry["what"] for entry in history if entry["what"] != "tick"]
    assert orders[:3] == ["move", "drain", "add"]
    text = daemon("history")
    assert "drain" in text
    assert "group 3 to worker 0" in text
    with urllib.request.urlopen(f"http://{daemon.client.address}/metrics", timeout=30) as reply:
        page = reply.read().decode()
    for name in ("flexstream_moves_total", "flexstream_last_move_ms", "flexstream_imbalance_percent"):
        assert f"\n{name} " in page, name
    assert "flexstream_rebalance_automatic 0" in page


def test_plan_changes_nothing(daemon: Daemon) -> None:
    before = daemon.placement()
    assert "no rows arrived" in daemon("plan")
    made = daemon.json("plan")
    assert made["plan"] == []
    assert made["reason"] == "no_load"
    assert daemon.placement() == before
    assert daemon.json("history")["history"] == []


def test_frozen_groups_and_drained_workers_are_shown_and_refuse_moves(daemon: Daemon) -> None:
    daemon("freeze", "1", "3")
    assert daemon.json("status")["frozen"] == [1, 3]
    assert "frozen groups: 1, 3" in daemon("status")
    said = daemon("move", "3", "0", code=1)
    assert "group 3 is frozen" in said
    assert "freeze --off 3" in said
    assert "worker 1 has frozen groups: 1, 3" in daemon("drain", "1", code=1)
    assert daemon("freeze", "--off").startswith("no group is frozen")
    daemon("drain", "1")
    status = daemon("status")
    assert "drained workers: 1" in status
    assert "worker 1 is drained" in daemon("move", "0", "1", code=1)
    assert "worker 0 is the last active one" in daemon("drain", "0", code=1)
    assert daemon("freeze").startswith(f"{GROUPS} of {GROUPS} groups are frozen")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("move", "99", "0"), "group 99 must be from 0 to 15"),
        (("move", "0", "7"), "worker 7 must be from 0 to 1"),
        (("drain", "2"), "worker 2 must be from 0 to 1"),
        (("add", "5"), "worker 5 must be from 0 to 1"),
        (("freeze", "3", "16"), "group 16 must be from 0 to 15"),
    ],
)
def test_what_does_not_exist_is_named(refusing: Daemon, arguments: tuple[str, ...], said: str) -> None:
    assert said in refusing(*arguments, code=1)


@pytest.mark.parametrize(
    "arguments", [("move", "x", "0"), ("move", "0"), ("auto", "maybe"), ("drain", "-1"), ("nothing",)]
)
def test_wrong_usage_is_exit_code_2(refusing: Daemon, arguments: tuple[str, ...]) -> None:
    refusing(*arguments, code=2)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("move", {"group": 1}, "the body has no 'worker'"),
        ("move", {"group": "1", "worker": 0}, "group = '1' is not a whole number"),
        ("move", {"group": True, "worker": 0}, "group = 'True' is not a whole number"),
        ("move", {"group": 1, "worker": 0, "wrker": 1}, "unknown field 'wrker'"),
        ("auto", {}, "the body has no 'on'"),
        ("auto", {"on": "yes"}, "on = 'yes' is not true or false"),
        ("drain", [], "the body must be a JSON object"),
        ("plan", {"now": True}, "unknown field 'now'"),
        ("freeze", {"groups": 3}, "groups = '3' is not a list"),
        ("freeze", {"groups": ["a"]}, "group 'a' must be from 0 to 15"),
        ("add", {"worker": 10**30}, "must be from 0 to 1"),
    ],
)
def test_bad_bodies_are_named(refusing: Daemon, path: str, body: Any, said: str) -> None:
    with pytest.raises(FlexStreamError) as refused:
        refusing.client.post(f"/v1/rebalance/{path}", body)
    assert said in refused.value.message


def test_the_history_has_a_limit(daemon: Daemon) -> None:
    for _ in range(3):
        daemon.client.post("/v1/rebalance/freeze", {})
    assert len(daemon.client.get("/v1/rebalance/history", limit=2)["history"]) == 2
    with pytest.raises(FlexStreamError, match="limit"):
        daemon.client.get("/v1/rebalance/history", limit=0)


def test_a_group_is_split_and_joined_by_hand(daemon: Daemon) -> None:
    rows = generate(40_000, 20, 1, 2_000)
    daemon.client.post("/v1/queries", YSB_QUERY.to_dict())
    producers = [fs.Producer(daemon.served.ready["control"], stream="ads", linger_ms=1) for _ in range(2)]
    try:
        for half in (slice(0, 20_000), slice(20_000, None)):
            for number, producer in enumerate(producers):
                producer.send(rows[half][number::2])
                producer.flush(60)
            if half.start:
                continue
            group = next(g for g, n in enumerate(daemon.client.get("/v1/status")["streams"]["ads"]["groups"]) if n)
            owner = daemon.placement()[group]
            said = daemon("split", str(group), str(1 - owner))
            assert f"group {group} is served by workers {owner}, {1 - owner}" in said
            assert "split in " in said
            (split,) = daemon.json("status")["split"]
            assert (split["group"], split["workers"]) == (group, [owner, 1 - owner])
            assert f"group {group} is split over workers {owner}" in daemon("status")
            connections = daemon.client.get("/v1/status")["connections"]
            assert connections["misaligned"] >= connections["split_away"] == split["misaligned"]
            assert "split already" in daemon("split", str(group), str(1 - owner), code=1)
        assert "joined in " in daemon("unsplit", str(group))
        assert "is not split" in daemon("unsplit", str(group))
    finally:
        for producer in producers:
            producer.close(60)
    expected = expected_views(rows)
    assert daemon.served.views(rows=len(expected)) == expected
    assert [e["what"] for e in daemon.json("history")["history"] if e["what"] != "tick"] == [
        "split", "unsplit", "unsplit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (("split", "99", "1"), "must be from 0 to"),
        (("split", "1", "7"), "must be from 0 to 1"),
        (("split", "0", "1"), "a connection has one worker"),
        (("unsplit", "99"), "must be from 0 to"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_its_reason(refusing: Daemon, order: tuple[str, ...], said: str) -> None:
    assert said in refusing(*order, code=1)
