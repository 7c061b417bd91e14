"""The command line: help, errors without tracebacks, exit codes. Commands run in-process unless imports are the point."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pdxfer import config
from pdxfer.cli import COMMANDS, cli
from pdxfer.core.reasons import ENDS, REFUSALS
from pdxfer.core.snapshot import RECV_STATES, SEND_STATES


def call(*args: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(cli, args, env={"PDXFER_CONFIG": None} | (env or {}))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pdxfer.cli import cli; cli(['--help'], standalone_mode=False);"
        "print(sorted({'zmq','nixl','numpy','torch','rich','asyncio','prometheus_client'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for name in COMMANDS:
        assert f"  {name} " in child.stdout
    assert child.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("demo", "bench")])
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert "Example: pdxfer" in result.output


def test_an_unknown_command_names_the_nearest() -> None:
    result = call("statsu")
    assert result.exit_code == 2
    assert "did you mean 'status'?" in result.output


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")

    monkeypatch.setattr("pdxfer.cli.importlib.import_module", missing)
    result = call("demo")
    assert result.exit_code == 69
    assert "'starlette'" in result.output
    assert "pip install 'pdxfer[demo]'" in result.output


# serve ---------------------------------------------------------------------------------------------------------------


def test_serve_has_a_flag_for_every_key() -> None:
    text = call("serve", "--help").output
    for key in config.every_key():
        assert key.flag in text


def test_print_config_shows_values_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[limits]\nopen_timeout = 7\n")
    result = call("serve", "--config", str(file), "--print-config", "--node-name", "p", env={"PDXFER_ADMIN_PORT": "0"})
    assert result.exit_code == 0
    lines = {line.partition("=")[0].strip(): line for line in result.output.splitlines()}
    assert "7.0" in lines["open_timeout"] and lines["open_timeout"].endswith(f"# file {file}")
    assert "# flag --node-name" in lines["name"]
    assert "# environment PDXFER_ADMIN_PORT" in result.output


def test_serve_with_a_wrong_configuration_exits_with_2_and_says_all() -> None:
    result = call("serve", "--limits-max-rooms", "many", env={"PDXFER_LIMITS_FOO": "1"})
    assert result.exit_code == 2
    assert "limits.max_rooms: expected int, found 'many' (flag --limits-max-rooms)" in result.output
    assert "PDXFER_LIMITS_FOO: unknown key" in result.output


# explain -------------------------------------------------------------------------------------------------------------


def test_explain_knows_every_reason() -> None:
    everything = call("explain").output
    for name in [*ENDS, *REFUSALS]:
        assert name in everything
        assert call("explain", name).exit_code == 0
    assert json.loads(call("explain", "peer_lost", "--json").output)["retriable"] is True
    assert len(json.loads(call("explain", "--json").output)) == len(ENDS) + len(REFUSALS)


def test_explain_of_an_unknown_reason_names_the_nearest() -> None:
    result = call("explain", "peer_los")
    assert result.exit_code == 2
    assert "peer_lost" in result.output


# asking a sidecar ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["status"], ["rooms"], ["abort", "r1"], ["status", "--json"], ["status", "--check"]]
)
def test_nobody_there(command: list[str], tmp_path: Path) -> None:
    result = call(*command, "--admin", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no sidecar answers at 127.0.0.1:1" in result.output
    env = {"PDXFER_NODE_RUNTIME_DIR": str(tmp_path), "PDXFER_ADMIN_PORT": "0"}
    result = call(*command, env=env)
    assert result.exit_code == 1
    assert "names no live sidecar" in result.output


def test_rooms_of_a_state_that_does_not_exist() -> None:
    result = call("rooms", "--state", "nosuch", "--admin", "127.0.0.1:1")
    assert result.exit_code == 2
    for state in (*SEND_STATES, *RECV_STATES):
        assert f"'{state}'" in result.output
        assert call("rooms", "--state", state, "--admin", "127.0.0.1:1").exit_code == 1  # nobody there


def test_a_bad_admin_address() -> None:
    for bad in ("7970", "host", "127.0.0.1:port", "127.0.0.1:99999"):
        result = call("status", "--admin", bad)
        assert result.exit_code == 2
        assert "expected HOST:PORT" in result.output


def test_a_published_address_of_a_dead_sidecar_is_not_used(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "admin.json").write_text(json.dumps({"host": "127.0.0.1", "port": 1, "pid": child.pid}))
    result = call("status", env={"PDXFER_NODE_RUNTIME_DIR": str(tmp_path), "PDXFER_ADMIN_PORT": "2"})
    assert "127.0.0.1:2" in result.output


# keygen and doctor ---------------------------------------------------------------------------------------------------


def test_keygen_makes_a_private_file_once(tmp_path: Path) -> None:
    file = tmp_path / "node.key"
    public = call("keygen", str(file)).output.strip()
    assert len(public) == 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert call("keygen", "--show", str(file)).output.strip() == public
    assert json.loads(call("keygen", "--show", "--json", str(file)).output) == {"file": str(file), "public": public}
    again = call("keygen", str(file))
    assert again.exit_code == 1
    assert "exists already" in again.output
    file.chmod(0o644)
    assert "mode 0644, expected 0600" in call("keygen", "--show", str(file)).output


def checks(*args: str, env: dict[str, str]) -> tuple[int, dict[str, Any]]:
    result = call("doctor", "--json", *args, env=env)
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.output)}


def test_doctor_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.commands.doctor._nixl", lambda: iter(()))  # 2 s; the live tests load it all the time
    (tmp_path / "key").write_text("nonsense")
    (tmp_path / "key").chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {
            "PDXFER_NODE_RUNTIME_DIR": str(tmp_path),
            "PDXFER_ADMIN_PORT": "0",
            "PDXFER_BOOTSTRAP_LISTEN": f"tcp://127.0.0.1:{port}",
            "PDXFER_BOOTSTRAP_KEY_FILE": str(tmp_path / "key"),
            "PDXFER_ENGINE_SEND_SLOTS": "4096",
            "PDXFER_ENGINE_SLOT_BYTES": str(64 << 20),
        }
        code, found = checks(env=env)
    assert code == 1
    assert found["configuration"]["level"] == "ok"
    assert found["zmq"]["level"] == "ok"
    assert found["running sidecar"]["level"] == "warn"
    assert "is no key file" in found["key"]["found"]
    assert (found["bootstrap.listen"]["level"], f"127.0.0.1:{port}" in found["bootstrap.listen"]["found"]) == (
        "fail",
        True,
    )
    assert found["memory"]["level"] == "fail"


def test_doctor_of_a_wrong_configuration_checks_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.commands.doctor._nixl", lambda: iter(()))
    code, found = checks(env={"PDXFER_LIMITS_MAX_ROOMS": "x"})
    assert code == 1
    assert "limits.max_rooms" in found["configuration"]["found"]
    assert found["python"]["level"] == "ok"
