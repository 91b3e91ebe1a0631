"""The house: folders, symlinks, and import names that pollute nobody's site-packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexstream.daemon.config import resolve

LINKS = ("nic", "state", "cython_ext")
HOT_PATHS = ("pandas", "pyspark", "pyarrow.dataset", "rich")


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("name", LINKS)
def test_import_names_are_symlinks_to_the_top_folders(project: Path, name: str) -> None:
    link = project / "flexstream" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (project / name).is_dir()
    assert not (project / name).is_symlink()


@pytest.mark.parametrize("name", LINKS)
def test_symlinks_are_committed_as_symlinks(project: Path, name: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s", f"flexstream/{name}"], cwd=project, capture_output=True, text=True
    )
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git work tree, or nothing is committed yet")
    assert listed.stdout.startswith("120000 "), f"committed as a copy: {listed.stdout}"


def test_importing_everything_leaves_the_bare_names_alone(project: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys
sys.path.insert(0, {str(project)!r})
import flexstream
for module in pkgutil.walk_packages(flexstream.__path__, "flexstream."):
    if "__main__" not in module.name and ".spark" not in module.name:
        importlib.import_module(module.name)
bare = [name for name in {LINKS!r} if name in sys.modules]
assert not bare, f"imported under their bare names: {{bare}}"
assert "flexstream.nic.user" in sys.modules
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_flexstream_is_light(project: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(project)!r})
import flexstream
heavy = [name for name in {HOT_PATHS!r} if name in sys.modules]
assert not heavy, f"imported at start: {{heavy}}"
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_everything_that_is_promised_is_there(project: Path) -> None:
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "setup.py",
        "pyproject.toml",
        "docs/architecture.md",
    ):
        assert (project / name).is_file(), name
    assert "Apache License" in (project / "LICENSE").read_text()
    for script in ("scripts/run", "scripts/test", ".ci/run"):
        assert (project / script).stat().st_mode & 0o111, f"{script} is not executable"


def test_scripts_are_valid_shell(project: Path) -> None:
    for script in ("scripts/run", "scripts/test", "scripts/setup_env", ".ci/run"):
        done = subprocess.run(["bash", "-n", script], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_modules_stay_small_enough_to_read(project: Path) -> None:
    """About 300 lines. From 500 on ask whether it is one idea; past 700 it is two modules."""
    folders = ("flexstream", "nic", "state", "benchmarks", "scripts")
    sources = [path for folder in folders for path in (project / folder).rglob("*.py")]
    native = list((project / "cython_ext").rglob("*.pyx"))
    assert len(sources) > 100, "the folders were not looked at"
    assert len(native) > 30, "the native folders were not looked at"
    sources += native
    long = {
        str(path.relative_to(project)): count
        for path in sources
        if (count := len(path.read_text().splitlines())) > 700
    }
    assert not long, f"more than 700 lines: {long}"


def test_a_run_sees_no_settings_of_the_machine_or_its_user() -> None:
    found = resolve()
    assert found.warnings == []
    assert {item.source for item in found.settings.values()} == {"default"}
    assert found.file is not None
    assert found.file.read_text() == ""
