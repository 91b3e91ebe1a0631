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
        assert kept["bytes"] <= bound + batch
        found = as_rows(engine.late("q", offset=kept["first_offset"]))
        assert len(found) == 800_000 - kept["first_offset"]
        assert found[-1]["x"] == 39
        with pytest.raises(fs.FlexStreamError, match="is gone"):
            next(engine.late("q", offset=0))
