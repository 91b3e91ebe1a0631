"""The migration protocol, model-checked: the model holds in every interleaving, and each seeded fault is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

MEMORY_MB = 4096
HINT = "the model checker is missing: apt-get install spin"

MODELS = {
    "2 workers x 2 groups x 2 windows": ["GROUPS=2", "MOVES=2"],
    "3 workers x 1 group x 2 windows": ["WORKERS=3", "GROUPS=1", "MOVES=3"],
    "2 workers, there and back and there": ["GROUPS=1", "MOVES=3"],
    "split, un-split, move": ["GROUPS=1", "SPLIT"],
}
ONE_GROUP = ["GROUPS=1", "MOVES=2"]
SPLIT = ["GROUPS=1", "SPLIT"]
MUTANTS = {
    "M_OPEN_ONLY": ONE_GROUP,
    "M_NEW_FIRES_EARLY": ONE_GROUP,
    "M_DRAINED_OVERTAKES": ONE_GROUP,
    "M_DRAINED_EARLY": ONE_GROUP,
    "M_OLD_STILL_FIRES": ONE_GROUP,
    "M_SUBTRACT_FIRST": ONE_GROUP,
    "M_SECOND_MOVE_EARLY": ONE_GROUP,
    "M_CLEAR_BEFORE_COUNT": ONE_GROUP,
    "M_PROCESSED_WATERMARK": ONE_GROUP,
    "M_NO_FORWARD": ONE_GROUP,
    "M_NO_GRACE": ONE_GROUP,
    "M_NO_FENCE": SPLIT,
    "M_CONTRIB_COUNTS_FIRST": SPLIT,
}


@dataclass(frozen=True)
class Search:
    """What the checker said."""

    errors: int
    states: int
    depth: int
    seconds: float
    complete: bool
    output: str

    def violation(self) -> str:
        found = re.search(r"(assertion violated .*)", self.output)
        return found[1] if found else "no assertion"


@pytest.fixture(scope="module", autouse=True)
def spin() -> None:
    if shutil.which("spin") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-qq", "-y", "spin"], capture_output=True, timeout=50)
    if shutil.which("spin") is None:
        pytest.fail(HINT)


def search(model: Path, folder: Path, defines: list[str], *, optimise: str) -> Search:
    """Every reachable state of one configuration; stops at the first error."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    generated = run("spin", "-a", *(f"-D{define}" for define in defines), str(model))
    assert "rror" not in generated, generated
    run("gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c")
    began = time.monotonic()
    output = run("./pan", "-E", "-m400000")
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    depth = re.search(r"depth reached (\d+)", output)
    if not (errors and states and depth):
        pytest.fail(output)
    cut_short = ("Search not completed", "max search depth too small", "Bit statespace")
    complete = not any(words in output for words in cut_short)
    took = time.monotonic() - began
    return Search(
        int(errors[1]), int(states[1]), int(depth[1]), took, complete and "Bit statespace" not in output, output
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_protocol_holds_in_every_interleaving(name: str, project: Path, tmp_path: Path) -> None:
    found = search(project / "state" / "migration.pml", tmp_path, MODELS[name], optimise="-O2")
    print(f"\n{name}: {found.states} states, depth {found.depth}, {found.seconds:.1f} s")
    assert found.errors == 0, found.violation()
    assert found.complete, found.output
    # The monitor must have been reached: a model that never comes to its end proves nothing.
    assert re.search(r"unreached in proctype monitor\n\t\(0 of", found.output), found.output


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_seeded_fault_is_found(mutant: str, project: Path, tmp_path: Path) -> None:
    model = project / "state" / "migration.pml"
    assert re.search(rf"\b{mutant}\b", model.read_text()), f"the model has no {mutant}"
    found = search(model, tmp_path, [*MUTANTS[mutant], mutant], optimise="-O0")
    print(f"\n{mutant}: {found.violation()} after {found.states} states, {found.seconds:.1f} s")
    assert found.errors == 1
    assert "assertion violated" in found.output


def test_every_mutant_of_the_model_is_tried(project: Path) -> None:
    text = (project / "state" / "migration.pml").read_text()
    assert set(re.findall(r"\bM_[A-Z_]+[A-Z]\b", text)) == set(MUTANTS)
