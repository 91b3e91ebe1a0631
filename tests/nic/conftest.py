"""These tests make network namespaces and devices: what that needs and is missing is a failure, not a skip."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "ethtool": "ethtool"}


@pytest.fixture(scope="session", autouse=True)
def _privilege_and_commands() -> None:
    if os.geteuid() != 0:
        pytest.fail("tests/nic needs root: it makes network namespaces and devices", pytrace=False)
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({package for command, package in PACKAGES.items() if shutil.which(command, path=path) is None})
    if missing:
        names = " ".join(missing)
        pytest.fail(f"tests/nic needs {names}: apt-get install --no-install-recommends {names}", pytrace=False)
