"""A card that takes every table, shows no key and obeys nothing: QEMU's vmxnet3, under its real driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nic_in_loop import observed
from tests.nic_in_loop.machine import DEVICE, QUEUES, VMXNET3, Guest, booted_guest
from tests.nic_in_loop.served import GROUPS, Daemon, flexstream, serve, wait_for_launcher
from tests.nic_in_loop.traffic import QUERY, sending, wait_until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.time_limit(1800)]

ALL = range(GROUPS)


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with booted_guest(VMXNET3) as booted:
        wait_for_launcher(booted)
        yield booted


def test_its_table_can_be_read_and_its_key_cannot(guest: Guest) -> None:
    shown = json.loads(flexstream(guest, "nic", "show", DEVICE, "--json"))
    assert (shown["driver"], shown["queues"], shown["key"]) == ("vmxnet3", QUEUES, None)
    assert shown["table"] == observed.table(guest)
    assert set(shown["table"]) == set(range(QUEUES))
    assert "does not show its RSS key" in shown["alignment_reason"]


def _sent_until(daemon: Daemon, wanted: str, what: str) -> dict[str, Any]:
    """Rows to all groups until the NIC is in this state; the daemon's results must be the oracle's for them."""
    daemon.post("/v1/queries", QUERY.to_dict())
    with sending(daemon) as sender:

        def settled() -> Any:
            sender.send(ALL)
            nic = daemon.get("/v1/nic")["nic"]
            return nic if f"{nic['kind']} {nic['state']}" == wanted else None

        found: dict[str, Any] = wait_until(settled, what)
    return found


def test_auto_passes_it_over_for_a_table_that_can_align(guest: Guest, facts: list[str]) -> None:
    before = observed.features(guest)
    daemon = Daemon(guest, "--nic", "auto", data_dir="/run/tmp/auto")
    try:
        nic = _sent_until(daemon, "kernel verified", "the kernel's table to be verified")
        assert (nic["device"], nic["fallbacks"]) == (DEVICE, 0)
        assert "does not show its RSS key" in nic["passed_over"][0]
        assert daemon.get("/v1/status")["connections"]["alignment"] == 1.0
        facts.append(f"vmxnet3, auto: {nic['kind']}, {nic['state_reason']}; passed over {nic['passed_over']}")
        assert observed.features(guest) != before, "LRO is off under generic XDP"
        assert daemon.stop() == 0
        assert observed.features(guest) == before
    finally:
        daemon.kill()


def test_named_it_is_found_out_by_what_is_seen_and_left(guest: Guest, facts: list[str]) -> None:
    table = observed.table(guest)
    daemon = serve(guest, data_dir="/run/tmp/named")
    try:
        nic = _sent_until(daemon, "kernel verified", "the card to be left for the kernel's table")
        assert nic["fallbacks"] == 1
        [why] = nic["passed_over"]
        assert "disobeyed" in why
        assert f"the table spreads them over {QUEUES} queues" in why
        assert observed.table(guest) == table
        facts.append(f"vmxnet3, named: {why}; then {nic['kind']}: {nic['state_reason']}")
        assert daemon.stop() == 0
    finally:
        daemon.kill()
