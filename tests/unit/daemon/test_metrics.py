"""The Prometheus page says everything that the status says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from flexstream.daemon.metrics import render
from tests.unit.daemon.fake_engine import ADS, VIEWS, FakeEngine

SAMPLE = re.compile(r'^([a-z_][a-z0-9_]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+|nan|inf)$')


def full_status() -> dict[str, Any]:
    engine = FakeEngine()
    engine.add(ADS)
    engine.submit(VIEWS)
    return engine.status()


def numbered(value: Any, numbers: Iterator[int]) -> Any:
    """The same status with a different number at every numeric leaf."""
    if isinstance(value, dict):
        return {key: numbered(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [numbered(item, numbers) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return next(numbers)


def leaves(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def test_every_number_of_the_status_is_on_the_page() -> None:
    status = numbered(full_status(), count(100_001))
    text = render(status)
    missing = [leaf for leaf in leaves(status) if str(leaf) not in text]
    assert leaves(status)
    assert missing == []


def test_every_line_is_valid_and_each_metric_has_one_type_and_one_block() -> None:
    seen: list[str] = []
    current = ""
    for line in render(full_status()).splitlines():
        if line.startswith("# TYPE "):
            current = line.split()[2]
            assert line.split()[3] in ("counter", "gauge")
            seen.append(current)
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            assert match[1] == current
    assert len(seen) == len(set(seen))
    assert all(name.startswith("flexstream_") for name in seen)


def test_samples_are_unique() -> None:
    names = [line.rpartition(" ")[0] for line in render(full_status()).splitlines() if line[0] != "#"]
    assert len(names) == len(set(names))


def test_counters_end_in_total_and_only_counters_do() -> None:
    for line in render(full_status()).splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name.endswith("_total") == (kind == "counter"), name


def test_trouble_is_a_one_and_its_absence_a_zero() -> None:
    status = full_status()
    assert "flexstream_result_log_failing" + '{query="ysb"} 0' in render(status)
    status["queries"]["ysb"]["log"]["error"] = "disk full"
    status["queries"]["ysb"]["state"] = "failed"
    status["workers"][0]["stalled"] = "the result log is full"
    text = render(status)
    assert 'flexstream_result_log_failing{query="ysb"} 1' in text
    assert 'flexstream_query_failed{query="ysb",stream="ads"} 1' in text
    assert 'flexstream_worker_stalled{worker="0",cpu="0"} 1' in text
    assert 'flexstream_worker_stalled{worker="1",cpu="1"} 0' in text


def test_labels_are_escaped() -> None:
    text = render({"connections": {"closed": {'a"b\\c\nd': 3}}})
    assert 'reason="a\\"b\\\\c\\nd"} 3' in text


def test_a_status_with_parts_missing_or_null_still_makes_a_page() -> None:
    assert "flexstream_state" in render({})
    assert "None" not in render(
        {"latency": {"count": 0, "p50_ms": None}, "streams": {"a": {"watermark": None}}}
    )
