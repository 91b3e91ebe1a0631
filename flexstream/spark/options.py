"""The options of `format("flexstream")`, read once on the driver and checked there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexstream.client.discovery import Address
from flexstream.errors import ConfigError
from flexstream.rows.schema import near_names
from flexstream.state.stage.applied import DEFAULT_REMEMBER_S

# Spark hands its own options over together with ours; these it uses itself.
SPARK_OPTIONS = {
    "checkpointlocation",
    "path",
    "queryname",
    "mode",
    "paths",
    "truncate",
    "numrows",
    "__partition_columns",
}
DEFAULT_SINK = "spark"
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class Options:
    """What the user said.

    `endpoints`: control ports of the daemons, each "host:port". Sink: `stream`, `sink_id`, `job`, `end`,
    `at_least_once`, `watermark`, `remember_s`. Source: `query`, `max_rows`, `partition_rows`, `group_partitions`,
    `starting_offset`, `late`. Both: `token`, `timeout_s`.
    """

    endpoints: tuple[str, ...]
    stream: str | None = None
    query: str | None = None
    token: str | None = None
    sink_id: str = DEFAULT_SINK
    job: str | None = None
    end: bool = False
    at_least_once: bool = False
    watermark: str = "batch"
    remember_s: float = DEFAULT_REMEMBER_S
    max_rows: int | None = None
    partition_rows: int = 1_000_000
    group_partitions: int = 1
    starting_offset: str = "earliest"
    late: bool = False
    timeout_s: float = 60.0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Raises ConfigError: an unknown option, or a value that cannot be used."""
        values: dict[str, Any] = {}
        for name, text in given.items():
            word = name.lower()
            if word not in _READERS:
                if word in SPARK_OPTIONS or word.startswith("spark."):
                    continue
                raise ConfigError(
                    f"format flexstream has no option {name!r}",
                    code="bad_option",
                    hint=near_names(word, sorted(_READERS)),
                )
            field, read = _READERS[word]
            values[field] = read(word, str(text))
        if "endpoints" not in values:
            raise ConfigError(
                "format flexstream needs the option endpoint: the control port of a daemon, or several with commas",
                code="bad_option",
                hint='.option("endpoint", "127.0.0.1:7401")',
            )
        values.setdefault("token", os.environ.get("FLEXSTREAM_TOKEN"))
        return cls(**values)

    def need(self, name: str) -> str:
        """`stream` or `query`, which must be there."""
        value = getattr(self, name)
        if not value:
            raise ConfigError(
                f"format flexstream needs the option {name} to {'write' if name == 'stream' else 'read'}",
                code="bad_option",
                hint=f'.option("{name}", "...")',
            )
        return str(value)


def _endpoints(name: str, text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part for part in re.split(r"[,\s]+", text.strip("[] ")) if part))
    if not found:
        raise ConfigError(f"option {name} is empty", code="bad_option", hint="give host:port of a control port")
    for part in found:
        if Address.parse(part).direct:
            raise ConfigError(
                f"option {name}: {part} is a data port",
                code="bad_option",
                hint="give the control port (7401): commits go there",
            )
    return found


def _text(name: str, text: str) -> str:
    return text


def _token_file(name: str, text: str) -> str:
    try:
        return Path(text).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"option {name}: cannot read {text}: {error.strerror}",
            code="bad_option",
            hint="the driver must be able to read it",
        ) from error


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"option {name}={text!r} must be true or false", code="bad_option")
    return text.lower() in _TRUE


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"option {name}={text!r} must be a whole number above 0", code="bad_option")
    return int(text)


def _seconds(name: str, text: str, most: float = 86_400) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < most:
        raise ConfigError(
            f"option {name}={text!r} must be a number of seconds above 0 and below {most:.0f}", code="bad_option"
        )
    return value


def _long_time(name: str, text: str) -> float:
    return _seconds(name, text, 1e9)


def _watermark(name: str, text: str) -> str:
    if text not in ("batch", "rows"):
        raise ConfigError(f"option {name}={text!r} must be batch or rows", code="bad_option")
    return text


def _start(name: str, text: str) -> str:
    if text not in ("earliest", "latest") and not text.isdecimal():
        raise ConfigError(f"option {name}={text!r} must be earliest, latest or an offset", code="bad_option")
    return text


_READERS: dict[str, tuple[str, Any]] = {
    "endpoint": ("endpoints", _endpoints),
    "stream": ("stream", _text),
    "query": ("query", _text),
    "token": ("token", _text),
    "token_file": ("token", _token_file),
    "sink_id": ("sink_id", _text),
    "job": ("job", _text),
    "end": ("end", _flag),
    "at_least_once": ("at_least_once", _flag),
    "watermark": ("watermark", _watermark),
    "remember_s": ("remember_s", _long_time),
    "max_rows": ("max_rows", _count),
    "partition_rows": ("partition_rows", _count),
    "group_partitions": ("group_partitions", _count),
    "starting_offset": ("starting_offset", _start),
    "late": ("late", _flag),
    "timeout_s": ("timeout_s", _seconds),
}
