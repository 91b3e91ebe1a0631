"""The machine's receive side: which queue, and so which worker, gets a connection's packets."""

from flexstream.nic.contract import Capability, Change, Connection, Nic, Verdict, Verification
from flexstream.nic.user import UserNic

__all__ = ["Capability", "Change", "Connection", "Nic", "UserNic", "Verdict", "Verification"]
