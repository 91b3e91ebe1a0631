"""Watermarks: of each group by itself, over sessions that count, with those that hold them named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.wire import FrameType, frame
from tests.adversity.rig import GROUPS, RawClient, bitmap, data_frame, read_frame, rows_of_group, serving
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
        wait_until(lambda: stream_status(engine)["watermark"]["max"] == 1000, "the watermark")
        said = stream_status(engine)
        assert said["watermark"]["min"] is None
        assert said["groups_without_watermark"] == 1
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
