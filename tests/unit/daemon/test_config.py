"""Settings: a flag beats the environment beats the file beats the default, and every mistake is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexstream.addresses import is_loopback, split_address
from flexstream.daemon.config import SETTINGS, Resolution, resolve
from flexstream.errors import ConfigError


def given(
    tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: object
) -> Resolution:
    file = tmp_path / "flexstream.toml"
    file.write_text(text)
    return resolve(flags, {"HOME": str(tmp_path), **(environ or {})}, file)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    text = 'groups = 16\nmax_sessions = 7\nidle_timeout_s = "2m"\n'
    found = given(tmp_path, text, {"FLEXSTREAM_GROUPS": "32", "FLEXSTREAM_MAX_SESSIONS": "8"}, groups="64")
    config = found.config()
    assert (config.groups, config.max_sessions, config.idle_timeout_s, config.frame_bytes) == (
        64,
        8,
        120.0,
        32768,
    )
    sources = {name: found.settings[name].source for name in ("groups", "max_sessions", "frame_bytes")}
    assert sources == {
        "groups": "flag --groups",
        "max_sessions": "environment FLEXSTREAM_MAX_SESSIONS",
        "frame_bytes": "default",
    }
    assert found.settings["idle_timeout_s"].source.startswith("file ")


def test_the_defaults_stay_on_loopback_and_need_no_token(tmp_path: Path) -> None:
    config = given(tmp_path).config()
    assert (config.control, config.data) == (("127.0.0.1", 7401), ("127.0.0.1", 7400))
    assert config.token is None
    assert config.data_dir == tmp_path / ".local/state/flexstream"
    assert config.engine_arguments()["listen"] == "127.0.0.1:7400"
    assert config.engine_arguments()["compile"] == "auto"


def test_systemd_state_directory_is_the_default_data_dir(tmp_path: Path) -> None:
    found = given(tmp_path, "", {"STATE_DIRECTORY": "/var/lib/flexstream"})
    assert found.config().data_dir == Path("/var/lib/flexstream")
    assert found.settings["data_dir"].source == "environment STATE_DIRECTORY"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("workers", "2", 2),
        ("compile", "require", "require"),
        ("workers", "0,3", [0, 3]),
        ("retention_bytes", "2GiB", 2 << 30),
        ("retention_bytes", "none", None),
        ("retention_s", "7d", 7 * 86400.0),
        ("hello_timeout_s", "1.5", 1.5),
        ("busy_poll", "yes", True),
        ("control", "[::1]:80", ("::1", 80)),
        ("control", "localhost", ("localhost", 7401)),
    ],
)
def test_values_are_read_as_people_write_them(
    tmp_path: Path, name: str, value: str, expected: object
) -> None:
    assert getattr(given(tmp_path, **{name: value}).config(), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("groups", "0"),
        ("groups", "many"),
        ("workers", "0,0"),
        ("workers", "-1"),
        ("control", "127.0.0.1:99999"),
        ("data", ":7400"),
        ("idle_timeout_s", "soon"),
        ("compile", "always"),
        ("retention_bytes", "-1"),
        ("busy_poll", "maybe"),
        ("nic", "magic"),
        ("log_level", "loud"),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_the_fix(tmp_path: Path, name: str, value: str) -> None:
    found = given(tmp_path, "", {f"FLEXSTREAM_{name.upper()}": value})
    with pytest.raises(ConfigError) as caught:
        found.config()
    text = str(caught.value)
    assert name in text
    assert repr(value) in text
    assert f"environment FLEXSTREAM_{name.upper()}" in text
    assert "hint: give" in text


def test_an_unknown_key_suggests_the_near_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'retention_byte'; did you mean retention_bytes"):
        given(tmp_path, "retention_byte = 3").config()


def test_every_variable_that_the_docs_name_is_known(project: Path, tmp_path: Path) -> None:
    pages = [*project.glob("docs/*.md"), project / "README.md", *project.glob("packaging/*")]
    named = {name for page in pages for name in re.findall(r"FLEXSTREAM_[A-Z_]*[A-Z]", page.read_text())}
    assert {"FLEXSTREAM_NIC_DIR", "FLEXSTREAM_NIC_WAY", "FLEXSTREAM_TOKEN"} <= named
    for variable in sorted(named):
        assert given(tmp_path, environ={variable: "1"}).warnings == [], variable


def test_an_unknown_variable_is_a_warning(tmp_path: Path) -> None:
    found = given(tmp_path, "", {"FLEXSTREAM_WORKER": "3", "FLEXSTREAM_DEBUG": "1"})
    assert found.problems == []
    assert len(found.warnings) == 1
    assert "FLEXSTREAM_WORKERS" in found.warnings[0]


def test_all_problems_are_collected(tmp_path: Path) -> None:
    found = given(tmp_path, 'groups = 0\nworkers = "x"\nspeed = 3\n')
    assert {problem.code for problem in found.problems} == {"bad_setting", "unknown_setting"}
    assert len(found.problems) == 3


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flexstream\.toml.*line 2"):
        given(tmp_path, "groups = 3\ngroups == 4\n").config()


def test_a_missing_named_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve({}, {"HOME": "/x"}, tmp_path / "no.toml").config()


@pytest.mark.parametrize("name", ["control", "data"])
def test_listening_off_loopback_needs_a_token_file(tmp_path: Path, name: str) -> None:
    port = {"control": 7401, "data": 7400}[name]
    with pytest.raises(ConfigError, match="token-file") as caught:
        given(tmp_path, **{name: f"0.0.0.0:{port}"}).config()
    assert caught.value.code == "token_needed"
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    found = given(tmp_path, token_file=str(token), **{name: f"0.0.0.0:{port}"})
    assert found.config().token == "0123456789abcdef0123456789abcdef"
    assert found.warnings == []


def test_an_empty_missing_or_open_token_file_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        given(tmp_path, token_file=str(token)).config()
    token.write_text("\n")
    with pytest.raises(ConfigError, match="no token in its first line"):
        given(tmp_path, token_file=str(token)).config()
    token.chmod(0o600)
    token.write_text("short\n")
    with pytest.raises(ConfigError, match="is too short"):
        given(tmp_path, token_file=str(token)).config()
    token.write_text("0123456789abcdef\n")
    assert given(tmp_path, token_file=str(token)).config().token == "0123456789abcdef"
    for mode in (0o644, 0o640, 0o602):
        token.chmod(mode)
        with pytest.raises(ConfigError, match="open to users other than its owner") as caught:
            given(tmp_path, token_file=str(token)).config()
        assert "chmod 600" in str(caught.value.hint)


def test_both_ports_on_one_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both use port 7400"):
        given(tmp_path, control="127.0.0.1:7400").config()


def test_only_loopback_addresses_count_as_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example")] == [False] * 4
    assert split_address("::1", 5) == ("::1", 5)


def test_every_setting_is_in_the_operations_manual(project: Path) -> None:
    text = (project / "docs" / "operations.md").read_text()
    assert [name for name in SETTINGS if f"| `{name}` |" not in text] == []
