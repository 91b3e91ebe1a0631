"""An engine in a process of its own, for benchmarks: commands as JSON lines on standard input, one answer
each.

  {"command": "open", "stream": "ads1"}   a fresh YSB stream with its query; a session's end is a stream's end
  {"command": "status"}                   Engine.status()
  {"command": "close", "stream": "ads1"}  counts results and cancels the query

The end of the input is the end of the process.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import flexstream as fs
from flexstream.testing.ysb import YSB_STREAM


def ysb_stream(name: str, *, max_disorder: str = "0ms") -> fs.Stream:
    """The YSB stream under another name."""
    return fs.Stream(
        name, YSB_STREAM.schema, key=list(YSB_STREAM.key), time=YSB_STREAM.time, max_disorder=max_disorder
    )


def ysb_query(stream: fs.Stream, name: str, window: fs.WindowSpec | None = None) -> fs.Query:
    """Views per campaign and window (10 s, tumbling, unless told otherwise)."""
    views = stream.query(name).filter(fs.col("event_type") == b"view")
    return views.window(window or fs.tumbling("10s")).agg(n=fs.count())


def serve(engine: fs.Engine) -> None:
    host, port = engine.data_address or ("", 0)
    answer({"host": host, "port": port})
    for line in sys.stdin:
        request = json.loads(line)
        command, name = request["command"], request.get("stream", "")
        if command == "open":
            stream = ysb_stream(name)
            engine.add(stream)
            engine.submit(ysb_query(stream, name))
            answer({})
        elif command == "status":
            answer(engine.status())
        elif command == "close":
            counted = sum(int(sum(batch.column("n").to_pylist())) for batch in engine.results(name))
            status = engine.status()
            engine.cancel(name)
            answer({"counted": counted, "query": status["queries"][name], "stream": status["streams"][name]})
        else:
            raise SystemExit(f"unknown command {command!r}")


def answer(body: dict[str, Any]) -> None:
    print(json.dumps(body), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--cpus", default="0")
    parser.add_argument("--compile", default="off", help="off: the generic variant; require: the compiled one")
    parser.add_argument("--data-dir", help="keep the result log there, not in memory")
    options = parser.parse_args()
    cpus = [int(cpu) for cpu in options.cpus.split(",")]
    with fs.Engine(workers=cpus, groups=options.groups, listen="127.0.0.1:0", compile=options.compile,
                   data_dir=options.data_dir) as engine:  # fmt: skip
        serve(engine)


if __name__ == "__main__":
    main()
