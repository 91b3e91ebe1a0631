"""What a user gets: a wheel built from the sdist works in an empty environment outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

from flexstream.compile.toolchain import find_compiler

SMOKE = """
import importlib, pkgutil, sys
import flexstream as fs
assert "site-packages" in fs.__file__, fs.__file__
EXTRAS = ("flexstream.spark", "flexstream.nic.rss.netlink")  # with flexstream[spark], flexstream[nic]
clicks = fs.Stream("clicks", {"at": "timestamp[ms]", "user": "i64"}, key="user", time="at")
query = clicks.query("n").window(fs.tumbling("10s")).agg(n=fs.count())
with fs.Engine(workers=1, compile="require") as engine:  # the wheel has what the compiler needs
    engine.add(clicks)
    engine.submit(query)
    engine.feed("clicks", [{"at": 1, "user": 7}, {"at": 2, "user": 7}, {"at": 3, "user": 8}])
    engine.finish()
    found = {row["user"]: row["n"] for batch in engine.results("n") for row in batch.to_pylist()}
assert found == {7: 2, 8: 1}, found
with fs.Engine(workers=1, listen="127.0.0.1:0") as engine:
    engine.add(clicks)
    with fs.Producer("tcp://%s:%d" % engine.data_address, stream="clicks") as producer:
        producer.send([{"at": 1, "user": 7}])
    assert engine.status()["streams"]["clicks"]["ledger"]["received"] == 1
for module in pkgutil.walk_packages(fs.__path__, "flexstream."):
    if "__main__" not in module.name and not module.name.startswith(EXTRAS):
        importlib.import_module(module.name)
bare = [name for name in ("nic", "state", "cython_ext") if name in sys.modules]
assert not bare, bare
print("smoke test passed")
"""


# What is in the wheel matters here, not how fast it runs: nothing is optimised, and C that is the tree's byte for byte,
# with the same headers, is not compiled a second time when the tree has the object of it.
QUICK_CC = """
import filecmp, os, shutil, sys, sysconfig
from pathlib import Path

def object_of(source):
    build = Path(TREE, "build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")
    known, made = Path(TREE, source), (build / source).with_suffix(".o")
    here = Path("flexstream/cython_ext/includes")
    there = Path(TREE, here)
    headers = [path.name for path in there.iterdir() if path.is_file()]
    same = filecmp.cmp(source, known, shallow=False) and not any(filecmp.cmpfiles(here, there, headers, False)[1:])
    newest = max(path.stat().st_mtime for path in [known, *(there / name for name in headers)])
    return made if same and made.stat().st_mtime >= newest else None

given = sys.argv[1:]
source = next((Path(word) for word in given if word.endswith(".c")), None)
if source and "-c" in given:
    try:
        made = object_of(source)
    except OSError:
        made = None
    if made:
        shutil.copy(made, given[given.index("-o") + 1])
        sys.exit()
os.execvp(CC[0], [*CC, *given, "-O0"])
"""


def run(command: list[str], cwd: Path, **environ: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def quick_compiler(folder: Path, project: Path) -> str:
    path = folder / "cc"
    path.write_text(f"#!{sys.executable} -I\nCC, TREE = {find_compiler()!r}, {str(project)!r}\n{QUICK_CC}")
    path.chmod(0o755)
    return str(path)


def test_every_package_of_the_tree_is_shipped(project: Path) -> None:
    """A folder with sources in it and no __init__.py would not be."""
    said = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    shipped = set(find_packages(str(project), **said))
    folders = ["flexstream", *(f"flexstream/{name}" for name in ("nic", "state", "cython_ext"))]
    found = {
        str(source.parent.relative_to(project)).replace("/", ".")
        for folder in folders
        for source in (project / folder).rglob("*.p*")
        if source.suffix in (".py", ".pyx", ".pxd")
    }
    assert len(found) > 30, "the folders were not looked at"
    assert found == shipped


@pytest.mark.slow
@pytest.mark.time_limit(700)
def test_a_wheel_from_the_sdist_works_in_an_empty_environment(project: Path, tmp_path: Path) -> None:
    # Given: an sdist of the tree, unpacked elsewhere, as a user would get it.
    run([sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "-o", str(tmp_path), "."], project)
    (sdist,) = tmp_path.glob("flexstream-*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "source")
    names = [str(path) for path in (tmp_path / "source").rglob("*")]
    assert not [name for name in names if name.endswith(".so") or "__pycache__" in name]
    assert any(name.endswith("LICENSE") for name in names)
    (source,) = (tmp_path / "source").iterdir()

    # When: a wheel is built from it and installed into an empty environment.
    build = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "-o", str(tmp_path), "."]
    run(build, source, CC=quick_compiler(tmp_path, project))
    (wheel,) = tmp_path.glob("flexstream-*.whl")
    top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top_level == {"flexstream", "pyspark_flexstream.py", wheel.name.split("-cp")[0] + ".dist-info"}, top_level
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile", str(wheel)], tmp_path)

    # Then: the engine and the command work there.
    assert "smoke test passed" in run([str(python), "-c", SMOKE], tmp_path)
    assert "serve" in run([str(python.with_name("flexstream")), "--help"], tmp_path)
