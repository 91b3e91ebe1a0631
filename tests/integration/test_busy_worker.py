"""A worker that has much to fire, or cannot get rid of its results, still hears: HELLOs, cancel and stop."""

import threading

import numpy as np
import pytest

import flexstream as fs
from tests.property.checks import FINISH_S, as_rows
from tests.waiting import WAIT_S, wait_until

BUSY = fs.Stream("busy", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")
OTHER = fs.Stream("other", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")
MORE_THAN_FITS = 200_000  # results that no output holds


def windows(n, per_window=1, descending=False):
    rows = np.zeros(n * per_window, BUSY.schema.dtype)
    times = np.repeat(np.arange(n), per_window)
    rows["t"] = times[::-1] if descending else times
    rows["k"] = np.tile(np.arange(per_window), n)
    return rows


@pytest.fixture
def held_up():
    """An engine of one worker that is in the middle of a firing, and whose results nobody reads until `go_on`."""
    reading, go_on, gave_up = threading.Event(), threading.Event(), threading.Event()

    def hold_up_the_reader(batch):
        reading.set()
        if not go_on.wait(WAIT_S):
            gave_up.set()

    with fs.Engine(workers=1, groups=4, pin=False, listen="127.0.0.1:0") as engine:
        engine.add(OTHER)
        engine.submit(BUSY.query("q").window(fs.tumbling("1s")).agg(n=fs.count()))
        engine.submit(OTHER.query("other").window(fs.tumbling("10s")).agg(n=fs.count()))
        engine.on_results("q", hold_up_the_reader)
        engine.feed("busy", windows(MORE_THAN_FITS), watermark=False)
        engine.feed("busy", windows(0), watermark=MORE_THAN_FITS)
        assert reading.wait(WAIT_S)
        wait_until(lambda: engine.workers[0].stats()["stalled"], "the worker waits for its results to be read")
        yield engine, go_on
        assert not gave_up.is_set(), "it was not held up any more when the test got what it waited for"
        go_on.set()


def test_a_producer_of_another_stream_is_welcomed(held_up):
    engine, go_on = held_up
    host, port = engine.data_address
    with fs.Producer(f"tcp://{host}:{port}", stream="other") as producer:
        producer.send(windows(100))
        wait_until(lambda: engine.workers[0].stats()["connections"], "its connections are served")
        go_on.set()
    assert sum(row["n"] for row in as_rows(engine.results("other"))) == 100


def test_cancel_ends_a_firing(held_up):
    engine, go_on = held_up
    cancelling = threading.Thread(target=engine.cancel, args=("q",))
    cancelling.start()
    wait_until(lambda: engine.workers[0].stats()["stalled"] is None, "the worker goes on without the query")
    go_on.set()
    cancelling.join(WAIT_S)
    assert not cancelling.is_alive()
    engine.feed("other", windows(100))
    engine.finish(timeout=FINISH_S)
    assert sum(row["n"] for row in as_rows(engine.results("other"))) == 100


# -- costs that grew with the square: these did not end before


def test_many_open_windows_of_a_group_fire():
    with fs.Engine(workers=1, groups=1, pin=False) as engine:
        engine.submit(BUSY.query("q").window(fs.tumbling("1s")).agg(n=fs.count()))
        engine.feed("busy", windows(300_000, descending=True), watermark=False)
        engine.finish(timeout=FINISH_S)
        assert sum(batch.num_rows for batch in engine.results("q")) == 300_000
        assert engine.status()["queries"]["q"]["windows_fired"] == 300_000


def test_windows_of_many_panes_fire():
    with fs.Engine(workers=1, groups=1, pin=False) as engine:
        window = fs.sliding("65536s", every="1s")
        engine.submit(BUSY.query("q").window(window).agg(least=fs.min("t")))
        engine.feed("busy", windows(20_000), watermark=False)
        engine.feed("busy", windows(0), watermark=20_000)
        engine.flush()
        engine.cancel("q")
        engine.submit(BUSY.query("next").window(fs.tumbling("1s")).agg(n=fs.count()))
        engine.feed("busy", windows(20_001))
        engine.finish(timeout=FINISH_S)
        assert sum(batch.num_rows for batch in engine.results("next")) == 1
