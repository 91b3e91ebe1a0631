"""Ports for tests that must know one before it is used, or use it again: not those that the kernel gives to others."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST, RANGE = 10_000, Path("/proc/sys/net/ipv4/ip_local_port_range")


def quiet_port(host: str = "127.0.0.1") -> int:
    """Free, and below the ports that connections get: nobody takes it between two uses, unless he asks for it."""
    end = max(int(RANGE.read_text().split()[0]), LOWEST + 1_000)
    for port in random.SystemRandom().sample(range(LOWEST, end), 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {LOWEST} to {end} is free")
