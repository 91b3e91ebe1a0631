"""Does the device obey its table? Judged from where live connections arrived; a pure function."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from flexstream.nic.contract import Connection, Steering, Verdict, Verification
from flexstream.nic.rss.toeplitz import bucket_of

CHANCE = 1e-6  # of a device that obeys being called one that does not
TOLERATED_SHARE = 0.1  # connections that may disagree: their latest packet may have met an interrupt on its way


def judge(
    connections: Sequence[Connection],
    steering: Steering,
    table: Sequence[int],
    queue_cpu: Sequence[int | None],
    *,
    device: str,
    rps: bool = False,
    queue_napi: Mapping[int, int] | None = None,
) -> Verification:
    """Compare with the prediction: the core of the queue's interrupt, and one NAPI id per queue.

    A connection without a NAPI id did not come through a device's queue (loopback, a software device) and says
    nothing. One without a core or with a queue that is not pinned to one is judged by its NAPI id alone, which needs
    a second queue to compare with, unless the kernel tells each queue's id (`queue_napi`).
    """
    seen: list[tuple[Connection, int]] = []
    for connection in connections:
        if connection.napi_id:
            bucket = bucket_of(steering.key, connection.peer, connection.local, len(table))
            seen.append((connection, table[bucket]))
    if not seen:
        return Verification(
            Verdict.UNVERIFIED, f"no connection arrived through a queue of {device} (none has a NAPI id)"
        )
    told = {napi: queue for queue, napi in (queue_napi or {}).items()}
    owners = {**_owners(seen), **told}
    wrong: list[str] = []
    agreed = 0
    for connection, queue in seen:
        cpu = queue_cpu[queue] if queue < len(queue_cpu) else None
        by_core = cpu is not None and connection.incoming_cpu is not None
        if by_core and connection.incoming_cpu != cpu:
            wrong.append(
                f"{_who(connection)} arrived on core {connection.incoming_cpu}, but queue {queue} belongs to core {cpu}"
            )
        elif owners[connection.napi_id or 0] != queue:
            wrong.append(f"{_who(connection)} arrived by NAPI {connection.napi_id}, which is not queue {queue}'s")
        elif by_core or told or len(set(owners.values())) > 1:
            agreed += 1
    checked = agreed + len(wrong)
    if len(wrong) >= 2 and len(wrong) > TOLERATED_SHARE * checked:
        reason = f"{len(wrong)} of {checked} connections did not arrive where the table says: {wrong[0]}"
        return Verification(Verdict.DISOBEYED, reason, checked)
    if agreed:
        by = "NAPI ids (RPS hides the cores)" if rps else "cores and NAPI ids"
        return Verification(
            Verdict.VERIFIED, f"{agreed} of {checked} connections arrived where the table says, by {by}", checked
        )
    if wrong:
        return Verification(Verdict.UNVERIFIED, f"there is only one connection, and {wrong[0]}", checked)
    return Verification(
        Verdict.UNVERIFIED, "all connections are on one queue that is not pinned to one core: nothing to compare", 0
    )


def judge_spread(
    connections: Sequence[Connection], table: Sequence[int], queue_cpu: Sequence[int | None], *, why: str
) -> Verification:
    """Where no bucket can be predicted (no key, another hash): do connections spread as the table spreads them?

    A device that keeps to one queue under a table of several is seen through once that is no accident. One that uses
    several may obey; more cannot be said, and `why` says the reason. By cores where all queues of the table are pinned,
    else by NAPI ids, each of which is a queue's.
    """
    shares = {queue: count / len(table) for queue, count in Counter(table).items()}
    if len(shares) < 2:
        return Verification(Verdict.UNVERIFIED, why)
    cores = {queue: queue_cpu[queue] if queue < len(queue_cpu) else None for queue in shares}
    by_core = None not in cores.values()
    places = [c.incoming_cpu if by_core else c.napi_id for c in connections]
    seen = Counter(place for place in places if place is not None)
    checked, what = seen.total(), "core" if by_core else "NAPI id"
    largest = max(shares.values())
    if by_core:
        per_core: Counter[int | None] = Counter()
        for queue, share in shares.items():
            per_core[cores[queue]] += share  # type: ignore[assignment]
        largest = max(per_core.values())
        stray = sum(count for core, count in seen.items() if core not in per_core)
        if stray >= 2 and stray > TOLERATED_SHARE * checked:
            reason = f"{stray} of {checked} connections arrived on cores that serve no queue of the table"
            return Verification(Verdict.DISOBEYED, reason, checked)
    if checked and max(seen.values()) > (1 - TOLERATED_SHARE) * checked and largest ** max(seen.values()) < CHANCE:
        [(place, count)] = seen.most_common(1)
        reason = (
            f"{count} of {checked} connections arrived on {what} {place}, but the table spreads them over "
            f"{len(shares)} queues"
        )
        return Verification(Verdict.DISOBEYED, reason, checked)
    spread = f"; {checked} connections were seen on {len(seen)} {what}s, and the table has {len(shares)} queues"
    return Verification(Verdict.UNVERIFIED, why + (spread if checked else ""), checked)


def _owners(seen: Sequence[tuple[Connection, int]]) -> dict[int, int]:
    """NAPI id -> the queue that most of its connections are predicted on, each queue given to one id only."""
    votes: dict[tuple[int, int], int] = defaultdict(int)
    for connection, queue in seen:
        votes[(connection.napi_id or 0, queue)] += 1
    owners: dict[int, int] = {}
    for (napi, queue), _ in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
        if napi not in owners and queue not in owners.values():
            owners[napi] = queue
    for napi, _ in votes:
        owners.setdefault(napi, -1)
    return owners


def _who(connection: Connection) -> str:
    return f"{connection.peer[0]}:{connection.peer[1]} of group {connection.group}"
