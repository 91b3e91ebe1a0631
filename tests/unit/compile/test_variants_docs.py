"""docs/compiled.md: its Python runs, and the C that it shows is the C that is made."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "compiled.md"


def test_every_python_block_runs_and_the_c_shown_is_generated(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXSTREAM_CACHE", str(tmp_path))
    text = PAGE.read_text("utf-8")
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, PAGE.name, "exec"), namespace)
    (shown,) = re.findall(r"^```c\n(.*?)^```", text, re.M | re.S)
    assert shown in namespace["code"]
