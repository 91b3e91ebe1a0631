"""What the Spark benchmark compares our sink with: code that runs in Spark's tasks, so it is a module of its own."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

ROW = "<qqqqqq8s22s"
BUFFER_BYTES = 1 << 16
RECEIVE_BYTES = 1 << 20


@dataclass
class Counted(WriterCommitMessage):
    rows: int


class CountingWriter(DataSourceArrowWriter):
    """Takes the Arrow batches as our sink does, and only counts their rows. The driver's commit keeps the sum."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[Any]) -> None:
        with open(self._path, "w") as file:  # another process than the benchmark's
            file.write(str(sum(message.rows for message in messages)))


class CountingDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counting"

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return CountingWriter(str(self.options["counted"]))


def row_sender(port: int) -> Callable[[Iterator[Any]], None]:
    """For foreachPartition: each row packed by `struct` and written to a buffered socket."""

    def send(rows: Iterator[Any]) -> None:
        pack = struct.Struct(ROW).pack
        with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("wb", BUFFER_BYTES) as file:
            for r in rows:
                millis = int(r.event_time.timestamp() * 1000)
                text, pad = r.event_type.encode(), r.pad.encode()
                file.write(pack(millis, r.campaign_id, r.user_id, r.page_id, r.ad_id, r.ip, text, pad))

    return send


class Discarding:
    """A TCP server that counts bytes, a thread per connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.received = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._receive, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _receive(self, sock: socket.socket) -> None:
        buffer, total = bytearray(RECEIVE_BYTES), 0
        with sock:
            while n := sock.recv_into(buffer):
                total += n
        with self._lock:
            self.received += total

    def take_rows(self) -> int:
        """Rows since the last call; all their connections have been closed by the senders."""
        while self._threads:
            self._threads.pop().join()
        with self._lock:
            received, self.received = self.received, 0
        return received // struct.calcsize(ROW)

    def close(self) -> None:
        self._listener.close()
