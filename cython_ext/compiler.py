"""Compiles generated C in the background with the host's compiler, and keeps the objects by content.

Nothing here runs in a worker, and nothing here can stop a query: whatever goes wrong is a reason that status shows,
and the generic variant stays. Objects lie in a private directory (0700, ours) and are loaded only from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import resource
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexstream.cython_ext.codegen import ENTRY_POINT

log = logging.getLogger("flexstream.compiler")

INCLUDES = Path(__file__).resolve().parent / "includes"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno")
TIME_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 2 << 30
INSTALL_HINT = "install a C compiler (Debian: apt-get install gcc libc6-dev), or set CC"


class CompileError(Exception):
    """Why there is no compiled variant, in words for status."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant that is loaded, for good: `function` is its address."""

    function: int
    path: Path
    seconds: float
    cached: bool


def find_compiler(environ: dict[str, str] | None = None) -> list[str]:
    """CC, then cc, gcc, clang. Raises CompileError with what to install."""
    chosen = (os.environ if environ is None else environ).get("CC")
    if chosen:
        command = shlex.split(chosen)
        if not shutil.which(command[0]):
            raise CompileError(f"CC={chosen!r} is not a program here; {INSTALL_HINT}")
        return command
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    raise CompileError(f"no C compiler on this machine; {INSTALL_HINT}")


def cache_directory() -> Path:
    """FLEXSTREAM_CACHE, or the user's cache directory; made private. Raises CompileError when it is not ours."""
    base = os.environ.get("FLEXSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "flexstream" / "code"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except (OSError, RuntimeError) as error:
        raise CompileError(f"the code cache {directory} cannot be used: {error}") from error
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise CompileError(f"the code cache {directory} is not private: it must be ours with mode 0700")
    return directory


@cache
def _identity(command: tuple[str, ...]) -> str:
    """Compiler and processor: what else than the code decides the object."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} does not answer: {error}") from error
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    return version + cpu


def compile_code(code: str) -> Compiled:
    """The loaded variant of this code, from the cache or compiled now. Raises CompileError."""
    started = time.monotonic()
    command = find_compiler()
    directory = cache_directory()
    header = (INCLUDES / "flexstream_abi.h").read_text()
    name = hashlib.sha256("\0".join([code, header, _identity(tuple(command)), " ".join(FLAGS)]).encode()).hexdigest()
    path = directory / f"{name}.so"
    cached = _is_ours(path)
    if not cached:
        _run_compiler(command, code, path)
    function = _load(path)
    return Compiled(function, path, time.monotonic() - started, cached)


def _is_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o022


def _run_compiler(command: list[str], code: str, path: Path) -> None:
    """Into a file beside, then renamed: a crash leaves nothing half-written under the real name."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as work:
        source, target = Path(work) / "variant.c", Path(work) / "variant.so"
        source.write_text(code)
        full = [*command, *FLAGS, f"-I{INCLUDES}", "-o", str(target), str(source)]
        try:
            done = subprocess.run(
                full, capture_output=True, text=True, timeout=TIME_LIMIT_S, cwd=work, preexec_fn=_limits
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{command[0]} did not finish within {TIME_LIMIT_S} s") from error
        except OSError as error:
            raise CompileError(f"{command[0]} cannot be run: {error}; {INSTALL_HINT}") from error
        if done.returncode != 0:
            raise CompileError(f"{command[0]} failed ({done.returncode}): {done.stderr.strip()[:500]}")
        try:
            target.chmod(0o600)
            target.rename(path)
        except OSError as error:
            raise CompileError(f"the object cannot be kept: {error}") from error


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT_S, TIME_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    os.nice(10)


_loaded: dict[Path, ctypes.CDLL] = {}
_loading = threading.Lock()


def _load(path: Path) -> int:
    with _loading:
        try:
            if path not in _loaded:
                _loaded[path] = ctypes.CDLL(str(path))  # never unloaded: a worker may be in it
            return ctypes.cast(_loaded[path][ENTRY_POINT], ctypes.c_void_p).value or 0
        except (OSError, AttributeError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise CompileError(f"the compiled object cannot be loaded: {error}") from error


class BackgroundCompiler:
    """Compiles in a thread of its own, which waits for the compiler's process; calls back with the outcome."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fs-compiler")

    def submit(self, code: str, done: Callable[[Compiled | CompileError], None]) -> None:
        self._pool.submit(self._work, code, done)

    def _work(self, code: str, done: Callable[[Compiled | CompileError], None]) -> None:
        outcome: Compiled | CompileError
        try:
            outcome = compile_code(code)
        except CompileError as error:
            outcome = error
        except Exception as error:
            log.exception("compiler_failed")
            outcome = CompileError(f"unexpected: {error}")
        done(outcome)

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
