"""``pdxfer rooms``: what is under way in a sidecar."""

from __future__ import annotations

import json

import click

from . import _admin


@click.command(epilog="Example: pdxfer rooms --side send --older-than 5")
@click.option("--side", type=click.Choice(["send", "receive"]), help="Only this side.")
@click.option("--state", help="Only rooms in this state.")
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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = {"room": "room", "epoch": "epoch", "side": "side", "state": "state", "worker": "worker", "peer": "peer",
               "age_seconds": "age s", "idle_seconds": "idle s", "pages": "pages", "bytes": "bytes"}  # fmt: skip
    for key, title in columns.items():
        table.add_column(
            title, justify="left" if key in ("room", "side", "state", "worker", "peer") else "right", overflow="fold"
        )
    for room in found:
        table.add_row(*(f"{room[key]:.2f}" if isinstance(room[key], float) else str(room[key]) for key in columns))
    Console().print(table if found else "no rooms")
