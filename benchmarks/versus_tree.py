"""A commit of this repository, built in a venv of its own and kept under .cache, to be compared with this tree."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import PROJECT

KEPT = PROJECT / ".cache" / "versus"
STAMP = "built"


@dataclass(frozen=True)
class Tree:
    """A built tree and the Python that runs it."""

    name: str
    folder: Path
    python: str


def this_tree() -> Tree:
    return Tree("new", PROJECT, sys.executable)


def built(commit: str, kept: Path = KEPT) -> Tree:
    """The tree of a commit. The first time it is built, which takes a minute or two."""
    found = resolved(commit)
    folder = kept / found[:12]
    tree = Tree(found[:12], folder / "tree", str(folder / "venv" / "bin" / "python"))
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text() != made_with():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"building {tree.name} in {folder} ...", file=sys.stderr, flush=True)
        unpack(found, tree.folder)
        make_venv(folder / "venv")
        build(tree)
        stamp.write_text(made_with())
    return tree


def made_with() -> str:
    """What a build depends on beside its sources: another Python or Cython, and it is made again."""
    return f"{sys.version} Cython {importlib.metadata.version('cython')}"


def resolved(commit: str) -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"no commit {commit!r} in {PROJECT} (a shallow clone? git fetch --unshallow) {done.stderr}")
    return done.stdout.strip()


def unpack(commit: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    with subprocess.Popen(["git", "archive", commit], cwd=PROJECT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.returncode != 0:
        raise SystemExit(f"git archive {commit} failed; see above")


def make_venv(folder: Path) -> None:
    """It borrows this Python's packages, so that both sides have the same numpy, Arrow and Cython. (A path in a .pth
    does not bring that folder's own .pth files, such as that of this tree's editable install.)
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))


def build(tree: Tree) -> None:
    """Its extensions, with the flags of its own setup.py and none of this process's switches."""
    command = [tree.python, "setup.py", "-q", "build_ext", "--inplace", "--parallel", str(os.cpu_count() or 1)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLEXSTREAM_")}
    done = subprocess.run(command, cwd=tree.folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"cannot build {tree.name}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
