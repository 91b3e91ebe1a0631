"""Long sliding windows: what is kept between firings gives what merging all panes anew would give, whatever comes."""

import random

import numpy as np
import pytest

import flexstream as fs
from flexstream.testing import run
from tests.property.checks import FINISH_S, as_rows, assert_last_results, window_of

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "f": "f64"}, key="k", time="t")
INVERTIBLE = {"n": fs.count(), "total": fs.sum("x")}
OTHERS = {
    "least": fs.min("x"), "most": fs.max("f"), "mean": fs.avg("f"), "spread": fs.stddev("f"), "first": fs.first("x"),
    "last": fs.last("x"), "about": fs.approx_distinct("x"),
}  # fmt: skip
BESIDE = {"exact": fs.distinct("x"), "often": fs.mode("x"), "middle": fs.median("f"), "both": fs.median("x")}


def random_aggregates(rnd):
    chosen = dict(INVERTIBLE)
    kind = rnd.choice(("invertible", "others", "others", "beside"))
    if kind != "invertible":
        chosen |= {name: OTHERS[name] for name in rnd.sample(sorted(OTHERS), rnd.randint(1, 3))}
    beside = rnd.sample(sorted(BESIDE), rnd.randint(1, 4)) if kind == "beside" else []
    return chosen | {name: BESIDE[name] for name in beside}


def random_batch(rnd, now, n):
    """Mostly new rows, some of them old, or of one old pane again and again; keys come and go with time."""
    old = now // 30 * 30 - 7
    again = rnd.random() < 0.3
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"] = [now + (rnd.randint(0, 12) if rnd.random() < 0.95 else -rnd.randint(0, 80)) for _ in rows]
    if again:
        rows["t"][-2:] = old
    rows["k"] = [now // 40 * 3 + rnd.randint(0, 5) for _ in rows]
    rows["x"] = [rnd.randint(-9, 9) for _ in rows]
    rows["f"] = [rnd.randint(-9, 9) / 4 for _ in rows]
    return rows


def random_steps(rnd):
    now, steps, gap = 0, [], rnd.choice((1, 100, 1000))
    for _ in range(rnd.randint(3, 40)):
        steps.append((random_batch(rnd, now, rnd.choice((0, 1, 4, 40))), now if rnd.random() < 0.8 else False))
        now += rnd.choice((0, 1, 2, 5, 30, gap))
    return steps


def check(rnd):
    slide = rnd.choice((1, 1, 2, 5))
    size = slide * rnd.choice((9, 17, 30, 64)) + rnd.choice((0, 0, slide // 2))
    lateness = rnd.choice((0, 0, 0, 3, 50, 2000))
    window = fs.sliding(f"{size}s", every=f"{slide}s")
    query = STREAM.query("q").window(window, allowed_lateness=f"{lateness}s").agg(**random_aggregates(rnd))
    steps, workers, groups = random_steps(rnd), rnd.choice((1, 2)), rnd.choice((1, 3))
    marks, at = [], 0
    for batch, watermark in steps:
        at += len(batch)
        if watermark is not False:
            marks.append((at, watermark))
    everything = np.concatenate([batch for batch, _ in steps])
    oracle = run(query, everything, marks)
    compile = rnd.choice(("off", "require"))
    with fs.Engine(workers=workers, groups=groups, pin=False, compile=compile) as engine:
        engine.submit(query)
        for batch, watermark in steps:
            engine.feed("s", batch, watermark=watermark)
            if workers == 2 and rnd.random() < 0.2:
                engine.flush()  # while a group moves its windows fire later, and take rows that would have been late
                engine.move({group: rnd.randint(0, 1) for group in range(groups)})
        engine.finish(timeout=FINISH_S)
        results, late = as_rows(engine.results("q")), as_rows(engine.late("q"))
        state_bytes = sum(worker["state_bytes"] for worker in engine.status()["workers"])
    note = f"{query.explain()}\n{[(batch.tolist(), watermark) for batch, watermark in steps]}"
    last = {}
    for row in results:
        window = window_of(query, row)
        assert window not in last or row["revision"] > last[window]["revision"], note
        assert lateness or row["revision"] == 0, note
        last[window] = row
    assert_last_results(query, results, oracle.windows, note)
    assert len(late) == len(oracle.late), note
    if lateness == 0:
        assert state_bytes < 1 << 20, note


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_long_windows_give_what_the_oracle_gives(seed, part):
    for i in range(20):
        check(random.Random(f"{seed}/{part}/{i}"))


@pytest.mark.parametrize("lateness", ["50s", "1h"])
def test_a_late_row_behind_all_that_was_merged(lateness):
    """Nothing of what was merged is left, and a pane comes between it and the windows that are open."""
    query = STREAM.query("q").window(fs.sliding("100s", every="1s"), allowed_lateness=lateness)
    query = query.agg(n=fs.count(), least=fs.min("x"))
    steps = [(0, -9, False), (10, -8, 105), (1000, 5, 1000), (880, 4, 1000), (1001, 6, 1050)]
    rows = np.zeros(len(steps), STREAM.schema.dtype)
    rows["t"], rows["x"] = [step[0] for step in steps], [step[1] for step in steps]
    marks = [(i + 1, mark) for i, (_, _, mark) in enumerate(steps) if mark is not False]
    with fs.Engine(workers=1, groups=1, pin=False, compile="off") as engine:
        engine.submit(query)
        for i, (_, _, mark) in enumerate(steps):
            engine.feed("s", rows[i : i + 1], watermark=mark)
        engine.finish(timeout=FINISH_S)
        assert_last_results(query, as_rows(engine.results("q")), run(query, rows, marks).windows, lateness)


def test_a_window_of_many_panes_fires_with_little_state_memory():
    """Where there is no memory to merge in, or to keep what was merged, keys are looked up in each pane."""
    query = STREAM.query("q").window(fs.sliding("64s", every="1s")).agg(n=fs.count(), least=fs.min("x"))
    rows = np.zeros(64 * 400, STREAM.schema.dtype)
    rows["t"], rows["k"], rows["x"] = np.repeat(np.arange(64), 400), np.tile(np.arange(400), 64), np.arange(len(rows))
    oracle = run(query, rows[rows["k"] < 5])
    with fs.Engine(workers=1, groups=1, pin=False, state_memory_bytes=4 << 20) as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        engine.finish(timeout=FINISH_S)
        results = [row for row in as_rows(engine.results("q")) if row["k"] < 5]
        rejected = engine.status()["queries"]["q"]["rejected"]["state_full"]
    if rejected == 0:
        assert {window_of(query, row): row["least"] for row in results} == {
            window: values["least"] for window, values in oracle.windows.items()
        }
    assert len(results) > 64
