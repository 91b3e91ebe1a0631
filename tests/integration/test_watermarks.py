"""Watermarks: of each group by itself, over sessions that count, with those that hold them named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.wire.frames import FrameType, frame
from tests.adversity.rig import (
    GROUPS,
    QUERY,
    RawClient,
    address,
    assert_results,
    bitmap,
    data_frame,
    make_rows,
    read_frame,
    rows_of_group,
    serving,
)
from tests.property.checks import as_rows
from tests.waiting import wait_until


def stream_status(engine: fs.Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.status()["streams"]["s"]
    return found


def fired(engine: fs.Engine) -> set[tuple[int, int]]:
    """(group, window start) of all results."""
    return {(row["group"], row["window_start"]) for row in as_rows(engine.results("q"))}


def promise(client: RawClient, control: Any, watermark: int) -> None:
    control.sendall(frame(FrameType.WATERMARK, value=watermark, payload=bitmap()))


def end(*controls: Any) -> None:
    for control in controls:
        control.sendall(frame(FrameType.EOS, payload=bitmap()))
    for control in controls:
        assert read_frame(control)[0].type is FrameType.ACK


def set_idle(engine: fs.Engine, *producers: str) -> None:
    """As the clock would find them silent, in this order."""
    sessions = engine.running()[0][0].sessions
    for producer in producers:
        session = sessions.find(producer)
        assert session is not None
        sessions.set_idle(session)
        assert session.state == "idle"


def test_a_groups_windows_fire_by_the_groups_own_watermark() -> None:
    """FlexStream paper, section 4.2: a group that is held back holds no other one."""
    ahead, behind = rows_of_group(2, 8, start=0), rows_of_group(5, 8, start=0)
    with serving() as engine, RawClient(engine, producer="p") as client:
        control = client.open()
        socks = {group: client.open(group) for group in (2, 5)}
        socks[2].sendall(data_frame(2, ahead) + frame(FrameType.WATERMARK, 2, value=1000))
        socks[5].sendall(data_frame(5, behind) + frame(FrameType.WATERMARK, 5, value=50))
        control.sendall(frame(FrameType.WATERMARK, value=1000, payload=bitmap(2, 5)))
        wait_until(lambda: stream_status(engine)["watermark"] == {"min": 50, "max": 1000}, "the watermarks")
        wait_until(lambda: fired(engine), "results")
        assert fired(engine) == {(2, 0)}
        socks[5].sendall(frame(FrameType.WATERMARK, 5, value=100))
        wait_until(lambda: fired(engine) == {(2, 0), (5, 0)}, "the windows of the other group")


def test_a_group_without_a_watermark_is_the_one_that_is_shown() -> None:
    with serving() as engine, RawClient(engine, producer="p") as client:
        assert stream_status(engine)["groups_without_watermark"] == GROUPS
        control = client.open()
        control.sendall(frame(FrameType.WATERMARK, value=1000, payload=bitmap(5)))
        wait_until(lambda: stream_status(engine)["groups_without_watermark"] == 1, "the other groups' watermark")
        said = stream_status(engine)
        assert said["watermark"] == {"min": None, "max": 1000}
        assert [holder["producer"] for holder in said["held_by"]] == ["p"]
        promise(client, control, 1000)
        wait_until(lambda: stream_status(engine)["watermark"]["min"] == 1000, "the watermark of the last group")
        assert stream_status(engine)["groups_without_watermark"] == 0


@pytest.mark.parametrize("order", [("ahead", "behind"), ("behind", "ahead")])
def test_when_all_are_silent_what_was_promised_has_fired_whoever_became_idle_first(order: tuple[str, str]) -> None:
    rows = rows_of_group(2, 8, start=0)
    with (
        serving() as engine,
        RawClient(engine, producer="ahead") as ahead,
        RawClient(engine, producer="behind") as behind,
    ):
        controls = ahead.open(), behind.open()
        sock = ahead.open(2)
        sock.sendall(data_frame(2, rows) + frame(FrameType.WATERMARK, 2, value=1000))
        controls[0].sendall(frame(FrameType.WATERMARK, value=1000, payload=bitmap(2)))
        promise(behind, controls[1], 10)
        wait_until(lambda: stream_status(engine)["watermark"] == {"min": 10, "max": 10}, "the watermark")
        sessions = engine.running()[0][0].sessions
        wait_until(lambda: all(s["watermark"] for s in stream_status(engine)["sessions"]), "both watermarks")
        set_idle(engine, *order)
        wait_until(lambda: stream_status(engine)["watermark"] == {"min": 1000, "max": 1000}, "the watermark")
        wait_until(lambda: fired(engine) == {(2, 0)}, "the window")
        # Then: nothing goes on until one of them speaks, and the status says so.
        holders = stream_status(engine)["held_by"]
        assert {holder["producer"] for holder in holders} == {"ahead", "behind"}
        assert all(holder["idle"] for holder in holders)
        # When: the one ahead speaks again. Then: it alone counts.
        controls[0].sendall(frame(FrameType.WATERMARK, value=2000, payload=bitmap()))
        wait_until(lambda: stream_status(engine)["watermark"]["min"] == 2000, "the watermark")
        wait_until(lambda: sessions.find("ahead").state == "live", "the one that spoke to count again")
        assert [(h["producer"], h["idle"]) for h in stream_status(engine)["held_by"]] == [("ahead", False)]
        assert sessions.find("behind").state == "idle"


def test_an_idle_session_that_is_left_when_others_ended_is_named() -> None:
    rows = rows_of_group(2, 8, start=0)
    with serving() as engine, RawClient(engine, producer="silent") as silent, RawClient(engine, producer="p") as client:
        controls = silent.open(), client.open()
        sock = client.open(2)
        sock.sendall(data_frame(2, rows) + frame(FrameType.EOS, 2))
        set_idle(engine, "silent")
        controls[1].sendall(frame(FrameType.EOS, payload=bitmap(2)))
        wait_until(lambda: [s["producer"] for s in stream_status(engine)["sessions"]] == ["silent"], "the end")
        assert [(h["producer"], h["idle"]) for h in stream_status(engine)["held_by"]] == [("silent", True)]
        end(controls[0])
        wait_until(lambda: fired(engine) == {(2, 0)}, "the window")
        assert np.size(rows) == sum(row["n"] for row in as_rows(engine.results("q")))


def test_a_session_that_is_ending_and_still_owes_a_group_is_named() -> None:
    with serving(session_timeout_s=60) as engine, RawClient(engine, producer="p") as client:
        control = client.open()
        client.open(2)
        control.sendall(frame(FrameType.EOS, payload=bitmap(2)))
        wait_until(lambda: stream_status(engine)["sessions"][0]["state"] == "ending", "the end")
        assert [h["producer"] for h in stream_status(engine)["held_by"]] == ["p"]


# -- after a restart


def restarted(engine: fs.Engine, *known: tuple[str, int]) -> None:
    engine.expect_sessions("s", known)
    engine.submit(QUERY)


def test_the_first_producer_back_after_a_restart_does_not_drive_the_watermark_alone() -> None:
    rows = make_rows(2000)
    with fs.Engine(groups=GROUPS, listen="127.0.0.1:0", pin=False, session_timeout_s=600) as engine:
        restarted(engine, ("fast", 1), ("slow", 1))
        assert {(h["producer"], h["peer"]) for h in stream_status(engine)["held_by"]} == {
            ("fast", "before the restart"), ("slow", "before the restart"),
        }  # fmt: skip
        with fs.Producer(address(engine), stream="s", producer_id="fast") as fast:
            fast.send(rows[1000:])
        assert engine.status()["queries"]["q"]["windows_fired"] == 0
        assert [h["producer"] for h in stream_status(engine)["held_by"]] == ["slow"]
        with fs.Producer(address(engine), stream="s", producer_id="slow") as slow:
            slow.send(rows[:1000])
        assert_results(engine, rows)
        assert engine.status()["queries"]["q"]["late"] == 0


def test_a_producer_that_does_not_come_back_after_a_restart_is_waited_for_no_longer_than_a_broken_one() -> None:
    rows = make_rows(2000)
    with fs.Engine(groups=GROUPS, listen="127.0.0.1:0", pin=False, session_timeout_s=0.5) as engine:
        restarted(engine, ("gone", 1))
        with fs.Producer(address(engine), stream="s", producer_id="fast") as fast:
            fast.send(rows)
        wait_until(lambda: engine.status()["queries"]["q"]["windows_fired"] > 0, "windows")
        assert stream_status(engine)["sessions_expired"] == 1
        assert_results(engine, rows)


def test_producers_that_are_waited_for_are_not_among_the_expected_ones_before_they_come() -> None:
    rows = make_rows(1000)
    with fs.Engine(groups=GROUPS, listen="127.0.0.1:0", pin=False, expected_producers=2) as engine:
        restarted(engine, ("a", 1), ("b", 1))
        sessions = engine.running()[0][0].sessions
        with fs.Producer(address(engine), stream="s", producer_id="a") as first:
            first.send(rows[:500])
        engine.end_session("s", "b")
        wait_until(lambda: not sessions.all(), "the end of both")
        assert engine.status()["queries"]["q"]["windows_fired"] == 0
        with fs.Producer(address(engine), stream="s", producer_id="c") as second:
            second.send(rows[500:])
        assert_results(engine, rows)
