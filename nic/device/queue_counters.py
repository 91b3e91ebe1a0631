"""Packets per receive queue: from the driver's statistics, whose names are its own, or from the kernel's counters."""

from __future__ import annotations

import re

from flexstream.nic.rss.transport import RssTransport

# rx_queue_0_packets (virtio, ixgbe, igb), rx-0.packets (i40e), rx0_packets (mlx5), queue_0_rx_cnt (ena), ...
_NAME = re.compile(r"^(?:rx_queue_|rx-|rx|queue_|ring)(\d+)[_.]?(?:rx_)?(?:packets|cnt|pkts)$")


def queue_packets(transport: RssTransport, queues: int) -> tuple[int, ...] | None:
    """One count per queue since boot; None where neither driver nor kernel counts them."""
    wanted = set(range(queues))
    try:
        statistics = transport.ioctl.statistics()
    except OSError:
        statistics = {}
    counts = {int(match[1]): value for name, value in statistics.items() if (match := _NAME.match(name))}
    if not wanted <= set(counts):
        counts = transport.queue_packets()
    return tuple(counts[queue] for queue in range(queues)) if wanted <= set(counts) else None
