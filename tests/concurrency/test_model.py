"""The protocols of moves, splits and lanes, model-checked: the models hold in every interleaving, and each seeded fault
is found.

All searches that were asked for run side by side, as many as there are cores, the long ones first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

MEMORY_MB = 4096  # of all searches that run at a time
SIDE_BY_SIDE = min(2, os.cpu_count() or 1)
HINT = "the model checker is missing: apt-get install spin"

MODELS = {  # the long ones first
    "migration: 2 workers x 2 groups x 2 windows": ["GROUPS=2", "MOVES=2"],
    "lanes: the slot is used again": ["REUSE", "ROWS=2"],
    "lanes: a connection breaks": ["BREAKS", "ROWS=2"],
    "ordered: a connection breaks": ["MOVES=2", "FEEDS=2", "BREAKS"],
    "lanes: split, joined, moved": ["MOVE"],
    "migration: 3 workers x 1 group x 2 windows": ["WORKERS=3", "GROUPS=1", "MOVES=3"],
    "migration: 2 workers, there and back and there": ["GROUPS=1", "MOVES=3"],
    "migration: split, un-split, move": ["GROUPS=1", "SPLIT"],
    "ordered: there and back and there": ["MOVES=3", "FEEDS=5"],
}
ONE_GROUP = ["GROUPS=1", "MOVES=2"]
SPLIT = ["GROUPS=1", "SPLIT"]
FED = ["MOVES=1", "FEEDS=5"]
BROKEN = ["MOVES=1", "FEEDS=2", "BREAKS"]
LANE = ["ROWS=2"]
MUTANTS = {
    "migration M_OPEN_ONLY": ONE_GROUP,
    "migration M_NEW_FIRES_EARLY": ONE_GROUP,
    "migration M_DRAINED_OVERTAKES": ONE_GROUP,
    "migration M_DRAINED_EARLY": ONE_GROUP,
    "migration M_OLD_STILL_FIRES": ONE_GROUP,
    "migration M_SUBTRACT_FIRST": ONE_GROUP,
    "migration M_SECOND_MOVE_EARLY": ONE_GROUP,
    "migration M_CLEAR_BEFORE_COUNT": ONE_GROUP,
    "migration M_PROCESSED_WATERMARK": ONE_GROUP,
    "migration M_NO_FORWARD": ONE_GROUP,
    "migration M_NO_GRACE": ONE_GROUP,
    "migration M_NO_FENCE": SPLIT,
    "migration M_CONTRIB_COUNTS_FIRST": SPLIT,
    "ordered M_READS_BEFORE_DRAINED": FED,
    "ordered M_SOCKETS_BEFORE_PANES": FED,
    "ordered M_FEEDS_BEFORE_DRAINED": FED,
    "ordered M_FEEDS_BEFORE_ADOPT": FED,
    "ordered M_FEEDS_UNROUTED": FED,
    "ordered M_DRAIN_OVERTAKES_FEEDS": FED,
    "ordered M_PARKED_SERVED": BROKEN,
    "ordered M_NEXT_ROW_STAYS": BROKEN,
    "lanes M_PROMISE_BEFORE_PANES": LANE,
    "lanes M_PANES_STAY": LANE,
    "lanes M_MESSAGE_BEFORE_ORDERS": LANE,
    "lanes M_REGISTERED_AT_OWNER_ONLY": LANE,
    "lanes M_ROWS_BEFORE_ACK": LANE,
    "lanes M_LENT_SOCKET_SERVED": ["BREAKS", *LANE],
    "lanes M_NEXT_ROW_STAYS": ["BREAKS", *LANE],
    "lanes M_FREED_EARLY": ["REUSE", *LANE],
    "lanes M_STALE_SHARE": ["REUSE", *LANE],
    "lanes M_STALE_CONNECTION": ["REUSE", *LANE],
}


@dataclass(frozen=True)
class Search:
    """What the checker said."""

    errors: int
    states: int
    depth: int
    memory_mb: float
    seconds: float
    complete: bool
    output: str

    def violation(self) -> str:
        found = re.search(r"(assertion violated .*)", self.output)
        return found[1] if found else "no assertion"

    def __str__(self) -> str:
        return f"{self.states} states, depth {self.depth}, {self.memory_mb:.0f} MB, {self.seconds:.1f} s"


def search(model: Path, folder: Path, defines: list[str], *, optimise: str) -> Search:
    """Every reachable state of one configuration; stops at the first error."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    folder.mkdir()
    limit = f"-DMEMLIM={MEMORY_MB // SIDE_BY_SIDE}"
    generated = run("spin", "-a", *(f"-D{define}" for define in defines), str(model))
    assert "rror" not in generated, generated
    run("gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", limit, "-o", "pan", "pan.c")
    began = time.monotonic()
    output = run("./pan", "-E", "-m400000")
    took = time.monotonic() - began
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    depth = re.search(r"depth reached (\d+)", output)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", output)
    if not (errors and states and depth and memory):
        raise AssertionError(output)
    cut_short = ("Search not completed", "max search depth too small", "Bit statespace")
    complete = not any(words in output for words in cut_short)
    return Search(int(errors[1]), int(states[1]), int(depth[1]), float(memory[1]), took, complete, output)


def model_of(name: str, project: Path) -> Path:
    return project / "state" / "models" / (re.split(r"[: ]", name)[0] + ".pml")


def mutant_of(name: str) -> str:
    return name.split()[1]


@pytest.fixture(scope="module")
def searches(
    request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Search]]]:
    """Those of the tests that were selected."""
    if shutil.which("spin") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-qq", "-y", "spin"], capture_output=True, timeout=50)
    if shutil.which("spin") is None:
        pytest.fail(HINT)
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    selected = {item.callspec.params["name"] for item in here}
    folder = tmp_path_factory.mktemp("models")
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    found: dict[str, Future[Search]] = {}
    for number, (name, defines) in enumerate((MODELS | MUTANTS).items()):
        if name in selected:
            more = [mutant_of(name)] if name in MUTANTS else []
            optimise = "-O2" if name in MODELS or "REUSE" in defines else "-O0"  # the others are found before it pays
            found[name] = pool.submit(
                search, model_of(name, project), folder / str(number), [*defines, *more], optimise=optimise
            )
    yield found
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_protocol_holds_in_every_interleaving(name: str, searches: dict[str, Future[Search]]) -> None:
    found = searches[name].result()
    print(f"\n{name}: {found}")
    assert found.errors == 0, found.violation()
    assert found.complete, found.output
    # The monitor must have been reached: a model that never comes to its end proves nothing.
    assert re.search(r"unreached in proctype monitor\n\t\(0 of", found.output), found.output


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_is_found(name: str, searches: dict[str, Future[Search]], project: Path) -> None:
    text = model_of(name, project).read_text()
    assert re.search(rf"\b{mutant_of(name)}\b", text), f"the model has no {mutant_of(name)}"
    found = searches[name].result()
    print(f"\n{name}: {found.violation()} after {found}")
    assert found.errors == 1
    assert "assertion violated" in found.output


def test_every_mutant_of_the_models_is_tried(project: Path) -> None:
    models = sorted((project / "state").rglob("*.pml"))
    assert models
    for model in models:
        mutants = set(re.findall(r"\bM_[A-Z_]+[A-Z]\b", model.read_text()))
        assert mutants == {mutant_of(name) for name in MUTANTS if model_of(name, project) == model}, model.name
