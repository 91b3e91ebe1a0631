"""Which variant runs, what status says of it, and that no trouble of the compiler is trouble of the query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.compile import toolchain as compiler
from flexstream.compile.toolchain import Limits
from tests.property.checks import FINISH_S, as_rows
from tests.waiting import wait_until

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64"}, key="k", time="t")
QUERY = STREAM.query("q").filter(col("x") > 0).window(fs.tumbling("10s")).agg(n=fs.count(), total=fs.sum("x"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "_loaded", {})
    return tmp_path / "cache" / "flexstream" / "code"


def rows(n: int = 500) -> np.ndarray:
    made = np.zeros(n, STREAM.schema.dtype)
    made["x"] = np.arange(n) % 3
    return made


def status_when(engine: fs.Engine, **wanted: Any) -> dict[str, Any]:
    """The query's status as soon as it is as wanted."""

    def status() -> dict[str, Any]:
        said: dict[str, Any] = engine.status()["queries"]["q"]
        return said

    def fits() -> dict[str, Any] | None:
        said = status()
        return said if all(said[name] == value for name, value in wanted.items()) else None

    return wait_until(fits, f"a query with {wanted}", seen=status) or {}


def assert_it_works(engine: fs.Engine) -> None:
    engine.feed("s", rows())
    engine.finish(timeout=FINISH_S)
    assert [(row["n"], row["total"]) for row in as_rows(engine.results("q"))] == [(333, 499)]


def test_auto_begins_generic_and_goes_on_compiled():
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(QUERY)
        said = status_when(engine, variant="compiled")
        assert said["variant_reason"] is None
        (entry,) = said["history"]
        assert entry["variant"] == "compiled"
        assert "the compiler took" in entry["reason"]
        assert entry["after_s"] > 0
        assert_it_works(engine)
        assert engine.status()["queries"]["q"]["compiled_rows"] > 400


def test_the_second_time_the_object_is_in_the_cache():
    for reason in ("the compiler took", "in the cache"):
        with fs.Engine(groups=4, pin=False, compile="require") as engine:
            engine.submit(QUERY)
            assert reason in engine.status()["queries"]["q"]["history"][0]["reason"]
            assert_it_works(engine)


def test_off_does_not_compile(cache):
    with fs.Engine(groups=4, pin=False, compile="off") as engine:
        engine.submit(QUERY)
        said = engine.status()["queries"]["q"]
        assert (said["variant"], said["variant_reason"], said["history"]) == ("generic", "compile is off", [])
        assert_it_works(engine)
        assert engine.status()["queries"]["q"]["compiled_rows"] == 0
    assert not cache.exists()


def test_other_words_than_auto_off_and_require_are_refused():
    with pytest.raises(fs.EngineError, match="auto, off or require"):
        fs.Engine(compile="maybe")


def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    return "no C compiler on this machine; install"


def wrong_cc(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    return "not a program on this machine; install"


def failing(tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho sorry >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return "sorry"


def hanging(tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(compiler, "Limits", lambda: Limits(seconds=0.3))
    return "did not finish within 0.3 s"


def read_only_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXSTREAM_CACHE", "/proc/flexstream")
    return "cannot be used"


def open_cache(tmp_path, monkeypatch):
    compiler.cache_directory().chmod(0o755)
    return "not private"


TROUBLES = [no_compiler, wrong_cc, failing, hanging, read_only_cache, open_cache]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_with_auto_no_trouble_stops_the_query_and_status_says_why(trouble, tmp_path, monkeypatch):
    reason = trouble(tmp_path, monkeypatch)
    with fs.Engine(groups=4, pin=False, compile="auto") as engine:
        engine.submit(QUERY)
        assert_it_works(engine)
        history = wait_until(lambda: engine.status()["queries"]["q"]["history"], "an entry in the history")
        said = engine.status()["queries"]["q"]
        assert (said["variant"], said["state"], said["compiled_rows"]) == ("generic", "running", 0)
        assert reason in said["variant_reason"]
        assert history[0]["reason"] == said["variant_reason"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_with_require_any_trouble_refuses_the_query_and_leaves_no_trace(trouble, tmp_path, monkeypatch):
    reason = trouble(tmp_path, monkeypatch)
    with fs.Engine(groups=4, pin=False, compile="require") as engine:
        with pytest.raises(fs.EngineError, match="was not compiled") as caught:
            engine.submit(QUERY)
        assert caught.value.code == "not_compiled"
        assert reason in str(caught.value)
        assert engine.queries == {}
        engine.feed("s", rows())
        engine.finish(timeout=FINISH_S)


def test_a_damaged_object_in_the_cache_is_compiled_again(cache, monkeypatch):
    for _ in range(2):
        with fs.Engine(groups=4, pin=False, compile="require") as engine:
            engine.submit(QUERY)
            assert "the compiler took" in engine.status()["queries"]["q"]["history"][0]["reason"]
            assert_it_works(engine)
        (path,) = cache.iterdir()
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
        path.chmod(0o600)
        monkeypatch.setattr(compiler, "_loaded", {})


def test_an_engine_closes_while_the_compiler_hangs(tmp_path, monkeypatch):
    hanging(tmp_path, monkeypatch)
    monkeypatch.setattr(compiler, "Limits", lambda: Limits(seconds=1000))
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(QUERY)
        assert_it_works(engine)
        assert engine.status()["queries"]["q"]["variant_reason"] == "compiling"


def test_a_query_cancelled_before_it_is_compiled_does_no_harm():
    with fs.Engine(groups=4, pin=False) as engine:
        for _ in range(3):
            engine.submit(QUERY)
            engine.cancel("q")
        engine.submit(QUERY)
        status_when(engine, variant="compiled")
        assert_it_works(engine)
