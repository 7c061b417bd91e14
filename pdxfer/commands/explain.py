"""``pdxfer explain``: the closed lists of reasons, for people."""

from __future__ import annotations

import difflib
import json

import click

from ..cli import USAGE, Failure
from ..core.reasons import ENDS, REFUSALS, End, Refusal


def _entry(name: str) -> dict[str, object]:
    found: End | Refusal = ENDS[name] if name in ENDS else REFUSALS[name]
    return {"kind": "end of a room" if isinstance(found, End) else "refusal", **found._asdict()}


@click.command(epilog="Example: pdxfer explain peer_lost")
@click.argument("reason", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(reason: str | None, as_json: bool) -> None:
    """Say what REASON means and what to do; without REASON, list all."""
    if reason is not None and reason not in ENDS and reason not in REFUSALS:
        near = difflib.get_close_matches(reason, [*ENDS, *REFUSALS], 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`pdxfer explain` lists all"
        raise Failure(f"no reason is called {reason!r}; {hint}", USAGE)
    if as_json:
        names = [reason] if reason is not None else [*ENDS, *REFUSALS]
        entries = [_entry(name) for name in names]
        click.echo(json.dumps(entries[0] if reason is not None else entries, indent=2))
        return
    if reason is None:
        click.echo("How a room can end:")
        for end in ENDS.values():
            click.echo(f"  {end.name:22} {end.state:8} {'retriable' if end.retriable else '':10} {end.meaning}")
        click.echo("\nWhy a request or frame was refused:")
        for refusal in REFUSALS.values():
            click.echo(f"  {refusal.name:22} {refusal.meaning}")
        return
    found = ENDS.get(reason)
    if found is not None:
        click.echo(
            f"{found.name}: a room's end, {found.state}, {'retriable with the next epoch' if found.retriable else 'not retriable'}"
        )
        click.echo(f"  meaning: {found.meaning}\n  advice:  {found.advice}")
    if reason in REFUSALS:
        refusal = REFUSALS[reason]
        click.echo(f"{refusal.name}: a refused request or frame; the room it names is not changed by it")
        click.echo(f"  meaning: {refusal.meaning}\n  advice:  {refusal.advice}")
