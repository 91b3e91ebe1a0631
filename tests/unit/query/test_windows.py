"""Window shapes."""

import pytest

import flexstream as fs
from flexstream import WindowSpec, sliding, tumbling
from flexstream.errors import FlexStreamError, QueryError


def test_a_tumbling_window_is_its_own_pane():
    spec = tumbling("10s")
    assert (spec.kind, spec.size_ns, spec.slide_ns, spec.pane_ns) == ("tumbling", 10**10, 10**10, 10**10)


def test_panes_are_the_greatest_common_divisor_also_when_size_is_no_multiple_of_slide():
    assert sliding("10s", every="1s").pane_ns == 10**9
    assert sliding("10s", every="4s").pane_ns == 2 * 10**9
    assert sliding("7s", every="3s").pane_ns == 10**9
    assert sliding("5s", every="5s").pane_ns == 5 * 10**9


@pytest.mark.parametrize("spec", [tumbling("1500ms"), sliding("10s", every="4s")], ids=str)
def test_dict_form_comes_back(spec):
    assert WindowSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    "make",
    [
        lambda: tumbling("0s"),
        lambda: tumbling("-1s"),
        lambda: tumbling("ten"),
        lambda: sliding("1s", every="2s"),
        lambda: sliding("1s", every="0s"),
        lambda: sliding("1d", every="1ns"),
        lambda: sliding("3600001ms", every="7ms"),
    ],
)
def test_shapes_that_cannot_work_are_refused(make):
    with pytest.raises(FlexStreamError):
        make()


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "tumbling",
        {},
        {"kind": "session", "size": "1s"},
        {"kind": "tumbling"},
        {"kind": ["tumbling"], "size": 1},
        {"kind": "tumbling", "size": "1s", "every": "1s"},
        {"kind": "sliding", "size": "1s"},
        {"kind": "tumbling", "size": None},
        {"kind": "tumbling", "size": "1s", 3: 4},
    ],
)
def test_bad_dict_forms_are_refused(body):
    with pytest.raises(FlexStreamError):
        WindowSpec.from_dict(body)


def test_a_gap_between_windows_is_refused_with_the_reason():
    with pytest.raises(QueryError, match="in no window"):
        sliding("1s", every="2s")


def test_a_plan_whose_cost_per_row_is_absurd_is_refused_with_the_number():
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")
    long = fs.sliding("65536s", every="1s")
    with pytest.raises(fs.QueryError, match=r"each of its windows: 65536 times .* the limit is 1024") as error:
        stream.query("q").window(long).agg(n=fs.distinct("k"))
    assert error.value.code == "too_costly"
    for beside in (fs.mode, fs.median):
        with pytest.raises(fs.QueryError, match="the limit is 1024"):
            stream.query("q").window(long).agg(n=beside("k"))
    with pytest.raises(fs.QueryError, match="65536 of them") as error:
        stream.query("q").window(long, allowed_lateness="1s")
    assert error.value.code == "too_costly"
    assert stream.query("q").window(long).agg(n=fs.count(), least=fs.min("k"), d=fs.approx_distinct("k")).bound()
