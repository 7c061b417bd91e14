"""``pdxfer serve``: the daemon in the foreground, under systemd, Kubernetes or a terminal.

Owns: the flags, which come from the configuration's structs. Must not: wire anything; ``daemon`` does.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import click

from .. import config as configuration
from .. import shortage
from ..cli import BUSY, EXIT_CODES, UNAVAILABLE, Failure
from ._admin import load_config


def _flags(command: click.Command) -> click.Command:
    """One flag for every key. Their values stay text here: ``config`` converts and judges them, with better words."""
    defaults = configuration.Config()
    for key in configuration.every_key():
        default = getattr(getattr(defaults, key.table), key.name)
        shown = repr(default) if isinstance(default, float | int) else str(default) or "derived"
        command.params.append(
            click.Option(
                [key.flag, f"flag_{key.table}__{key.name}"],
                metavar=key.expected.upper()
                if key.is_scalar and len(key.expected) < 12
                else "VALUE"
                if key.is_scalar
                else "JSON",
                help=f"{key.path}; default {shown}." if len(shown) < 40 else f"{key.path}.",
            )
        )
    return command


@click.command(
    epilog="Example: pdxfer serve --config /etc/pdxfer.toml --node-name gpu7 --log-level debug\n\n"
    "Precedence: flag, then environment (PDXFER_<TABLE>_<KEY>), then file, then default.\n" + EXIT_CODES
)
@click.option(
    "--config", "config_file", metavar="FILE", type=click.Path(dir_okay=False),
    help=f"Configuration file, TOML ({configuration.CONFIG_VARIABLE}).",
)  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print every effective value and where it came from, and exit.")
def serve(config_file: str | None, print_config: bool, **flags: Any) -> None:
    """Run the sidecar until SIGTERM or SIGINT (which drain it; a second one does not wait).

    SIGHUP reads the configuration again: log level, limits, static registry and authorised peers change at once, the rest is
    reported as needing a restart.
    """
    given = {
        name.removeprefix("flag_").replace("__", ".", 1): value for name, value in flags.items() if value is not None
    }
    effective = load_config(config_file, given)
    if print_config:
        click.echo(configuration.render(effective), nl=False)
        return
    _check_dependencies()
    try:
        from .. import daemon
    except (MemoryError, OSError, ImportError) as error:
        short = shortage.of(error)
        if short is None:
            raise
        raise Failure(f"cannot start: the sidecar's own code cannot be loaded: {short.words}", BUSY) from None

    sys.exit(daemon.run(effective, lambda: configuration.load(config_file, flags=given)))


def _check_dependencies() -> None:
    """Find what the daemon, its engine and its threads will import, without importing it: NIXL has no place in this process."""
    from ..engineservice import nixl_installed

    for found, module, package, why in (
        (importlib.util.find_spec("zmq"), "zmq", "pyzmq", "the socket between nodes"),
        (nixl_installed(), "nixl", "pdxfer[engine]", "the transfer engine"),
    ):
        if found is None:
            raise Failure(
                f"the Python module {module!r} is not installed; it is needed for {why}: pip install '{package}'",
                UNAVAILABLE,
            )


_flags(serve)
