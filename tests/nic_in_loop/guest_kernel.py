"""The guest's kernel and first file system, made once and kept in the project's .cache.

The kernel is Debian's own package, found and fetched by apt and unpacked beside everything else: nothing of
this machine's boot is touched. From it come the kernel image and a file system of busybox, the few modules
that find the disk and the network, and /init.
"""

from __future__ import annotations

import fcntl
import io
import lzma
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.nic_in_loop import requirements
from tests.nic_in_loop.requirements import GuestError

META_PACKAGE = "linux-image-amd64"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "virtio_net", "virtio_console", "vmxnet3")
FOLDERS = ("bin", "dev", "proc", "sys", "modules", "root")
FETCH_S = 600
INIT = Path(__file__).with_name("init.sh")


@dataclass(frozen=True)
class GuestKernel:
    name: str
    image: Path
    modules: Path

    def initramfs(self, path: Path) -> None:
        """Write it, uncompressed: decompressing is what emulation is slow at."""
        program = requirements.busybox()
        assert program is not None, "requirements.check() comes first"
        ordered = [self.modules / line for line in (self.modules / "order").read_text().split()]
        path.write_bytes(
            cpio(
                [
                    *((name, stat.S_IFDIR | 0o755, b"") for name in FOLDERS),
                    ("bin/busybox", stat.S_IFREG | 0o755, program.read_bytes()),
                    ("init", stat.S_IFREG | 0o755, INIT.read_bytes()),
                    ("modules/order", stat.S_IFREG | 0o644, (self.modules / "order").read_bytes()),
                    *((f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes()) for module in ordered),
                ]
            )
        )


def guest_kernel(cache: Path) -> GuestKernel:
    """The cached one, or the newest that apt knows. Raises GuestError."""
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        done = sorted(path.parent for path in cache.glob("linux-image-*/complete") if path.read_text() == _contents())
        folder = done[-1] if done else _fetch(cache)
    return GuestKernel(folder.name, folder / "vmlinuz", folder / "modules")


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the file's lock; BlockingIOError when somebody else does and this is not to wait."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _fetch(cache: Path) -> Path:
    if requirements.command("apt-get") is None:
        raise GuestError("the guest's kernel comes from Debian's packages and there is no apt-get here")
    package = _package_name() or _package_name(after_update=True)
    if package is None:
        raise GuestError(f"apt knows no {META_PACKAGE}: add a Debian source for amd64 and run apt-get update")
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        work = Path(temporary)
        _run(["apt-get", "download", "-qq", package], cwd=work)
        _run(["dpkg", "-x", str(next(work.glob("*.deb"))), "tree"], cwd=work)
        made = work / "made"
        (made / "modules").mkdir(parents=True)
        shutil.copy(next(work.glob("tree/boot/vmlinuz-*")), made / "vmlinuz")
        order = []
        for name, content in modules_in_order(work / "tree", MODULES):
            (made / "modules" / name).write_bytes(content)
            order.append(name)
        (made / "modules" / "order").write_text("\n".join(order) + "\n")
        (made / "complete").write_text(_contents())
        target = cache / package
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def _contents() -> str:
    """What a complete one was made of: one of other modules is made anew."""
    return " ".join(MODULES)


def _package_name(after_update: bool = False) -> str | None:
    """The package that the meta package stands for today, such as linux-image-6.1.0-50-amd64."""
    if after_update:
        _run(["apt-get", "update", "-qq"])
    listed = subprocess.run(
        ["apt-cache", "depends", META_PACKAGE], capture_output=True, text=True, timeout=FETCH_S, check=False
    )
    found = re.search(r"Depends: (linux-image-\S+)", listed.stdout)
    return found[1] if found else None


def _run(command: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise GuestError(f"{' '.join(command)} did not end in {FETCH_S} s") from None
    if done.returncode:
        raise GuestError(f"{' '.join(command)} failed ({done.returncode}): {(done.stderr or done.stdout)[-2000:]}")


def modules_in_order(tree: Path, wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The modules and what they depend on, as file name and content, each after all it needs.

    The package has no modules.dep (depmod writes that at installation), so each module is asked itself.
    """
    files = {_module_name(path): path for path in tree.glob("lib/modules/*/kernel/**/*.ko*")}
    contents: dict[str, bytes] = {}

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        if name in contents or name not in files:  # not a file: built in
            return
        path = files[name]
        raw = path.read_bytes()
        content = contents[name] = lzma.decompress(raw) if path.suffix == ".xz" else raw
        for needed in _depends(content):
            yield from visit(needed)
        yield name + ".ko", content

    for name in wanted:
        yield from visit(name.replace("-", "_"))


def _module_name(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _depends(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    names = found[1].decode().split(",") if found else []
    return [name.replace("-", "_") for name in names if name]


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive in the "newc" form, as the kernel unpacks it (Documentation/driver-api/early-userspace)."""
    out = io.BytesIO()
    for inode, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + path)
        out.write(b"\0" * (-out.tell() % 4) + content)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()
