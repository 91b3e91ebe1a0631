"""YSB with Bytewax: a dataflow of one worker; event-time tumbling windows, counted by key."""

from datetime import UTC, datetime, timedelta

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.dataflow import Dataflow
from bytewax.operators.windowing import EventClock, TumblingWindower
from bytewax.testing import TestingSink, TestingSource, run_main
from common import WINDOW_MS, serve

START = datetime(2020, 1, 1, tzinfo=UTC)


def prepare(rows):
    """Python objects, made before the clock starts: (campaign, time, type)."""
    times = [datetime.fromtimestamp(ms / 1000, UTC) for ms in rows["event_time"].tolist()]
    return list(zip(map(str, rows["campaign_id"].tolist()), times, rows["event_type"].tolist(), strict=True))


def run(rows, batch):
    out: list = []
    flow = Dataflow("ysb")
    stream = op.input("in", flow, TestingSource(rows, batch_size=batch))
    views = op.filter("views", stream, lambda row: row[2] == b"view")
    # Its watermark also moves on with the wall clock, so that rows of a slow run would be late: it waits long enough.
    clock = EventClock(ts_getter=lambda row: row[1], wait_for_system_duration=timedelta(hours=1))
    windower = TumblingWindower(length=timedelta(milliseconds=WINDOW_MS), align_to=START)
    counted = win.count_window("count", views, clock, windower, key=lambda row: row[0])
    op.output("out", counted.down, TestingSink(out))
    run_main(flow)
    return sum(count for _, (_, count) in out)


if __name__ == "__main__":
    serve(run, prepare)
