"""What the daemon asks of an engine: `flexstream.Engine`, or anything that does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from flexstream.query import Query
    from flexstream.rebalancing import Rebalancer
    from flexstream.state.result_log import ResultLog
    from flexstream.stream import Stream


class EngineAPI(Protocol):
    """All methods may be called from any thread and may block; the daemon calls them off its event loop."""

    @property
    def groups(self) -> int: ...

    @property
    def streams(self) -> Mapping[str, Stream]: ...

    @property
    def queries(self) -> Mapping[str, Query]: ...

    @property
    def data_address(self) -> tuple[str, int] | None: ...

    @property
    def rebalancer(self) -> Rebalancer: ...

    def add(self, stream: Stream) -> Any: ...

    def submit(self, query: Query) -> Any: ...

    def cancel(self, name: str) -> Any: ...

    def result_log(self, name: str) -> ResultLog: ...

    def late_log(self, name: str) -> ResultLog: ...

    @property
    def staging(self) -> Any: ...

    def status(self) -> dict[str, Any]: ...

    def health(self) -> dict[str, Any]: ...

    def drain(self, timeout: float | None = None) -> list[Any]: ...

    def close(self) -> None: ...
