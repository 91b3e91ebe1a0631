"""Whose session is it? A network producer is never a sink's or the feeder's, whatever it calls itself."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest

import flexstream as fs
from flexstream.catalog.sessions import FEED, SINK
from flexstream.wire.frames import FrameType, frame
from tests.adversity.rig import STREAM, RawClient, address, assert_results, bitmap, make_rows, read_frame, serving
from tests.waiting import WAIT_S, wait_until


def stage(engine: fs.Engine, rows: object) -> dict[str, Any]:
    with fs.Producer(address(engine), stream=STREAM, stage=str(uuid.uuid4())) as producer:
        producer.send(rows)
        return producer.finish_stage()


def said(engine: fs.Engine) -> set[tuple[str, str, int]]:
    return {(s["kind"], s["producer"], s["epoch"]) for s in engine.status()["streams"]["s"]["sessions"]}


def end(client: RawClient) -> None:
    control = client.open()
    control.sendall(frame(FrameType.EOS, payload=bitmap()))
    assert read_frame(control)[0].type is FrameType.ACK


def test_a_producer_with_a_sinks_name_and_a_huge_epoch_is_somebody_else() -> None:
    rows = make_rows(4000)
    with serving() as engine, RawClient(engine, producer="sink:mine", epoch=2**62) as imposter:
        engine.staging.commit("mine", "q", 0, [stage(engine, rows[:2000])], wait_s=WAIT_S)
        fired = engine.status()["queries"]["q"]["windows_fired"]
        end(imposter)
        wait_until(lambda: said(engine) == {(SINK, "sink:mine", 1)}, "the imposter's end, and no other")
        assert engine.status()["queries"]["q"]["windows_fired"] == fired
        assert engine.staging.commit("mine", "q", 1, [stage(engine, rows[2000:])], wait_s=WAIT_S)["applied"]
        assert_results(engine, rows)


def test_a_producer_with_the_feeders_name_is_somebody_else() -> None:
    rows = make_rows(4000)
    with serving() as engine, RawClient(engine, producer="feed", epoch=2**62) as imposter:
        engine.feed("s", rows[:2000])
        end(imposter)
        wait_until(lambda: said(engine) == {(FEED, "feed", 1)}, "the imposter's end, and no other")
        engine.feed("s", rows[2000:])
        assert_results(engine, rows)


@pytest.mark.parametrize(("epoch", "told"), [(2, False), (3, True), (2**62, True)])
def test_an_epoch_that_jumps_is_logged_with_both_peers(
    epoch: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as engine, RawClient(engine, producer="p", epoch=1) as client, caplog.at_level(logging.WARNING):
        first = client.open().getsockname()[1]
        second = client.open(epoch=epoch).getsockname()[1]
        found = [record.fields for record in caplog.records if record.getMessage() == "epoch_jumped"]
        wanted = {"producer": "p", "epoch": 1, "new_epoch": epoch, "peer": f"127.0.0.1:{second}"}
        assert found == ([wanted | {"old_peer": f"127.0.0.1:{first}"}] if told else [])
