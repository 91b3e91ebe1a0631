"""The OpenAPI document describes exactly the routes that exist, in valid form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexstream.daemon.openapi import document
from flexstream.daemon.server import Daemon
from flexstream.testing.ysb import YSB_QUERY
from tests.unit.daemon.fake_engine import FakeEngine

METHODS = {"get", "post", "delete", "put", "patch", "head", "options", "trace"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def test_every_route_is_in_the_document_and_nothing_else_is() -> None:
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in Daemon(FakeEngine()).app.router.routes()
        if route.resource is not None
    }
    assert routes == {(path, method) for path, method, _ in operations()}


def test_the_document_is_openapi_3_1_and_json() -> None:
    text = json.dumps(document())
    assert json.loads(text) == document()
    assert document()["openapi"].startswith("3.1.")
    assert {"title", "version"} <= set(document()["info"])
    assert set(document()) <= {"openapi", "info", "servers", "security", "paths", "components", "tags"}


def test_every_operation_is_complete_and_its_parameters_are_those_of_its_path() -> None:
    names = []
    for path, method, operation in operations():
        where = f"{method} {path}"
        assert method in METHODS, where
        assert operation["summary"], where
        names.append(operation["operationId"])
        assert any(status.startswith("2") for status in operation["responses"]), where
        for status, reply in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status), where
            assert "$ref" in reply or reply["description"], where
        parameters = operation.get("parameters", [])
        in_path = {p["name"] for p in parameters if p["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path)), where
        assert all(p.get("required") for p in parameters if p["in"] == "path"), where
        assert all("schema" in p for p in parameters), where
        assert ("requestBody" in operation) == (method == "post"), where
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere() -> None:
    for item in walk(document()):
        if "$ref" in item:
            target: Any = document()
            for part in item["$ref"].removeprefix("#/").split("/"):
                assert part in target, item["$ref"]
                target = target[part]


@pytest.mark.parametrize("name", ["Error", "Stream", "Query", "StreamReply", "Placement"])
def test_the_schemas_that_programs_need_are_there(name: str) -> None:
    schema = document()["components"]["schemas"][name]
    assert schema["type"] == "object"
    assert set(schema.get("required", [])) <= set(schema.get("properties", {}))


def test_a_plan_has_the_parts_that_the_document_says() -> None:
    schemas = document()["components"]["schemas"]
    plan = YSB_QUERY.to_dict()
    assert set(plan) == set(schemas["Query"]["properties"])
    assert plan["version"] == schemas["Query"]["properties"]["version"]["const"]
    assert {node["op"] for node in plan["nodes"]} <= set(schemas["PlanNode"]["properties"]["op"]["enum"])
    for node in plan["nodes"]:
        assert f"{node['op']}: {', '.join(list(node)[3:])}" in schemas["PlanNode"]["description"]
    old = json.loads((Path(__file__).parents[1] / "query/plan/version_1/ysb.json").read_text())
    assert set(old) == set(schemas["QueryVersion1"]["properties"])
