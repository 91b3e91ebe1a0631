"""What GET /v1/nic says beyond the status: the implementation's table, capabilities, changes and findings."""

from __future__ import annotations

from typing import Any

from flexstream.errors import FlexStreamError


def nic_details(engine: Any) -> dict[str, Any]:
    """Empty for an engine without a NIC service. Reads the device: call it off the event loop."""
    nic = getattr(getattr(engine, "nic", None), "nic", None)
    if nic is None:
        return {}
    details: dict[str, Any] = {
        "capabilities": [
            {"name": item.name, "present": item.present, "reason": item.reason or None} for item in nic.capabilities()
        ],
        "changes": [{"where": change.where, "old": change.old, "new": change.new} for change in nic.changes()],
    }
    try:
        details["table"] = list(nic.table())
        details["queue_cpu"] = list(nic.queue_cpu())
    except (FlexStreamError, OSError) as error:
        details["table_error"] = getattr(error, "message", str(error))
    if nic.device is not None:
        from flexstream.nic.device.facts import read_facts

        cpus = [worker.get("cpu") for worker in engine.status().get("workers", [])]
        details["findings"] = [finding.to_dict() for finding in read_facts(nic.device).findings(cpus)]
    return details
