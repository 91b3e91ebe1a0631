"""The service over a played device: what it says when the table, the link or a core changes under it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexstream.ingest import nic_service
from flexstream.ingest.nic_service import NicService
from flexstream.nic.alignment import Arrival
from flexstream.nic.contract import Connection, Nic
from flexstream.nic.device import journal
from flexstream.nic.ethtool import EthtoolNic
from flexstream.nic.rss.ioctl import EthtoolIoctl
from flexstream.nic.rss.toeplitz import bucket_of
from flexstream.nic.rss.transport import RssTransport
from tests.unit.nic.played_device import PlayedDevice, machine_of

GROUPS = 128
LOCAL = ("10.0.0.1", 7400)
NO_SOCKET = 1 << 20  # descriptors from here on are nobody's


class Played:
    """A service on a device of four queues, with a connection for each group in its bucket."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = PlayedDevice(name=f"fs{secrets.token_hex(4)}")
        self.root = machine_of(self.device, tmp_path / "root")
        monkeypatch.setattr(journal, "device_index", lambda name: 7)
        monkeypatch.setattr(nic_service, "open_nic", self.opened)
        self.folder = tmp_path / "journal"
        self.service = NicService("auto", GROUPS, [0, 1, 2, 3], "10.0.0.1")
        monkeypatch.setattr(self.service._alignment, "sample", lambda placement, since: self.seen)
        self.seen: list[Connection] = []
        self.ports: list[int] = []

    def opened(self, spec: object, **more: object) -> Nic:
        way = RssTransport(self.device.name, ioctl=EthtoolIoctl(self.device.name, self.device.ioctl), way="ioctl")
        nic = EthtoolNic(
            self.device.name, groups=GROUPS, root=self.root, journal_folder=self.folder, transport=way
        )
        nic.start([0, 1, 2, 3])
        nic.follow([group % 4 for group in range(GROUPS)])
        return nic

    def connect_all(self) -> None:
        wanted = set(range(GROUPS))
        for port in range(20000, 60000):
            group = bucket_of(self.device.key, ("10.0.0.2", port), LOCAL, 128)
            if group in wanted:
                wanted.discard(group)
                owner = self.service.placement()[group]
                self.service.arrived(NO_SOCKET + port, Arrival(("10.0.0.2", port), LOCAL, group, owner))
                self.ports.append(port)
        assert not wanted

    def verify(self) -> None:
        """Every connection has just been seen on the core of its queue."""
        table = self.device.table
        queues = {port: table[bucket_of(self.device.key, ("10.0.0.2", port), LOCAL, 128)] for port in self.ports}
        self.seen = [
            Connection(("10.0.0.2", port), LOCAL, 0, None, queue, 500 + queue) for port, queue in queues.items()
        ]
        self.service.check()
        self.seen = []  # and then nobody sends any more

    @property
    def state(self) -> tuple[str, str]:
        status = self.service.status()
        return status["state"], status["state_reason"]

    @property
    def alignment(self) -> float:
        return self.service.connections()["alignment"]

    def pin(self, irq: int, cores: str) -> None:
        (self.root / f"proc/irq/{irq}/smp_affinity_list").write_text(cores + "\n")

    def link(self, flags: str) -> None:
        (self.root / f"sys/class/net/{self.device.name}/flags").write_text(flags + "\n")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    made = Played(tmp_path, monkeypatch)
    made.connect_all()
    made.verify()
    assert made.state[0] == "verified"
    assert made.alignment == 1.0
    yield made
    made.service.close()


def test_what_was_seen_stands_while_nobody_sends_and_nothing_changes(played: Played) -> None:
    played.service.check()
    assert played.state[0] == "verified"


def test_a_table_that_somebody_else_writes_is_judged_again(played: Played) -> None:
    played.device.table = [0] * 128
    played.service.check()
    assert played.state[0] == "unverified"
    assert "table: 96 of 128 entries changed" in played.state[1]
    assert played.alignment == 0.25, "a quarter of the connections is where it belongs"
    played.device.table = [1] * 128
    played.service.check()
    assert played.alignment == 0.25
    played.device.table = [entry % 4 for entry in range(128)]
    played.service.check()
    assert played.alignment == 1.0
    assert played.state[0] == "unverified", "until connections were seen again"
    played.verify()
    assert played.state[0] == "verified"


def test_an_interrupt_on_another_core_takes_its_queue_to_that_core_s_worker(played: Played) -> None:
    played.pin(25, "1")  # queue 0, by irqbalance
    played.service.check()
    assert played.state[0] == "unverified"
    assert played.alignment == 0.75
    played.pin(25, "7")  # nobody's
    played.service.check()
    assert played.alignment == 0.75
    played.pin(25, "0")
    played.service.check()
    assert played.alignment == 1.0


def test_a_link_that_went_down_is_not_verified_any_more_nor_when_it_is_back(played: Played) -> None:
    played.link("0x1002")
    played.service.check()
    assert played.state == ("unverified", f"link: {played.device.name} is down")
    played.link("0x1003")
    played.service.check()
    assert played.state[0] == "unverified", "drivers drop tables with their link: it must be seen"
    played.verify()
    assert played.state[0] == "verified"


def test_a_worker_on_another_core_is_judged_again(played: Played) -> None:
    cores: list[int | None] = [0, 1, 2, 3]
    played.service.watch_cores(lambda: cores)
    played.service.check()
    assert played.state[0] == "verified"
    cores = [1, 0, 2, 3]
    played.service.check()
    assert played.state[0] == "unverified"
    assert played.alignment == 0.5
    assert played.service.connections()["misaligned"] == 0, "they came as they should"


def test_moves_are_followed_and_stay_verified(played: Played) -> None:
    placement = [3] * GROUPS
    assert played.service.follow(placement) is None
    assert played.alignment == 1.0
    played.service.check()
    assert played.state[0] == "verified"
    played.device.refuse = {0x47: 16, 0x39: 16}
    assert "EBUSY" in str(played.service.follow([0] * GROUPS))
    assert played.alignment == 0.0
