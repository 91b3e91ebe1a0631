"""The one error tree. Every error says what was tried, on what, and what to do next."""

from __future__ import annotations


class FlexStreamError(Exception):
    """Anything that FlexStream refuses or fails at.

    `code` is a short stable word for programs (`unknown_field`), `message` a sentence for people, `hint`
    what to do next, or None. `str(error)` shows message and hint.
    """

    default_code = "error"

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r}, hint={self.hint!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional args; ours carry keywords.
        return (_rebuild, (type(self), self.message, self.code, self.hint))

    def to_dict(self) -> dict[str, str | None]:
        """The form of ERROR frames and of HTTP error bodies."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


def _rebuild(kind: type[FlexStreamError], message: str, code: str, hint: str | None) -> FlexStreamError:
    return kind(message, code=code, hint=hint)


class SchemaError(FlexStreamError):
    """A stream or field definition, or rows that do not fit it."""

    default_code = "bad_schema"


class QueryError(FlexStreamError):
    """A query that cannot mean anything on its stream."""

    default_code = "bad_query"


class ProtocolError(FlexStreamError):
    """A peer that broke the wire protocol; `code` is the ERROR frame's."""

    default_code = "protocol"


class ConnectError(FlexStreamError):
    """A server that could not be reached, or that refused us."""

    default_code = "connect"


class BackPressure(FlexStreamError):
    """The receiving side is full, and the caller chose to be told instead of to wait."""

    default_code = "back_pressure"


class ConfigError(FlexStreamError):
    """A setting with a value that cannot be used."""

    default_code = "bad_config"


class EngineError(FlexStreamError):
    """The engine cannot do this in its present state."""

    default_code = "engine"


class ResultLogError(FlexStreamError):
    """The result log could not be written or read; it is as it was before the call."""

    default_code = "result_log"


class StageError(FlexStreamError):
    """Staged rows that cannot be taken, kept or committed. Nothing of the call was applied."""

    default_code = "stage"
