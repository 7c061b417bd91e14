"""``pdxfer doctor``: can this host run this sidecar, and does it?

Owns: the checks, each with what it expected, what it found and what to do. Must not: change anything on the host.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from .. import config as configuration
from ..cli import FAILED, Failure
from ..config import Config
from . import _admin

NIXL = "1.5.1"  # the version whose behaviour under faults was measured; see pyproject.toml
OPEN_FILES = 4096


class Finding(NamedTuple):
    check: str
    level: str  # ok, warn or fail
    found: str
    advice: str = ""


@click.command(epilog="Example: pdxfer doctor --config /etc/pdxfer/pdxfer.toml")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_admin.options
def doctor(as_json: bool, admin: str | None, config_file: str | None) -> None:
    """Check dependencies, keys, limits, ports and the running sidecar. Exits with 1 if anything fails."""
    findings: list[Finding] = []
    try:
        effective = configuration.load(config_file)
        config = effective.config
        made = effective.origins["bootstrap.key_file"] == "derived"
        findings.append(Finding("configuration", "ok", "valid"))
    except configuration.ConfigError as error:
        config, made = None, False
        findings += [Finding("configuration", "fail", problem, "correct the key") for problem in error.problems]
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _zmq, _nixl, _open_files, _locked_memory]
    if config is not None:
        settings = config
        checks += [lambda: _shared_memory(settings), lambda: _runtime_dir(settings), lambda: _keys(settings, made)]
        running = _running(admin, config_file)
        findings.append(running)
        if running.level == "warn":  # none runs: it could be started
            checks.append(lambda: _ports(settings))
    for check in checks:
        findings += check()
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for f in findings:
            mark = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[f.level]
            click.echo(f"{mark}  {f.check:16} {f.found}{f'  → {f.advice}' if f.advice and f.level != 'ok' else ''}")
    if any(finding.level == "fail" for finding in findings):
        raise SystemExit(FAILED)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "fail", version, "Python 3.11 or later is needed")


def _zmq() -> Iterator[Finding]:
    try:
        import zmq
    except ImportError as error:
        yield Finding("zmq", "fail", f"not importable: {error}", "pip install pyzmq")
        return
    curve = zmq.has("curve")
    yield Finding(
        "zmq", "ok" if curve else "fail", f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}, CURVE {'yes' if curve else 'no'}",
        "install a pyzmq wheel from PyPI: its libzmq has CURVE",
    )  # fmt: skip


def _nixl() -> Iterator[Finding]:
    """In a child: importing NIXL loads UCX, which has no place in this process (and may crash it)."""
    from ..engineservice import nixl_installed

    found = nixl_installed()
    if found is None:
        yield Finding("nixl", "fail", "not installed", "pip install 'pdxfer[engine]'")
        return
    module, package = found
    version = importlib.metadata.version(package)
    if version != NIXL:
        yield Finding(
            "nixl version", "warn", version, f"pdxfer is tested with {NIXL}, and both nodes must run the same"
        )
    code = f"import {module}._api, os, sys; sys.stdout.write('ok'); sys.stdout.flush(); os._exit(0)"
    try:
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("nixl", "fail", "its import took more than 60 s", "look for a hanging driver or network device")
        return
    if child.stdout.endswith("ok"):
        yield Finding("nixl", "ok", f"{package} {version}, importable")
    else:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            "nixl",
            "fail",
            f"import ends with {child.returncode}: {last}",
            f"pip install --force-reinstall '{package}=={NIXL}'",
        )


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        "open files", "ok" if soft >= OPEN_FILES else "warn", f"ulimit -n {soft} (hard {hard})",
        f"at least {OPEN_FILES}: each worker holds a connection and a descriptor per pool",
    )  # fmt: skip


def _locked_memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Finding(
        "locked memory", "ok" if unlimited else "warn", "unlimited" if unlimited else f"{soft >> 20} MiB",
        "RDMA and pinned slots need ulimit -l unlimited; TCP and shared memory do not",
    )  # fmt: skip


def _shared_memory(config: Config) -> Iterator[Finding]:
    try:
        fd = os.memfd_create("pdxfer-doctor", os.MFD_CLOEXEC)
        os.close(fd)
    except OSError as error:
        yield Finding(
            "memfd", "fail", f"memfd_create: {error.strerror}", "allow the memfd_create system call (seccomp profile)"
        )
        return
    needed = config.engine.memory
    free = _available()
    yield Finding(
        "memory", "ok" if free >= 2 * needed else "fail" if free < needed else "warn",
        f"{free >> 20} MiB available, staging slots take {needed >> 20} MiB",
        "make engine.slot_bytes, engine.send_slots or engine.recv_slots smaller",
    )  # fmt: skip
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", "warn", error.strerror or str(error), "UCX uses it between processes of one host")
        return
    free = stat.f_bavail * stat.f_frsize
    yield Finding(
        "/dev/shm", "ok" if free >= 64 << 20 else "warn", f"{free >> 20} MiB free", "UCX needs some tens of MiB there"
    )


def _available() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _runtime_dir(config: Config) -> Iterator[Finding]:
    path = config.node.runtime_dir
    parent = path
    while not os.path.exists(parent):
        parent = os.path.dirname(parent) or "."
    if not os.path.isdir(parent):
        yield Finding("runtime dir", "fail", f"{parent} is not a directory", "set node.runtime_dir")
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield Finding(
            "runtime dir",
            "fail",
            f"{parent} cannot be written by user {os.getuid()}",
            "create it for this user, or set node.runtime_dir",
        )
    else:
        yield Finding("runtime dir", "ok", path)


def _keys(config: Config, made: bool) -> Iterator[Finding]:
    """The node's own key. ``made``: the sidecar makes the file at its first start."""
    from ..bootstrap import keys

    path = Path(config.bootstrap.key_file)
    if made and not path.exists():
        yield Finding("key", "ok", f"{path} is made at the first start")
        return
    try:
        public = keys.load(path).public
    except keys.BadKeyFile as error:
        yield Finding("key", "fail", str(error), "pdxfer keygen makes one")
        return
    yield Finding("key", "ok", f"{path}, public key {public}")
    for entry in config.registry.nodes:
        if entry.node == config.node.name and entry.public_key != public:
            yield Finding(
                "key", "fail", f"registry.nodes says that {entry.node}'s public key is {entry.public_key}",
                "its peers will refuse it: correct the entry or bootstrap.key_file",
            )  # fmt: skip


def _bootstrap_port(config: Config) -> Iterator[tuple[str, str, int]]:
    host, _, port = config.bootstrap.listen.removeprefix("tcp://").rpartition(":")
    yield "bootstrap.listen", "0.0.0.0" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port)


def _ports(config: Config) -> Iterator[Finding]:
    wanted = [("admin.port", config.admin.host, config.admin.port), *_bootstrap_port(config)]
    for key, host, port in wanted:
        if not port:
            yield Finding(key, "ok", "any free port")
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                yield Finding(key, "ok", f"{host}:{port} is free")
            except OSError as error:
                yield Finding(key, "fail", f"{host}:{port}: {error.strerror}", f"stop what uses it, or set {key}")


def _running(admin: str | None, config_file: str | None) -> Finding:
    try:
        address = _admin.find(admin, config_file)
        status, answer = _admin.ask(address, "GET", "/readyz", timeout=5.0)
    except Failure as error:
        return Finding("running sidecar", "fail" if admin else "warn", error.message, "start it with `pdxfer serve`")
    where = f"{address[0]}:{address[1]}"
    if status == 200:
        return Finding("running sidecar", "ok", f"ready at {where}")
    reasons = "; ".join(answer.get("reasons", [])) if isinstance(answer, dict) else str(answer)
    return Finding("running sidecar", "fail", f"not ready at {where}: {reasons}", "see its log")
