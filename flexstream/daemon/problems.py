"""Errors over HTTP: {"error": {"code", "message", "hint"}}, with the right status."""

from __future__ import annotations

from aiohttp import web

from flexstream.errors import FlexStreamError, ResultLogError

_STATUS = {
    "unknown_stream": 404,
    "unknown_query": 404,
    "unknown_session": 404,
    "unclear_session": 409,
    "unknown_path": 404,
    "unknown_stage": 409,
    "stage_counts": 409,
    "stage_used": 409,
    "batch_differs": 409,
    "stage_damaged": 500,
    "stage_io": 500,
    "sink_ending": 503,
    "sink_full": 507,
    "too_many_commits": 503,
    "too_many_sessions": 503,
    "stream_exists": 409,
    "query_exists": 409,
    "log_schema": 409,
    "drained": 409,
    "frozen": 409,
    "last_worker": 409,
    "no_grace": 503,
    "not_settled": 503,
    "closed": 503,
    "offset_expired": 410,
    "body_too_large": 413,
    "plan_too_large": 413,
    "bad_content_type": 415,
    "bad_token": 401,
    "bad_host": 403,
    "bad_origin": 403,
    "shutting_down": 503,
    "too_many_readers": 503,
    "disk_full": 507,
    "catalog_io": 507,
}


class ApiError(FlexStreamError):
    """Something wrong with a request."""

    default_code = "bad_request"


def status_of(error: FlexStreamError) -> int:
    """The HTTP status for an error: by its code; else 500 for the log's own trouble, 400 for the caller's."""
    if error.code in _STATUS:
        return _STATUS[error.code]
    return 500 if isinstance(error, ResultLogError) else 400


def reply(error: FlexStreamError, status: int | None = None) -> web.Response:
    body = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    headers = {"WWW-Authenticate": "Bearer"} if error.code == "bad_token" else None
    return web.json_response(body, status=status or status_of(error), headers=headers)


def from_http(error: web.HTTPException, request: web.Request) -> web.Response:
    """aiohttp's own refusals (no such path, wrong method, body too large) in our form."""
    if error.status == 404:
        problem = ApiError(
            f"there is nothing at {request.path[:200]}",
            code="unknown_path",
            hint="GET /openapi.json lists all paths",
        )
    elif error.status == 405:
        allowed = ", ".join(sorted(getattr(error, "allowed_methods", [])))
        problem = ApiError(
            f"{request.method} does not work on {request.path[:200]}",
            code="bad_method",
            hint=f"use {allowed}",
        )
        return web.json_response({"error": problem.to_dict()}, status=405, headers={"Allow": allowed})
    elif error.status == 413:
        problem = ApiError(
            "the request body is too large",
            code="body_too_large",
            hint="send less, or raise max_body_bytes in the daemon's configuration",
        )
    else:
        problem = ApiError(error.reason or "refused", code="http_error", hint=None)
    return reply(problem, error.status)
