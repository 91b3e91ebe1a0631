"""The rules by which benchmarks.versus compares this tree with a commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def benchmarks_importable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))


def sides(order: list[str], **rates: list[float | str]) -> dict[str, Callable[[], Any]]:
    """Sides that note when they ran, and whose runs have these rates (a text is what went wrong); the last goes on."""
    from benchmarks.versus import Run

    def side(name: str) -> Callable[[], Run]:
        left = list(rates.get(name, [100.0]))

        def run() -> Run:
            order.append(name)
            rate = left.pop(0) if len(left) > 1 else left[0]
            return Run(1.0, 1.0, rate) if isinstance(rate, str) else Run(rate, 1000.0 / rate)

        return run

    return {name: side(name) for name in ("old", "new", "same")}


def test_it_explains_itself(project: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.versus", "--help"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    for word in ("commit", "e2e5293", "--json", "--quick", "--full", "--pairs"):
        assert word in done.stdout


def test_each_side_of_a_pair_runs_as_often_after_itself_as_after_the_other() -> None:
    from benchmarks.versus import run_rounds

    order: list[str] = []
    run_rounds(4, sides(order))
    assert order[:8] == ["old", "new", "new", "same", "same", "new", "new", "old"]
    pairs = [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert [pairs.count(pair) for pair in (("old", "new"), ("new", "old"), ("new", "same"), ("same", "new"))] == [2] * 4


def test_a_pair_is_compared_within_its_round_and_the_same_tree_apart() -> None:
    from benchmarks.versus import AGAIN, cpu_ratios, ratios, run_rounds

    # Even rounds take new's first run for the pair with old, odd ones its second.
    rounds, void = run_rounds(2, sides([], old=[100, 50], new=[90, 80, 40, 25], same=[100, 50]))
    assert not void
    assert ratios(rounds) == [0.9, 0.5]
    assert ratios(rounds, AGAIN) == [0.8, 0.8]
    assert cpu_ratios(rounds) == pytest.approx([0.9, 0.5])


def test_a_round_in_which_a_side_did_not_do_its_work_is_void_and_repeated() -> None:
    from benchmarks.versus import ratios, run_rounds

    order: list[str] = []
    rounds, void = run_rounds(3, sides(order, old=[100, "3 rows are missing", 100], new=[100]))
    assert ratios(rounds) == [1.0, 1.0, 1.0]
    assert void == ["old: 3 rows are missing"]
    assert len(order) == 4 * 4


@pytest.mark.parametrize("who", ["old", "new", "same"])
def test_a_side_that_never_does_its_work_gives_no_ratio(who: str) -> None:
    from benchmarks.versus import CASES, again, run_rounds, summary, worst

    rounds, void = run_rounds(3, sides([], **{who: ["not compiled"]}))
    assert rounds == []
    assert len(void) == 6
    assert not again(rounds)
    good, _ = run_rounds(3, sides([]))
    cases = [summary(CASES[0], good, []), summary(CASES[1], rounds, void)]
    assert cases[1]["ratio"] is None
    assert worst(cases) is None
    assert worst(cases[:1]) == 1.0


def test_the_ratio_is_the_worst_median_not_the_worst_pair() -> None:
    from benchmarks.versus import CASES, run_rounds, summary, worst

    def case(*rates: float) -> dict[str, Any]:
        each = [float(rate) for rate in rates for _ in range(2)]  # new runs twice in a round
        return summary(CASES[0], run_rounds(len(rates), sides([], new=[*each]))[0], [])

    found = [case(100, 10, 100), case(99, 97, 98.5), case(120, 130, 110)]
    assert worst(found) == 0.985
    assert worst([]) is None


def test_only_a_case_below_the_target_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import versus

    sittings: list[tuple[int, float]] = []
    rates = iter([97.0, 99.0, 98.0, 98.0])

    def sit(case: versus.Case, old: Any, pairs: int, until: float) -> Any:
        sittings.append((pairs, until))
        return versus.run_rounds(pairs, sides([], new=[next(rates)]))

    monkeypatch.setattr(versus, "sit", sit)
    slow: Any = versus.measure(versus.CASES[0], None, 3, 1, until=5.0)  # type: ignore[arg-type]
    assert sittings == [(3, 5.0), (3, float("inf")), (3, float("inf"))]
    assert (slow["first_ratio"], slow["ratio"], slow["pairs"]) == (0.97, 0.985, 6)
    good: Any = versus.measure(versus.CASES[0], None, 3, 1, until=5.0)  # type: ignore[arg-type]
    assert (len(sittings), good["ratio"], good["pairs"]) == (4, 0.98, 3)
    assert "first_ratio" not in good


def test_a_used_up_budget_ends_a_case_but_not_before_nine_pairs() -> None:
    from benchmarks.versus import LEAST_PAIRS, run_rounds

    assert LEAST_PAIRS == 9
    assert len(run_rounds(15, sides([]), until=0.0, clock=lambda: 1.0)[0]) == 9
    assert len(run_rounds(15, sides([]), until=2.0, clock=lambda: 1.0)[0]) == 15
    assert len(run_rounds(3, sides([]), until=0.0, clock=lambda: 1.0)[0]) == 3


def test_a_side_uses_public_names_alone(project: Path) -> None:
    """Any tree since e2e5293 must be able to run it: neither this one's modules nor its benchmarks."""
    import ast

    tree = ast.parse((project / "benchmarks" / "versus_side.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "flexstream" in imported
    assert not [name for name in imported if name.startswith(("flexstream.", "benchmarks"))]
    assert not [node.attr for node in ast.walk(tree) if is_private_of_another(node)]


def is_private_of_another(node: Any) -> bool:
    import ast

    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id == "self")


def test_rows_are_kept_by_slice_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import versus
    from benchmarks.versus_side import Data
    from flexstream.testing import ysb

    monkeypatch.setattr(versus, "CACHE", tmp_path)
    folder = versus.prepare(20_000)
    made = (folder / "rows.npy").stat().st_mtime_ns
    assert versus.prepare(20_000) == folder
    assert (folder / "rows.npy").stat().st_mtime_ns == made
    data = Data.load(folder)
    assert (data.rows, len(data.slices)) == (20_000, versus.SLICES)
    before = 0
    for batches, until_ms in data.slices:
        for group, rows in batches:
            assert (ysb.YSB_STREAM.group_of(rows, versus.GROUPS) == group).all()
            assert rows["event_time"].min() >= before
            assert rows["event_time"].max() <= until_ms
        before = until_ms
    assert sum(len(rows) for batches, _ in data.slices for _, rows in batches) == 20_000


def test_the_stream_is_the_one_that_the_c_sender_sends() -> None:
    import flexstream as fs
    from benchmarks.versus_side import FIELDS
    from flexstream.testing.ysb import YSB_STREAM

    stream = fs.Stream("ads", FIELDS, key="campaign_id", time="event_time")
    assert stream.schema.hash == YSB_STREAM.schema.hash


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("number", range(6))
def test_a_side_of_this_tree_does_its_work(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from benchmarks import versus
    from benchmarks.versus_tree import this_tree

    monkeypatch.setattr(versus, "CACHE", tmp_path)
    monkeypatch.setattr(versus, "SEND_S", 0.1)
    case = replace(versus.CASES[number], rows=20_000)
    with versus.Side(this_tree(), case, versus.Cores.pick()) as side:
        run = side.run()
    assert run.wrong is None
    assert run.per_s > 0
    assert run.cpu_ns > 0


def test_a_commit_that_is_not_there_is_named() -> None:
    from benchmarks.versus_tree import resolved

    with pytest.raises(SystemExit, match="no commit 'not-a-commit'"):
        resolved("not-a-commit")
