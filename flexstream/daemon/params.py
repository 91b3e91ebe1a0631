"""Query parameters of the HTTP API: each is checked, and a wrong one is named with its value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from aiohttp import web

from flexstream.daemon.problems import ApiError

MAX_OFFSET = 2**63 - 1
MAX_PARTS = 65_536  # as many as there can be groups


class Params:
    """The parameters of one request. Construction refuses unknown and repeated names."""

    def __init__(self, request: web.Request, *known: str) -> None:
        self._values: dict[str, str] = {}
        for name, value in request.query.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known) or 'none'}"
                raise ApiError(f"unknown parameter {name[:64]!r}", code="bad_parameter", hint=hint)
            if name in self._values:
                raise ApiError(f"parameter {name} is given twice", code="bad_parameter", hint="give it once")
            self._values[name] = value

    def whole(
        self, name: str, default: int | None, *, lowest: int = 0, highest: int = MAX_OFFSET
    ) -> int | None:
        text = self._values.get(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 19 or not lowest <= int(text) <= highest:
            raise _bad(name, text, f"a whole number from {lowest} to {highest}")
        return int(text)

    def choice(self, name: str, default: str, options: Mapping[str, object] | tuple[str, ...]) -> str:
        text = self._values.get(name, default)
        if text not in options:
            raise _bad(name, text, "one of " + ", ".join(options))
        return text

    def flag(self, name: str) -> bool:
        text = self._values.get(name, "0").lower()
        if text in ("1", "true", "yes"):
            return True
        if text in ("0", "false", "no"):
            return False
        raise _bad(name, text, "1 or 0")


def _bad(name: str, value: str, expected: str) -> ApiError:
    return ApiError(
        f"parameter {name} = {value[:64]!r} cannot be used", code="bad_parameter", hint=f"give {expected}"
    )
