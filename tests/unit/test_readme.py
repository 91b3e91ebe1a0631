"""README.md is run: every Python block, top to bottom, and every console block that is marked as runnable."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ports import quiet_port

FENCE = re.compile(
    r"^(?P<mark><!-- runnable -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    runnable: bool


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            found["language"],
            found["text"],
            text.count("\n", 0, found.start("text")) + 1,
            found["mark"] is not None,
        )
        for found in FENCE.finditer(text)
    ]


@pytest.fixture
def blocks(project: Path) -> list[Block]:
    return blocks_of(project / "README.md")


def test_python_blocks_run_top_to_bottom(project: Path, blocks: list[Block], tmp_path: Path) -> None:
    python = [block for block in blocks if block.language == "python"]
    assert len(python) >= 3
    script = tmp_path / "readme.py"
    lines: list[str] = []
    for block in python:  # padded, so that a traceback shows README.md's line numbers
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    script.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    assert done.returncode == 0, f"README.md (same line numbers):\n{done.stdout}{done.stderr}"


def test_the_first_example_is_about_ten_lines(blocks: list[Block]) -> None:
    first = next(block for block in blocks if block.language == "python")
    assert first.line < 30, "the first screen has an example"
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 11


def test_links_lead_somewhere(project: Path) -> None:
    for page in (project / "README.md", *sorted((project / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_path_that_the_docs_name_is_there(project: Path) -> None:
    """`folder/` and `folder/file.py`, in backquotes."""
    folders = "flexstream|nic|state|cython_ext|tests|benchmarks|scripts"
    path_in_quotes = re.compile(rf"`((?:{folders})/(?:[\w./*-]*(?:/|\.\w+))?)`")
    pages = [project / "README.md", *sorted((project / "docs").rglob("*.md")), project / "state" / "README.md"]
    named = [
        (page.name, path)
        for page in pages
        for path in path_in_quotes.findall(page.read_text())
    ]
    assert len(named) > 100
    gone = [(page, path) for page, path in named if not any(project.glob(path))]
    assert not gone


def test_every_recipe_for_an_extension_has_files_tests_and_a_diff_of_files_that_are_there(project: Path) -> None:
    text = (project / "docs" / "extending.md").read_text()
    recipes = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    around = {"Before you begin", "Before you commit"}
    assert around < set(recipes)
    for name in recipes.keys() - around:
        recipe = recipes[name]
        changed = re.findall(r"^\+\+\+ b/(\S+)$", recipe, re.MULTILINE)
        assert changed, f"{name}: no diff"
        assert changed == re.findall(r"^--- a/(\S+)$", recipe, re.MULTILINE), name
        gone = [path for path in changed if not (project / path).is_file()]
        assert not gone, f"{name}: {gone}"
        assert re.search(r"`tests/[\w/]+", recipe), f"{name}: no tests"
        assert re.search(r"^1\. ", recipe, re.MULTILINE), f"{name}: no steps"
    named = re.findall(r"\]\(#([\w-]+)\)", text)
    assert set(named) == {name.lower().replace(" ", "-") for name in recipes}


@dataclass
class Shell:
    """Runs the README's commands as a user would:

    a line that ends in & stays, the daemon among them is awaited.
    """

    environment: dict[str, str]
    folder: Path
    background: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, command: str, line: int) -> None:
        if command.endswith("&"):
            with (self.folder / "background.log").open("ab") as log:
                process = subprocess.Popen(
                    command.removesuffix("&").split(),
                    env=self.environment,
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                )
            self.background.append(process)
            self.wait_until_ready(process)
            return
        done = subprocess.run(
            command,
            shell=True,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"README.md line {line}: {command}\n{done.stdout}{done.stderr}"

    def wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            try:
                urllib.request.urlopen(self.environment["FLEXSTREAM_URL"] + "/readyz", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        pytest.fail("the daemon did not start:\n" + (self.folder / "background.log").read_text())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    control, data = (f"127.0.0.1:{quiet_port()}" for _ in range(2))
    made = Shell(
        {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FLEXSTREAM_CONTROL": control,
            "FLEXSTREAM_DATA": data,
            "FLEXSTREAM_DATA_DIR": str(tmp_path / "data"),
            "FLEXSTREAM_URL": f"http://{control}",
            "FLEXSTREAM_WORKERS": "1",
        },
        tmp_path,
    )
    yield made
    for process in made.background:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the daemon's exit code after SIGTERM"


def test_runnable_console_blocks_run(blocks: list[Block], shell: Shell) -> None:
    runnable = [block for block in blocks if block.language == "console" and block.runnable]
    assert runnable
    if shutil.which("flexstream", path=shell.environment["PATH"]) is None:
        pytest.skip("the flexstream command is not installed here: scripts/test installs it")
    for block in runnable:
        for number, line in enumerate(block.text.splitlines(), block.line):
            if line.startswith("$ flexstream"):
                shell.run(line.removeprefix("$ ").strip(), number)
