"""``pdxfer demo``: two sidecars, a model, a gateway, and faults; prints a verdict."""

from __future__ import annotations

from pathlib import Path

import click

_EPILOG = """
\b
Examples:
  pdxfer demo --quick                              under a minute, with the synthetic engine
  pdxfer demo --json out.json --html out.html      under five minutes, with SmolLM2-135M

\b
Exit codes:
   0  everything held
   1  something did not; the verdict names it
 130  ended by ^C, with everything cleaned up
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--quick", is_flag=True, help="Use the synthetic engine, whose every byte can be checked: under a minute."
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as JSON.",
)
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as a page with a timeline.",
)
@click.option(
    "--keep-logs",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep every process's log here.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How often the agent is killed."
)
@click.option(
    "--sessions",
    type=click.IntRange(1, 1000),
    default=80,
    show_default=True,
    help="Streams of the agent that is killed.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="For the prompts.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of the model; parity needs fp32.",
)
def demo(
    quick: bool,
    json_file: Path | None,
    html_file: Path | None,
    keep_logs: Path | None,
    rounds: int,
    sessions: int,
    seed: int,
    dtype: str,
) -> None:
    """Show that pdxfer moves a real model's cache right, and that nothing wedges when things are killed.

    Starts two sidecars, a prefill worker, a decode worker and a gateway on this machine; compares answers with those of
    one process; then kills an agent with open streams, both transfer engines and a worker, and raises an exception in a
    bootstrap thread. After each, every session must have ended and every page and slot must be home.
    """
    from ..demo import run

    options = run.Options(quick, json_file, html_file, keep_logs, rounds, sessions, seed, dtype)
    raise SystemExit(run.main(options))
