"""A veth that delays and loses packets, in both directions: netem where the kernel has it, and the same by other
means where it has not (a token bucket makes packets wait, a BPF program drops some)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from flexstream.nic.bpf.assembler import R0, Assembler
from flexstream.nic.bpf.loader import AttachType, Link, Program, ProgramType
from tests.nic.netns import Namespace, Pair

NETEM = "netem delay 3ms 2ms loss 2%"
SLOW = "tbf rate 80mbit burst 32kb latency 100ms"
LOST_OF_65536 = 1311  # 2%
GET_PRANDOM_U32 = 7
TCX_NEXT, TCX_DROP = -1, 2


@contextlib.contextmanager
def bad_wire(pair: Pair) -> Iterator[str]:
    """Yields how it is done."""
    ends = ((pair.client, pair.client_device), (pair.server, pair.server_device))
    for where, device in ends:  # what is lost is then a packet as on a wire, not 64 KiB at once
        where.ip("link", "set", device, "gso_max_segs", "1")
    try:
        for where, device in ends:
            _queue(where, device, NETEM)
    except RuntimeError as error:
        if "kind is unknown" not in str(error):
            raise
    else:
        yield NETEM
        return
    with contextlib.ExitStack() as links:
        for where, device in ends:
            _queue(where, device, SLOW)
            links.callback(_lossy(where, device).close)
        yield f"{SLOW}, and 2% dropped by BPF"


def _queue(where: Namespace, device: str, kind: str) -> None:
    where.execute("tc", "qdisc", "replace", "dev", device, "root", *kind.split())


def _lossy(where: Namespace, device: str) -> Link:
    """Drops at the receiving end: a drop at the sending one is told to TCP, which then has lost nothing."""
    code = Assembler()
    code.call(GET_PRANDOM_U32)
    code.alu(R0, "&", 0xFFFF)
    code.jump_if(R0, "<", LOST_OF_65536, "lost")
    code.exit(TCX_NEXT)
    code.label("lost")
    code.exit(TCX_DROP)
    program = Program(ProgramType.SCHED_CLS, code.assemble(), attach=AttachType.TCX_INGRESS, name="lossy")
    try:
        with where.entered():
            return Link(program, socket.if_nametoindex(device), AttachType.TCX_INGRESS)
    finally:
        program.close()


def retransmissions(where: Namespace) -> int:
    """TCP segments that were sent again, in this namespace, so far."""
    names, values = (line.split() for line in where.execute("cat", "/proc/net/snmp").splitlines() if line[:4] == "Tcp:")
    return int(values[names.index("RetransSegs")])
