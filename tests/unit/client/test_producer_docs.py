"""docs/producers.md: every Python block runs, top to bottom, against an engine that listens."""

import ast
import asyncio
import inspect
import re
from pathlib import Path

import flexstream as fs

PAGE = Path(__file__).parents[3] / "docs" / "producers.md"
ADS = fs.Stream("ads", {"t": "timestamp[ms]", "ad": "i64"}, key="ad", time="t")
CONTROL_PORT = '"127.0.0.1:7401"'


def blocks() -> list[tuple[int, str]]:
    """(line, code) of each Python block."""
    text = PAGE.read_text("utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text.count("\n", 0, match.start()) + 1, match[1]) for match in found]


def test_every_python_block_runs():
    with fs.Engine(listen="127.0.0.1:0", groups=8, pin=False) as engine:
        engine.add(ADS)
        host, port = engine.data_address
        producer = fs.Producer(f"tcp://{host}:{port}", stream="ads")  # of the blocks that make none
        namespace = {"__name__": "producers.md", "producer": producer}
        sent = 0
        try:
            for line, code in blocks():
                assert CONTROL_PORT in code or "Producer(" not in code, f"line {line}: another address"
                code = code.replace(CONTROL_PORT, f'"tcp://{host}:{port}"')  # the engine has no control port
                compiled = compile(
                    "\n" * line + code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
                )
                namespace["producer"] = producer
                if compiled.co_flags & inspect.CO_COROUTINE:
                    asyncio.run(eval(compiled, namespace))
                else:
                    exec(compiled, namespace)
                sent += 1000
        finally:
            producer.close()
        engine.finish(timeout=60)
        assert sent >= 3000
        assert engine.status()["streams"]["ads"]["ledger"]["received"] == sent
