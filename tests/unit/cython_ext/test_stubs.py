"""What type checkers believe of the native modules is what these have: the same names, the same parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

NATIVE = Path(__file__).parents[3] / "cython_ext"
STUBS = sorted(NATIVE.rglob("*.pyi"))
# Python calls into these all the time: without a stub a wrong argument is not a type error.
NEEDED = {
    "memory/allocator", "operators/queries", "produce/sender", "worker/placement", "worker/streams", "worker/worker",
}  # fmt: skip


def module_of(stub: Path) -> Any:
    parts = stub.relative_to(NATIVE).with_suffix("").parts
    return importlib.import_module(".".join(("flexstream.cython_ext", *parts)))


def defined_in(module: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def members(kind: type) -> set[str]:
    own = {name for name in vars(kind) if not name.startswith("_")}
    return own - {"add_note", "with_traceback", "args"}


def parameters(node: ast.FunctionDef, method: bool) -> list[str]:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return names[1:] if method else names


def real_parameters(function: Any, method: bool) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return names[1:] if method else names


def differences(stub: Path) -> list[str]:
    module, found = module_of(stub), []
    tree = ast.parse(stub.read_text())
    said = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    real = {name: value for name, value in defined_in(module).items() if inspect.isclass(value) or callable(value)}
    if set(said) != set(real):
        found.append(f"{module.__name__}: only one of them has {sorted(set(said) ^ set(real))}")
    for name in set(said) & set(real):
        node = said[name]
        if isinstance(node, ast.FunctionDef):
            if parameters(node, False) != real_parameters(real[name], False):
                found.append(f"{name}: {parameters(node, False)}, in truth {real_parameters(real[name], False)}")
            continue
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
        stated = {member for member in {*methods, *fields} if not member.startswith("_")}
        if stated != members(real[name]):
            found.append(f"{name}: only one of them has {sorted(stated ^ members(real[name]))}")
        for member, method in methods.items():
            value = vars(real[name]).get(member)
            if member.startswith("_") or value is None or method.decorator_list:
                continue
            if parameters(method, True) != real_parameters(value, True):
                found.append(f"{name}.{member}: {parameters(method, True)}, in truth {real_parameters(value, True)}")
    return found


def test_what_python_calls_most_has_a_stub() -> None:
    have = {str(path.relative_to(NATIVE).with_suffix("")) for path in STUBS}
    assert have >= NEEDED


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_a_stub_says_what_the_module_has(stub: Path) -> None:
    assert not differences(stub)
