"""The configuration: one TOML file, and for every key of it an environment variable and a flag.

Owns: reading, precedence (flag > environment > file > default), error messages and ``--print-config``. Must not: know
what a key is for; the tables' structs do, and their ``check`` methods judge values.

``limits.open_timeout`` is ``PDXFER_LIMITS_OPEN_TIMEOUT`` in the environment and ``--limits-open-timeout`` on the command
line; lists and tables are written as JSON there. Nothing here is listed twice: all three names come from the structs.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .bootstrap.settings import BootstrapSettings, RegistrySettings
from .core.limits import Limits, MirrorSettings
from .engine.settings import EngineSettings
from .settings import AdminSettings, DebugSettings, LogSettings, NodeSettings, SupervisorSettings, WorkerSettings

PREFIX = "PDXFER_"
CONFIG_VARIABLE = "PDXFER_CONFIG"


class Config(msgspec.Struct, frozen=True):
    """All tables. The names of the fields are the names of the tables."""

    node: NodeSettings = NodeSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    bootstrap: BootstrapSettings = BootstrapSettings()
    registry: RegistrySettings = RegistrySettings()
    admin: AdminSettings = AdminSettings()
    limits: Limits = Limits()
    mirror: MirrorSettings = MirrorSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    log: LogSettings = LogSettings()
    debug: DebugSettings = DebugSettings()


class ConfigError(Exception):
    """What is wrong with the configuration, all of it: one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Key(NamedTuple):
    """One key of one table."""

    table: str
    name: str
    type: Any

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.table}_{self.name}".upper()

    @property
    def flag(self) -> str:
        return f"--{self.table}-{self.name}".replace("_", "-")

    @property
    def is_scalar(self) -> bool:
        """Written as it is, and not as JSON, in the environment and on the command line."""
        info = msgspec.inspect.type_info(self.type)
        members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
        simple = (
            msgspec.inspect.StrType, msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.BoolType,
            msgspec.inspect.NoneType, msgspec.inspect.LiteralType, msgspec.inspect.EnumType,
        )  # fmt: skip
        return all(isinstance(member, simple) for member in members)

    @property
    def expected(self) -> str:
        """The type, for people."""
        name = getattr(self.type, "__name__", None) if isinstance(self.type, type) else None
        return (
            name
            if name in ("str", "int", "float", "bool")
            else re.sub(r"\b(?:typing|[a-z_]+(?:\.\w+)*)\.(?=[A-Z])", "", str(self.type))
        )


class Effective(NamedTuple):
    """A configuration and where each of its values came from."""

    config: Config
    origins: dict[str, str]  # "limits.open_timeout" → "default", "file …", "environment …", "flag …" or "derived"
    file: str | None


def every_key() -> Iterator[Key]:
    for table in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(table.type):
            yield Key(table.name, field.name, field.type)


def load(
    file: str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Effective:
    """Read everything. ``flags`` maps "table.key" to the text of its flag. Raises ConfigError with every problem found."""
    environ = os.environ if environ is None else environ
    file = file if file is not None else environ.get(CONFIG_VARIABLE) or None
    problems: list[str] = []
    by_path = {key.path: key for key in every_key()}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(by_path, "default")

    def take(key: Key, value: Any, source: str, *, text: bool) -> None:
        try:
            values[key.path] = _convert(key, value, source, text=text)
        except ConfigError as error:
            problems.extend(error.problems)
        origins[key.path] = source

    if file is not None:
        for key, value in _from_file(Path(file), by_path, problems):
            take(key, value, f"file {file}", text=False)
    for key, value in _from_environment(environ, by_path, problems):
        take(key, value, f"environment {key.variable}", text=True)
    for path, value in (flags or {}).items():
        take(by_path[path], value, f"flag {by_path[path].flag}", text=True)
    if problems:
        raise ConfigError(problems)

    tables = {
        table.name: table.type(
            **{p.partition(".")[2]: v for p, v in values.items() if p.partition(".")[0] == table.name}
        )
        for table in msgspec.structs.fields(Config)
    }
    config = _derive(Config(**tables), origins, environ)
    _check(config, origins)
    return Effective(config, origins, str(file) if file is not None else None)


def render(effective: Effective) -> str:
    """The effective configuration as TOML, each key with its origin as a comment."""
    lines: list[str] = []
    table = ""
    for key in every_key():
        if key.table != table:
            lines += ["", f"[{key.table}]"] if lines else [f"[{key.table}]"]
            table = key.table
        value = msgspec.to_builtins(getattr(getattr(effective.config, key.table), key.name))
        text = f"# {key.name} is not set" if value is None else f"{key.name} = {_toml(value)}"
        lines.append(f"{text:<48} # {effective.origins[key.path]}")
    lines += ["", "# The engine's environment:"]
    lines += [f"# {f'{v.name}={v.value}':<46} # {v.origin}" for v in effective.config.engine.variables()]
    return "\n".join(lines) + "\n"


def differences(old: Config, new: Config) -> list[str]:
    """The keys whose values differ."""
    return [
        k.path for k in every_key() if getattr(getattr(old, k.table), k.name) != getattr(getattr(new, k.table), k.name)
    ]


def merged(old: Config, new: Config, paths: list[str]) -> Config:
    """``old`` with the values of ``new`` for these keys."""
    tables = {}
    for field in msgspec.structs.fields(Config):
        table, names = getattr(old, field.name), [p.partition(".")[2] for p in paths if p.startswith(f"{field.name}.")]
        fresh = getattr(new, field.name)
        tables[field.name] = msgspec.structs.replace(table, **{name: getattr(fresh, name) for name in names})
    return Config(**tables)


# one source at a time ----------------------------------------------------------------------------------------------


def _from_file(path: Path, by_path: dict[str, Key], problems: list[str]) -> Iterator[tuple[Key, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"configuration file {path}: {error.strerror or error}; give an existing file with --config")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"configuration file {path}: not TOML: {error}")
        return
    tables = {key.table for key in by_path.values()}
    for table, entries in document.items():
        if table not in tables:
            problems.append(f"{table}: unknown table (file {path}){_nearest(table, tables)}")
        elif not isinstance(entries, dict):
            problems.append(f"{table}: expected a table [{table}], found {entries!r} (file {path})")
        else:
            for name, value in entries.items():
                key = by_path.get(f"{table}.{name}")
                if key is None:
                    known = [k.path for k in by_path.values() if k.table == table]
                    near = _nearest(f"{table}.{name}", known) or _nearest(
                        name, [k.name for k in by_path.values()], by_path
                    )
                    problems.append(f"{table}.{name}: unknown key (file {path}){near}")
                else:
                    yield key, value


def _from_environment(
    environ: Mapping[str, str], by_path: dict[str, Key], problems: list[str]
) -> Iterator[tuple[Key, str]]:
    """Variables that begin like a table of ours must be keys of it; others may belong to anything and are left alone,
    unless they are a slip of the pen away from one of ours.
    """
    by_variable = {key.variable: key for key in by_path.values()}
    tables = tuple(f"{PREFIX}{table.name}_".upper() for table in msgspec.structs.fields(Config))
    for name, value in environ.items():
        if name in by_variable:
            yield by_variable[name], value
        elif name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            near = _nearest(name, by_variable, cutoff=0.6 if name.startswith(tables) else 0.92)
            if near or name.startswith(tables):
                if value.startswith("tcp://"):  # how Kubernetes tells of a service named pdxfer-…
                    near = "; set enableServiceLinks: false in the pod"
                problems.append(f"{name}: unknown key (environment){near}")


def _convert(key: Key, value: Any, source: str, *, text: bool) -> Any:
    found = value
    if text and not key.is_scalar:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                [f"{key.path}: expected {key.expected} as JSON, found {_short(found)}: {error} ({source})"]
            ) from None
    try:
        return msgspec.convert(value, key.type, strict=not (text and key.is_scalar))
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        inner = where.rstrip("`")
        at = value
        for step in re.findall(r"\[(\d+)\]|\.(\w+)", inner):
            try:
                at = at[int(step[0]) if step[0] else step[1]]
            except (KeyError, IndexError, TypeError):
                break
        unknown = re.search(r"unknown field `(\w+)`", message)
        if unknown:
            message = f"unknown key {unknown[1]!r}{_nearest(unknown[1], _names_within(key.type))}"
            raise ConfigError([f"{key.path}{inner}: {message} ({source})"]) from None
        expected = re.match(r"Expected (.*?)(?:, got .*)?$", message)
        what = f"expected {expected[1].replace('`', '')}" if expected else message.replace("`", "'")
        if "Invalid enum" in message:
            what = f"expected one of {', '.join(_choices(key.type))}"
        raise ConfigError([f"{key.path}{inner}: {what}, found {_short(at)} ({source})"]) from None


def _derive(config: Config, origins: dict[str, str], environ: Mapping[str, str]) -> Config:
    """Fill the keys whose default depends on the host or on other keys."""

    def derived(path: str) -> None:
        origins[path] = "derived"

    node, worker = config.node, config.worker
    if not node.name:
        node = msgspec.structs.replace(node, name=socket.gethostname())
        derived("node.name")
    if not node.runtime_dir:
        node = msgspec.structs.replace(node, runtime_dir=_runtime_dir(environ))
        derived("node.runtime_dir")
    if not worker.socket:
        worker = msgspec.structs.replace(worker, socket=os.path.join(node.runtime_dir, "worker.sock"))
        derived("worker.socket")
    bootstrap = config.bootstrap
    if not bootstrap.key_file:
        bootstrap = msgspec.structs.replace(bootstrap, key_file=os.path.join(node.runtime_dir, "bootstrap.key"))
        derived("bootstrap.key_file")
    return msgspec.structs.replace(config, node=node, worker=worker, bootstrap=bootstrap)


def _runtime_dir(environ: Mapping[str, str]) -> str:
    if environ.get("RUNTIME_DIRECTORY"):  # set by systemd; several are joined by colons
        return environ["RUNTIME_DIRECTORY"].split(":")[0]
    if environ.get("XDG_RUNTIME_DIR") and os.getuid() != 0:
        return os.path.join(environ["XDG_RUNTIME_DIR"], "pdxfer")
    return "/run/pdxfer"


def _check(config: Config, origins: dict[str, str]) -> None:
    """Let every table judge itself, and say where the value that it names came from."""
    problems = []
    for key in every_key():
        value = getattr(getattr(config, key.table), key.name)
        if isinstance(value, float) and not math.isfinite(
            value
        ):  # nothing may wait for ever, nor for no time that there is
            problems.append(f"{key.path} is {value}, expected a finite number ({origins.get(key.path, 'default')})")
    if problems:
        raise ConfigError(problems)
    for table in msgspec.structs.fields(Config):
        check = getattr(getattr(config, table.name), "check", None)
        if check is None:
            continue
        try:
            check()
        except ValueError as error:
            named = re.search(rf"\b{table.name}\.(\w+)", str(error))
            origin = origins.get(named[0]) if named else None
            problems.append(f"{error} ({origin})" if origin else str(error))
    if problems:
        raise ConfigError(problems)


# words -------------------------------------------------------------------------------------------------------------


def _nearest(name: str, known: Any, by_path: Any = None, *, cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff)
    if not near:
        return ""
    if by_path is not None:  # the key exists in another table
        return f"; did you mean {next(k.path for k in by_path.values() if k.name == near[0])}?"
    return f"; did you mean {near[0]}?"


def _names_within(kind: Any) -> set[str]:
    """The keys of every struct inside a type."""
    names: set[str] = set()
    todo = [msgspec.inspect.type_info(kind)]
    while todo:
        info = todo.pop()
        if isinstance(info, msgspec.inspect.StructType):
            names |= {field.encode_name for field in info.fields}
            todo += [field.type for field in info.fields]
        for attribute in ("item_type", "value_type", "key_type"):
            if hasattr(info, attribute):
                todo.append(getattr(info, attribute))
        for attribute in ("types", "item_types"):
            todo += list(getattr(info, attribute, ()))
    return names


def _choices(kind: Any) -> list[str]:
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.LiteralType):
        return [str(value) for value in info.values]
    if isinstance(info, msgspec.inspect.EnumType):
        return [str(member.value) for member in info.cls]
    return [str(kind)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None)
        return "{" + inner + "}"
    return repr(value)
