"""The compiler's bad days: none there, one that fails or hangs, a cache that is of no use, damaged objects."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexstream.compile import toolchain as compiler
from flexstream.compile.toolchain import (
    BackgroundCompiler,
    Compiled,
    CompileError,
    Limits,
    Outcome,
    cache_directory,
    compile_code,
    find_compiler,
    sealed,
)
from flexstream.testing.ysb import YSB_QUERY
from tests.waiting import WAIT_S, wait_until

CODE = """#include "flexstream_abi.h"
uint32_t fs_variant_run(const unsigned char *rows, uint32_t n, fs_view *view) { return n; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, and nothing loaded yet."""
    monkeypatch.setenv("FLEXSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "_loaded", {})
    return tmp_path / "cache" / "flexstream" / "code"


@pytest.fixture
def fake_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A compiler that answers to --version and otherwise does what the test says."""

    def make(script: str, version: str = "echo fake 1.0; exit 0") -> Path:
        path = tmp_path / "fake-cc"
        path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) {version};; esac\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        monkeypatch.setattr(compiler, "_versions", {})
        return path

    return make


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()]


# -- a good day


def test_code_is_compiled_once_and_then_comes_from_the_cache(cache, monkeypatch):
    first = compile_code(CODE)
    monkeypatch.setattr(compiler, "_loaded", {})
    second = compile_code(CODE)
    assert (first.cached, second.cached) == (False, True)
    assert first.function
    assert second.function
    assert left_behind(cache) == [first.path.name]
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_other_code_flags_or_compiler_make_another_object(monkeypatch):
    paths = [compile_code(CODE).path, compile_code(CODE + "\n").path]
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    paths.append(compile_code(CODE).path)
    monkeypatch.setenv("CC", "cc -DX=1")
    paths.append(compile_code(CODE).path)
    assert len(set(paths)) == 4


def test_the_cache_keeps_what_was_used_last_and_forgets_what_killed_builds_left(cache, monkeypatch):
    monkeypatch.setattr(compiler, "MOST_KEPT", 3)
    made = [compile_code(f"{CODE} int version = {version};").path for version in range(3)]
    for age, path in zip((300, 200, 100), made, strict=True):
        os.utime(path, (time.time() - age, time.time() - age))
    for name, age in (("build-old", 2 * compiler.ABANDONED_S), ("build-new", 0)):
        (cache / name).mkdir()
        (cache / name / "variant.c").touch()
        os.utime(cache / name, (time.time() - age, time.time() - age))
    assert compile_code(f"{CODE} int version = 0;").cached
    newest = compile_code(f"{CODE} int version = 3;").path
    assert set(left_behind(cache)) == {path.name for path in (made[0], made[2], newest)} | {"build-new"}


def test_real_queries_compile():
    assert compile_code(YSB_QUERY.explain("code")).function


# -- no compiler


def test_without_a_compiler_the_reason_names_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match=r"no C compiler on this machine; install .*gcc"):
        compile_code(CODE)


@pytest.mark.parametrize("value", ["/nowhere/cc", "no-such-compiler -O2", "'unbalanced"])
def test_a_wrong_cc_is_named(value, monkeypatch):
    monkeypatch.setenv("CC", value)
    with pytest.raises(CompileError, match=r"CC=.*(not a program|not a command).*install a C compiler"):
        compile_code(CODE)


def test_cc_comes_first_and_an_empty_one_does_not_count():
    path = os.environ["PATH"]
    assert find_compiler({"CC": "sh -c", "PATH": path}) == ["sh", "-c"]
    assert find_compiler({"CC": "  ", "PATH": path}) == find_compiler({"PATH": path})


# -- a compiler that does not work


def test_a_compiler_that_fails_is_quoted(fake_cc, cache):
    fake_cc('echo "variant.c:3: I do not like this" >&2; exit 3')
    with pytest.raises(CompileError, match=r"fake-cc failed \(exit 3\): variant.c:3: I do not like this"):
        compile_code(CODE)
    assert left_behind(cache) == []


def test_code_that_is_no_c_fails_and_leaves_nothing(cache):
    with pytest.raises(CompileError, match=r"error"):
        compile_code("this is no C")
    assert left_behind(cache) == []


def test_missing_headers_name_what_to_install(fake_cc):
    fake_cc('echo "fatal error: stdint.h: No such file or directory" >&2; exit 1')
    with pytest.raises(CompileError, match=r"libc6-dev"):
        compile_code(CODE)


def test_a_compiler_that_is_killed_is_told(fake_cc):
    fake_cc("kill -9 $$")
    with pytest.raises(CompileError, match=r"failed \(signal 9\): it said nothing"):
        compile_code(CODE)


def test_a_compiler_that_makes_nothing_is_told(fake_cc):
    fake_cc("exit 0")
    with pytest.raises(CompileError, match=r"wrote no object"):
        compile_code(CODE)


def test_a_compiler_that_makes_rubbish_is_told_and_the_rubbish_is_gone(fake_cc, cache):
    fake_cc('while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"')
    with pytest.raises(CompileError, match=r"cannot be loaded"):
        compile_code(CODE)
    assert left_behind(cache) == []


def test_a_compiler_that_is_no_program_is_told(fake_cc):
    fake_cc("").write_bytes(b"\x7fELF but not really")
    with pytest.raises(CompileError, match=r"fake-cc failed"):
        compile_code(CODE)


def test_words_that_are_no_utf8_do_no_harm(fake_cc):
    fake_cc("printf '\\377\\376 bad' >&2; exit 1")
    with pytest.raises(CompileError, match=r"bad"):
        compile_code(CODE)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_compiler_that_hangs_is_ended_with_its_children_and_its_files(fake_cc, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    fake_cc(f'mktemp >/dev/null; sleep 1000 & echo $! > "{tmp_path}/child"; wait')
    written = tmp_path / "child"
    for seconds in (0.5, 2, 8, 32):  # on a busy machine it is ended before it has a child
        with pytest.raises(CompileError, match=rf"fake-cc: it did not finish within {seconds:g} s"):
            compile_code(CODE, Limits(seconds=seconds))
        if written.exists() and written.read_text().strip():
            break
    child = int(written.read_text())
    wait_until(lambda: gone(child), "the child's end")
    assert left_behind(cache) == list((tmp_path / "temporary").iterdir()) == []


def test_a_compiler_that_does_not_say_its_version_is_ended(fake_cc):
    fake_cc("exit 0", version="sleep 1000")
    with pytest.raises(CompileError, match=r"did not finish within"):
        compile_code(CODE, Limits(seconds=0.3))


def test_a_compiler_that_eats_memory_is_ended(fake_cc):
    fake_cc("ulimit -v >&2; exit 1")
    with pytest.raises(CompileError, match=r"failed \(exit 1\): 1048576"):
        compile_code(CODE, Limits(memory_bytes=1 << 30))


# -- a cache that cannot be used


def test_a_cache_on_a_read_only_file_system_is_told(monkeypatch):
    monkeypatch.setenv("FLEXSTREAM_CACHE", "/proc/flexstream")
    with pytest.raises(CompileError, match=r"/proc/flexstream.*cannot be used.*FLEXSTREAM_CACHE"):
        compile_code(CODE)


def test_a_cache_that_cannot_be_written_is_told(cache, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    cache_directory()
    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(CompileError, match=r"cannot be written.*Read-only file system.*FLEXSTREAM_CACHE"):
        compile_code(CODE)


def test_a_cache_in_the_way_of_a_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"cannot be used"):
        compile_code(CODE)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_cache_that_others_may_enter_is_refused(mode, cache):
    cache_directory().chmod(mode)
    with pytest.raises(CompileError, match=rf"not private.*mode {mode:04o}"):
        compile_code(CODE)


def test_a_cache_of_somebody_else_is_refused(cache, monkeypatch):
    cache_directory()
    monkeypatch.setattr(compiler.os, "getuid", lambda: 4_000_000)
    with pytest.raises(CompileError, match=r"not private"):
        compile_code(CODE)


def test_without_a_home_there_is_a_reason(monkeypatch):
    for name in ("FLEXSTREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(CompileError, match=r"cannot be used"):
        compile_code(CODE)


# -- objects that are damaged


def replace(path: Path, content: bytes) -> None:
    """Another file under the name: the old one is still mapped, by this process."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def truncated(path: Path) -> None:
    replace(path, path.read_bytes()[:5000])


def emptied(path: Path) -> None:
    replace(path, b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    replace(path, bytes(content))


def without_its_seal(path: Path) -> None:
    replace(path, path.read_bytes()[: -len(compiler.SEAL) - 32])


def writable_by_all(path: Path) -> None:
    path.chmod(0o666)


def a_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [truncated, emptied, flipped, without_its_seal, writable_by_all, a_link])
def test_a_damaged_object_is_not_loaded_but_compiled_again(damage, monkeypatch):
    path = compile_code(CODE).path
    whole = path.read_bytes()
    damage(path)
    monkeypatch.setattr(compiler, "_loaded", {})
    again = compile_code(CODE)
    assert not again.cached
    assert again.function
    assert not path.is_symlink()
    assert len(path.read_bytes()) == len(whole)


def test_a_whole_object_that_cannot_be_loaded_is_removed_and_the_next_time_is_fine(monkeypatch):
    code = CODE + "/* never loaded before */\n"
    with monkeypatch.context() as unloaded:
        unloaded.setattr(compiler, "_load", lambda path: 1)
        path = compile_code(code).path
    replace(path, sealed(b"not an object"))
    with pytest.raises(CompileError, match=r"cannot be loaded"):
        compile_code(code)
    assert not compile_code(code).cached


def test_an_object_without_our_function_is_refused():
    with pytest.raises(CompileError, match=r"cannot be loaded.*fs_variant_run"):
        compile_code("int something_else;\n")


# -- in the background


def outcomes() -> tuple[list[Outcome], threading.Event, Callable[[Outcome], None]]:
    found: list[Outcome] = []
    ready = threading.Event()

    def done(outcome: Outcome) -> None:
        found.append(outcome)
        ready.set()

    return found, ready, done


def test_the_outcome_is_told_once_good_or_bad():
    background = BackgroundCompiler()
    good, bad = lambda: CODE, lambda: 1 / 0
    for code, kind in ((CODE, Compiled), ("no C", CompileError), (good, Compiled), (bad, CompileError)):
        found, ready, done = outcomes()
        background.submit(code, done)
        assert ready.wait(WAIT_S)
        assert [type(outcome) for outcome in found] == [kind]
    assert "ZeroDivisionError" in str(found[0])
    background.stop()


def test_stop_ends_the_compiler_at_work_and_answers_all_who_wait(fake_cc, tmp_path):
    fake_cc(f'sleep 1000 & echo $! > "{tmp_path}/child"; wait')
    background = BackgroundCompiler()
    waiting = [outcomes() for _ in range(3)]
    for _, _, done in waiting:
        background.submit(CODE, done)
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), "the child")
    background.stop()
    waiting.append(outcomes())
    background.submit(CODE, waiting[-1][2])
    for found, ready, _ in waiting:
        assert ready.wait(WAIT_S)
        assert "the engine closes" in str(found[0])
    wait_until(lambda: gone(int((tmp_path / "child").read_text())), "the child's end")


def test_queries_that_differ_in_names_alone_share_an_object(cache):
    first = compile_code(f"/* one */\n{CODE}")
    second = compile_code(f"/* another name */\n{CODE}")
    assert second.path == first.path
    assert second.cached
