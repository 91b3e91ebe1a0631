"""`flexstream status` as text says of the NIC what `--json` says."""

from __future__ import annotations

from typing import Any

from flexstream.cli.status import describe

NIC: dict[str, Any] = {
    "kind": "kernel",
    "device": "eth0",
    "aligned": True,
    "reason": None,
    "state": "unverified",
    "state_reason": "no data has arrived since the table was written",
    "passed_over": ["ethtool:eth0: disobeyed: 31 of 32 connections did not arrive where the table says"],
    "drift": ["eth0 rx-0 rps_cpus: it is 0, but FlexStream had set 0-1", "eth0 is down"],
    "follow_error": "eth0: set table: driver answered EBUSY",
    "fallbacks": 1,
    "notes": ["irq 25 cpus stays 0-3: EACCES"],
}
CONNECTIONS = {"open": 7, "accepted": 9, "misaligned": 4, "alignment": 0.5, "behind_nat": 3, "steered_by_old_table": 2}


def text(nic: dict[str, Any], connections: dict[str, Any] = CONNECTIONS, **more: Any) -> str:
    return describe({"state": "running", "uptime_s": 1, "groups": 4, "nic": nic, "connections": connections, **more})


def test_everything_that_is_wrong_with_the_nic_is_in_the_text() -> None:
    said = text(NIC)
    for value in (NIC["state"], NIC["state_reason"], NIC["follow_error"], *NIC["passed_over"], *NIC["drift"]):
        assert value in said
    assert "nic kernel:eth0: unverified" in said
    assert "fell back 1 time " in said
    assert "behind NAT: 3 connections" in said
    assert "steered by an old table: 2 connections" in said
    assert "50% aligned now" in said
    assert NIC["notes"][0] in said


def test_a_nic_that_is_as_it_should_be_takes_a_line() -> None:
    fine = NIC | {"state": "verified", "state_reason": "all arrived", "passed_over": [], "drift": []}
    fine |= {"follow_error": None, "fallbacks": 0, "notes": []}
    said = text(fine, {"open": 7, "behind_nat": 0, "steered_by_old_table": 0})
    assert "nic kernel:eth0: verified, all arrived" in said
    for word in ("fell back", "passed over", "changed by", "follow", "NAT", "old table", "note"):
        assert word not in said


def test_a_worker_that_was_moved_off_its_core_is_named_with_the_reason() -> None:
    moved = {"worker": 1, "cpu": 1, "pinned": False, "pin_reason": "somebody else has set its thread to cores 0-1"}
    said = text(NIC, workers=[moved])
    assert "worker 1 is not pinned: somebody else has set its thread to cores 0-1" in said
    assert "is not pinned" not in text(NIC, workers=[moved | {"pinned": True, "pin_reason": None}])
    assert "is not pinned" not in text(NIC, workers=[moved | {"cpu": -1, "pin_reason": "pinning is off"}])
