"""The pages on streams and queries: every Python block runs, top to bottom, in one namespace per page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["streams.md", "queries.md"])
def test_every_python_block_runs(page, capsys):
    text = (DOCS / page).read_text("utf-8")
    blocks = [(match.start(), match[1]) for match in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]
    assert blocks
    namespace = {}
    for start, block in blocks:
        line = text.count("\n", 0, start) + 1
        exec(compile("\n" * line + block, page, "exec"), namespace)
