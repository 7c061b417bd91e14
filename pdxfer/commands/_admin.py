"""Talking to a running sidecar's admin service: shared by status, rooms, abort and doctor.

Owns: finding its address, one request, and the errors for people. Must not: print.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from .. import config as configuration
from ..cli import FAILED, USAGE, Failure


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--admin`` and ``--config`` for a command that asks a sidecar."""
    command = click.option(
        "--config", "config_file", metavar="FILE", type=click.Path(dir_okay=False),
        help=f"The sidecar's configuration file, to find its admin address ({configuration.CONFIG_VARIABLE}).",
    )(command)  # fmt: skip
    return click.option(
        "--admin",
        metavar="HOST:PORT",
        help="The sidecar's admin address; by default from its runtime directory or configuration.",
    )(command)


def load_config(config_file: str | None, flags: dict[str, str] | None = None) -> configuration.Effective:
    """The configuration, with its errors turned into a failure of the command."""
    try:
        return configuration.load(config_file, flags=flags)
    except configuration.ConfigError as error:
        raise Failure("the configuration is wrong:\n  " + "\n  ".join(error.problems), USAGE) from None


def find(admin: str | None, config_file: str | None) -> tuple[str, int]:
    """Host and port: as given, else as a live sidecar wrote it into the runtime directory, else as configured."""
    if admin:
        parts = urlsplit(admin if "//" in admin else f"//{admin}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if not parts.hostname or port is None:
            raise Failure(f"--admin is {admin!r}, expected HOST:PORT, for example 127.0.0.1:7970", USAGE)
        return parts.hostname, port
    config = load_config(config_file).config
    published = Path(config.node.runtime_dir) / "admin.json"
    try:
        found = json.loads(published.read_text())
        os.kill(int(found["pid"]), 0)  # a sidecar that was killed leaves the file behind
        return str(found["host"]), int(found["port"])
    except PermissionError:  # it lives, under another user
        return str(found["host"]), int(found["port"])
    except (OSError, ValueError, KeyError, TypeError):
        if config.admin.port:
            return config.admin.host, config.admin.port
    raise Failure(
        f"admin.port is 0 and {published} names no live sidecar: start it (pdxfer serve), or give --admin HOST:PORT"
    )


def ask(address: tuple[str, int], method: str, path: str, body: Any = None, timeout: float = 10.0) -> tuple[int, Any]:
    """One request: status and decoded JSON. Raises Failure when the sidecar cannot be reached or is not one."""
    where = f"{address[0]}:{address[1]}"
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
        response = connection.getresponse()
        raw = response.read()
    except ConnectionRefusedError:
        raise Failure(
            f"no sidecar answers at {where} (connection refused): is `pdxfer serve` running?"
            " Use --admin or --config to name another",
            FAILED,
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise Failure(f"no answer from the sidecar at {where}: {type(error).__name__}: {error}", FAILED) from None
    finally:
        connection.close()
    try:
        return response.status, json.loads(raw)
    except ValueError:
        raise Failure(
            f"{where} answered {response.status} without JSON: is it a pdxfer admin service?", FAILED
        ) from None


def get(address: tuple[str, int], path: str) -> Any:
    """A GET that must succeed."""
    status, answer = ask(address, "GET", path)
    if status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        raise Failure(f"the sidecar answered {status}: {error or answer}", FAILED)
    return answer
