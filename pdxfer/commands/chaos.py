"""``pdxfer chaos``: faults against real processes (list, run, soak, wedge, cost, corruption) and in simulation (sim, replay).

Owns: which module has which verb; it is loaded when the verb is called. Must not: know options.
"""

from __future__ import annotations

import importlib

import click

VERBS = {
    "list": ("live", "List the scenarios of live chaos."),
    "run": ("live", "Run scenarios against real processes; prints a verdict."),
    "soak": ("live", "Scenarios drawn at random, for so many minutes."),
    "wedge": ("live", "The original wedge, before and after."),
    "cost": ("live", "What the fix of the original wedge costs."),
    "corruption": ("live", "The original corruption of index keys, before and after."),
    "sim": ("sim", "Many seeds of the deterministic simulation."),
    "replay": ("sim", "One seed of it, as a readable timeline."),
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """From ``COMMANDS`` of chaos.live.cli or chaos.sim.cli."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"pdxfer.chaos.{VERBS[cmd_name][0]}.cli")
        command: click.Command | None = module.COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, so that help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(cls=_Verbs, epilog="Example: pdxfer chaos run agent-kill-1s --concurrency 80 --html chaos.html")
def chaos() -> None:
    """Prove the wedge contract: the same faults against live processes and in simulation, each with a control that must fail."""
