"""Reading the machine for `flexstream doctor`. It changes nothing; tests give another `root`."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flexstream.addresses import CONTROL_PORT, DATA_PORT, join_address
from flexstream.client.http import Client
from flexstream.errors import FlexStreamError
from flexstream.wire.frames import HEADER_BYTES, FrameType, Header, WireError, frame

ASK_S = 1.0  # for whoever has a port to say what he is
WANTED_FILES = 65_536
WANTED_SOMAXCONN = 1024
WANTED_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class Check:
    """One finding. `state`: ok, info (a fact), warn (works, could be better), fail (does not work)."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine(root: Path = Path("/")) -> list[Check]:
    """All checks, in the order in which they matter."""
    checks: list[Check] = []
    parts: list[Callable[[], list[Check]]] = [
        lambda: [cores(os.cpu_count() or 1, os.sched_getaffinity(0))],
        lambda: [open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))],
        lambda: [port("data port", DATA_PORT), port("control port", CONTROL_PORT)],
        lambda: [somaxconn(root)],
        lambda: [buffer(root, "rmem_max", "receive"), buffer(root, "wmem_max", "send")],
        lambda: [clock(root)],
        lambda: devices(root),
        lambda: receive_side(root),
        lambda: [compiled()],
        lambda: [java()],
    ]
    for part in parts:
        checks += part()
    return checks


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cores(total: int, allowed: set[int]) -> Check:
    found = f"{len(allowed)} of {total} cores are available ({_ranges(allowed)})"
    if len(allowed) < 2:
        return Check("cores", "warn", found, "workers, producers and control share one core: use two or more")
    if len(allowed) < total:
        return Check("cores", "info", found, "taskset, a cpuset or a container limits this process")
    return Check("cores", "ok", found)


def _ranges(cpus: set[int]) -> str:
    """{0, 1, 2, 5} -> 0-2,5."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def open_files(soft: int, hard: int) -> Check:
    shown = {resource.RLIM_INFINITY: "unlimited"}
    found = f"{shown.get(soft, soft)} (hard limit {shown.get(hard, hard)})"
    if soft == resource.RLIM_INFINITY or soft >= WANTED_FILES:
        return Check("open files", "ok", found)
    advice = f"a producer opens one connection per group: `ulimit -n {WANTED_FILES}`, or LimitNOFILE= in the unit"
    return Check("open files", "fail" if soft < 256 else "warn", found, advice)


def port(name: str, number: int, host: str = "127.0.0.1") -> Check:
    """Free, or a flexstream daemon's own: whoever has it is asked what he is, and nobody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, number))
        except PermissionError as error:
            return Check(name, "fail", f"{number}: {error.strerror}", "choose a port above 1023")
        except OSError as error:
            if _speaks_frames(host, number) or _speaks_http(host, number):
                return Check(name, "ok", f"{number} is in use by a running flexstream daemon")
            advice = f"`ss -ltnp sport = :{number}` shows who has it; or use `serve --{name.split()[0]} HOST:PORT`"
            return Check(name, "fail", f"{number}: {error.strerror}", advice)
    return Check(name, "ok", f"{number} is free")


def _speaks_frames(host: str, number: int) -> bool:
    """A data port refuses what is no HELLO, in a frame of its own."""
    try:
        with socket.create_connection((host, number), timeout=ASK_S) as sock:
            sock.settimeout(ASK_S)
            sock.sendall(frame(FrameType.ACK))
            return Header.unpack(sock.recv(HEADER_BYTES, socket.MSG_WAITALL)).type is FrameType.ERROR
    except (OSError, WireError, struct.error):
        return False


def _speaks_http(host: str, number: int) -> bool:
    try:
        status, body = Client(join_address(host, number), timeout_s=ASK_S).probe("/healthz")
    except FlexStreamError:
        return False
    return status in (200, 401, 503) and isinstance(body, dict) and ("engine" in body or "error" in body)


def somaxconn(root: Path) -> Check:
    text = _read(root / "proc/sys/net/core/somaxconn")
    if text is None or not text.isdecimal():
        return Check("somaxconn", "info", "not readable here")
    if int(text) >= WANTED_SOMAXCONN:
        return Check("somaxconn", "ok", text)
    advice = f"many producers that connect at once will wait: run sysctl -w net.core.somaxconn={WANTED_SOMAXCONN}"
    return Check("somaxconn", "warn", text, advice)


def buffer(root: Path, name: str, what: str) -> Check:
    text = _read(root / "proc/sys/net/core" / name)
    if text is None or not text.isdecimal():
        return Check(name, "info", "not readable here")
    found = f"{text} bytes of {what} buffer at most"
    if int(text) >= WANTED_BUFFER_BYTES:
        return Check(name, "ok", found)
    advice = f"fast networks need more: run sysctl -w net.core.{name}={WANTED_BUFFER_BYTES}"
    return Check(name, "warn", found, advice)


def clock(root: Path) -> Check:
    folder = root / "sys/devices/system/clocksource/clocksource0"
    current = _read(folder / "current_clocksource")
    if current is None:
        return Check("clock", "info", "cannot read the clock source here")
    if current in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
        return Check("clock", "ok", current)
    available = _read(folder / "available_clocksource") or ""
    advice = "with this source every latency marker costs a system call"
    if "tsc" in available.split():
        advice += "; tsc is available: boot with clocksource=tsc"
    return Check("clock", "warn", current, advice)


def devices(root: Path) -> list[Check]:
    """Network devices with driver and receive queues. Only what sysfs says: it needs no privilege."""
    found = []
    folder = root / "sys/class/net"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name == "lo":
            continue
        device = folder / name
        driver = device / "device/driver"
        kind = os.path.basename(os.readlink(driver)) if driver.is_symlink() else "virtual"
        receive = len(list((device / "queues").glob("rx-*")))
        state = _read(device / "operstate") or "unknown"
        text = f"{name}: driver {kind}, {receive} receive queues, {state}"
        if kind != "virtual" and receive < 2:
            advice = (
                f"one queue feeds one core: `ethtool -L {name} combined N` if the device has more"
            )
            found.append(Check("nic", "warn", text, advice))
        else:
            found.append(Check("nic", "info" if kind == "virtual" else "ok", text))
    if not found:
        found.append(Check("nic", "info", "no network device but loopback", "rows can come only from this machine"))
    return found


def receive_side(root: Path) -> list[Check]:
    """Tables, queues and what is in their way. Devices are asked on the machine itself only, not on a copy."""
    from flexstream.cli import nic_checks

    asked = nic_checks.receive_side() if root == Path("/") else []
    return [*asked, nic_checks.irqbalance(root)]


def compiled() -> Check:
    """Are the extensions built? Without them nothing runs."""
    folder = Path(__file__).resolve().parent.parent / "cython_ext"
    wanted = sorted(path.stem for path in folder.rglob("*.pyx"))
    built = {path.name.split(".")[0] for path in folder.rglob("*.so")}
    missing = [name for name in wanted if name not in built]
    if missing or not built:
        advice = "run `pip install -e .` in the source tree, or install a wheel"
        return Check("extensions", "fail", f"not compiled: {', '.join(missing) or 'all'}", advice)
    return Check("extensions", "ok", f"{len(built)} compiled")


def java() -> Check:
    """Only Spark needs it."""
    path = shutil.which("java")
    if path is None:
        return Check("java", "info", "none", "only flexstream[spark] needs it: install a JRE 17 or newer")
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("java", "warn", f"{path} does not run: {error}", "only flexstream[spark] needs it")
    lines = (done.stderr or done.stdout).strip().splitlines()
    return Check("java", "ok", lines[0] if lines else path)
