"""Queue -> interrupt -> core: every naming scheme in the format that /proc/interrupts has it in.

virtio_one_queue was recorded; the others are composed as their drivers and kernels print them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexstream.nic.device import interrupts
from flexstream.nic.device.interrupts import (
    affinity,
    format_cpus,
    format_mask,
    own_interrupts,
    parse_cpus,
    parse_interrupts,
    parse_mask,
    pinning_obstacle,
    queue_interrupts,
    read_interrupts,
    set_affinity,
)
from flexstream.nic.rss.ioctl import DeviceRefused

TEXTS = Path(__file__).with_name("interrupts")
# text, driver, device, bus address, first interrupt of the function and one past its last, queue -> interrupt
DEVICES = [
    ("virtio_one_queue", "virtio_net", "eth0", "0000:00:03.0", (37, 40), {0: 38}),
    ("virtio_four_queues", "virtio_net", "eth0", "0000:00:03.0", (24, 33), {0: 25, 1: 27, 2: 29, 3: 31}),
    ("virtio_four_queues", "virtio_net", "eth1", "0000:00:04.0", (33, 36), {0: 34}),
    ("mlx5", "mlx5_core", "eth4", "0000:3b:00.0", (101, 106), {0: 102, 1: 103, 2: 104, 3: 105}),
    ("mlx5", "mlx5_core", "eth5", "0000:3b:00.1", (120, 125), {0: 121, 1: 122, 2: 123, 3: 124}),
    ("ixgbe", "ixgbe", "enp1s0f0", "0000:01:00.0", (40, 45), {0: 40, 1: 41, 2: 42, 3: 43}),
    ("ixgbe", "ixgbe", "enp1s0f1", "0000:01:00.1", (45, 50), {0: 45, 1: 46, 2: 47, 3: 48}),
    ("i40e", "i40e", "ens1f0", "0000:18:00.0", (60, 65), {0: 61, 1: 62, 2: 63, 3: 64}),
    ("ice", "ice", "ens785f0", "0000:17:00.0", (70, 76), {0: 71, 1: 72, 2: 73, 3: 74}),
    ("igb", "igb", "eno1", "0000:02:00.0", (50, 55), {0: 51, 1: 52, 2: 53, 3: 54}),
    ("igb", "igb", "eno2", "0000:02:00.1", (56, 61), {0: 57, 1: 58}),
    ("ena", "ena", "ens5", "0000:00:05.0", (27, 32), {0: 28, 1: 29, 2: 30, 3: 31}),
    ("gve", "gve", "ens4", "0000:00:04.0", (30, 39), {0: 34, 1: 35, 2: 36, 3: 37}),
    ("gve_before_6_2", "gve", "ens4", "0000:00:04.0", (30, 35), {0: 32, 1: 33}),
    ("bnxt", "bnxt_en", "enp6s0f0np0", "0000:06:00.0", (80, 84), {0: 80, 1: 81, 2: 82, 3: 83}),
    ("mana", "mana", "enP30832s1", "7870:00:00.0", (25, 30), {0: 26, 1: 27, 2: 28, 3: 29}),
    ("arm_gic", "virtio_net", "eth0", "0000:00:04.0", (50, 61), {0: 50, 1: 51}),
]
NAMED_BY_DEVICE = [case for case in DEVICES if "virtio" not in case[1] and case[0] != "gve_before_6_2"]


@pytest.mark.parametrize(
    ("text", "driver", "device", "bus", "own", "expected"), DEVICES, ids=[f"{c[0]}-{c[2]}" for c in DEVICES]
)
def test_the_queues_of_every_driver_are_found(
    text: str, driver: str, device: str, bus: str, own: tuple[int, int], expected: dict[int, int]
) -> None:
    lines = parse_interrupts((TEXTS / f"{text}.txt").read_text())
    found = queue_interrupts(lines, driver=driver, device=device, bus=bus, own=frozenset(range(*own)))
    assert found == expected


@pytest.mark.parametrize(
    ("text", "driver", "device", "bus", "own", "expected"), NAMED_BY_DEVICE, ids=[c[0] + c[2] for c in NAMED_BY_DEVICE]
)
def test_without_the_functions_own_list_the_name_tells_devices_apart(
    text: str, driver: str, device: str, bus: str, own: tuple[int, int], expected: dict[int, int]
) -> None:
    lines = parse_interrupts((TEXTS / f"{text}.txt").read_text())
    assert queue_interrupts(lines, driver=driver, device=device, bus=bus, own=frozenset()) == expected


def test_names_without_a_device_in_them_are_not_believed_without_the_functions_own_list() -> None:
    lines = parse_interrupts((TEXTS / "virtio_four_queues.txt").read_text())
    assert queue_interrupts(lines, driver="virtio_net", device="eth0", bus="", own=frozenset()) == {}


def test_a_device_that_was_renamed_while_it_was_up_is_found_by_its_own_interrupts() -> None:
    lines = parse_interrupts((TEXTS / "ena.txt").read_text())
    own = frozenset(range(27, 32))
    found = queue_interrupts(lines, driver="ena", device="wan0", bus="0000:00:05.0", own=own)
    assert found == {0: 28, 1: 29, 2: 30, 3: 31}


def test_a_driver_that_nobody_knows_is_guessed_from_its_own_interrupts_only() -> None:
    lines = parse_interrupts((TEXTS / "ixgbe.txt").read_text())
    own = frozenset(range(40, 45))
    assert queue_interrupts(lines, driver="new", device="x", bus="", own=own) == {0: 40, 1: 41, 2: 42, 3: 43}
    assert queue_interrupts(lines, driver="new", device="x", bus="", own=frozenset()) == {}


def test_every_scheme_matches_its_own_example() -> None:
    for scheme in interrupts.SCHEMES:
        bus = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", scheme.example)
        pattern = scheme.pattern.replace("{bus}", re.escape(bus[0]) if bus else "x")
        for device in ("eth0", "eth%d"):
            bound = pattern.replace("{device}", re.escape(device))
            if re.search(bound, scheme.example):
                break
        else:
            pytest.fail(f"{scheme.drivers}: {scheme.example} does not match {scheme.pattern}")


def test_counts_are_per_core_and_hardware_numbers_are_not_counts() -> None:
    lines = parse_interrupts((TEXTS / "arm_gic.txt").read_text())
    assert all(len(line.counts) == 4 for line in lines.values())
    assert lines[14].name == "uart-pl011"
    one = parse_interrupts("           CPU0\n 5:         12         7  chip  eth0-rx-0\n")
    assert one[5].counts == (12,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "nonsense",
        "CPU0\n",
        "  CPU0 CPU1\n garbage line\n 5: x y z\n 6:\n",
        "\0\0\0",
        "CPU0\n 7: 1",
        "CPU0\n 99999999999999999999: 1 a-edge  b\n",
    ],
)
def test_a_strange_text_gives_no_exception(text: str) -> None:
    lines = parse_interrupts(text)
    assert queue_interrupts(lines, driver="ice", device="eth0", bus="", own=frozenset({5, 6, 7})) == {}


def test_shared_interrupts_have_several_names() -> None:
    line = " 16:      1   2  IO-APIC  16-fasteoi   ehci_hcd:usb1, eth0-rx-0\n"
    lines = parse_interrupts("   CPU0 CPU1\n" + line)
    assert queue_interrupts(lines, driver="e1000e", device="eth0", bus="", own=frozenset()) == {0: 16}


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5", (0, 1, 2, 5)), ("7", (7,)), ("", ()), ("0,2-3\n", (0, 2, 3))])
def test_core_lists_are_read_and_written(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(cpus) == text.strip()


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", ()), ("5", (0, 2)), ("1,00000000", (32,)), ("80000000,00000000,00000001", (0, 95)), ("00000003", (0, 1))],
)
def test_masks_are_read_and_written_in_words_of_32_bits(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_mask(text) == cpus
    assert parse_mask(format_mask(cpus)) == cpus
    assert format_mask((0, 95)) == "80000000,00000000,00000001"


def machine(tmp_path: Path) -> Path:
    function = tmp_path / "sys/devices/pci0000:00/0000:00:03.0"
    (function / "virtio0/net/eth0").mkdir(parents=True)
    (function / "msi_irqs").mkdir()
    for number in range(24, 33):
        (function / "msi_irqs" / str(number)).touch()
        (tmp_path / f"proc/irq/{number}").mkdir(parents=True)
        (tmp_path / f"proc/irq/{number}/smp_affinity_list").write_text("0-3\n")
    (tmp_path / "sys/class/net").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0").symlink_to(function / "virtio0/net/eth0")
    (function / "virtio0/net/eth0/device").symlink_to(function / "virtio0")
    (tmp_path / "proc/interrupts").write_text((TEXTS / "virtio_four_queues.txt").read_text())
    return tmp_path


def test_a_function_s_interrupts_are_those_of_the_nearest_parent_that_has_some(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert own_interrupts("eth0", root) == frozenset(range(24, 33))
    assert own_interrupts("eth9", root) == frozenset()
    assert len(read_interrupts(root)) == 15


def test_pinning_writes_the_affinity_list(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert affinity(25, root) == (0, 1, 2, 3)
    set_affinity(25, (2,), root)
    assert affinity(25, root) == (2,)
    assert affinity(99, root) is None


def test_an_interrupt_that_is_not_there_says_so_before_and_when_it_is_pinned(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert pinning_obstacle(25, root) is None
    assert "many containers hide /proc/irq" in str(pinning_obstacle(99, root))
    with pytest.raises(DeviceRefused, match="ENOENT"):
        set_affinity(99, (0,), root)
