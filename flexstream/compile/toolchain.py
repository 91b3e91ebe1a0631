"""Compiles generated C in the background with the host's compiler, and keeps the objects by content.

Nothing here runs in a worker, and nothing here can stop a query: whatever goes wrong is a reason that status shows,
and the generic variant stays. Objects lie in a private directory (0700, ours) and are loaded only from there, and
only when the digest at their end is right: loading a damaged object could end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flexstream.compile.codegen import ENTRY_POINT

log = logging.getLogger("flexstream.compiler")

HEADERS = ("flexstream_abi.h", "folds.h", "murmur3.h")
INCLUDES = Path(__file__).resolve().parent.parent / "cython_ext" / "includes"
# No contraction: a*b+c in one rounding would differ from the generic variant.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
)
INSTALL_HINT = "install a C compiler (Debian: apt-get install gcc libc6-dev), or set CC"
MOST_KEPT = 512  # objects in the cache: the longest unused go first
ABANDONED_S = 3600.0  # a build directory this old belongs to a process that was killed
SEAL = b"flexstream object, sha256 of all before: "
# A shell sets the limits, not a preexec_fn: that would need a fork of a process that may be big, with its threads.
_LIMITED = 'ulimit -t "$1" && ulimit -v "$2" && shift 2 && exec "$@"'


class CompileError(Exception):
    """Why there is no compiled variant, in words for status."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of the compiler may take."""

    seconds: float = 60.0
    memory_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant that is loaded, for good: `function` is its address."""

    function: int
    path: Path
    seconds: float
    cached: bool


class Job:
    """Runs one command after the other, and lets another thread end it early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self, command: list[str], seconds: float, work: str | None = None) -> tuple[int, str]:
        """Exit code and what it said. Raises CompileError: it cannot be run, takes too long, or was stopped."""
        process = self._start(command, work)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, 10)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CompileError(f"it did not finish within {seconds:g} s") from None
        finally:
            self._end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        if self._stopped:
            raise CompileError("the engine closes")
        return process.returncode, said

    def _start(self, command: list[str], work: str | None) -> subprocess.Popen[str]:
        environment = {**os.environ, "LC_ALL": "C"}
        if work is not None:
            environment["TMPDIR"] = work  # a compiler that is killed leaves its files there, not for ever in /tmp
        with self._lock:
            if self._stopped:
                raise CompileError("the engine closes")
            try:
                self._process = subprocess.Popen(
                    command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, errors="replace", env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise CompileError(f"it cannot be run: {error}; {INSTALL_HINT}") from error
            return self._process

    def _end(self) -> None:
        """With all its children: cc is only the one that waits for the others."""
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self._stopped = True
        self._end()


def find_compiler(environ: Mapping[str, str] | None = None) -> list[str]:
    """CC, then cc, gcc, clang. Raises CompileError with what to install."""
    environ = os.environ if environ is None else environ
    path, chosen = environ.get("PATH", ""), environ.get("CC", "").strip()
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise CompileError(f"CC={chosen!r} is not a command ({error}); {INSTALL_HINT}") from None
        if not command or not shutil.which(command[0], path=path):
            raise CompileError(f"CC={chosen!r} is not a program on this machine; {INSTALL_HINT}")
        return command
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name, path=path)
        if found:
            return [found]
    raise CompileError(f"no C compiler on this machine; {INSTALL_HINT}")


def cache_directory() -> Path:
    """FLEXSTREAM_CACHE, or the user's cache directory; made private. Raises CompileError when it is not ours."""
    base = os.environ.get("FLEXSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(base, "flexstream", "code")
    try:
        directory = directory.expanduser().absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except (OSError, RuntimeError) as error:
        raise CompileError(f"the code cache {directory} cannot be used: {error}; {_CACHE_HINT}") from error
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise CompileError(
            f"the code cache {directory} is not private: it belongs to user {facts.st_uid} with mode "
            f"{stat.S_IMODE(facts.st_mode):04o}, but must belong to user {os.getuid()} with mode 0700; {_CACHE_HINT}"
        )
    return directory


_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_CACHE_HINT = "set FLEXSTREAM_CACHE to another directory"


_versions: dict[tuple[str, ...], str] = {}


def _identity(command: list[str], limits: Limits, job: Job) -> str:
    """Compiler and processor: what else than the code decides the object."""
    asked = tuple(command)
    if asked not in _versions:
        _versions[asked] = _checked(command, ["--version"], limits, job)
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    return _versions[asked] + cpu


def _checked(command: list[str], arguments: list[str], limits: Limits, job: Job, work: str | None = None) -> str:
    """What the compiler said, when it ended well. Raises CompileError."""
    cpu_seconds, memory_kib = str(int(limits.seconds) + 1), str(limits.memory_bytes >> 10)
    full = ["/bin/sh", "-c", _LIMITED, "sh", cpu_seconds, memory_kib, *command, *arguments]
    try:
        code, said = job.run(full, limits.seconds, work)
    except CompileError as error:
        raise CompileError(f"{command[0]}: {error}") from None
    if code == 0:
        return said
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    hint = f"; {INSTALL_HINT}" if code in (126, 127) or "No such file" in said else ""
    raise CompileError(f"{command[0]} failed ({how}): {said.strip()[:500] or 'it said nothing'}{hint}")


def compile_code(code: str, limits: Limits | None = None, job: Job | None = None) -> Compiled:
    """The loaded variant of this code, from the cache or compiled now. Raises CompileError."""
    started = time.monotonic()
    limits, job = limits or Limits(), job or Job()
    command = find_compiler()
    directory = cache_directory()
    headers = [(INCLUDES / name).read_text() for name in HEADERS]
    identity = _identity(command, limits, job)
    bare = _COMMENT.sub(" ", code)  # names are in comments only: queries that differ in nothing else share an object
    name = hashlib.sha256("\0".join([bare, *headers, identity, " ".join([*command, *FLAGS])]).encode()).hexdigest()
    path = directory / f"{name}.so"
    cached = _is_ours(path) and _is_whole(path)
    if cached:
        with contextlib.suppress(OSError):
            os.utime(path)
    else:
        _build(command, code, path, limits, job)
        _prune(directory)
    return Compiled(_load(path), path, time.monotonic() - started, cached)


def _is_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o022


def _is_whole(path: Path) -> bool:
    """Does the file end with the digest of what is before? A torn or damaged one is compiled again."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return sealed(content[: -len(SEAL) - 32]) == content


def sealed(content: bytes) -> bytes:
    """An object as it lies in the cache; loaders do not look at what is behind its last section."""
    return content + SEAL + hashlib.sha256(content).digest()


def _build(command: list[str], code: str, path: Path, limits: Limits, job: Job) -> None:
    """Into a file beside, then renamed: a crash leaves nothing half-written under the real name."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as work:
            source, target = Path(work) / "variant.c", Path(work) / "variant.so"
            source.write_text(code)
            _checked(command, [*FLAGS, f"-I{INCLUDES}", "-o", str(target), str(source)], limits, job, work)
            if not target.is_file():
                raise CompileError(f"{command[0]} ended without an error but wrote no object; {INSTALL_HINT}")
            ready = Path(work) / "sealed.so"
            ready.touch(mode=0o600)
            ready.write_bytes(sealed(target.read_bytes()))
            ready.rename(path)
    except OSError as error:
        raise CompileError(f"the code cache {path.parent} cannot be written: {error}; {_CACHE_HINT}") from error


def _prune(directory: Path) -> None:
    """Other processes may do the same, and a loaded object outlives its name: nothing here can fail anybody."""
    with contextlib.suppress(OSError):
        ages = []
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):
                used = entry.stat(follow_symlinks=False).st_mtime
                if entry.name.endswith(".so"):
                    ages.append((used, entry.path))
                elif entry.name.startswith("build-") and time.time() - used > ABANDONED_S:
                    shutil.rmtree(entry.path, ignore_errors=True)
        for _, path in sorted(ages)[:-MOST_KEPT]:
            with contextlib.suppress(OSError):
                os.unlink(path)


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
            raise CompileError(f"the compiled object cannot be loaded: {error}; {_CACHE_HINT}") from error


Outcome = Compiled | CompileError


class BackgroundCompiler:
    """Compiles in a thread of its own, which waits for the compiler's process; calls back with the outcome."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._job = Job()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fs-compiler")

    def submit(self, code: str | Callable[[], str], done: Callable[[Outcome], None]) -> None:
        """`done` is called once, whatever happens, from some thread."""

        def finished(future: Future[Outcome]) -> None:
            done(CompileError("the engine closes") if future.cancelled() else future.result())

        try:
            future = self._pool.submit(self._work, code)
        except RuntimeError:  # stopped
            done(CompileError("the engine closes"))
        else:
            future.add_done_callback(finished)

    def _work(self, code: str | Callable[[], str]) -> Outcome:
        try:
            return compile_code(code if isinstance(code, str) else code(), self._limits, self._job)
        except CompileError as error:
            return error
        except Exception as error:
            log.exception("compiler_failed")
            return CompileError(f"unexpected: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Ends a compiler that is at work, and does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._job.stop()
