"""GET /v1/nic and the unit: what operators see of the NIC, and what puts it back after a crash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flexstream as fs
from flexstream.daemon.nic_details import nic_details


def test_the_daemon_s_nic_is_described_with_table_and_reasons() -> None:
    with fs.Engine(workers=1, nic="user") as engine:
        details = json.loads(json.dumps(nic_details(engine)))
    assert set(details["table"]) == {0}
    absent = [item for item in details["capabilities"] if not item["present"]]
    assert absent
    assert all(item["reason"] for item in absent)
    assert details["changes"] == []


def test_an_engine_without_a_nic_has_no_details() -> None:
    assert nic_details(object()) == {}


def test_the_unit_undoes_the_nic_after_a_crash(project: Path) -> None:
    lines = (project / "packaging" / "flexstream.service").read_text().splitlines()
    assert "ExecStopPost=-/usr/bin/flexstream nic undo" in lines


def test_systemd_accepts_the_drop_in_and_it_grants_what_the_nic_needs(project: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("systemd-analyze is missing, so the drop-in cannot be checked: apt-get install systemd")
    (tmp_path / "flexstream").symlink_to(sys.executable)
    unit = (project / "packaging" / "flexstream.service").read_text()
    (tmp_path / "flexstream.service").write_text(unit.replace("/usr/bin/flexstream", str(tmp_path / "flexstream")))
    (tmp_path / "flexstream.service.d").mkdir()
    drop_in = (project / "packaging" / "flexstream-nic.conf").read_text()
    (tmp_path / "flexstream.service.d" / "nic.conf").write_text(drop_in)
    done = subprocess.run(
        [program, "verify", "--man=no", str(tmp_path / "flexstream.service")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    for line in ("PrivateUsers=no", "ProtectKernelTunables=no", "RestrictAddressFamilies=AF_NETLINK"):
        assert line in drop_in.splitlines()
    assert "CAP_NET_ADMIN" in drop_in
