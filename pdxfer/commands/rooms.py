"""``pdxfer rooms``: what is under way in a sidecar."""

from __future__ import annotations

import json

import click

from ..core.snapshot import RECV_STATES, SEND_STATES
from . import _admin

_STATES = tuple(dict.fromkeys((*SEND_STATES, *RECV_STATES)))


@click.command(epilog="Example: pdxfer rooms --side send --older-than 5")
@click.option("--side", type=click.Choice(["send", "receive"]), help="Only this side.")
@click.option("--state", type=click.Choice(_STATES), help="Only rooms in this state.")
@click.option("--older-than", type=float, default=0.0, metavar="SECONDS", help="Only rooms of at least this age.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_admin.options
def rooms(
    side: str | None, state: str | None, older_than: float, as_json: bool, admin: str | None, config_file: str | None
) -> None:
    """List the sidecar's live rooms, the oldest first."""
    found = [
        room
        for room in _admin.get(_admin.find(admin, config_file), "/rooms")
        if side in (None, room["side"]) and state in (None, room["state"]) and room["age_seconds"] >= older_than
    ]
    found.sort(key=lambda room: -room["age_seconds"])
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from ._tables import add, new_console, new_table

    numbers = ("epoch", "age s", "idle s", "pages", "bytes")
    table = new_table(
        "", "room", "epoch", "side", "state", "worker", "peer", "age s", "idle s", "pages", "bytes", numbers=numbers
    )
    for r in found:
        add(
            table, r["room"], r["epoch"], r["side"], r["state"], r["worker"], r["peer"], f"{r['age_seconds']:.2f}",
            f"{r['idle_seconds']:.2f}", r["pages"], r["bytes"],
        )  # fmt: skip
    new_console().print(table if found else "no rooms")
