"""What can be ordered of an engine's workers while rows arrive: groups moved, split and joined; and how it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from flexstream.health import health
from flexstream.moving import GroupMove, Mover
from flexstream.rebalancing import Rebalancer

if TYPE_CHECKING:
    from flexstream.engine import Engine


class Orders(ABC):
    """A part of Engine. Errors of all: EngineError, and the group is served where it was."""

    mover: Mover
    rebalancer: Rebalancer

    @abstractmethod
    def _check_open(self) -> None:
        """Raises EngineError when the engine is closed."""

    def move(self, targets: Mapping[int, int], reason: str = "asked for") -> list[GroupMove]:
        """Move groups to workers, {group: worker}, while rows arrive. Returns when they are settled there."""
        self._check_open()
        return self.mover.move(targets, reason)

    def split(self, group: int, workers: Iterable[int]) -> dict[str, Any]:
        """Let these workers serve connections of the group beside its owner, which goes on firing its windows.

        A producer that knows lanes is asked for one for each of them; otherwise the group needs two connections.
        Automatic balancing undoes it when the group is not hot: freeze the group to keep it.
        """
        self._check_open()
        return self.rebalancer.split(group, workers)

    def unsplit(self, group: int) -> dict[str, Any]:
        """The group's owner serves all its connections again; lanes end. Nothing to do if it is not split."""
        self._check_open()
        return self.rebalancer.unsplit(group)

    def health(self) -> dict[str, Any]:
        """{"state", "problem"}: None when all is well. Cheap, and no part of `status`, which may fail by itself."""
        return health(cast("Engine", self))
