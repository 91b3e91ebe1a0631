"""What the skew, zipf and statecost benchmarks compute, and that the ways they compare give the right answer."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexstream.testing import ysb

SCRIPTS = ("skew", "zipf", "statecost")


@pytest.fixture(autouse=True)
def benchmarks_importable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_benchmark_explains_itself(project: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], cwd=project, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert "--quick" in done.stdout


# -- peaks, ratios, slopes


def test_the_peak_is_the_largest_mean_of_five_milliseconds_after_the_turn() -> None:
    from benchmarks.skew import binned, peak_ms

    timeline = [(-3.0, 900.0), (-1.0, 900.0), (0.5, 4.0), (4.9, 8.0), (5.0, 7.0), (12.0, 1.0)]
    at, means = binned(timeline)
    assert at.tolist() == [-2.5, 2.5, 7.5, 12.5]
    assert means.tolist() == [900.0, 6.0, 7.0, 1.0]
    assert peak_ms(timeline) == 7.0


def test_a_run_without_markers_has_no_peak() -> None:
    from benchmarks.skew import peak_ms

    assert math.isnan(peak_ms([]))
    assert math.isnan(peak_ms([(-5.0, 3.0)]))


def test_the_slope_is_the_exponent() -> None:
    from benchmarks.skew import slope

    keys = [100, 1000, 10_000]
    assert slope(keys, [0.5 * k**0.8 for k in keys]) == pytest.approx(0.8)
    assert slope(keys, [7.0] * 3) == pytest.approx(0.0)
    assert slope([100, 100], [1.0, 2.0]) is None
    assert slope([], []) is None


def test_ratios_leave_out_rounds_in_which_one_did_not_migrate() -> None:
    from benchmarks.skew import medians, ratios

    rounds: list[dict[str, dict[str, Any]]] = [
        {"flexstream": {"migration_ms": 2.0}, "fetching": {"migration_ms": 8.0}},
        {"flexstream": {"migration_ms": 2.0}, "fetching": {}},
    ]
    assert ratios(rounds, "migration_ms") == [0.25]
    assert medians(rounds, "fetching", "migration_ms") == 8.0
    assert medians(rounds, "restarting", "migration_ms") is None


def test_only_what_both_did_in_most_rounds_is_compared() -> None:
    from benchmarks.skew import compared

    def case(ours: int, theirs: int) -> dict[str, Any]:
        return {"rounds": 5, "ways": {"flexstream": {"migrated": ours}, "fetching": {"migrated": theirs}}}

    assert compared(case(5, 3))
    assert not compared(case(5, 2))
    assert not compared(case(0, 5))


def test_a_run_sends_every_key_before_the_load_turns_but_ends_in_time() -> None:
    from benchmarks.skew import AFTER_S, BEFORE_S, MOST_BEFORE_S, lengths

    assert lengths(1000, 1e6, False) == (BEFORE_S + AFTER_S, BEFORE_S)
    assert lengths(1_000_000, 1e6, False)[1] == pytest.approx(1.5)
    assert lengths(1_000_000, 1e3, False)[1] == MOST_BEFORE_S


def move(at_ms: float, group: int, state: str = "moved") -> SimpleNamespace:
    """A settled move whose steps are a millisecond apart."""
    ns = int(at_ms * 1e6)
    steps = {"flag": 0, "grace": 1, "sweep": 2, "table": 3, "drain": 4, "adopt": 5, "clear": 6}
    facts = {"swept_ns": 2.2, "adopted_ns": 2.5, "drained_ns": 4.0, "absorbed_ns": 5.0}
    return SimpleNamespace(
        group=group,
        state=state,
        began_at=0.0,
        steps={name: ns + int(ms * 1e6) for name, ms in steps.items()},
        facts={name: ns + int(ms * 1e6) for name, ms in facts.items()} | {"entries": 10},
    )


def test_a_reaction_is_the_first_migration_after_the_turn_with_what_followed_closely() -> None:
    from benchmarks.migration import reaction

    history = [move(10, 1), move(1000, 2), move(1000, 3), move(1150, 2), move(1001, 9, "given up"), move(3000, 4)]
    found = reaction(history, int(500e6))
    assert found["groups"] == 2
    assert found["moved_keys"] == 30
    assert found["later_moves"] == 1
    assert found["absorbed_ns"] == int(1155e6)
    assert reaction(history, int(9000e6)) == {}


def test_the_cost_of_a_move_is_split_into_four() -> None:
    from benchmarks.migration import cost_split

    split = cost_split([move(0, 1), move(50, 2)])
    expected = {"state_update": 3.0, "table_update": 1.0, "transfer": 1.3, "synchronisation": 2.0}
    assert split == pytest.approx(expected, abs=1e-3)


# -- the load and its answer


def test_what_was_sent_gives_the_counts_that_numpy_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import skewed_load

    monkeypatch.setattr(skewed_load, "EVENT_RATE", 100)  # windows of 1000 rows: most frames lie across an end
    frames = skewed_load.keyed_frames(8, 50)
    rows = frames.table()["rows"]
    sent = np.random.default_rng(5).integers(0, len(rows), 60).astype(np.uint32)
    all_rows = rows[sent].reshape(-1).copy()
    numbers = np.arange(len(all_rows), dtype=np.int64)
    all_rows["event_time"] = skewed_load.START_MS + numbers * 1000 // skewed_load.EVENT_RATE
    counts = skewed_load.expected_counts(frames, sent)
    found = {
        (skewed_load.START_MS + int(w) * skewed_load.WINDOW_MS, int(k)): int(counts[w, k])
        for w, k in zip(*np.nonzero(counts), strict=True)
    }
    assert found == ysb.expected_views(all_rows)


def test_every_frame_holds_rows_of_its_group_and_every_key_occurs() -> None:
    from benchmarks import skewed_load
    from flexstream.wire import frames as wire

    frames = skewed_load.keyed_frames(8, 50)
    table = frames.table()
    for frame in table:
        group = wire.HEADER.unpack(frame["header"].tobytes())[4]
        assert (ysb.YSB_STREAM.group_of(frame["rows"], 8) == group).all()
    assert set(table["rows"]["campaign_id"].ravel().tolist()) == set(range(50))


@pytest.mark.slow
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("way", ["flexstream", "fetching", "restarting"])
def test_each_way_counts_every_row_once_whatever_moves(way: str, project: Path) -> None:
    """`skew_run` compares with the rows sent and ends with an error when a count is wrong."""
    from benchmarks.skew_run import Run

    found = Run(way, keys=3000, rate=400_000, duration_s=1.5, turn_s=0.3, forced=way != "flexstream").run()
    assert found["rows"] > 0
    if way != "flexstream":
        assert found["migrated"], found
        assert found["groups"] > 0
    if way == "fetching":
        assert found["moved_keys"] > 0


# -- zipf


def test_zipf_shares_add_up_and_fall() -> None:
    from benchmarks.zipf_frames import weights

    shares = weights(1000, 1.0)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[0] / shares[9] == pytest.approx(10.0)
    assert weights(10, 0.0).tolist() == pytest.approx([0.1] * 10)


def test_the_hottest_group_bounds_what_any_placement_reaches() -> None:
    from benchmarks.zipf_frames import bound, group_shares

    shares = group_shares(np.array([0, 0, 1]), np.array([0.5, 0.3, 0.2]), 2)
    assert shares.tolist() == pytest.approx([0.8, 0.2])
    assert bound(shares, 2) == pytest.approx(0.625)
    assert bound(np.array([0.5, 0.5]), 2) == 1.0


def test_the_worst_loss_is_of_those_that_can_be_balanced() -> None:
    from benchmarks.zipf import worst_loss

    cases = [{"balanced_ratio": 0.97, "possible": True}, {"balanced_ratio": 0.6, "possible": False}]
    assert worst_loss(cases) == pytest.approx(0.03)
    assert worst_loss(cases[1:]) is None


# -- the plot


def test_the_plot_is_a_png_whose_pixels_unpack(tmp_path: Path) -> None:
    from benchmarks import plot

    path = tmp_path / "deep" / "plot.png"
    plot.draw(path, "title: 1.5%", "x", "y", [plot.Line("a", [-1.0, 2.0], [0.5, 80.0]), plot.Line("none", [], [])])
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (plot.WIDTH, plot.HEIGHT)
    size = struct.unpack(">I", data[33:37])[0]
    raw = zlib.decompress(data[41 : 41 + size])
    assert len(raw) == plot.HEIGHT * (1 + 3 * plot.WIDTH)
    pixels = np.frombuffer(raw, np.uint8).reshape(plot.HEIGHT, -1)[:, 1:].reshape(plot.HEIGHT, plot.WIDTH, 3)
    assert (pixels == plot.COLORS[0]).all(axis=2).sum() > 100


def test_ticks_are_round_and_inside() -> None:
    from benchmarks.plot import ticks

    assert ticks(-600, 1400) == [-500, 0, 500, 1000]
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


# -- what the record path costs


def test_the_copy_without_moves_depends_on_every_native_source(tmp_path: Path) -> None:
    from benchmarks.statecost import native_hash

    (tmp_path / "cython_ext" / "includes").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("")
    source = tmp_path / "cython_ext" / "moving.pyx"
    source.write_text("a")
    before = native_hash(tmp_path)
    source.write_text("b")
    assert native_hash(tmp_path) != before
