"""Choosing a NIC: what is tried in which order, and why each was passed over."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest

from flexstream.errors import ConfigError
from flexstream.nic import UserNic, probe
from flexstream.nic.probe import Spec, default_device, device_of, listening_device, open_nic


@pytest.mark.parametrize("text", ["auto", "user", "ethtool:eth0", "kernel:veth-a.1", " auto "])
def test_specs_that_are_understood(text: str) -> None:
    assert str(Spec.parse(text)) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "hardware", "ethtool", "ethtool:", "user:eth0", "auto:eth0", "kernel:a/b", "kernel:..", "kernel:a b",
     "ethtool:much-too-long-name", "eth0", None, 3, ["auto"]],
)  # fmt: skip
def test_specs_that_are_not(text: object) -> None:
    with pytest.raises(ValueError, match="ethtool:DEVICE"):
        Spec.parse(text)


class Made(UserNic):
    """Stands for a device's implementation: a user NIC under another kind, that can be told what to refuse."""

    refuses: str | None = None
    never_aligns: str | None = None
    start_fails = False
    closed = 0

    def __init__(self, device: str, *, groups: int, group_rows: object = None) -> None:
        super().__init__(groups, [0, 1])
        self.device = device

    @classmethod
    def probe(cls, device: str) -> str | None:
        return cls.refuses

    def cannot_align(self) -> str | None:
        return self.never_aligns

    def start(self, worker_cpus: object) -> None:
        if self.start_fails:
            raise ConfigError("the driver answered EBUSY", code="nic", hint=None)

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An ethtool and a kernel implementation to be told what to refuse."""
    made = SimpleNamespace()
    for kind in ("ethtool", "kernel"):
        implementation = type(kind, (Made,), {"kind": kind})
        setattr(made, kind, implementation)
        monkeypatch.setitem(sys.modules, f"made_{kind}", SimpleNamespace(Implementation=implementation))  # type: ignore[arg-type]
        monkeypatch.setitem(probe._CLASSES, kind, (f"made_{kind}", "Implementation"))
    monkeypatch.setattr(probe, "listening_device", lambda host: ("eth7", ""))
    return made


def opened(spec: str = "auto", **more: object) -> object:
    return open_nic(spec, groups=8, cpus=[0, 1], host="192.0.2.1", **more)  # type: ignore[arg-type]


def test_the_devices_own_table_comes_first(kinds: SimpleNamespace) -> None:
    nic = opened()
    assert (nic.kind, nic.device, nic.passed_over) == ("ethtool", "eth7", ())  # type: ignore[attr-defined]


def test_what_is_passed_over_is_named_with_its_reason(kinds: SimpleNamespace) -> None:
    kinds.ethtool.refuses = "driver veth answered EOPNOTSUPP"
    kinds.kernel.start_fails = True
    nic = opened()
    assert nic.kind == "user"  # type: ignore[attr-defined]
    first, second = nic.passed_over  # type: ignore[attr-defined]
    assert "ethtool:eth7" in first
    assert "EOPNOTSUPP" in first
    assert "kernel:eth7" in second
    assert "EBUSY" in second
    assert kinds.kernel.closed == 1, "one that failed to start is closed again"


def test_auto_goes_on_to_what_can_align(kinds: SimpleNamespace) -> None:
    kinds.ethtool.never_aligns = "driver vmxnet3 does not show its RSS key"
    nic = opened()
    assert nic.kind == "kernel"  # type: ignore[attr-defined]
    assert "does not show its RSS key" in nic.passed_over[0]  # type: ignore[attr-defined]
    assert kinds.ethtool.closed == 1
    assert opened("ethtool:eth3").kind == "ethtool", "a named one is taken as it is"  # type: ignore[attr-defined]
    kinds.kernel.never_aligns = "nothing does"
    assert opened().kind == "user"  # type: ignore[attr-defined]


def test_a_named_one_is_taken_or_refused_never_replaced(kinds: SimpleNamespace) -> None:
    assert opened("kernel:eth3").device == "eth3"  # type: ignore[attr-defined]
    kinds.ethtool.refuses = "no table"
    with pytest.raises(ConfigError, match="ethtool:eth3 does not work here: no table") as error:
        opened("ethtool:eth3")
    assert error.value.code == "nic_unavailable"
    kinds.kernel.start_fails = True
    with pytest.raises(ConfigError, match="EBUSY"):
        opened("kernel:eth3")


def test_after_a_failure_only_what_comes_below_is_tried(kinds: SimpleNamespace) -> None:
    nic = opened("ethtool:eth3", below="ethtool", passed_over=["ethtool:eth3: disobeyed"])
    assert (nic.kind, nic.device) == ("kernel", "eth3")  # type: ignore[attr-defined]
    assert nic.passed_over == ("ethtool:eth3: disobeyed",)  # type: ignore[attr-defined]
    assert opened("ethtool:eth3", below="kernel").kind == "user"  # type: ignore[attr-defined]


def test_an_implementation_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe._CLASSES, "kernel", ("flexstream.nic.no_such_module", "KernelNic"))
    with pytest.raises(ConfigError, match="not installed"):
        open_nic("kernel:eth0", groups=4, cpus=[0])


def test_a_device_that_is_not_there_is_refused_by_the_real_implementations() -> None:
    for spec in ("ethtool:nosuchdev0", "kernel:nosuchdev0"):
        with pytest.raises(ConfigError, match="nosuchdev0"):
            open_nic(spec, groups=4, cpus=[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.9.9.9", "localhost", None])
def test_loopback_and_no_port_are_served_in_user_space(host: str | None) -> None:
    nic = open_nic("auto", groups=4, cpus=[0, 1], host=host)
    assert nic.kind == "user"
    assert ("loopback" if host else "no data port") in nic.passed_over[0]


def test_the_device_of_an_address_is_the_kernels_answer() -> None:
    assert device_of("127.0.0.1") == "lo"
    assert device_of("::1") == "lo"
    assert device_of("203.0.113.250") is None
    device, why = listening_device("203.0.113.250")
    assert device is None
    assert "no device has the address" in why
    assert "has no address" in listening_device("no-such-host.invalid")[1]


def test_every_address_listens_on_the_device_of_the_default_route(monkeypatch, tmp_path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
        "eth9\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    )
    monkeypatch.setattr(probe, "_ROUTES", routes)
    assert default_device() == "eth9"
    assert listening_device("0.0.0.0") == listening_device("::") == ("eth9", "")
    monkeypatch.setattr(probe, "_ROUTES", tmp_path / "none")
    for names, expected in ((["lo", "eth5"], "eth5"), (["lo"], None), (["lo", "a", "b"], None)):
        monkeypatch.setattr(socket, "if_nameindex", lambda names=names: list(enumerate(names, 1)))
        assert default_device() == expected
    assert "name one" in listening_device("::")[1]
