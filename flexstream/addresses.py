"""host:port, and which hosts are this machine."""

from __future__ import annotations

import ipaddress

DATA_PORT = 7400
CONTROL_PORT = 7401


def split_address(text: object, default_port: int | None = None) -> tuple[str, int]:
    """("127.0.0.1", 7401) of "127.0.0.1:7401" or "[::1]:7401". Without a default it has a port. Raises ValueError."""
    if not isinstance(text, str) or not text:
        raise ValueError("an address such as 127.0.0.1:7401")
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text, "" if default_port is None else str(default_port)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("an address such as 127.0.0.1:7401, with a port from 0 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of what `join_address` made; "" of a text that is no address."""
    try:
        return split_address(address)[0]
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Only what surely stays on this machine: localhost, 127.0.0.0/8, ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
