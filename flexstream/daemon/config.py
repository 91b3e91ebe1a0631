"""The daemon's settings: a flag beats the environment (FLEXSTREAM_*) beats flexstream.toml beats the default.

resolved = resolve(flags={"workers": "2"}, environ=os.environ)
config = resolved.config()          # ConfigError: the first bad value, its source, the fix
resolved.settings["workers"].source # "flag --workers"
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexstream import durations
from flexstream.addresses import CONTROL_PORT, DATA_PORT, is_loopback, join_address, split_address
from flexstream.errors import ConfigError
from flexstream.nic.probe import Spec

PREFIX = "FLEXSTREAM_"
FILE_NAME = "flexstream.toml"
SYSTEM_FILE = Path("/etc/flexstream/flexstream.toml")
MIN_TOKEN = 16  # characters
# Variables with our prefix that other parts read: not settings of the daemon, and not mistakes.
# What other parts read, and the docs name: no settings of the daemon, and no mistakes.
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("CONFIG", "URL", "TOKEN", "CACHE", "QUIET", "NIC_DIR", "NIC_WAY"),
        *("DEBUG", "SANITIZE", "ANNOTATE", "EXT", "SEED", "EXPLORE"),
    )
)
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "kb": 1000, "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
          "g": 1 << 30, "gib": 1 << 30, "gb": 10**9, "t": 1 << 40, "tib": 1 << 40, "tb": 10**12}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Everything `flexstream serve` needs. Immutable; names and units as in `flexstream.Engine`."""

    control: tuple[str, int]
    data: tuple[str, int]
    token_file: Path | None
    data_dir: Path
    workers: int | list[int]
    groups: int
    nic: str
    pin: bool
    busy_poll: bool
    frame_bytes: int
    state_memory_bytes: int | None
    compile: str
    balance: str
    idle_timeout_s: float
    session_timeout_s: float
    hello_timeout_s: float
    max_pending_hello: int
    max_sessions: int
    expected_producers: int
    max_future: int | None
    retention_bytes: int | None
    retention_s: float | None
    late_bytes: int | None
    stage_limit_bytes: int | None
    stage_timeout_s: float
    drain_timeout_s: float
    max_body_bytes: int
    log_level: str

    @property
    def token(self) -> str | None:
        """The token in the token file; None without one. Raises ConfigError."""
        return read_token(self.token_file) if self.token_file is not None else None

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `flexstream.Engine`."""
        names = (
            "workers groups data_dir nic pin busy_poll frame_bytes idle_timeout_s session_timeout_s"
            " hello_timeout_s max_pending_hello max_sessions expected_producers max_future retention_bytes"
            " retention_s late_bytes token compile stage_limit_bytes stage_timeout_s balance"
        )
        arguments = {name: getattr(self, name) for name in names.split()}
        arguments["listen"] = join_address(*self.data)
        if self.state_memory_bytes is not None:
            arguments["state_memory_bytes"] = self.state_memory_bytes
        return arguments


@dataclass(frozen=True)
class Setting:
    """One name: how its text is read, its default, and one line of help."""

    name: str
    parse: Callable[[object], Any]
    default: object
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Resolved:
    """Where one value came from. `error` is set instead of `value` when it cannot be used."""

    setting: Setting
    raw: object
    source: str
    value: Any = None
    error: ConfigError | None = None


@dataclass
class Resolution:
    """All values with their sources, and everything that is wrong with them."""

    settings: dict[str, Resolved]
    file: Path | None
    problems: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def config(self) -> Config:
        """The Config; raises the first problem."""
        if self.problems:
            raise self.problems[0]
        return Config(**{name: resolved.value for name, resolved in self.settings.items()})


# Reading one value -----------------------------------------------------------------------------------------


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        text = value.strip().lower().replace("_", "")
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = _SIZES.get(text[len(number) :].strip())
        if number.isdecimal() and unit is not None:
            return int(number) * unit
    raise ValueError("a number of bytes such as 1073741824 or 1GiB")


def _frame_bytes(value: object) -> int:
    size = _size(value)
    if not 4096 <= size <= 1 << 20:
        raise ValueError("4096 to 1048576 bytes (4KiB to 1MiB)")
    return size


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    if isinstance(value, str):
        try:
            return _seconds(float(value))
        except ValueError:
            pass
        try:
            return durations.parse(value) / 1e9
        except ConfigError:
            pass
    raise ValueError("seconds such as 30 or 2.5, or a duration such as 30s, 5m, 7d")


def _future(value: object) -> int | None:
    """Nanoseconds; None: off."""
    if value == "off":
        return None
    try:
        if isinstance(value, str):
            return durations.parse(value)
    except ConfigError:
        pass
    raise ValueError("a duration such as 1d or 10m, or off")


def _count(lowest: int, highest: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest:
            return value
        raise ValueError(f"a whole number from {lowest} to {highest}")

    return parse


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


def _choice(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError("one of " + ", ".join(names))

    return parse


def _nic(value: object) -> str:
    return str(Spec.parse(value))


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def optional(value: object) -> Any:
        return None if value is None or value in ("", "none") else parse(value)

    return optional


def _path(value: object) -> Path:
    if isinstance(value, str | os.PathLike) and str(value):
        return Path(value).expanduser().absolute()
    raise ValueError("a path")


def _address(port: int) -> Callable[[object], tuple[str, int]]:
    return lambda value: split_address(value, port)


def _workers(value: object) -> int | list[int]:
    """2 is two workers on any cores, [0, 2] or "0,2" (with a comma) these cores, auto every allowed core."""
    expected = "a number of workers, a list of cores such as [0, 1] or 0,1, or auto"
    if value == "auto":
        return max(1, len(os.sched_getaffinity(0)))
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        if not value or not all(str(cpu).isdecimal() and not isinstance(cpu, bool) for cpu in value):
            raise ValueError(expected)
        cpus = [int(cpu) for cpu in value]
        if len(set(cpus)) != len(cpus):
            raise ValueError(expected + ", each core once")
        return cpus
    try:
        return _count(1, 1024)(value)
    except ValueError:
        raise ValueError(expected) from None


def default_data_dir(environ: Mapping[str, str]) -> str:
    """What systemd gave us (StateDirectory=), else the user's state directory."""
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "/var/lib") / ".local" / "state")
    return given or str(Path(state) / "flexstream")


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("control", _address(CONTROL_PORT), f"127.0.0.1:{CONTROL_PORT}", "address of the HTTP API"),
        Setting("data", _address(DATA_PORT), f"127.0.0.1:{DATA_PORT}", "address that producers send rows to"),
        Setting("token_file", _optional(_path), None, "file with the token; required off loopback"),
        Setting("data_dir", _path, None, "directory of catalog and results; one daemon each"),
        Setting("workers", _workers, "auto", "number of workers, or the cores to pin them to (0,1)"),
        Setting("groups", _count(1, 65534), 128, "key groups; fixed for the life of a data_dir"),
        Setting("nic", _nic, "auto", "what steers rows to cores: auto, user, ethtool:DEVICE, kernel:DEVICE"),
        Setting("pin", _flag, True, "pin each worker to its core"),
        Setting("busy_poll", _flag, False, "spin instead of sleeping: lower latency, a full core per worker"),
        Setting("frame_bytes", _frame_bytes, 32768, "size of a receive block, and of a frame"),
        Setting("state_memory_bytes", _optional(_size), None, "bound on window state"),
        Setting("compile", _choice("auto", "off", "require"), "auto", "compile queries to C: auto, off or require"),
        Setting("balance", _choice("auto", "off"), "auto", "move groups to workers that have room: auto or off"),
        Setting("idle_timeout_s", _seconds, 30.0, "a producer silent for this long stops holding windows"),
        Setting("session_timeout_s", _seconds, 60.0, "how long a lost producer may take to come back"),
        Setting("hello_timeout_s", _seconds, 5.0, "how long a connection may take to send HELLO"),
        Setting("max_pending_hello", _count(1, 1 << 20), 1024, "connections that have not sent HELLO yet"),
        Setting("max_sessions", _count(1, 1 << 16), 256, "producers per stream at a time"),
        Setting("expected_producers", _count(0, 1 << 16), 0, "no window fires before this many have registered"),
        Setting("max_future", _future, "1d", "rows further ahead of the clock are rejected; off: none are"),
        Setting("retention_bytes", _optional(_size), None, "results kept per query; none keeps all"),
        Setting("retention_s", _optional(_seconds), None, "age of the oldest results kept; none keeps all"),
        Setting("late_bytes", _optional(_size), "256MiB", "late rows kept per stream, the newest; none keeps all"),
        Setting("stage_limit_bytes", _optional(_size), "16GiB", "bound on stages that are not applied yet"),
        Setting("stage_timeout_s", _seconds, 86400.0, "how long a finished stage waits for a commit"),
        Setting("drain_timeout_s", _seconds, 30.0, "how long a stop waits to process received rows"),
        Setting("max_body_bytes", _size, 1 << 20, "largest HTTP request body"),
        Setting("log_level", _choice("debug", "info", "warning", "error"), "info", "least severe level to log"),
    )
}


# Putting them together -------------------------------------------------------------------------------------


def resolve(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolution:
    """Every setting with its source. Problems are collected, not raised: `config check` shows them all.

    `flags` that are None were not given. `file` None means FLEXSTREAM_CONFIG, ./flexstream.toml, then
    /etc/flexstream/flexstream.toml, whichever is there first.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    environ = os.environ if environ is None else environ
    result = Resolution({}, _find_file(file, environ))
    in_file = _read_file(result)
    for name, setting in SETTINGS.items():
        if name in flags:
            raw, source = flags[name], f"flag {setting.flag}"
        elif setting.variable in environ:
            raw, source = environ[setting.variable], f"environment {setting.variable}"
        elif name in in_file:
            raw, source = in_file[name], f"file {result.file}"
        else:
            raw, source = setting.default, "default"
            if name == "data_dir":
                raw = default_data_dir(environ)
                source = "environment STATE_DIRECTORY" if environ.get("STATE_DIRECTORY") else "default"
        result.settings[name] = _parse(setting, raw, source, result.problems)
    for variable in sorted(environ):
        known = OTHER_VARIABLES | {setting.variable for setting in SETTINGS.values()}
        if variable.startswith(PREFIX) and variable not in known:
            result.warnings.append(f"the environment has {variable}, which is not a setting{_near(variable, known)}")
    if not result.problems:
        _check_together(result)
    return result


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if environ.get(PREFIX + "CONFIG"):
        return Path(environ[PREFIX + "CONFIG"])
    return next((path for path in (Path(FILE_NAME), SYSTEM_FILE) if path.is_file()), None)


def _read_file(result: Resolution) -> dict[str, object]:
    path = result.file
    if path is None:
        return {}
    try:
        with path.open("rb") as stream:
            values = tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = ConfigError(f"cannot read {path}: {reason}", code="bad_config_file", hint="fix the file")
        result.problems.append(problem)
        return {}
    for key in sorted(set(values) - set(SETTINGS)):
        result.problems.append(
            ConfigError(
                f"{path}: unknown setting {key!r}{_near(key, SETTINGS)}",
                code="unknown_setting",
                hint="`flexstream config check` lists all settings",
            )
        )
    return values


def _near(name: str, known: Mapping[str, object] | frozenset[str] | set[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _parse(setting: Setting, raw: object, source: str, problems: list[ConfigError]) -> Resolved:
    try:
        return Resolved(setting, raw, source, value=setting.parse(raw))
    except ValueError as error:
        problem = ConfigError(
            f"{setting.name} = {raw!r} (from {source}) cannot be used",
            code="bad_setting",
            hint=f"give {error}",
        )
    problems.append(problem)
    return Resolved(setting, raw, source, error=problem)


def _check_together(result: Resolution) -> None:
    value = {name: resolved.value for name, resolved in result.settings.items()}
    for name in ("control", "data"):
        host, _ = value[name]
        if not is_loopback(host) and value["token_file"] is None:
            result.problems.append(
                ConfigError(
                    f"{name} = {join_address(*value[name])} (from {result.settings[name].source}) "
                    "can be reached from other machines, but the daemon has no token",
                    code="token_needed",
                    hint="give --token-file FILE (`openssl rand -hex 32 > FILE`), or listen on 127.0.0.1",
                )
            )
    if value["control"][1] == value["data"][1] != 0:
        result.problems.append(
            ConfigError(
                f"control and data both use port {value['data'][1]}",
                code="same_port",
                hint=f"use {CONTROL_PORT} for control and {DATA_PORT} for data",
            )
        )
    if value["token_file"] is not None:
        try:
            _check_token(value["token_file"])
        except ConfigError as error:
            result.problems.append(error)


def read_token(path: Path) -> str:
    """The first line of the file, without white space around it. Raises ConfigError."""
    try:
        token = path.read_text(encoding="utf-8").strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"cannot read the token file {path}: {reason}",
            code="bad_token_file",
            hint="it must be a text file that this user may read",
        ) from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"the token file {path} has no token in its first line",
            code="bad_token_file",
            hint="write one: `openssl rand -hex 32 > FILE; chmod 600 FILE`",
        )
    return token


def _check_token(path: Path) -> None:
    """Of the daemon's own token file: nobody else reads it, and nobody guesses it. Raises ConfigError."""
    if len(read_token(path)) < MIN_TOKEN:
        raise ConfigError(
            f"the token in {path} is too short: it needs at least {MIN_TOKEN} characters",
            code="bad_token_file",
            hint=f"make a new one: `openssl rand -hex 32 > {path}`",
        )
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the token file {path} is open to users other than its owner",
            code="bad_token_file",
            hint=f"chmod 600 {path}",
        )
