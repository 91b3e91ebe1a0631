"""The NIC's part of `flexstream status` as text: what `--json` says of it, a line for each thing that is so."""

from __future__ import annotations

from typing import Any


def nic_lines(nic: dict[str, Any], connections: dict[str, Any]) -> list[str]:
    """A pure function of the status; what is as it should be takes one line."""
    if not nic:
        return []
    name = f"{nic.get('kind', '?')}{':' + nic['device'] if nic.get('device') else ''}"
    state = nic.get("state", "unknown")
    lines = [f"nic {name}: {state}" + (f", {nic['state_reason']}" if nic.get("state_reason") else "")]
    if nic.get("fallbacks"):
        lines.append(f"  fell back {nic['fallbacks']} time{'s' if nic['fallbacks'] > 1 else ''} since the start")
    lines += [f"  passed over: {why}" for why in nic.get("passed_over") or ()]
    lines += [f"  changed by somebody else: {what}" for what in nic.get("drift") or ()]
    if nic.get("follow_error"):
        lines.append(f"  does not follow the placement: {nic['follow_error']}")
    lines += [f"  note: {note}" for note in nic.get("notes") or ()]
    if connections.get("behind_nat"):
        lines.append(
            f"  behind NAT: {connections['behind_nat']} connections arrived with a port or address that their "
            "producer did not bind; they are handed over, not aligned"
        )
    if connections.get("steered_by_old_table"):
        lines.append(f"  steered by an old table: {connections['steered_by_old_table']} connections, told the new one")
    return lines
