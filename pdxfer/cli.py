"""The ``pdxfer`` command.

Owns: the list of subcommands, loaded only when called, and the exit codes. Must not: import the daemon, the engine or
anything heavy: ``pdxfer --help`` answers at once, and a subcommand whose extra is not installed says so.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import click

from . import __version__

# Exit codes, as in sysexits.h where it has one.
OK = 0
FAILED = 1  # the command ran and its answer is no
USAGE = 2  # wrong arguments or configuration
UNAVAILABLE = 69  # a dependency is missing, for example NIXL
INTERNAL = 70  # a defect, or a restart budget that is used up
BUSY = 75  # the runtime directory or a port is taken, or the host is short of something: later it may do

EXIT_CODES = """
\b
Exit codes:
   0  success, or an orderly shutdown
   1  the command's answer is no, or the daemon cannot be reached
   2  wrong arguments or configuration
  69  a dependency is missing (nixl, pyzmq)
  70  a restart budget is used up, or a defect
  75  the runtime directory or a port is taken, or the host is short of files, space, memory or threads
"""


class _Command(NamedTuple):
    module: str
    extra: str  # what to install when an import fails
    help: str


COMMANDS = {
    "serve": _Command("serve", "pdxfer", "Run the sidecar."),
    "status": _Command("status", "pdxfer", "Show the state of a running sidecar."),
    "rooms": _Command("rooms", "pdxfer", "List a sidecar's rooms."),
    "abort": _Command("abort", "pdxfer", "End a room, now, by name."),
    "explain": _Command("explain", "pdxfer", "Say what a reason or refusal means and what to do."),
    "doctor": _Command("doctor", "pdxfer", "Check that this host can run a sidecar."),
    "keygen": _Command("keygen", "pdxfer", "Make the key pair of a node."),
    "demo": _Command("demo", "pdxfer[demo]", "Two sidecars, a model, a gateway, and faults; prints a verdict."),
    "bench": _Command("bench", "pdxfer[engine]", "Measure rooms between two sidecars against plain NIXL."),
    "layouts": _Command("layouts", "pdxfer", "The page formats that are known by name; check a buffer against one."),
    "probe": _Command("probe", "pdxfer[engine]", "Index keys moved, and what sparse attention selects after it."),
    "chaos": _Command("chaos", "pdxfer[demo]", "Faults against real processes and in simulation; prints a verdict."),
}


class Failure(click.ClickException):
    """An error of the user's or of the world's: one message, an exit code, no traceback."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class and reads it from the instance


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            module = importlib.import_module(f"pdxfer.commands.{entry.module}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "pdxfer":
                raise Failure(
                    f"pdxfer {cmd_name}: this installation has no {error.name}; install pdxfer again", UNAVAILABLE
                ) from None
            raise Failure(
                f"pdxfer {cmd_name} needs the Python module {error.name!r}, which is not installed:"
                f" pip install '{entry.extra}'",
                UNAVAILABLE,
            ) from None
        for name in (cmd_name, "command"):
            command = getattr(module, name, None)
            if isinstance(command, click.Command):
                return command
        raise Failure(f"pdxfer.commands.{entry.module} has no click command {cmd_name!r}: a defect", INTERNAL)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, so that help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(COMMANDS)}"
            raise Failure(f"no such command {args[0]!r}{hint}", USAGE)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Lazy,
    epilog="Example: pdxfer serve --config /etc/pdxfer.toml\n" + EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="pdxfer")
def cli() -> None:
    """The transfer layer of disaggregated LLM serving: moves KV cache from prefill workers to decode workers."""


def main() -> None:
    """The console script."""
    try:
        cli.main(prog_name="pdxfer")
    except BrokenPipeError:  # the reader of our output went away, as in `pdxfer rooms | head`
        sys.stderr.close()
        sys.exit(FAILED)
