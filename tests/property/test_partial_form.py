"""A partial that was written and read again merges as the one that was written: in the middle of an engine's life."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import generate
from flexstream.compile.toolchain import compile_code
from flexstream.compile.variant_choices import Choices
from flexstream.cython_ext.testing.partial_probe import PartialProbe
from flexstream.testing import run
from tests.property.checks import (
    FINISH_S,
    FUNCTIONS,
    as_rows,
    assert_last_results,
    assert_same_results,
    random_batches,
    random_query,
    random_rows,
    random_stream,
)

FIELDS = {"t": "timestamp[s]", "k": "i64", "x": "i64", "f": "f64", "ok": "bool"}
STREAM = fs.Stream("s", FIELDS, key="k", time="t", max_disorder="1000s")
EVERY = {
    "n": fs.count(), "some": fs.count_if("ok"), "total": fs.sum("x"), "real": fs.sum("f"), "least": fs.min("f"),
    "most": fs.max("x"), "mean": fs.avg("f"), "dev": fs.stddev("f"), "var": fs.variance("x"), "all": fs.bool_and("ok"),
    "any": fs.bool_or("ok"), "low": fs.min_by("x", "f"), "high": fs.max_by("f", "x"), "first": fs.first("x"),
    "last": fs.last("f"), "about": fs.approx_distinct("x"), "values": fs.distinct("x"), "often": fs.mode("x"),
    "middle": fs.median("f"),
}  # fmt: skip
PROBES: list[PartialProbe] = []  # panes that they lent to an engine are there until it ends


@contextmanager
def running(query: fs.Query, groups: int = 1, **options: Any) -> Any:
    """An engine with one worker and the query, its state there, and a probe."""
    probe = PartialProbe()
    PROBES.append(probe)
    with fs.Engine(workers=1, groups=groups, pin=False, **{"compile": "off", **options}) as engine:
        engine.submit(query)
        ((entry,)) = engine.running()[1]
        yield engine, entry.states[0], probe


def rest(engine: fs.Engine) -> None:
    """All that was fed is worked off, what it made due has fired, and the worker has nothing to do."""
    engine.flush()
    for _ in range(2):
        engine._parts.round_trips.wait_for_workers(time.monotonic() + FINISH_S)


def make_rows(rng: np.random.Generator, n: int, keys: int = 50, until: int = 60) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"], rows["k"] = rng.integers(0, until, n), rng.integers(-keys, keys, n)
    rows["x"], rows["ok"] = rng.integers(-20, 20, n), rng.integers(0, 2, n)
    rows["f"] = rng.choice([0.0, -0.0, np.nan, np.inf, -3.5, 7.25, 1e9], n)
    return rows


def check_images(probe: PartialProbe, state: Any, group: int) -> int:
    """Each image, read and written again, is the same; how many there are."""
    images = probe.images(state, group)
    for image in images:
        assert probe.again(state, image) == image
    return len(images)


# -- in the middle of an engine's life


def random_life(rnd: random.Random, stream: fs.Stream, query: fs.Query, rows: np.ndarray) -> int:
    """Panes go out and come in again between batches, at once or when others have come in their place."""
    ordered = any(aggregate.fn == "order_hash" for aggregate in query.aggregates.values())
    mode = "off" if ordered else rnd.choice(("off", "require"))
    groups, images = rnd.choice((1, 3)), 0
    with running(query, groups, compile=mode) as (engine, state, probe):
        for batch in random_batches(rnd, rows):
            out = {}
            if rnd.random() < 0.4:
                rest(engine)
                for group in range(groups):
                    images += check_images(probe, state, group)
                    out[group] = probe.take_out(state, group)
            half = 0 if ordered or not out else len(batch) // 2
            if half:
                engine.feed(stream.name, batch[:half], watermark=False)
                rest(engine)
            for group, taken in out.items():
                probe.put_in(state, group, taken)
            engine.feed(stream.name, batch[half:])
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results(query.name)), run(query, rows).windows)
    return images


@pytest.mark.time_limit(280)
def test_random_queries_say_what_the_oracle_says_though_their_panes_were_written_and_read(seed):
    images = 0
    for i in range(25):
        rnd = random.Random(f"{seed}/{i}")
        stream = random_stream(rnd)
        rows = random_rows(rnd.getrandbits(32), stream, rnd.choice((1, 40, 400)), rnd.choice((1, 3, 200)))
        query = random_query(rnd, stream, "q", functions=FUNCTIONS)
        try:
            images += random_life(rnd, stream, query, rows)
        except BaseException:
            print(f"case {i}\n{query.explain()}\n{rows[:40]!r}")
            raise
    assert images > 25


@pytest.mark.parametrize("compile", ["off", "require"])
@pytest.mark.parametrize("window", [fs.tumbling("20s"), fs.sliding("30s", every="7s")], ids=str)
def test_every_aggregate_goes_on_where_its_image_ended(window, compile):
    rng = np.random.default_rng(5)
    query = STREAM.query("q").window(window).agg(**EVERY)
    rows = make_rows(rng, 4_000)
    with running(query, groups=3, compile=compile) as (engine, state, probe):
        for batch in np.array_split(rows, 8):
            engine.feed("s", batch[:250], watermark=False)
            rest(engine)
            taken = [probe.take_out(state, group) for group in range(3)]
            engine.feed("s", batch[250:], watermark=False)
            rest(engine)
            for group in range(3):
                probe.put_in(state, group, taken[group])
            assert max(probe.shape(state, group)[1] for group in range(3)) > 1
            assert sum(check_images(probe, state, group) for group in range(3)) > 3
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results("q")), run(query, rows).windows)


def test_order_hash_goes_on_where_its_image_ended():
    query = STREAM.query("q").window(fs.tumbling("20s")).agg(order=fs.order_hash("x"), real=fs.order_hash("f"))
    rows = make_rows(np.random.default_rng(4), 2_000)
    with running(query, groups=2) as (engine, state, probe):
        for batch in np.array_split(rows, 9):
            engine.feed("s", batch, watermark=False)
            rest(engine)
            for group in range(2):
                check_images(probe, state, group)
                probe.put_in(state, group, probe.take_out(state, group))
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results("q")), run(query, rows).windows)


def test_what_one_worker_wrote_another_goes_on_with():
    """The group moves while its panes are records: it is adopted without them, as it will be from a disk."""
    query = STREAM.query("q").window(fs.sliding("30s", every="10s")).agg(**EVERY)
    rows = make_rows(np.random.default_rng(2), 3_000)
    rows.sort(order="t")
    probe = PartialProbe()
    PROBES.append(probe)
    with fs.Engine(workers=2, groups=2, pin=False, compile="off", balance="off") as engine:
        engine.submit(query)
        ((entry,)) = engine.running()[1]
        for batch in np.array_split(rows, 12):
            engine.feed("s", batch, watermark=int(batch["t"][0]))
            rest(engine)
            owner = engine.placement()[0]
            taken = probe.take_out(entry.states[owner], 0)
            engine.move({0: 1 - owner})
            rest(engine)
            assert probe.shape(entry.states[1 - owner], 0)[0] == 0
            probe.put_in(entry.states[1 - owner], 0, taken)
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results("q")), run(query, rows).windows)


def test_late_rows_revise_windows_whose_panes_were_written():
    rng = np.random.default_rng(6)
    window = fs.sliding("20s", every="5s")
    query = STREAM.query("q").window(window, allowed_lateness="1000s").agg(**EVERY)
    rows, marks = make_rows(rng, 3_000), []
    with running(query) as (engine, state, probe):
        for i, batch in enumerate(np.array_split(rows, 10)):
            engine.feed("s", batch, watermark=False)
            rest(engine)
            taken = probe.take_out(state, 0)
            probe.put_in(state, 0, taken)
            assert probe.images(state, 0) == taken[0]
            assert probe.position(state, 0) == taken[1]
            marks.append(((i + 1) * 300, 6 * i))
            engine.feed("s", rows[:0], watermark=6 * i)
        engine.finish(timeout=FINISH_S)
        results = as_rows(engine.results("q"))
    assert_last_results(query, results, run(query, rows, marks).windows, "")
    assert any(row["revision"] > 1 for row in results)


def test_entries_that_were_written_dirty_fire_again_and_count_on_from_where_their_windows_were():
    query = STREAM.query("q").window(fs.sliding("20s", every="10s"), allowed_lateness="1000s").agg(**EVERY)
    rows = make_rows(np.random.default_rng(9), 1_000)
    with running(query) as (engine, state, probe):
        engine.feed("s", rows, watermark=40)
        rest(engine)
        probe.dirty_all(state, 0)
        taken = probe.take_out(state, 0)
        assert probe.shape(state, 0) == (0, 0, 0, 0)
        probe.put_in(state, 0, taken)
        assert probe.shape(state, 0)[3] == len(taken[0])
        engine.feed("s", rows[:0], watermark=41)
        rest(engine)
        results = as_rows(engine.results("q"))
    first = [row for row in results if row["revision"] == 0]
    again = [row for row in results if row["revision"] == 1]
    assert {row["window_end"] for row in first} == {10, 20, 30, 40}
    assert_same_results(query, again, {w: v for w, v in run(query, rows).windows.items() if w[0] + 20 <= 40})
    assert len(first) == len(again)
    assert len(results) == 2 * len(first)


@pytest.mark.parametrize("settled", [False, True])
def test_a_dense_front_is_copied_and_stays(settled):
    query = STREAM.query("q").window(fs.sliding("20s", every="10s")).agg(n=fs.count(), total=fs.sum("x"), a=fs.avg("f"))
    function = compile_code(generate(query.bound(), Choices(dense=True))).function
    rows = make_rows(np.random.default_rng(7), 6_000, keys=300)
    with running(query) as (engine, state, probe):
        engine.feed("s", rows[:1000], watermark=False)  # some keys are in tables before there are fronts
        rest(engine)
        state.use_range(-300, 600)
        state.use_variant(function)
        engine.feed("s", rows[1000:4000], watermark=False)
        rest(engine)
        assert probe.shape(state, 0)[2] > 0
        before = probe.images(state, 0)
        assert probe.images(state, 0) == before
        if settled:
            probe.drop_fronts(state, 0)
            assert probe.shape(state, 0)[2] == 0
            assert [len(image) for image in probe.images(state, 0)] == [len(image) for image in before]
        probe.put_in(state, 0, probe.take_out(state, 0))
        engine.feed("s", rows[4000:], watermark=False)
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results("q")), run(query, rows).windows)


def test_parts_that_are_half_folded_are_written_as_they_are():
    """Keys have gone over to the pane, and their values have not yet: a part has values whose keys another has."""
    query = STREAM.query("q").window(fs.tumbling("100s")).agg(
        n=fs.count(), values=fs.distinct("x"), often=fs.mode("x"), middle=fs.median("x")
    )  # fmt: skip
    rows = make_rows(np.random.default_rng(8), 40_000, keys=6_000)
    with running(query) as (engine, state, probe):
        engine.feed("s", rows[:20_000], watermark=False)
        rest(engine)
        taken = probe.take_out(state, 0)
        engine.feed("s", rows[20_000:], watermark=False)
        rest(engine)
        probe.put_in(state, 0, taken)
        slices = 0
        while probe.fold_once(state):
            slices += 1
            assert check_images(probe, state, 0) == 1
            probe.put_in(state, 0, probe.take_out(state, 0))
            if slices == 6:
                break
        assert probe.shape(state, 0)[1] == 2
        engine.finish(timeout=FINISH_S)
        assert_same_results(query, as_rows(engine.results("q")), run(query, rows).windows)


# -- one image for one state


GOLDEN = 0x9E3779B97F4A7C15


def test_the_image_does_not_depend_on_the_order_of_rows_or_the_multiplier_of_the_table():
    """Keys that all begin at one place make the table draw another multiplier; the image is in the same order."""
    inverse = pow(GOLDEN, -1, 1 << 64)
    flood = np.array([inverse * i % (1 << 64) for i in range(3_000)], np.uint64).view(np.int64)
    query = STREAM.query("q").window(fs.tumbling("100s")).agg(n=fs.count(), total=fs.sum("x"), values=fs.distinct("x"))
    rows = np.zeros(3_000, STREAM.schema.dtype)
    rows["k"], rows["x"] = flood, np.arange(3_000) % 11
    seen = []
    for order in (np.arange(3_000), np.arange(3_000)[::-1], np.random.default_rng(3).permutation(3_000)):
        with running(query) as (engine, state, probe):
            for batch in np.array_split(rows[order], 7):
                engine.feed("s", batch, watermark=False)
            rest(engine)
            seen.append(probe.images(state, 0))
            check_images(probe, state, 0)
    assert seen[0] == seen[1] == seen[2]
    keys = np.frombuffer(seen[0][0], "<u8", 3_000 * 5, 56 + 24).reshape(3_000, 5)[:, 1]
    hashes = keys * np.uint64(GOLDEN)
    assert (hashes[1:] > hashes[:-1]).all()


def test_a_pane_without_rows_has_an_image():
    query = STREAM.query("q").filter(col("x") > 10**6).window(fs.sliding("10s", every="5s")).agg(**EVERY)
    with running(query) as (engine, state, probe):
        engine.feed("s", make_rows(np.random.default_rng(1), 100), watermark=False)
        rest(engine)
        assert probe.images(state, 0) == []
        probe.put_in(state, 0, probe.take_out(state, 0))
        engine.finish(timeout=FINISH_S)
        assert as_rows(engine.results("q")) == []
