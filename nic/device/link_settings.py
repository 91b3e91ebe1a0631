"""Rings, coalescing, offload features and the link itself, by pyroute2; and which devices there are, by `ethtool`.

Both packages are optional (`pip install flexstream[nic]`; the `ethtool` package builds against libnl-3-dev). Without
them the ioctl answers the same questions for what FlexStream needs, and `by` says who answered. Nothing here is on the
path of a daemon that starts.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexstream.errors import ConfigError
from flexstream.nic.device.devices import DeviceFiles, device_names
from flexstream.nic.rss.ioctl import EthtoolIoctl

WAY = "FLEXSTREAM_NIC_WAY"  # auto, ioctl or netlink: how devices are asked
COALESCING = {
    "rx_usecs": "rx_coalesce_usecs",
    "rx_frames": "rx_max_coalesced_frames",
    "tx_usecs": "tx_coalesce_usecs",
    "tx_frames": "tx_max_coalesced_frames",
    "adaptive_rx": "use_adaptive_rx_coalesce",
}
# Those that change what a receiving core sees.
FEATURES = ("rx-hashing", "rx-ntuple-filter", "rx-gro", "rx-gro-hw", "rx-lro", "rx-checksum")


@dataclass(frozen=True, slots=True)
class Discovered:
    """A network device: `driver` is empty for those without one (loopback)."""

    name: str
    driver: str
    bus: str


def discover(root: Path = Path("/")) -> tuple[list[Discovered], str]:
    """All devices but loopback, and who told."""
    try:
        import ethtool
    except ImportError:
        names = [name for name in device_names(root) if name != "lo"]
        return [_by_ioctl(name, root) for name in names], "ioctl (the ethtool package is not installed)"
    found = []
    for name in sorted(ethtool.get_devices()):
        if name != "lo":
            driver = _answer(ethtool.get_module, name) or DeviceFiles(name, root).driver() or ""
            found.append(Discovered(name, driver, _answer(ethtool.get_businfo, name)))
    return found, str(getattr(ethtool, "version", "the ethtool package"))


def _answer(question: Any, name: str) -> str:
    try:
        return str(question(name))
    except OSError:
        return ""


def _by_ioctl(name: str, root: Path) -> Discovered:
    device = EthtoolIoctl(name)
    try:
        driver = device.driver()
        return Discovered(name, driver.name, driver.bus)
    except OSError:
        return Discovered(name, DeviceFiles(name, root).driver() or "", "")
    finally:
        device.close()


def read_link(device: str) -> dict[str, Any]:
    """Rings, coalescing, features and link of a device; what it does not have is None. Raises nothing."""
    if os.environ.get(WAY) == "ioctl":
        return _link_by_ioctl(device, f"ioctl ({WAY}=ioctl)")
    if importlib.util.find_spec("pyroute2") is None:
        return _link_by_ioctl(device, "ioctl (pyroute2 is not installed)")
    with _pyroute2(device) as tool:
        channels = _optional(lambda: tool.get_channels(device))
        rings = _optional(lambda: tool.get_rings(device))
        coalescing = _optional(lambda: tool.get_coalesce(device))
        features = _optional(lambda: tool.get_features(device).features)
    from pyroute2.config.version import __version__

    return {
        "by": f"pyroute2 {__version__}",
        "link": _link(device),
        "channels": None if channels is None else channels._asdict(),
        "rings": None
        if rings is None
        else {"rx": rings.rx, "rx_max": rings.rx_max, "tx": rings.tx, "tx_max": rings.tx_max},
        "coalescing": None if coalescing is None else {name: coalescing[field] for name, field in COALESCING.items()},
        "features": None
        if features is None
        else {name: bool(features[name].enable) for name in FEATURES if name in features},
    }


def _link_by_ioctl(device: str, by: str) -> dict[str, Any]:
    tool = EthtoolIoctl(device)
    try:
        rings, coalescing, flags = (_optional(ask) for ask in (tool.rings, tool.coalescing, tool.flags))
    finally:
        tool.close()
    features = None if flags is None else {"rx-hashing": flags["rxhash"], "rx-ntuple-filter": flags["ntuple"]}
    picked = None if coalescing is None else {name: coalescing[name] for name in COALESCING}
    return {"by": by, "link": None, "channels": None, "rings": rings, "coalescing": picked, "features": features}


def _link(device: str) -> dict[str, Any] | None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as route:
        try:
            [link] = route.get_links(ifname=device)
        except (NetlinkError, ValueError):
            return None
    return {
        "index": link["index"],
        "mtu": link.get_attr("IFLA_MTU"),
        "address": link.get_attr("IFLA_ADDRESS"),
        "state": str(link.get_attr("IFLA_OPERSTATE")).lower(),
        "rx_queues": link.get_attr("IFLA_NUM_RX_QUEUES"),
        "tx_queues": link.get_attr("IFLA_NUM_TX_QUEUES"),
    }


def read_link_setting(device: str, kind: str, name: str) -> str:
    """`kind` is ring or coalesce. Raises OSError with the driver's answer, or ConfigError."""
    with _pyroute2(device) as tool:
        if kind == "ring":
            return str(getattr(tool.get_rings(device), name))
        return str(tool.get_coalesce(device)[COALESCING[name]])


def write_link_setting(device: str, kind: str, name: str, value: str) -> None:
    with _pyroute2(device) as tool:
        if kind == "ring":
            tool.set_rings(device, **{name: int(value)})
        else:
            tool.set_coalesce(device, {COALESCING[name]: int(value)})


@contextlib.contextmanager
def _pyroute2(device: str) -> Iterator[Any]:
    """pyroute2's Ethtool, whose own exceptions become OSError. Raises ConfigError without pyroute2."""
    try:
        from pyroute2.ethtool import Ethtool
        from pyroute2.ethtool.ioctl import NoSuchDevice, NotSupportedError
    except ImportError:
        raise ConfigError(
            "setting rings and coalescing needs pyroute2, which is not installed",
            code="nic_pyroute2",
            hint="pip install flexstream[nic], or use ethtool(8)",
        ) from None
    with Ethtool() as tool:
        try:
            yield tool
        except NotSupportedError:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), device) from None
        except NoSuchDevice:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device) from None


def _optional(question: Any) -> Any:
    try:
        return question()
    except Exception:  # pyroute2 has no common base for what a driver can answer; what is not told is not shown
        return None
