"""What is missing is named with the package that has it, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nic_in_loop import requirements
from tests.nic_in_loop.machine import booted_guest
from tests.nic_in_loop.requirements import GuestError


def test_without_qemu_and_tun_there_is_a_failure_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "QEMU", "qemu-of-nowhere")
    monkeypatch.setattr(requirements, "PACKAGES", {"qemu-of-nowhere": "qemu-system-x86"})
    monkeypatch.setattr(requirements, "BUSYBOX_PLACES", ("/bin/sh",))  # runs only with shared libraries
    monkeypatch.setattr(requirements, "TUN", Path("/dev/net/no-such-tun"))
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 0)
    with pytest.raises(GuestError) as raised, booted_guest():
        pytest.fail("a guest without QEMU")
    assert "apt-get install --no-install-recommends qemu-system-x86 busybox-static" in str(raised.value)
    assert "modprobe tun" in str(raised.value)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 1000)
    assert any("run this as root" in reason for reason in requirements.missing())
