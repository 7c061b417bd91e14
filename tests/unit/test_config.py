"""The configuration: precedence, names derived from the structs, and errors that name key, source, expected and found."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdxfer import config
from pdxfer.config import ConfigError, Key, load, render


def problems(file: Any = None, **given: Any) -> list[str]:
    given.setdefault("environ", {})
    with pytest.raises(ConfigError) as caught:
        load(file, **given)
    return caught.value.problems


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "pdxfer.toml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_are_valid_and_derived_ones_are_filled() -> None:
    effective = load(environ={"XDG_RUNTIME_DIR": "/x", "RUNTIME_DIRECTORY": "/run/a:/run/b"})
    assert effective.config.node.name
    assert effective.config.node.runtime_dir == "/run/a"
    assert effective.config.worker.socket == "/run/a/worker.sock"
    assert effective.origins["worker.socket"] == "derived"
    assert effective.origins["limits.open_timeout"] == "default"


def test_flag_over_environment_over_file_over_default(toml: Any) -> None:
    file = toml("[limits]\nopen_timeout = 1\nwant_timeout = 1\npush_timeout = 1.5\n")
    environ = {"PDXFER_LIMITS_OPEN_TIMEOUT": "2", "PDXFER_LIMITS_WANT_TIMEOUT": "2"}
    effective = load(file, environ=environ, flags={"limits.open_timeout": "3"})
    limits = effective.config.limits
    assert (limits.open_timeout, limits.want_timeout, limits.push_timeout, limits.ack_timeout) == (3, 2, 1.5, 20)
    assert effective.origins["limits.open_timeout"] == "flag --limits-open-timeout"
    assert effective.origins["limits.want_timeout"] == "environment PDXFER_LIMITS_WANT_TIMEOUT"
    assert effective.origins["limits.push_timeout"] == f"file {file}"


def test_the_file_may_be_named_by_the_environment(toml: Any) -> None:
    assert load(environ={"PDXFER_CONFIG": toml("[node]\nname = 'p'\n")}).config.node.name == "p"


def text_of(key: Key) -> str:
    """Any valid value of the key, as it is written in the environment."""
    value = msgspec.to_builtins(getattr(getattr(load(environ={}).config, key.table), key.name))
    if not key.is_scalar:
        return msgspec.json.encode(value).decode()
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


@pytest.mark.parametrize("key", list(config.every_key()), ids=lambda key: key.path)
def test_every_key_has_a_variable_and_a_flag(key: Key) -> None:
    environ = {key.variable: text_of(key)}
    assert load(environ=environ).origins[key.path] == f"environment {key.variable}"
    assert load(environ={}, flags={key.path: text_of(key)}).origins[key.path] == f"flag {key.flag}"


def test_every_key_is_rendered_as_toml_with_its_origin_and_reads_back(toml: Any) -> None:
    effective = load(environ={"PDXFER_NODE_NAME": 'a "quoted" name\\'})
    text = render(effective)
    assert 'name = "a \\"quoted\\" name\\\\"' in text
    assert "# environment PDXFER_NODE_NAME" in text
    document = tomllib.loads(text)
    for key in config.every_key():
        assert f"{key.name} " in text
        assert key.table in document
    assert load(toml(text), environ={}).config == effective.config


def test_unknown_keys_name_the_nearest(toml: Any) -> None:
    file = toml("[limits]\nopen_timout = 1\n[node]\nstall_deadline = 3\n[limit]\n")
    found = problems(file)
    assert any("limits.open_timout: unknown key" in p and "limits.open_timeout?" in p and file in p for p in found)
    assert any("node.stall_deadline" in p and "did you mean limits.stall_deadline?" in p for p in found)
    assert any("limit: unknown table" in p and "limits?" in p for p in found)


def test_unknown_variables_of_our_tables_are_errors_and_others_are_not() -> None:
    (found,) = problems(environ={"PDXFER_LIMITS_OPEN_TIMOUT": "1"})
    assert found == "PDXFER_LIMITS_OPEN_TIMOUT: unknown key (environment); did you mean PDXFER_LIMITS_OPEN_TIMEOUT?"
    assert problems(environ={"PDXFER_LIMIT_OPEN_TIMEOUT": "1"})  # a slip of the pen
    (found,) = problems(environ={"PDXFER_ADMIN_PORT_7970_TCP": "tcp://10.0.0.1:7970"})
    assert "enableServiceLinks" in found
    load(environ={"PDXFER_PORT": "tcp://10.0.0.1:80", "PDXFER_DEMO_CACHE": "/x", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"limits.open_timeout": "soon"},
            ["limits.open_timeout", "expected float", "'soon'", "flag --limits-open-timeout"],
        ),
        ({"limits.max_rooms": "1.5"}, ["limits.max_rooms", "expected int", "'1.5'"]),
        ({"debug.hooks": "maybe"}, ["debug.hooks", "expected bool", "'maybe'"]),
        ({"log.level": "loud"}, ["log.level", "one of debug, error, info, warning", "'loud'"]),
        ({"limits.open_timeout": "-1"}, ["limits.open_timeout is -1", "positive", "flag --limits-open-timeout"]),
        ({"limits.retry_first": "5"}, ["limits.retry_first is 5", "limits.retry_most (1.0)", "flag"]),
        ({"admin.host": "0.0.0.0"}, ["admin.host", "loopback", "admin.allow_remote"]),
        ({"admin.port": "70000"}, ["admin.port is 70000", "0 to 65535"]),
        ({"worker.socket": "/" + "x" * 120}, ["worker.socket", "107"]),
        ({"node.name": "a\nb"}, ["node.name", "printable"]),
        ({"supervisor.backoff_first": "100"}, ["supervisor.backoff_first", "supervisor.backoff_most"]),
    ],
)
def test_wrong_values_are_named_with_source_expected_and_found(flags: dict[str, str], words: list[str]) -> None:
    (found,) = problems(flags=flags)
    for word in words:
        assert word in found


def test_a_remote_admin_must_be_asked_for() -> None:
    given = {"admin.host": "0.0.0.0", "admin.allow_remote": "true"}
    assert load(environ={}, flags=given).config.admin.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ('[{"node": "a", "adress": "x"}]', ["registry.nodes[0]: unknown key 'adress'", "did you mean address?"]),
        ('[{"node": "a"}]', ["registry.nodes[0]", "address"]),
        ('[{"node": 3, "address": "x", "public_key": "y"}]', ["registry.nodes[0].node: expected str, found 3"]),
        ("[{]", ["registry.nodes", "as JSON", "'[{]'"]),
        (
            '[{"node": "a", "address": "udp://x", "public_key": "y"}]',
            ["registry.nodes[0].address", "tcp://10.0.0.1:7971"],
        ),
    ],
)
def test_what_is_wrong_inside_a_list_is_named_with_its_place(nodes: str, words: list[str]) -> None:
    (found,) = problems(flags={"registry.nodes": nodes})
    for word in [*words, "flag --registry-nodes"]:
        assert word in found


def test_types_in_the_file_are_strict(toml: Any) -> None:
    (found,) = problems(toml('[limits]\nmax_rooms = "20"\n'))
    assert "limits.max_rooms: expected int, found '20' (file" in found


def test_all_problems_are_told_at_once(toml: Any) -> None:
    found = problems(toml('[limits]\nmax_rooms = "20"\nfoo = 1\n'), flags={"admin.port": "x"})
    assert len(found) == 3


def test_a_file_that_is_missing_or_not_toml(toml: Any, tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "none.toml")[0]
    assert "not TOML" in problems(toml("[limits\n"))[0]
    assert "expected a table" in problems(toml("limits = 3\n"))[0]
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in problems(tmp_path / "binary.toml")[0]


def test_the_example_configuration_shows_every_table_and_the_true_defaults(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "deploy" / "pdxfer.toml"
    load(path, environ={})
    text = path.read_text()
    shown = re.sub(r"(?m)^# (?=\w+ = (?!\[$))", "", text)  # with its commented defaults in force
    (tmp_path / "shown.toml").write_text(shown)
    assert config.differences(load(tmp_path / "shown.toml", environ={}).config, load(environ={}).config) == []
    assert len(re.findall(r"(?m)^\w+ = ", shown)) > 30
    for table in msgspec.structs.fields(config.Config):
        assert f"[{table.name}]" in text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["supervisor.drain_timeout", "mirror.timeout", "limits.open_timeout", "mirror.share"])
def test_no_number_is_without_an_end(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value}, expected a finite number \(flag"):
        load(flags={name: value}, environ={})


def test_a_mirror_beyond_every_machine() -> None:
    with pytest.raises(ConfigError, match=r"mirror\.bytes is 9223372036854775807"):
        load(flags={"mirror.bytes": "9223372036854775807"}, environ={})
