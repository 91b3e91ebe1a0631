"""A plan as JSON, version 2:

    {"version": 2, "name": ..., "nodes": [{"id": 0, "op": "scan", "in": [], "stream": "clicks"}, ...],
     "streams": {"clicks": {...}}, "tables": {}}

A node's inputs stand before it, and the last node is the root. What is read may come from anywhere: every part is
checked, and what is wrong is a QueryError that names the part, its value and what should be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexstream.errors import FlexStreamError, QueryError
from flexstream.query.plan import version_1
from flexstream.query.plan.bind import PlanError, check_query_name
from flexstream.query.plan.nodes import KINDS, MAX_STEPS, Node, Scan, shown, walk
from flexstream.rows.schema import near_names
from flexstream.rows.stream import Stream

VERSION = 2
MAX_NODES = MAX_STEPS + 4  # steps, and the scan, the window, the aggregates and the sink around them
_PARTS = ("version", "name", "nodes", "streams", "tables")
_NODE_PARTS = ("id", "op", "in")
_MOST_TOLD = 1_000  # characters of a message: names in it may be as long as somebody likes


def write(name: str, root: Node) -> dict[str, Any]:
    nodes = list(walk(root))
    ids = {id(node): number for number, node in enumerate(nodes)}
    return {
        "version": VERSION,
        "name": name,
        "nodes": [
            {"id": ids[id(node)], "op": node.op, "in": [ids[id(before)] for before in node.inputs], **node.body()}
            for node in nodes
        ],
        "streams": {node.stream.name: node.stream.to_dict() for node in nodes if isinstance(node, Scan)},
        "tables": {},
    }


def read(body: Any) -> tuple[str, Node]:
    """The query's name and the root of its plan, of this version or of one before. Raises FlexStreamError."""
    if not isinstance(body, dict):
        raise QueryError(f"a query must be an object, not {str(body)[:200]}", code="bad_query")
    version = body.get("version", version_1.VERSION)
    if version == version_1.VERSION and "nodes" not in body:
        return version_1.read(body)
    if version != VERSION or isinstance(version, bool) or "version" not in body:
        said = f"plan version {shown(version)}" if "version" in body else "nodes and no version"
        raise QueryError(
            f"query has {said}, this is {VERSION}",
            code="bad_version",
            hint="upgrade flexstream on the older side",
        )
    return _Reader(body).read()


class _Reader:
    """Reads one document. Each node is made once, from nodes that were made before it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._whose = "the query"

    def read(self) -> tuple[str, Node]:
        self._check_parts(self._body, _PARTS, "query", optional=("tables",))
        name = self._name()
        self._whose = f"query {name!r}"
        nodes = self._expect("nodes", list, "a list of nodes, each after its inputs")
        if not 1 <= len(nodes) <= MAX_NODES:
            raise self._bad(f"nodes has {len(nodes)} of them", f"a plan has 1 to {MAX_NODES} nodes")
        if self._expect("tables", dict, "an object", {}):
            raise self._bad(f"tables is {shown(self._body['tables'])}", "there are no tables yet: leave it empty")
        streams = self._streams()
        made: dict[int, Node] = {}
        for position, item in enumerate(nodes):
            number = self._number(position, item, made)
            made[number] = self._node(number, item, made, streams)
        self._check_read(made, streams)
        return name, made[nodes[-1]["id"]]

    def _name(self) -> str:
        try:
            return check_query_name(self._body["name"])
        except QueryError as error:
            raise QueryError(error.message[:_MOST_TOLD], code=error.code, hint=error.hint) from None

    def _streams(self) -> dict[str, Stream]:
        given = self._expect("streams", dict, "an object of stream definitions, by name")
        if len(given) > MAX_NODES:
            raise self._bad(f"streams has {len(given)} of them", f"a plan reads at most {MAX_NODES}")
        return {name: self._stream(name, definition) for name, definition in given.items()}

    def _stream(self, name: str, definition: Any) -> Stream:
        try:
            stream = Stream.from_dict(definition)
        except FlexStreamError as error:
            raise self._told(f"streams[{shown(name)}]", error) from None
        if stream.name != name:
            raise self._bad(
                f"streams[{shown(name)}] has the name {stream.name!r}", "a definition stands under its own name"
            )
        return stream

    def _number(self, position: int, item: Any, made: Mapping[int, Node]) -> int:
        if not isinstance(item, dict):
            raise self._bad(f"nodes[{position}] is {shown(item)}", 'a node is an object with "id", "op" and "in"')
        if missing := [part for part in _NODE_PARTS if part not in item]:
            raise self._bad(f"nodes[{position}] lacks {missing}", 'a node is an object with "id", "op" and "in"')
        number = item["id"]
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise self._bad(f"nodes[{position}] has the id {shown(number)}", "an id is a number from 0 on")
        if number in made:
            raise self._bad(f"nodes[{position}] has the id {number}, as a node before it", "ids are different")
        return number

    def _node(self, number: int, item: dict[str, Any], made: Mapping[int, Node], streams: dict[str, Stream]) -> Node:
        op = item["op"]
        if not isinstance(op, str) or op not in KINDS:
            hint = near_names(str(op)[:64], list(KINDS))
            raise self._bad(f"node {number} has the op {shown(op)}, which there is not", hint)
        kind, where = KINDS[op], f"node {number} ({op})"
        self._check_parts(item, (*_NODE_PARTS, *kind.parts), where)
        inputs = self._inputs(where, kind, item["in"], made)
        try:
            return kind.read(item, inputs, streams)
        except FlexStreamError as error:
            raise self._told(where, error) from None

    def _inputs(self, where: str, kind: type[Node], given: Any, made: Mapping[int, Node]) -> tuple[Node, ...]:
        if not isinstance(given, list) or len(given) != kind.arity:
            raise self._bad(f"{where}: in is {shown(given)}", f"{kind.op} has {kind.arity} inputs: a list of ids")
        for one in given:
            if not isinstance(one, int) or isinstance(one, bool) or one not in made:
                raise self._bad(
                    f"{where}: in has {shown(one)}, which is no node before it",
                    "nodes stand after their inputs, so that no node reads itself",
                )
        return tuple(made[one] for one in given)

    def _check_read(self, made: Mapping[int, Node], streams: Mapping[str, Stream]) -> None:
        """All nodes but the last have a reader, and all streams: nothing in a plan is there for nothing."""
        *others, _ = made
        inputs = {id(before) for node in made.values() for before in node.inputs}
        for number in others:
            if id(made[number]) not in inputs:
                raise self._bad(
                    f"node {number} ({made[number].op}) is read by no node",
                    "the last node is the root; every other is an input of one behind it",
                )

        scanned = {node.stream.name for node in made.values() if isinstance(node, Scan)}
        if unread := [name for name in streams if name not in scanned]:
            raise self._bad(f"streams defines {shown(unread[0])}, which no scan reads", "leave it out, or scan it")

    # -- what is wrong

    def _check_parts(
        self, body: dict[Any, Any], parts: tuple[str, ...], where: str, optional: tuple[str, ...] = ()
    ) -> None:
        if unknown := [part for part in body if part not in parts]:
            raise self._bad(f"{where} has the unknown part {shown(unknown[0])}", f"its parts are {', '.join(parts)}")
        if missing := [part for part in parts if part not in body and part not in optional]:
            raise self._bad(f"{where} lacks {missing}", f"its parts are {', '.join(parts)}")

    def _expect(self, part: str, kind: type, what: str, default: Any = None) -> Any:
        value = self._body.get(part, default)
        if not isinstance(value, kind):
            raise self._bad(f"{part} is {shown(value)}", f"{part} is {what}")
        return value

    def _bad(self, message: str, hint: str) -> QueryError:
        return QueryError(f"{self._whose}: {message}"[:_MOST_TOLD], code="bad_query", hint=hint)

    def _told(self, where: str, error: FlexStreamError) -> QueryError:
        """What a node or a stream says of itself, and which of them it is."""
        whose = f"{self._whose}, {where}"
        message = error.of(whose).message if isinstance(error, PlanError) else f"{whose}: {error.message}"
        return QueryError(message[:_MOST_TOLD], code=error.code, hint=error.hint)
