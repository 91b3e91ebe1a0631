"""Which interrupt serves which receive queue, and which core serves that interrupt.

Drivers name their interrupts as they like, and the only place where the names are is /proc/interrupts. So the
schemes are a table: one regular expression per naming scheme, whose group `queue` is the receive queue's number.
The interrupts of a PCI function are listed in its `msi_irqs` folder: that keeps two devices apart where the
names have no device in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexstream.nic.rss.ioctl import DeviceRefused, refused


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A line of /proc/interrupts."""

    number: int
    name: str
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How drivers name a receive queue's interrupt. `{device}` and `{bus}` are replaced before use."""

    drivers: tuple[str, ...]
    pattern: str
    example: str


SCHEMES = (
    Scheme(("virtio_net",), r"^virtio\d+-input\.(?P<queue>\d+)$", "virtio2-input.0"),
    Scheme(("mlx5_core",), r"^mlx5_comp(?P<queue>\d+)@pci:{bus}$", "mlx5_comp0@pci:0000:3b:00.0"),
    Scheme(("mlx4_en", "mlx4_core"), r"^mlx4-(?P<queue>\d+)@{bus}$", "mlx4-1@0000:04:00.0"),
    Scheme(
        ("ixgbe", "ixgbevf", "igb", "igbvf", "igc", "fm10k"),
        r"^{device}-([Tt]x)?([Rr]x)(-|_)?(?P<queue>\d+)$",
        "eth0-TxRx-0",
    ),
    Scheme(("i40e",), r"^i40e-{device}-(TxRx|rx)-(?P<queue>\d+)$", "i40e-eth0-TxRx-0"),
    Scheme(("iavf", "i40evf"), r"^(iavf|i40evf)-{device}-(TxRx|rx)-(?P<queue>\d+)$", "iavf-eth0-TxRx-0"),
    Scheme(("ice",), r"^ice-{device}-(TxRx|rx)-(?P<queue>\d+)$", "ice-eth0-TxRx-0"),
    Scheme(("idpf",), r"^(idpf-)?{device}-(TxRx|Rx|rx)-(?P<queue>\d+)$", "idpf-eth0-TxRx-0"),
    Scheme(("ena",), r"^{device}-Tx-Rx-(?P<queue>\d+)$", "eth0-Tx-Rx-0"),
    Scheme(("gve",), r"^gve-ntfy-blk(?P<queue>\d+)@pci:{bus}$", "gve-ntfy-blk1@pci:0000:00:04.0"),
    # Before 6.2 the name was made too early: it reads "eth%d" on every device.
    Scheme(("gve",), r"^{device}-ntfy-block\.(?P<queue>\d+)$", "eth%d-ntfy-block.1"),
    Scheme(("bnxt_en",), r"^{device}-(TxRx|rx)-(?P<queue>\d+)$", "eth0-TxRx-0"),
    Scheme(("bnx2x",), r"^{device}-fp-(?P<queue>\d+)$", "eth0-fp-0"),
    Scheme(("tg3",), r"^{device}-(rx|txrx)-(?P<queue>\d+)$", "eth0-rx-1"),
    Scheme(("mana", "mana_core"), r"^mana_q(?P<queue>\d+)@pci:{bus}$", "mana_q0@pci:7870:00:00.0"),
    Scheme(("vmxnet3",), r"^{device}-(rx|rxtx)-(?P<queue>\d+)$", "eth0-rxtx-0"),
    Scheme(("e1000e",), r"^{device}-rx-(?P<queue>\d+)$", "eth0-rx-0"),
    Scheme(("nfp",), r"^(nfp-)?{device}-rxtx-(?P<queue>\d+)$", "nfp-eth0-rxtx-0"),
    Scheme(("qede",), r"^{device}-fp-(?P<queue>\d+)$", "eth0-fp-0"),
    Scheme(("hns3",), r"^hns3-({bus}|{device})-TxRx-(?P<queue>\d+)$", "hns3-eth0-TxRx-0"),
    Scheme(("cxgb4",), r"^{device} \(queue (?P<queue>\d+)\)$", "eth0 (queue 0)"),
    Scheme(("sfc",), r"^{device}-(rx-)?(?P<queue>\d+)$", "eth0-0"),
)
# Drivers that are not in the table, by what most names have in common.
COMMON = re.compile(r"(?:input\.|[-_]?(?:tx-?)?rx(?:tx)?[-_.]?|fp-|comp|queue[ -]?)(?P<queue>\d+)\b", re.IGNORECASE)
_LINE = re.compile(r"^\s*(\d+):((?:\s+\d+)+)\s+(\S.*)$")


def parse_interrupts(text: str) -> dict[int, Interrupt]:
    """The numbered lines of /proc/interrupts; the architecture's own (NMI, LOC) are not devices'.

    A line is number, a count per core, the chip, the trigger, the names. Chips and triggers are of one word or
    two, so the name is found from the end; shared interrupts have several, separated by commas.
    """
    lines = text.splitlines()
    cores = len(lines[0].split()) if lines else 0
    found = {}
    for line in lines[1:]:
        match = _LINE.match(line)
        if match is None:
            continue
        counts = tuple(int(count) for count in match[2].split())
        if len(counts) > cores:  # the hardware number of a chip without a name
            counts = counts[:cores]
        found[int(match[1])] = Interrupt(int(match[1]), _name(match[3]), counts)
    return found


def _name(rest: str) -> str:
    """`PCI-MSIX-0000:00:03.0   1-edge      virtio2-input.0` -> `virtio2-input.0`."""
    words = re.split(r"\s{2,}", rest.strip())
    if len(words) > 1:
        tail = words[-1]
        # With long chip names the columns run together: what follows the trigger is the name.
        return re.sub(r"^\S*-?(?:edge|level|fasteoi|Edge|Level)\s+", "", tail)
    return re.sub(r"^.*?\b\S*-?(?:edge|level|fasteoi|Edge|Level)\s+", "", words[0])


def queue_interrupts(
    interrupts: dict[int, Interrupt], *, driver: str, device: str, bus: str, own: frozenset[int]
) -> dict[int, int]:
    """Receive queue -> interrupt number, counted from 0 as the indirection table counts.

    `own` are the interrupts of the device's PCI function; empty where that is unknown, and then only names that
    contain the device or the bus address are believed.
    """
    mine = [line for number, line in sorted(interrupts.items()) if not own or number in own]
    # A device renamed while it was up has the old name in its interrupts: its own list tells as well.
    name = r"\S+" if own else re.escape(device)
    known = [scheme for scheme in SCHEMES if driver in scheme.drivers]
    for scheme in known:
        if not own and "{" not in scheme.pattern:
            continue
        bound = scheme.pattern.replace("{device}", name).replace("{bus}", re.escape(bus))
        found = _numbered(mine, re.compile(bound))
        if found:
            return _renumbered(found, driver)
    if own and not known:
        return _renumbered(_numbered(mine, COMMON), driver)
    return {}


def _numbered(lines: Sequence[Interrupt], pattern: re.Pattern[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for line in lines:
        for name in line.name.split(", "):
            match = pattern.search(name)
            if match is not None:
                found.setdefault(int(match["queue"]), line.number)
    return found


def _renumbered(found: dict[int, int], driver: str) -> dict[int, int]:
    """Queue numbers from 0. gve has as many blocks for transmitting, and they come first."""
    numbers = sorted(found)
    if driver == "gve":
        numbers = numbers[len(numbers) // 2 :]
    return {queue: found[number] for queue, number in enumerate(numbers)}


def own_interrupts(device: str, root: Path = Path("/")) -> frozenset[int]:
    """The message-signalled interrupts of the device's PCI function, or of the nearest parent that has some."""
    link = root / "sys/class/net" / device / "device"
    try:
        folder = Path(os.path.realpath(link, strict=True))
    except OSError:
        return frozenset()
    for parent in (folder, *folder.parents):
        try:
            return frozenset(int(name) for name in os.listdir(parent / "msi_irqs"))
        except FileNotFoundError:
            if parent == root or parent.name in ("devices", "sys"):
                break
        except OSError:
            break
    return frozenset()


def is_interrupt_of(interrupt: int, device: str, bus: str, root: Path = Path("/")) -> bool:
    """Whether the kernel has this interrupt as the device's: in its function's list, else by name or bus address."""
    own = own_interrupts(device, root)
    if own:
        return interrupt in own
    line = read_interrupts(root).get(interrupt)
    names = [device, bus] if bus else [device]
    return line is not None and any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line.name) for name in names)


def read_interrupts(root: Path = Path("/")) -> dict[int, Interrupt]:
    try:
        return parse_interrupts((root / "proc/interrupts").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5), the kernel's list form."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def format_cpus(cpus: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> `0-2,5`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def parse_mask(text: str) -> tuple[int, ...]:
    """`00000000,00000005` -> (0, 2), the kernel's mask form (rps_cpus, xps_cpus)."""
    bits = int(text.strip().replace(",", "") or "0", 16)
    return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def format_mask(cpus: Sequence[int]) -> str:
    """(0, 2) -> `5`; words of 32 bits are separated by commas."""
    bits = sum(1 << cpu for cpu in set(cpus))
    words = []
    while True:
        words.append(bits & 0xFFFFFFFF)
        bits >>= 32
        if not bits:
            break
    return ",".join([f"{words[-1]:x}", *(f"{word:08x}" for word in reversed(words[:-1]))])


def affinity(interrupt: int, root: Path = Path("/")) -> tuple[int, ...] | None:
    """The cores that may serve it; None where /proc/irq does not say."""
    try:
        return parse_cpus((root / f"proc/irq/{interrupt}/smp_affinity_list").read_text())
    except (OSError, ValueError):
        return None


def set_affinity(interrupt: int, cpus: Sequence[int], root: Path = Path("/")) -> None:
    """Pin. The effective affinity follows with the next interrupt. Raises DeviceRefused."""
    path = root / f"proc/irq/{interrupt}/smp_affinity_list"
    try:
        path.write_text(format_cpus(cpus))
    except OSError as error:
        raise refused(f"pin to core {format_cpus(cpus)}", f"interrupt {interrupt}", error) from None


def pinning_obstacle(interrupt: int, root: Path = Path("/")) -> str | None:
    """Why this interrupt cannot be pinned from here, or None. It tries nothing."""
    path = root / f"proc/irq/{interrupt}/smp_affinity_list"
    if not path.exists():
        return f"there is no {path}: many containers hide /proc/irq"
    try:
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return "/proc/irq is mounted read-only, as in containers: pin on the host (`flexstream nic plan --script`)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not os.access(path, os.W_OK):
        return f"this user may not write {path}: run as root, or use `flexstream nic grant`"
    return None


__all__ = [
    "SCHEMES",
    "DeviceRefused",
    "Interrupt",
    "Scheme",
    "affinity",
    "format_cpus",
    "format_mask",
    "is_interrupt_of",
    "own_interrupts",
    "parse_cpus",
    "parse_interrupts",
    "parse_mask",
    "pinning_obstacle",
    "queue_interrupts",
    "read_interrupts",
    "set_affinity",
]
