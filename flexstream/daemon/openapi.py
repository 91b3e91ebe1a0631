"""The OpenAPI 3.1 document that the daemon serves at /openapi.json."""

from __future__ import annotations

from functools import cache
from typing import Any

import flexstream
from flexstream.catalog.sessions import KINDS
from flexstream.daemon.metrics import CONTENT_TYPE
from flexstream.daemon.params import MAX_OFFSET, MAX_PARTS
from flexstream.query.plan import nodes, serial

Json = dict[str, Any]

NAME: Json = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_.-]{0,63}$"},
}
STAGE: Json = {"name": "stage", "in": "path", "required": True, "schema": {"type": "string"}}
PRODUCER: Json = {"name": "producer", "in": "path", "required": True, "schema": {"type": "string"}}
KIND: Json = {
    "name": "kind",
    "in": "query",
    "description": "Which session, if a producer and a sink have the same name.",
    "schema": {"type": "string", "enum": ["any", *KINDS], "default": "any"},
}
OFFSET: Json = {
    "name": "offset",
    "in": "query",
    "description": "The first row that you want. By default the oldest row in the log.",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET},
}
LIMIT: Json = {
    "name": "limit",
    "in": "query",
    "description": "The largest number of rows to send.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_OFFSET},
}
PARTS: Json = {
    "name": "parts",
    "in": "query",
    "description": "Divide the results by group into this many parts, and send only `part`. "
    "Offset and limit count the rows of all parts.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PARTS, "default": 1},
}
PART: Json = {
    "name": "part",
    "in": "query",
    "description": "Send the rows whose group mod `parts` is this number.",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_PARTS - 1, "default": 0},
}
FORMAT: Json = {
    "name": "format",
    "in": "query",
    "schema": {"type": "string", "enum": ["arrow", "jsonl"], "default": "arrow"},
}
FOLLOW: Json = {
    "name": "follow",
    "in": "query",
    "description": "1: keep the reply open and send results as windows fire.",
    "schema": {"type": "string", "enum": ["0", "1"], "default": "0"},
}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _operation(
    name: str,
    summary: str,
    replies: dict[str, Json],
    *,
    parameters: list[Json] | None = None,
    body: str | None = None,
) -> Json:
    operation: Json = {"operationId": name, "summary": summary, "responses": dict(replies)}
    for status in ("400", "401", "500"):
        operation["responses"].setdefault(status, {"$ref": "#/components/responses/Error"})
    if parameters:
        operation["parameters"] = parameters
    if body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        }
        for status in ("409", "413", "415", "503", "507"):
            operation["responses"].setdefault(status, {"$ref": "#/components/responses/Error"})
    return operation


def _rows(description: str) -> Json:
    return {
        "description": description,
        "content": {
            "application/vnd.apache.arrow.stream": {
                "schema": {"type": "string", "contentEncoding": "binary"}
            },
            "application/x-ndjson": {"schema": {"type": "string", "description": "one JSON object per row"}},
        },
        "headers": {
            name: {"description": text, "schema": {"type": "integer"}}
            for name, text in (
                ("X-FlexStream-First-Offset", "oldest row in the log when the reply began"),
                ("X-FlexStream-Next-Offset", "offset that the next row would get when the reply began"),
                ("X-FlexStream-Generation", "how many queries have had this name; the newest wrote the last rows"),
                ("X-FlexStream-Generation-Offset", "the first row of the newest of these queries"),
            )
        },
    }


ERROR = {"$ref": "#/components/responses/Error"}


def _paths() -> Json:
    stream = _json("The stream and where to send its rows", _ref("StreamReply"))
    query = _json("The query", _ref("QueryReply"))
    probe = _ref("Probe")
    return {
        "/v1/streams": {
            "get": _operation(
                "listStreams",
                "All streams",
                {
                    "200": _json(
                        "The streams", _object(streams={"type": "array", "items": _ref("StreamReply")})
                    )
                },
            ),
            "post": _operation(
                "addStream",
                "Add a stream; adding the same definition again is not an error",
                {"201": stream, "200": stream},
                body="Stream",
            ),
        },
        "/v1/streams/{name}": {
            "get": _operation(
                "showStream",
                "Show one stream; a producer asks this first",
                {"200": stream, "404": ERROR},
                parameters=[NAME],
            )
        },
        "/v1/streams/{name}/sessions": {
            "get": _operation(
                "listSessions",
                "List the stream's producers: state, watermark, connections",
                {"200": _json("The sessions that have not ended", _ref("SessionsReply")), "404": ERROR},
                parameters=[NAME],
            )
        },
        "/v1/streams/{name}/sessions/{producer}": {
            "delete": _operation(
                "endSession",
                "End a session that holds back or poisons the stream; its rows so far count",
                {"200": _json("Ended", _ref("SessionReply")), "404": ERROR, "409": ERROR},
                parameters=[NAME, PRODUCER, KIND],
            )
        },
        "/v1/queries": {
            "get": _operation(
                "listQueries",
                "All queries",
                {
                    "200": _json(
                        "The queries", _object(queries={"type": "array", "items": {"type": "object"}})
                    )
                },
            ),
            "post": _operation(
                "submitQuery",
                "Submit a query (`query.to_json()`); adds its stream if it is new",
                {"201": query, "200": query},
                body="AnyQuery",
            ),
        },
        "/v1/queries/{name}": {
            "get": _operation("showQuery", "One query", {"200": query, "404": ERROR}, parameters=[NAME]),
            "delete": _operation(
                "cancelQuery",
                "Cancel a query",
                {
                    "200": _json("Cancelled", _object(name={"type": "string"}, cancelled={"const": True})),
                    "404": ERROR,
                },
                parameters=[NAME],
            ),
        },
        "/v1/queries/{name}/results": {
            "get": _operation(
                "readResults",
                "Read result rows by offset, as an Arrow IPC stream or JSON lines",
                {"200": _rows("The rows"), "404": ERROR, "410": ERROR, "503": ERROR},
                parameters=[NAME, OFFSET, LIMIT, FORMAT, FOLLOW, PARTS, PART],
            )
        },
        "/v1/queries/{name}/late": {
            "get": _operation(
                "readLate",
                "Read rows that came too late for their window: the stream's columns, and the watermark at that time",
                {"200": _rows("The rows"), "404": ERROR, "410": ERROR, "503": ERROR},
                parameters=[NAME, OFFSET, LIMIT, FORMAT, FOLLOW],
            )
        },
        "/v1/stages": {
            "get": _operation("listStages", "Staged rows", {"200": _json("The stages", _ref("StagesReply"))})
        },
        "/v1/stages/{stage}": {
            "delete": _operation(
                "dropStage",
                "Fence a stage and drop its rows; a committed stage stays",
                {"200": _json("What it was", _ref("DropReply"))},
                parameters=[STAGE],
            )
        },
        "/v1/commits": {
            "post": _operation(
                "commit",
                "Apply exactly these stages, all or none, once per (sink, query, batch)",
                {"200": _json("The batch was applied, now or before", _ref("CommitReply"))},
                body="Commit",
            )
        },
        "/v1/nic": {
            "get": _operation(
                "showNic", "Show the receive side of the machine", {"200": _json("The NIC", {"type": "object"})}
            )
        },
        **_rebalance_paths(),
        "/v1/status": {
            "get": _operation(
                "status", "Show everything that the daemon counts", {"200": _json("The status", {"type": "object"})}
            )
        },
        "/healthz": {
            "get": _operation("health", "Alive?", {"200": _json("Yes", probe), "503": _json("No", probe)}),
        },
        "/readyz": {
            "get": _operation(
                "ready", "Ready for rows?", {"200": _json("Yes", probe), "503": _json("No", probe)}
            ),
        },
        "/metrics": {
            "get": _operation(
                "metrics",
                "Prometheus text",
                {
                    "200": {
                        "description": "The page",
                        "content": {CONTENT_TYPE: {"schema": {"type": "string"}}},
                    }
                },
            )
        },
        "/openapi.json": {
            "get": _operation("openapi", "This document", {"200": _json("OpenAPI 3.1", {"type": "object"})})
        },
    }


def _rebalance_paths() -> Json:
    outcome = {"200": _json("What it did", _ref("Rebalanced")), "409": ERROR}
    most: Json = {
        "name": "limit",
        "in": "query",
        "description": "Show only this many, the newest ones.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 256},
    }
    entries = {"type": "array", "items": _ref("Rebalanced")}
    orders = {
        "apply": ("applyPlan", "Make a plan and carry it out now", "Nothing"),
        "auto": ("setAutomatic", "Switch automatic moves on or off", "OnOff"),
        "freeze": ("freezeGroups", "Freeze groups (without a list: all), or let them move again", "Freeze"),
        "move": ("moveGroup", "Move one group to a worker", "MoveGroup"),
        "split": ("splitGroup", "Let other workers serve connections of a group beside its owner", "SplitGroup"),
        "unsplit": ("unsplitGroup", "Give all connections of a group back to its owner", "OneGroup"),
        "drain": ("drainWorker", "Move all groups of a worker to the others; it gets no new ones", "OneWorker"),
        "add": ("addWorker", "Make a drained worker active again; it gets its share of the groups", "OneWorker"),
    }
    return {
        "/v1/rebalance": {
            "get": _operation(
                "showPlacement",
                "Show which worker owns which group, how loaded workers are, and which groups and keys are hot",
                {"200": _json("The placement", _ref("Placement"))},
            )
        },
        "/v1/rebalance/history": {
            "get": _operation(
                "rebalanceHistory",
                "List decisions and commands with their numbers, the oldest first",
                {"200": _json("The history", _object(history=entries))},
                parameters=[most],
            )
        },
        "/v1/rebalance/plan": {
            "post": _operation(
                "planMoves",
                "Show what would move now, without moving it",
                {"200": _json("The plan", _ref("MovePlan"))},
                body="Nothing",
            )
        },
        **{
            f"/v1/rebalance/{path}": {"post": _operation(name, summary, outcome, body=body)}
            for path, (name, summary, body) in orders.items()
        },
    }


def _query_schemas() -> Json:
    text = {"type": "string"}
    parts = "; ".join(f"{op}: {', '.join(kind.parts)}" for op, kind in nodes.KINDS.items())
    return {
        "Query": {
            "type": "object",
            "description": "The plan as `Query.to_json()` writes it",
            "required": ["version", "name", "nodes", "streams"],
            "properties": {
                "version": {"const": 2},
                "name": text,
                "nodes": {
                    "type": "array",
                    "description": "each after its inputs; the last is the root",
                    "minItems": 1,
                    "maxItems": serial.MAX_NODES,
                    "items": _ref("PlanNode"),
                },
                "streams": {"type": "object", "additionalProperties": _ref("Stream")},
                "tables": {"type": "object", "maxProperties": 0},
            },
            "additionalProperties": False,
        },
        "PlanNode": {
            "type": "object",
            "description": f"beside these, a node has the parts of its kind: {parts}",
            "required": ["id", "op", "in"],
            "properties": {
                "id": {"type": "integer", "minimum": 0},
                "op": {"enum": [*nodes.KINDS]},
                "in": {"type": "array", "description": "ids of nodes before it", "items": {"type": "integer"}},
            },
        },
        "QueryVersion1": {
            "type": "object",
            "description": "A plan as an older `Query.to_json()` wrote it",
            "required": ["name", "stream"],
            "properties": {
                "version": {"const": 1},
                "name": text,
                "stream": _ref("Stream"),
                "steps": {"type": "array"},
                "window": {"type": ["object", "null"]},
                "allowed_lateness": text,
                "aggregates": {"type": "object"},
            },
            "additionalProperties": False,
        },
        "AnyQuery": {"oneOf": [_ref("Query"), _ref("QueryVersion1")]},
    }


def _rebalance_schemas() -> Json:
    text: Json = {"type": "string"}
    whole: Json = {"type": "integer"}
    number: Json = {"type": "number"}
    moved = {"type": "array", "items": {"type": "object"}, "description": "each move with its steps and times"}
    steps = {"type": "array", "items": _object(group=whole, **{"from": whole, "to": whole})}
    workers: Json = {"type": "array", "items": whole}
    per_worker: Json = {"type": "array", "items": number, "description": "percent of a fair share, per worker"}
    return {
        "Placement": _object(
            automatic={"type": "boolean"},
            placement={"type": "array", "items": whole, "description": "worker of each group"},
            workers={
                "type": "array",
                "items": _object(worker=whole, cpu={"type": ["integer", "null"]}, groups=whole),
            },
            split={
                "type": "array",
                "items": _object(group=whole, owner=whole, workers=workers, misaligned=whole),
                "description": "groups that several workers serve; misaligned: connections away from their core",
            },
            too_hot={
                "type": "array",
                "items": {"type": "object"},
                "description": "groups that no placement and no split can relieve, with connection and key",
            },
        ),
        "Rebalanced": _object(
            at={**number, "description": "seconds since 1970"},
            what=text,
            text=text,
            error={"type": ["string", "null"]},
            repeated=whole,
            moved=moved,
            took_ms={"type": ["number", "null"]},
            latency={"type": ["object", "null"], "description": "of the markers that were seen during the moves"},
        ),
        "MovePlan": _object(
            plan=steps,
            text=text,
            reason=text,
            imbalance_percent=number,
            imbalance_percent_after=number,
            worker_percent=per_worker,
            worker_percent_after=per_worker,
        ),
        "Nothing": {"type": "object", "additionalProperties": False},
        "OnOff": {**_object(on={"type": "boolean"}), "additionalProperties": False},
        "MoveGroup": {**_object(group=whole, worker=whole), "additionalProperties": False},
        "SplitGroup": {
            **_object(group=whole, workers={"type": "array", "items": whole, "minItems": 1}),
            "additionalProperties": False,
        },
        "OneGroup": {**_object(group=whole), "additionalProperties": False},
        "OneWorker": {**_object(worker=whole), "additionalProperties": False},
        "Freeze": {
            "type": "object",
            "properties": {"groups": {"type": "array", "items": whole}, "on": {"type": "boolean"}},
            "additionalProperties": False,
        },
    }


def _schemas() -> Json:
    text: Json = {"type": "string"}
    whole: Json = {"type": "integer"}
    return {
        "Error": _object(error=_object(code=text, message=text, hint={"type": ["string", "null"]})),
        "Stream": {
            "type": "object",
            "required": ["name", "fields", "key", "time"],
            "properties": {
                "name": text,
                "fields": {
                    "type": "object",
                    "description": "field name to type, in order of the bytes: i8..i64, u8..u64, f32, f64, "
                    "bool, timestamp[s|ms|us|ns], bytes[N]",
                    "additionalProperties": text,
                },
                "key": {"oneOf": [text, {"type": "array", "items": text, "minItems": 1}]},
                "time": text,
                "max_disorder": {"type": "string", "examples": ["0ms", "5s"]},
                "max_future": {
                    "type": "string",
                    "description": "how far ahead of the clock rows may be; by default the daemon's setting",
                    "examples": ["1d", "off"],
                },
            },
            "additionalProperties": False,
        },
        "StreamReply": _object(
            stream=_ref("Stream"),
            groups=whole,
            data={"type": ["string", "null"], "description": "host:port to send rows to"},
            schema_hash=text,
        ),
        **_query_schemas(),
        "SessionsReply": _object(stream=text, sessions={"type": "array", "items": {"type": "object"}}),
        "SessionReply": _object(stream=text, producer=text, kind={"enum": [*KINDS]}, ended={"const": True}),
        "QueryReply": {
            "type": "object",
            "required": ["name", "plan"],
            "properties": {"name": text, "plan": _ref("Query"), "created": {"type": "boolean"}},
        },
        **_rebalance_schemas(),
        "StagesReply": {
            "type": "object",
            "required": ["stages", "limit_bytes", "kept_batches", "failed"],
            "properties": {
                "stages": {"type": "array", "items": {"type": "object"}},
                "limit_bytes": whole,
                "held_back": {**whole, "description": "producers that wait because limit_bytes is reached"},
                "kept_batches": {
                    **whole,
                    "description": "applied batches whose windows are not all in the result log yet",
                },
                "remembered_queries": {**whole, "description": "pairs (sink, query) whose batches may be repeated"},
                "failed": {"type": "object", "description": "batches that could not be applied, and why"},
                "set_aside": {
                    "type": "array",
                    "description": "batches that killed the daemon each time it applied them; their files are kept",
                    "items": {"type": "object"},
                },
            },
        },
        "DropReply": _object(
            stage=text,
            dropped={"type": "boolean"},
            was={"enum": ["open", "finished", "committed", "unknown"]},
        ),
        "Commit": {
            "type": "object",
            "required": ["sink", "query", "batch", "stages"],
            "properties": {
                "sink": text,
                "query": text,
                "batch": {"type": ["integer", "null"], "minimum": 0},
                "stages": {
                    "type": "array",
                    "description": "receipts of `Producer.finish_stage()`; if they have counts, the counts must agree",
                    "items": {
                        "type": "object",
                        "required": ["stage", "rows"],
                        "properties": {"stage": text, "rows": whole, "bytes": whole, "groups": {"type": "object"}},
                    },
                },
                "stream": {**text, "description": "needed to end a sink without rows"},
                "end": {"type": "boolean", "description": "the sink has ended: windows do not wait for it"},
                "remember_s": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "how long after the query's last batch a batch may be repeated; 90 days by default",
                },
            },
            "additionalProperties": False,
        },
        "CommitReply": _object(applied={"type": "boolean"}, rows=whole, duplicate={"type": "boolean"}),
        "Probe": {"type": "object"},
    }


@cache
def document() -> Json:
    """The whole document. Read-only: it is made once."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "FlexStream control API",
            "version": flexstream.__version__,
            "summary": "Streams, queries, results and health of one daemon",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:7401"}],
        "security": [{}, {"token": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "responses": {"Error": _json("What went wrong and what to do", _ref("Error"))},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token in --token-file; if the daemon has one, every request must carry it.",
                }
            },
        },
    }
