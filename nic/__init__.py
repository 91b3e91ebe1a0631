"""The machine's receive side: which queue, and so which worker, gets a connection's packets."""

from flexstream.nic.contract import (
    Capability,
    Change,
    Connection,
    Nic,
    NicHealth,
    NicState,
    Steering,
    Verdict,
    Verification,
    entries_for,
)
from flexstream.nic.user import UserNic

__all__ = [
    "Capability",
    "Change",
    "Connection",
    "Nic",
    "NicHealth",
    "NicState",
    "Steering",
    "UserNic",
    "Verdict",
    "Verification",
    "entries_for",
]
