"""The command line against a daemon with a fake engine: text for people, JSON for programs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flexstream.cli import app, main, send, top
from flexstream.client.http import Client
from flexstream.daemon.server import Daemon
from flexstream.errors import ResultLogError
from flexstream.state.results.result_log import ResultLog
from flexstream.testing.ysb import YSB_STREAM
from tests.unit.daemon.fake_engine import ADS, VIEWS, FakeEngine
from tests.waiting import WAIT_S


class Running:
    """A daemon on its own thread, and the command line pointed at it."""

    def __init__(
        self, engine: FakeEngine, capsys: pytest.CaptureFixture[str], token: str | None = None
    ) -> None:
        self.engine = engine
        self._capsys = capsys
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._daemon = self._call(lambda: self._made(token))
        self.address = f"127.0.0.1:{self._daemon.control_address[1]}"

    async def _made(self, token: str | None) -> Daemon:
        daemon = Daemon(self.engine, token=token)
        await daemon.start()
        return daemon

    def _call(self, make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(WAIT_S)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output of the command; with a code other than 0 its standard error."""
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--url", self.address])
        captured = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, captured.err + captured.out
        return captured.err if code else captured.out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def stop(self) -> None:
        self._call(self._daemon.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Running]:
    running = Running(FakeEngine(), capsys)
    yield running
    running.stop()


@pytest.fixture
def query_file(tmp_path: Path) -> str:
    path = tmp_path / "views.json"
    path.write_text(VIEWS.to_json())
    return str(path)


def test_submit_list_show_and_cancel(cli: Running, query_file: str) -> None:
    assert "no queries" in cli("queries", "list")
    assert "query ysb runs on stream ads" in cli("submit", query_file)
    assert "already" in cli("submit", query_file)
    assert cli.json("submit", query_file)["created"] is False
    assert "ysb" in cli("queries", "list")
    assert cli.json("queries", "list")["queries"][0]["name"] == "ysb"
    assert "state running" in cli("queries", "show", "ysb")
    assert "variant generic" in cli("queries", "show", "ysb")
    assert cli.json("queries", "show", "ysb")["plan"] == VIEWS.to_dict()
    assert cli("queries", "show", "ysb", "--code") == VIEWS.explain("code")
    assert cli.json("queries", "show", "ysb", "--code") == {"name": "ysb", "code": VIEWS.explain("code")}
    assert cli.json("cancel", "ysb") == {"name": "ysb", "cancelled": True}
    assert cli("cancel", "ysb", code=1).startswith("flexstream: there is no query 'ysb'\n  hint: ")


def test_submit_takes_an_object_of_a_module(
    cli: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_queries_of_test_cli.py").write_text(
        "from tests.unit.daemon.fake_engine import VIEWS\nviews = VIEWS\nmake = lambda: VIEWS\nwrong = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.json("submit", "my_queries_of_test_cli:views")["created"] is True
    assert cli.json("submit", "my_queries_of_test_cli:make")["created"] is False
    assert "not a Query" in cli("submit", "my_queries_of_test_cli:wrong", code=1)
    assert "cannot find" in cli("submit", "my_queries_of_test_cli:nothing", code=1)
    assert "cannot find" in cli("submit", "no_such_module_at_all:x", code=1)
    assert "neither a file nor" in cli("submit", "something", code=1)
    assert "cannot read" in cli("submit", "missing.json", code=1)


def test_streams_are_added_from_a_file_and_listed(cli: Running, tmp_path: Path) -> None:
    file = tmp_path / "ads.toml"
    file.write_text(
        'name = "ads"\nkey = "campaign_id"\ntime = "event_time"\n\n[fields]\n'
        'event_time = "timestamp[ms]"\ncampaign_id = "i64"\nevent_type = "bytes[8]"\n'
    )
    assert "no streams" in cli("streams", "list")
    assert "24 bytes to 127.0.0.1:7400" in cli("streams", "add", str(file))
    assert cli.json("streams", "add", str(file))["schema_hash"] == ADS.schema.hash
    assert "campaign_id" in cli("streams", "list")
    assert cli.json("streams", "list")["streams"][0]["groups"] == 8


def test_tail_shows_the_last_rows_a_table_or_json_lines(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    cli.engine.emit("ysb", 50)
    lines = [json.loads(line) for line in cli("tail", "ysb", "--no-follow", "-n", "3", "--json").splitlines()]
    assert [line["campaign_id"] for line in lines] == [47, 48, 49]
    text = cli("tail", "ysb", "--no-follow", "--offset", "45").splitlines()
    assert text[0].split() == ["window_start", "window_end", "campaign_id", "n", "group", "revision", "complete"]
    assert len(text) == 6
    assert "no query 'nope'" in cli("tail", "nope", "--no-follow", code=1)


def test_tail_follows_until_it_has_enough(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    cli.engine.emit("ysb", 2)
    timer = threading.Timer(0.3, lambda: cli.engine.emit("ysb", 5))
    timer.start()
    lines = cli("tail", "ysb", "--limit", "6", "--json").splitlines()
    timer.join()
    assert [json.loads(line)["n"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_tail_shows_late_rows(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    cli.engine.emit_late("ysb", [7])
    assert json.loads(cli("tail", "ysb", "--late", "--json", "--no-follow"))["campaign_id"] == 7


@pytest.mark.parametrize("options", [["--json", "--offset", "0"], ["--parquet", "out"]])
def test_a_reply_that_breaks_off_is_an_error_not_an_end(
    cli: Running, query_file: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("submit", query_file)
    cli.engine.emit("ysb", 10_000)
    read = ResultLog.read

    def fails_later(log: ResultLog, offset: int, max_rows: int) -> list[pa.RecordBatch]:
        if offset > 0:
            raise ResultLogError("the disk is gone", code="log_io")
        return read(log, offset, max_rows)

    monkeypatch.setattr(ResultLog, "read", fails_later)
    assert "ended early" in cli("tail", "ysb", *options, code=1)


def test_tail_exports_to_parquet_and_goes_on_where_it_ended(
    cli: Running, query_file: str, tmp_path: Path
) -> None:
    cli("submit", query_file)
    out = str(tmp_path / "out")
    cli.engine.emit("ysb", 5)
    assert cli.json("tail", "ysb", "--parquet", out)["rows"] == 5
    cli.engine.emit("ysb", 3)
    assert cli.json("tail", "ysb", "--parquet", out) == {
        "directory": out,
        "first_offset": 5,
        "rows": 3,
        "files": 2,
    }
    assert pq.read_table(out).column("campaign_id").to_pylist() == list(range(8))


def test_status_nic_and_placement(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    text = cli("status")
    for word in ("running", "ads", "ysb", "10", "p1", "no table in user space"):
        assert word in text
    assert cli.json("status")["daemon"]["pid"]
    assert "no table in user space" in cli("nic", "show")
    assert cli.json("nic", "show")["nic"]["kind"] == "user"
    assert "automatic balancing: off" in cli("rebalance", "status")
    assert cli.json("rebalance", "status")["placement"] == [0, 1] * 4


def test_sessions_are_listed_and_ended(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    assert "p1" in cli("sessions", "list")
    assert cli.json("sessions", "list", "--stream", "ads")["sessions"][0]["stream"] == "ads"
    assert "session p1 of stream ads: ended" in cli("sessions", "end", "p1")
    assert cli.json("sessions", "end", "p1", "--stream", "ads", "--kind", "sink")["kind"] == "sink"
    ended = [call for call in cli.engine.calls if call.startswith("end_session")]
    assert ended == ["end_session ads p1 None", "end_session ads p1 sink"]
    assert "no streams have a session 'p2'" in cli("sessions", "end", "p2", code=1)
    assert "no session 'a/b?'" in cli("sessions", "end", "a/b?", "--stream", "ads", code=1)


def test_top_once_shows_cores_groups_and_queries(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    text = cli("top", "--once", "--interval", "0.1")
    for word in ("M rows/s", "WORKER", "groups of ads", "ysb"):
        assert word in text
    body = cli.json("top", "--once", "--interval", "0.1")
    assert [core["worker"] for core in body["cores"]] == [0, 1]
    assert body["queries"][0]["query"] == "ysb"


def test_rates_are_differences_over_time_and_never_negative() -> None:
    def look(at: float, rows: int) -> dict[str, Any]:
        workers = [{"worker": 0, "rows": rows, "bytes": 78 * rows, "busy_share": 0.5}]
        streams = {"ads": {"groups": [rows, 0]}}
        return {
            "at": at,
            "status": {"state": "running", "workers": workers, "streams": streams, "queries": {}},
        }

    rates = top.rates_of(look(1.0, 100), look(3.0, 500))
    assert rates["cores"][0]["rows_per_s"] == 200.0
    assert rates["groups"] == {"ads": [200.0, 0.0]}
    assert top.rates_of(look(1.0, 500), look(2.0, 10))["cores"][0]["rows_per_s"] == 0.0
    assert top.picture([0.0, 50.0, 100.0]) == [f" {top.SHADES[4]}@"]


class FakeProducer:
    sent: list[Any] = []

    def __enter__(self) -> FakeProducer:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def send(self, rows: Any) -> None:
        self.sent.append(rows)

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    FakeProducer.sent = []
    monkeypatch.setattr(send, "_producer", lambda client, stream: FakeProducer())
    return FakeProducer.sent


def test_send_generates_benchmark_rows_and_adds_the_stream(cli: Running, sent: list[Any]) -> None:
    body = cli.json("send", "--generate", "ysb", "--rows", "250000", "--keys", "10")
    assert (body["stream"], body["rows"], body["bytes"]) == ("ads", 250_000, 250_000 * 78)
    rows = np.concatenate(sent)
    assert rows.dtype == YSB_STREAM.schema.dtype
    assert len(set(rows["campaign_id"].tolist())) == 10
    assert (np.diff(rows["event_time"]) >= 0).all()
    assert "ads" in cli.engine.streams
    assert "sent 10 rows" in cli("send", "--generate", "ysb", "--rows", "10")


@pytest.mark.parametrize("form", ["csv", "csv_iso", "parquet", "jsonl"])
def test_send_reads_csv_parquet_and_json_lines(
    cli: Running, sent: list[Any], tmp_path: Path, form: str
) -> None:
    cli.engine.add(ADS)
    path = tmp_path / f"rows.{form.removesuffix('_iso')}"
    times = [1_700_000_000_000, 1_700_000_001_000]
    if form == "csv":
        path.write_text(f"event_type,event_time,campaign_id\nview,{times[0]},1\nclick,{times[1]},2\n")
    elif form == "csv_iso":
        iso = ["2023-11-14T22:13:20", "2023-11-14T22:13:21"]
        path.write_text(f"event_time,campaign_id,event_type\n{iso[0]},1,view\n{iso[1]},2,click\n")
    elif form == "parquet":
        columns = {
            "event_time": pa.array(times, pa.timestamp("ms")),
            "campaign_id": [1, 2],
            "event_type": [b"view", b"click"],
        }
        pq.write_table(pa.table(columns), path)
    else:
        path.write_text(
            '{"event_time": "2023-11-14T22:13:20.000", "campaign_id": 1, "event_type": "view"}\n'
            '{"event_time": "2023-11-14T22:13:21.000", "campaign_id": 2, "event_type": "click"}\n'
        )
    assert cli.json("send", str(path), "--stream", "ads")["rows"] == 2
    [rows] = sent
    assert rows["event_time"].tolist() == times
    assert rows["campaign_id"].tolist() == [1, 2]
    assert rows["event_type"].tolist() == [b"view", b"click"]


def test_send_names_what_is_wrong_with_a_file(cli: Running, sent: list[Any], tmp_path: Path) -> None:
    cli.engine.add(ADS)
    path = tmp_path / "rows.csv"
    path.write_text("event_time,campaign_id\n1,2\n")
    assert "rows lack event_type" in cli("send", str(path), "--stream", "ads", code=1)
    path.write_text("event_time,campaign_id,event_type\n1,notanumber,view\n")
    assert "notanumber" in cli("send", str(path), "--stream", "ads", code=1)
    assert "No such file" in cli("send", str(tmp_path / "no.csv"), "--stream", "ads", code=1)
    assert "from its name" in cli("send", str(tmp_path / "rows.xls"), "--stream", "ads", code=1)
    assert "no stream 'nope'" in cli("send", str(path), "--stream", "nope", code=1)
    assert "--stream NAME" in cli("send", str(path), code=2)
    assert "either a file or" in cli("send", code=2)


def test_an_unreachable_daemon_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--url", "127.0.0.1:1"])
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("flexstream: no daemon answers at 127.0.0.1:1")
    assert lines[1].startswith("  hint: ")
    assert len(lines) == 2
    with pytest.raises(SystemExit):
        main(["status", "--url", "127.0.0.1:1", "--json"])
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "unreachable"


def test_a_token_is_read_from_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    running = Running(FakeEngine(), capsys, token="0123456789abcdef")
    try:
        file = tmp_path / "token"
        file.write_text("0123456789abcdef\n")
        assert "token is missing or wrong" in running("status", code=1)
        assert "running" in running("status", "--token-file", str(file))
        file.write_text("wrong\n")
        assert "token is missing or wrong" in running("status", "--token-file", str(file), code=1)
    finally:
        running.stop()


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["tail"], ["tail", "x", "--rows", "-1"], ["nonsense"], ["top", "--interval", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2, arguments
        assert capsys.readouterr().err


def all_commands() -> list[list[str]]:
    found = [[command.name] for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found += [[group.name, command.name] for command in group.typer_instance.registered_commands]
    return [[str(part) for part in command] for command in found]


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_every_command_has_json_an_example_and_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert not ended.value.code
    assert "--json" in text
    assert "Example:" in text


def test_config_check_says_where_each_value_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flexstream.toml"
    file.write_text("groups = 16\n")
    monkeypatch.setenv("FLEXSTREAM_WORKERS", "2")
    arguments = ["config", "check", "--config", str(file), "--max-sessions", "9"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert not ended.value.code
    assert body["settings"]["groups"] == {
        "value": 16,
        "source": f"file {file}",
        "help": body["settings"]["groups"]["help"],
    }
    assert body["settings"]["workers"]["source"] == "environment FLEXSTREAM_WORKERS"
    assert body["settings"]["max_sessions"]["source"] == "flag --max-sessions"
    assert body["settings"]["frame_bytes"]["source"] == "default"
    file.write_text("grups = 16\n")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "did you mean groups" in out
    assert "1 problems" in out


def test_importing_the_command_line_does_not_import_rich_or_pandas() -> None:
    import subprocess
    import sys

    unwanted = ("rich", "pandas", "pyarrow", "aiohttp")
    code = f"import flexstream.cli, sys; print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.strip() == "[]"


def test_the_live_screen_shows_cores_groups_and_queries() -> None:
    import io

    from rich.console import Console

    engine = FakeEngine()
    engine.add(ADS)
    engine.submit(VIEWS)
    look = {"at": 0.0, "status": engine.status()}
    out = io.StringIO()
    Console(file=out, width=120).print(top._screen(top.rates_of(look, {**look, "at": 1.0})))
    for word in ("running", "cores", "groups of ads", "queries", "ysb"):
        assert word in out.getvalue()


def test_every_command_is_in_the_operations_manual(project: Path) -> None:
    text = (project / "docs" / "operations.md").read_text()
    assert [command for command in all_commands() if f"`{' '.join(command)}" not in text] == []


HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\nc\ud800"
ESCAPED = r"a\x1b]0;owned\x07\x9b31m\u202eb\nc\ud800"


def with_hostile_names(engine: FakeEngine) -> None:
    """As if producers, keys and errors said whatever they like to whoever looks."""
    status = engine.status()
    for of in ("sessions", "held_by"):
        status["streams"]["ads"][of][0]["producer"] = HOSTILE
    hot = {"group": 1, "worker": 0, "percent": 50.0, "text": f"group 1: key {HOSTILE} alone"}
    status["rebalance"] = {
        "automatic": True, "verdict": "moved", "text": HOSTILE, "hot": [hot], "too_hot": [hot], "workers": [],
        "under_way": [], "frozen": [], "split": [],
    }  # fmt: skip
    status["queries"]["ysb"]["error"] = HOSTILE
    status["workers"][0]["stalled"] = HOSTILE
    status["nic"]["reason"] = HOSTILE
    status["failed_parts"] = {"latency": HOSTILE}
    status["connections"]["closed"] = {HOSTILE: 1}
    engine.status = lambda: status  # type: ignore[method-assign]


def assert_harmless(out: str) -> None:
    assert ESCAPED in out
    assert [char for char in out if char != "\n" and not char.isprintable()] == []
    assert not any(line.startswith("c\\ud800") for line in out.splitlines())


@pytest.mark.parametrize("command", [("status",), ("top", "--once", "-i", "0.1"), ("rebalance", "status")])
def test_what_came_from_outside_is_shown_escaped(cli: Running, query_file: str, command: tuple[str, ...]) -> None:
    cli("submit", query_file)
    with_hostile_names(cli.engine)
    assert_harmless(cli(*command))


def test_the_live_view_shows_what_came_from_outside_escaped(cli: Running, query_file: str) -> None:
    import io

    from rich.console import Console

    cli("submit", query_file)
    with_hostile_names(cli.engine)
    look = {"at": 1.0, "status": cli.engine.status()}
    out = io.StringIO()
    Console(file=out, width=400, color_system=None).print(top._screen(top.rates_of(look, {**look, "at": 2.0})))
    assert_harmless(out.getvalue())


def test_keys_that_hold_escapes_are_tailed_escaped(cli: Running, query_file: str) -> None:
    cli("submit", query_file)
    row = {"campaign_id": HOSTILE, "n": 1, HOSTILE: [HOSTILE]}
    lines = iter([json.dumps(row)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "lines", lambda *_, **__: lines)
        out = cli("tail", "ysb", "--no-follow")
    assert_harmless(out)


def test_an_error_that_quotes_the_outside_is_shown_escaped(cli: Running) -> None:
    def fail() -> Any:
        raise ResultLogError(f"cannot read {HOSTILE}", hint=HOSTILE)

    cli.engine.status = fail  # type: ignore[method-assign]
    assert_harmless(cli("status", code=1))
