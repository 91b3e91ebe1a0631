"""`flexstream serve`: the process around the daemon. Logs, lock, engine, event loop, and the last words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flexstream.addresses import join_address
from flexstream.daemon import logs
from flexstream.daemon.catalog import Catalog, DataDirLock
from flexstream.daemon.config import Config
from flexstream.daemon.engine_api import EngineAPI
from flexstream.daemon.server import Daemon
from flexstream.errors import FlexStreamError
from flexstream.query.query import Query

log = logging.getLogger("flexstream.daemon")
SHOWN_WINDOWS = 20


def make_engine(config: Config) -> EngineAPI:
    """The real engine, on the configured data port."""
    from flexstream.engine.engine import Engine

    engine: EngineAPI = Engine(**config.engine_arguments())
    return engine


def serve(
    config: Config, *, as_json: bool = False, engine_of: Callable[[Config], EngineAPI] | None = None
) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code: 0 after a drained stop, 1 if draining failed.

    Raises FlexStreamError when it cannot start: the directory is locked, a port is taken, the catalog is bad.
    """
    limit = logs.setup(config.log_level)
    token = config.token
    lock = DataDirLock(config.data_dir)
    clean = not lock.crashed  # nothing changes if it does not start
    try:
        catalog = Catalog(config.data_dir)
        catalog.check_groups(config.groups)
        engine = (engine_of or make_engine)(config)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                clean = runner.run(_run(config, engine, token, catalog, limit, as_json, lock.crashed))
        except FlexStreamError:
            engine.close()
            raise
        except Exception:
            log.exception("stop_failed")
            clean = False
            engine.close()
            return 1
    finally:
        lock.release(clean=clean)
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # a platform without it: the standard loop does the same, slower
        return None
    return uvloop.new_event_loop


async def _run(
    config: Config,
    engine: EngineAPI,
    token: str | None,
    catalog: Catalog,
    limit: logs.RateLimit,
    as_json: bool,
    crashed: bool,
) -> bool:
    """Returns whether the next start knows what was open."""
    daemon = Daemon(
        engine,
        control=config.control,
        token=token,
        catalog=catalog,
        crashed=crashed,
        drain_timeout_s=config.drain_timeout_s,
        max_body_bytes=config.max_body_bytes,
        suppressed=lambda: limit.suppressed,
    )
    await daemon.run(
        lambda d: _say_ready(config, d, as_json), lambda windows: _say_stopped(daemon, windows, as_json)
    )
    return daemon.clean


def _say_ready(config: Config, daemon: Daemon, as_json: bool) -> None:
    assert daemon.control_address is not None
    data = daemon.engine.data_address
    facts = {
        "event": "ready",
        "control": join_address(*daemon.control_address),
        "data": join_address(*data) if data else None,
        "data_dir": str(config.data_dir),
        "streams": sorted(daemon.engine.streams),
        "queries": sorted(daemon.engine.queries),
        "failed": daemon.catalog_failed,
    }
    if as_json:
        _print(json.dumps(facts))
        return
    _print(
        f"flexstream is ready: HTTP http://{facts['control']}, data {facts['data'] or 'off'}, "
        f"{len(daemon.engine.streams)} streams, {len(daemon.engine.queries)} queries, "
        f"data_dir {config.data_dir}"
    )


def _say_stopped(daemon: Daemon, windows: list[Any], as_json: bool) -> None:
    """An honest word on what a restart will not have: of open windows only committed rows are kept."""
    if as_json:
        facts = {"event": "stopped", "drained": daemon.drained, "open_windows": _plain(windows)}
        _print(json.dumps(facts))
        return
    done = (
        "every received row was processed" if daemon.drained else "draining took too long, and rows were dropped"
    )
    if not windows:
        _print(f"flexstream stopped: {done}, no window was open")
        return
    _print(f"flexstream stopped: {done}; these windows had not fired, and only their committed rows survive:")
    for window in windows[:SHOWN_WINDOWS]:
        _print(f"  {describe_window(window, daemon.engine.queries)}")
    if len(windows) > SHOWN_WINDOWS:
        _print(f"  and {len(windows) - SHOWN_WINDOWS} more")
    _print("  (send their other rows again: without checkpoints, which do not exist yet, a stop loses them)")


def describe_window(window: Any, queries: Mapping[str, Query]) -> str:
    """The open windows of a query in words: as the engine tells them, with times that people read."""
    if not isinstance(window, Mapping):
        return str(window)
    query = queries.get(str(window.get("query")))
    shown = dict(window)

    def moment(value: Any) -> str:
        if query is None or not isinstance(value, int):
            return str(value)
        return str(np.array([value]).view(f"M8[{query.stream.time_unit}]")[0])

    for key in ("first_end", "last_end"):
        if key in shown:
            shown[key] = moment(shown[key])
    if "ranges" in shown:
        more = shown.pop("more_ranges", 0)
        ranges = [f"{moment(begin)} to {moment(end)}" for begin, end in shown["ranges"]]
        shown["ranges"] = "; ".join([*ranges, f"and {more} more"] if more else ranges)
    return ", ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in shown.items())


def _plain(window: Any) -> Any:
    if isinstance(window, Mapping):
        return {str(key): _plain(value) for key, value in window.items()}
    if isinstance(window, tuple | list):
        return [_plain(value) for value in window]
    return window if isinstance(window, str | int | float | bool | None) else str(window)


def _print(line: str) -> None:
    try:
        print(line, file=sys.stdout, flush=True)
    except OSError:  # the reader of our output went away; what lies in its buffer must not fail the exit
        log.info("output_closed", extra={"fields": {"line": line}})
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
