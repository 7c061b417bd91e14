"""``pdxfer abort``: an operator ends a room."""

from __future__ import annotations

import json

import click

from ..cli import FAILED, Failure
from . import _admin


@click.command(epilog="Example: pdxfer abort 5f0c3a --epoch 1 --detail 'request was cancelled by hand'")
@click.argument("room")
@click.option("--epoch", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--detail", default="", help="Why, for the logs of both nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_admin.options
def abort(room: str, epoch: int, detail: str, as_json: bool, admin: str | None, config_file: str | None) -> None:
    """End the sides of ROOM that this sidecar has; its peer is told. The reason is operator_abort, which is retriable."""
    status, answer = _admin.ask(
        _admin.find(admin, config_file), "POST", "/rooms/abort", {"room": room, "epoch": epoch, "detail": detail}
    )
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        if status != 200:
            raise SystemExit(FAILED)
    elif status != 200:
        raise Failure(str(answer.get("error", answer)))
    else:
        click.echo(f"{room}/{epoch}: ended {answer['sides']} side(s)")
