"""The thread sanitizer over the native code under load: it finds nothing, and it finds a broken memory order."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SECONDS = 30
MUTANT_SECONDS = 6
EXIT_CODE = 66
ADDR_NO_RANDOMIZE = 0x0040000  # <sys/personality.h>
PACKAGES = ("flexstream", "cython_ext", "nic", "state")
WITH_RINGS = ("arena", "blocks", "edges", "moving", "placement", "work_item", "worker", "worker_loop")
RELEASE = "__atomic_store_n(p, v, __ATOMIC_RELEASE)"

pytestmark = pytest.mark.time_limit(280)


def library() -> str:
    """The sanitizer's run time of the compiler that builds the extensions."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the extensions cannot be built with the thread sanitizer")
    name = subprocess.run(
        [compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(name):
        pytest.skip("the C compiler has no thread sanitizer (Debian: libtsan2, part of gcc)")
    return name


def native_hash(project: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    native = project / "cython_ext"
    sources = [project / "setup.py", *native.rglob("*.p[yx][xd]"), *(native / "includes").iterdir()]
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(tree: Path, only: tuple[str, ...] = ()) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j2"], cwd=tree, capture_output=True, text=True,
        env={**os.environ, "FLEXSTREAM_SANITIZE": "thread", "FLEXSTREAM_EXT": ",".join(only)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def copy_python(project: Path, tree: Path) -> None:
    """Everything but what is built: the Python part is always today's."""
    for package in PACKAGES:
        shutil.copytree(
            project / package, tree / package, symlinks=True, dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.so", "*.c", "*.pyx", "*.pxd", "__pycache__", "nic", "state", "cython_ext"),
        )  # fmt: skip


@pytest.fixture(scope="module")
def tree(project: Path) -> Path:
    """A copy of the project, built with the sanitizer; kept as long as the native sources stay the same."""
    cache = project / ".cache" / "tsan"
    tree = cache / native_hash(project)
    if not (tree / "built").exists():
        shutil.rmtree(cache, ignore_errors=True)
        tree.mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(project / name, tree / name)
        for package in PACKAGES:
            shutil.copytree(
                project / package, tree / package, symlinks=True,
                ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"),
            )  # fmt: skip
        build(tree)
        (tree / "built").touch()
    copy_python(project, tree)
    return tree


@pytest.fixture(scope="module")
def mutant(tree: Path) -> Path:
    """The same with one word changed: a release store is relaxed, so a message may be read before it is written."""
    mutant = tree.with_name(tree.name + "-mutant")
    if not (mutant / "built").exists():
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(tree, mutant, symlinks=True)
        (mutant / "built").unlink()
        header = mutant / "cython_ext/includes/native.h"
        text = header.read_text()
        assert RELEASE in text
        header.write_text(text.replace(RELEASE, RELEASE.replace("RELEASE", "RELAXED")))
        shutil.rmtree(mutant / "build", ignore_errors=True)
        for name in WITH_RINGS:
            (built,) = (mutant / "cython_ext").rglob(f"{name}.*.so")
            built.unlink()
        build(mutant, WITH_RINGS)
        (mutant / "built").touch()
    copy_python(tree, mutant)
    return mutant


def fixed_addresses() -> None:
    """The sanitizer needs its shadow memory free; random addresses sometimes lie in it."""
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


def run_load(tree: Path, seconds: int, seed: int, logs: Path, patience_s: int) -> tuple[int, str, list[str]]:
    """Exit code, output, and the sanitizer's reports; ended the hard way when it takes too long."""
    options = {
        "exitcode": EXIT_CODE,
        "log_path": logs / "tsan",
        "suppressions": HERE / "tsan.supp",
        "history_size": 4,
        "second_deadlock_stack": 1,
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "load.py"), str(seconds), str(seed)],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=fixed_addresses,
        env={
            **os.environ,
            "LD_PRELOAD": library(),
            "PYTHONPATH": str(tree),
            "OPENBLAS_NUM_THREADS": "1",
            "TSAN_OPTIONS": " ".join(f"{name}={value}" for name, value in options.items()),
        },
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + f"\nended after {patience_s} s"
    text = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("tsan*")))
    reports = [part for part in re.split(r"={18,}\n", text) if "WARNING: ThreadSanitizer" in part]
    return process.returncode, output, reports


@pytest.mark.slow
def test_the_native_code_has_no_data_race_under_load(tree: Path, tmp_path: Path, seed: int) -> None:
    code, output, reports = run_load(tree, SECONDS, seed, tmp_path, patience_s=180)
    print(output)
    assert not reports, f"{len(reports)} reports:\n\n" + "\n".join(reports)
    assert code == 0, output


@pytest.mark.slow
def test_a_message_published_before_it_is_written_is_found(mutant: Path, tmp_path: Path, seed: int) -> None:
    """The check above can fail: the same load over a ring whose push does not release. It need not end well."""
    _, output, reports = run_load(mutant, MUTANT_SECONDS, seed, tmp_path, patience_s=40)
    print(output)
    assert any("ring_push" in report or "ring_pop" in report for report in reports), "\n".join(reports) or output
