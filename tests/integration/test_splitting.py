"""A group hotter than a core: the balancer splits it under load and joins it again, and no result knows of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.nic.balance.split_rule import SplitConfig
from tests.integration.skewed_producers import GROUPS, PATIENCE_S, STREAM, address
from tests.integration.skewed_producers import Load as Producers
from tests.integration.skewed_producers import make_engine as make_plain_engine

# The machine that runs this is shared: how busy a core is says nothing here, and nothing rests for long.
EAGER = SplitConfig(busy_share=0.0, undo_cores=0.0, undo_after_s=0.5, cool_down_s=0.5)

pytestmark = pytest.mark.time_limit(280)


def make_engine(**options: Any) -> fs.Engine:
    engine = make_plain_engine(**options)
    engine.balance.splitter.rule.config = EAGER
    return engine


Load = functools.partial(Producers, rows=2_000, hot_share=0.9)


def group_of(key: int) -> int:
    rows = np.zeros(1, STREAM.schema.dtype)
    rows["k"] = key
    return int(STREAM.group_of(rows, GROUPS)[0])


def entries(engine: fs.Engine, what: str) -> list[dict[str, Any]]:
    return [entry for entry in engine.balance.history() if entry["what"] == what and entry["error"] is None]


def shared(engine: fs.Engine) -> bool:
    """Each worker of a split has a share of its rows. (A split may end and begin again while nobody looks.)"""
    return any(min(split["percent"] or [0]) > 10 for split in engine.balance.status()["split"])


def test_a_group_hotter_than_a_core_is_split_and_joined_when_it_has_cooled_down() -> None:
    with make_engine() as engine, Load(engine, 4) as load:
        load.until(lambda: engine.balance.status()["imbalance_percent"] is not None, "rows")
        load.hot = [7]
        load.until(lambda: [split.group for split in engine.mover.splits()] == [group_of(7)], "a split")
        load.until(lambda: shared(engine), "rows at both workers")
        (made, *_) = entries(engine, "split")
        assert made["group_percent"] > 105
        assert made["connections"] >= 4
        assert 1 <= made["split"]["lent"][0]["connections"] <= 3
        load.hot = ()
        load.until(lambda: not engine.mover.splits(), "the end of the split")
        load.hot = [8]
        load.until(lambda: [split.group for split in engine.mover.splits()] == [group_of(8)], "another split")
        load.finish()
        assert entries(engine, "unsplit")


def test_one_connection_that_is_too_hot_is_named_with_its_group_and_key() -> None:
    with make_engine() as engine:
        engine.balance.splitter.rule.config = replace(EAGER, split_percent=104.0)
        with Load(engine, 1, lanes=0) as load:
            load.hot = [7]
            (hot,) = load.until(
                lambda: [one for one in engine.balance.status()["too_hot"] if one["keys"]], "a group that is too hot"
            )
            assert hot["group"] == group_of(7)
            assert hot["connections"] == 1
            assert hot["connection_percent"] > 105
            assert hot["keys"][0]["key"] == 7
            assert "its only connection alone is" in hot["text"]
            assert "key 7 alone is" in hot["text"]
            assert engine.mover.splits() == []
            assert {entry["group"] for entry in entries(engine, "too hot")} == {group_of(7)}
            load.finish()


def test_a_hot_group_of_one_producer_is_split_over_lanes_and_joined_when_it_has_cooled_down() -> None:
    with make_engine() as engine, Load(engine, 1) as load:
        (producer,) = load.producers
        load.hot = [7]
        load.until(lambda: [split.group for split in engine.mover.splits()] == [group_of(7)], "a split")
        load.until(lambda: shared(engine) and producer.stats()["further_lanes"] == 1, "rows on both lanes")
        (asked, *_) = entries(engine, "lanes")
        assert (asked["connections"], asked["producers"]) == (1, 1)
        (made, *_) = entries(engine, "split")
        assert made["split"]["misaligned"] == 0
        load.hot = ()
        load.until(lambda: not engine.mover.splits() and not producer.stats()["further_lanes"], "the end of the split")
        load.hot = [7]
        load.until(lambda: engine.mover.splits(), "another split")
        load.finish()


def test_lanes_are_joined_by_producers_that_come_later_and_go_with_those_that_leave() -> None:
    with make_engine() as engine, Load(engine, 2) as load:
        load.hot = [7]
        load.until(lambda: engine.mover.splits(), "a split")
        with fs.Producer(address(engine), stream=STREAM, watermark="explicit", linger_ms=1) as late:
            rows = np.zeros(500, STREAM.schema.dtype)
            rows["t"], rows["k"] = 1_000_000, 7  # far ahead: never late
            load.sent.append(rows)
            late.send(rows)
            late.flush(PATIENCE_S)
        load.finish()
