"""Late rows that come without end: the newest are kept, the others are counted."""

import pytest

import flexstream as fs
from tests.integration.small_engine import STREAM, counting, finish, many_rows, row
from tests.property.checks import as_rows


@pytest.mark.parametrize("on_disk", [True, False])
def test_late_rows_are_kept_up_to_a_bound_and_the_oldest_go_first(tmp_path, on_disk):
    bound = 4 << 20
    batch = 17 << 20  # the most that is written at once, and is there whole
    with fs.Engine(data_dir=tmp_path if on_disk else None, groups=8, pin=False, late_bytes=bound) as engine:
        engine.add(STREAM)
        engine.submit(counting())
        engine.feed("s", [row(1_000_000)])
        for number in range(40):
            rows = many_rows(20_000, 10)
            rows["x"] = number
            engine.feed("s", rows)
        finish(engine)
        status = engine.status()["queries"]["q"]
        kept = status["late_log"]
        assert status["late"] == kept["next_offset"] == 800_000
        assert 0 < kept["first_offset"] < 800_000
        assert engine.status()["streams"]["s"]["late_log"]["bytes"] <= bound + batch
        found = as_rows(engine.late("q", offset=kept["first_offset"]))
        assert len(found) == 800_000 - kept["first_offset"]
        assert found[-1]["x"] == 39
        with pytest.raises(fs.FlexStreamError, match="is gone"):
            next(engine.late("q", offset=0))


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_queries_of_a_stream_keep_no_more_late_rows_than_one_alone(tmp_path, on_disk):
    """A row is late for each of them, and is there once."""
    bound = 16 << 20
    batch = 17 << 20
    names = [f"q{number}" for number in range(6)]
    with fs.Engine(data_dir=tmp_path if on_disk else None, groups=8, pin=False, late_bytes=bound) as engine:
        engine.add(STREAM)
        for name in names:
            engine.submit(counting(name))
        engine.feed("s", [row(1_000_000)])
        for number in range(20):
            rows = many_rows(20_000, 10)
            rows["x"] = number
            engine.feed("s", rows)
        finish(engine)
        logs = {name: engine.status()["queries"][name]["late_log"] for name in names}
        assert all(log["next_offset"] == 400_000 for log in logs.values()), logs
        assert len({log["first_offset"] for log in logs.values()}) == 1, "they lost the same rows"
        kept = engine.status()["streams"]["s"]["late_log"]
        assert kept["bytes"] <= bound + batch
        assert kept["rows"] == 400_000 - logs["q0"]["first_offset"]
        for name, log in logs.items():
            found = as_rows(engine.late(name, offset=log["first_offset"]))
            assert len(found) == 400_000 - log["first_offset"], (name, log)
        engine.cancel("q0")
        engine.feed("s", many_rows(1000, 10))
        engine.flush()
    if on_disk:
        with fs.Engine(data_dir=tmp_path, groups=8, pin=False, late_bytes=bound // 4) as engine:
            engine.add(STREAM)
            for name in names[1:]:
                engine.submit(counting(name))
            engine.late_log("q1").enforce_retention()
            kept = engine.status()["streams"]["s"]["late_log"]["bytes"]
            being_written = batch
            assert kept <= bound // 4 + being_written, "what an earlier run left is under the same bound"
