"""host:port, read and written in one place."""

from __future__ import annotations

import pytest

from flexstream.addresses import host_of, join_address, split_address
from flexstream.client.discovery import Address
from flexstream.engine.options import data_address
from flexstream.errors import ConfigError, EngineError


@pytest.mark.parametrize("address", [("127.0.0.1", 7400), ("::1", 0), ("fe80::1%eth0", 65535), ("localhost", 1)])
def test_an_address_survives_being_written(address: tuple[str, int]) -> None:
    assert split_address(join_address(*address)) == address
    assert host_of(join_address(*address)) == address[0]


@pytest.mark.parametrize("text", ["", "7400", "127.0.0.1", "::1", "[::1]", "before the restart", "host:", "host:65536"])
def test_what_has_no_port_is_no_address_unless_there_is_a_default(text: str) -> None:
    with pytest.raises(ValueError, match="an address such as"):
        split_address(text)
    assert host_of(text) == ""


def test_a_default_is_for_what_has_no_port() -> None:
    assert split_address("::1", 5) == ("::1", 5)
    assert split_address("[::1]", 5) == ("::1", 5)
    assert split_address("host:7", 5) == ("host", 7)


def test_engine_and_producer_read_the_same_address() -> None:
    assert data_address("[::1]:7400", None) == ("::1", 7400)
    assert Address.parse("tcp://[::1]:7400") == Address("::1", 7400, direct=True)
    assert Address.parse(":7401") == Address("127.0.0.1", 7401)
    for wrong in ("::1:7400", "127.0.0.1:x", "127.0.0.1:65536"):
        with pytest.raises(EngineError, match="must be host:port"):
            data_address(wrong, None)
        with pytest.raises(ConfigError, match="is not an address"):
            Address.parse(wrong)
