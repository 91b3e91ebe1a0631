"""python -m tests.nic_in_loop [pytest arguments]: a real driver, a real RSS table, the real daemon.

Boots a guest with four cores and a four-queue NIC under QEMU, runs FlexStream in it, sends to it from outside,
and compares what the kernel counts with what FlexStream predicts; then one with a card that obeys nothing. About four
minutes; needs root and QEMU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-v", "-p", "no:cacheprovider", str(Path(__file__).parent), *sys.argv[1:]]))
