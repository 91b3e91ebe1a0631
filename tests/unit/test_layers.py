"""The rooms of the house, and who may know of whom: a room imports from rooms below it, and from itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BESIDE = "beside the folders"
ROOMS = {
    BESIDE: 0, "cython_ext": 0,
    "rows": 1, "nic": 1,
    "query": 2, "wire": 2,
    "client": 3, "state": 3,
    "results": 4, "spark": 4, "testing": 4,
    "catalog": 5,
    "compile": 6, "ingest": 6, "balance": 6,
    "staging": 7,
    "engine": 8,
    "daemon": 9,
    "cli": 10,
}  # fmt: skip
NATIVE_ROOMS = {
    "includes": 0,
    "memory": 1, "wire": 1, "balance": 1,
    "expressions": 2, "produce": 2,
    "operators": 3,
    "worker": 4,
    "testing": 5,
}  # fmt: skip
# What reaches upwards by nature. No fourth: what else wants to is in the wrong room.
UPWARDS = {
    ("rows.stream", "query.query"): "stream.query(...) begins a query",
    ("query.query", "spark.translate"): "query.to_spark(df) runs it on Spark",
    ("query.query", "compile.explain"): 'query.explain("code") shows the C',
}
CIMPORT = re.compile(r"^\s*from\s+(flexstream[\w.]*)\s+c?import\s+(\([^)]*\)|[^\n#]+)", re.M)
IMPORT = re.compile(r"^\s*c?import\s+(flexstream[\w.]*)", re.M)
Edge = tuple[str, str]


def sources(project: Path) -> dict[str, list[Path]]:
    """{module below flexstream: its files}. A .pxd and its .pyx are one module."""
    found: dict[str, list[Path]] = {}
    for folder in ("flexstream", "nic", "state", "cython_ext"):
        for path in sorted((project / folder).rglob("*.p*")):
            if path.suffix in (".py", ".pyx", ".pxd", ".pyi"):
                parts = path.relative_to(project).with_suffix("").parts
                name = ".".join(parts[1:] if folder == "flexstream" else parts)
                found.setdefault(name.removesuffix(".__init__").removesuffix("__init__"), []).append(path)
    return found


def imported(path: Path) -> Iterator[str]:
    """Full names, as "flexstream.rows.schema.Schema": at run time, lazily, for types, and cimported."""
    text = path.read_text()
    if path.suffix in (".pyx", ".pxd"):
        for module, names in CIMPORT.findall(text):
            yield from (f"{module}.{name.split()[0]}" for name in names.strip("() \n").split(",") if name.strip())
        yield from IMPORT.findall(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots: say where from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(project: Path) -> set[Edge]:
    """(who imports, whom), both below flexstream. The package itself, which has the public names, is left out."""
    modules = sources(project)
    found: set[Edge] = set()
    for module, paths in modules.items():
        for name in (name for path in paths for name in imported(path)):
            parts = name.split(".")
            if parts[0] != "flexstream" or module == "":
                continue
            known = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            target = next((candidate for candidate in known if candidate in modules), "")
            if target:
                found.add((module, target))
    return found


def room_of(module: str, rooms: dict[str, int], depth: int) -> str:
    name = module.split(".")[depth]
    return name if name in rooms else BESIDE


def against(found: set[Edge], rooms: dict[str, int], depth: int = 0) -> list[str]:
    """The edges that a layer does not allow, as lines for people."""
    bad = []
    for who, whom in sorted(found):
        mine, theirs = room_of(who, rooms, depth), room_of(whom, rooms, depth)
        if mine != theirs and rooms[theirs] >= rooms[mine]:
            bad.append(f"{who} (layer {rooms[mine]}) imports {whom} (layer {rooms[theirs]})")
    return bad


@pytest.fixture(scope="module")
def graph(project: Path) -> set[Edge]:
    found = edges(project)
    assert len(found) > 500, "the import graph was not read"
    return found


def test_every_folder_is_a_room_with_a_layer(project: Path) -> None:
    names = [name.split(".") for name in sources(project)]
    assert {parts[0] for parts in names} == {*ROOMS, "", "errors", "durations", "addresses", "missing_build"} - {BESIDE}
    assert {parts[1] for parts in names if parts[0] == "cython_ext" and len(parts) > 1} == set(NATIVE_ROOMS)


def test_a_room_imports_only_from_rooms_below(graph: set[Edge]) -> None:
    bad = against(graph - set(UPWARDS), ROOMS)
    assert not bad, "\n".join(bad)


def test_what_reaches_upwards_is_what_the_list_says(graph: set[Edge]) -> None:
    assert set(UPWARDS) <= graph, "the list names an edge that is not there any more"
    assert len(against(set(UPWARDS), ROOMS)) == len(UPWARDS), "the list names an edge that needs no permission"


def test_native_rooms_import_only_from_native_rooms_below(graph: set[Edge]) -> None:
    native = {edge for edge in graph if edge[0].startswith("cython_ext.")}
    assert len(native) > 150, "the cimports were not read"
    foreign = sorted(edge for edge in native if not edge[1].startswith("cython_ext."))
    assert not foreign, "native code knows nothing of the package around it"
    bad = against(native, NATIVE_ROOMS, depth=1)
    assert not bad, "\n".join(bad)


def test_the_daemon_and_the_commands_give_orders_through_the_engine_alone(project: Path, graph: set[Edge]) -> None:
    """They may name the type of the door; who carries orders out is the engine's."""
    past = ("balance.", "cython_ext.worker.", "catalog.registry", "engine.wiring", "ingest.acceptor")
    outside = {edge for edge in graph if edge[0].startswith(("daemon.", "cli."))}
    assert len(outside) > 50, "the daemon was not found"
    assert not [edge for edge in outside if edge[1].startswith(past) and edge[1] != "balance.door"]
    paths = [path for room in ("daemon", "cli") for path in (project / "flexstream" / room).glob("*.py")]
    reach = re.compile(r"\bengine\.(mover|workers|collector|lanes|acceptor|_\w+)")
    assert not [path.name for path in paths if reach.search(path.read_text())]


@pytest.mark.parametrize(
    "line",
    [
        "from flexstream.engine.engine import Engine",
        "import flexstream.engine.engine",
        "def f():\n    from flexstream.engine import engine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flexstream.engine.engine import Engine",
    ],
)
def test_an_import_from_above_is_found_however_it_is_written(tmp_path: Path, line: str) -> None:
    for name, text in (("rows/schema.py", line), ("engine/engine.py", ""), ("errors.py", "")):
        path = tmp_path / "flexstream" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert against(edges(tmp_path), ROOMS) == ["rows.schema (layer 1) imports engine.engine (layer 8)"]


def test_a_cimport_from_above_is_found(tmp_path: Path) -> None:
    for name, text in (
        ("memory/ring.pxd", "from flexstream.cython_ext.worker.shared cimport (\n    Shared, Flags,\n)"),
        ("worker/shared.pxd", ""),
    ):
        path = tmp_path / "cython_ext" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = against(edges(tmp_path), NATIVE_ROOMS, depth=1)
    assert found == ["cython_ext.memory.ring (layer 1) imports cython_ext.worker.shared (layer 4)"]
