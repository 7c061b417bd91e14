"""``pdxfer status``: the state of a running sidecar, for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..cli import FAILED
from . import _admin

if TYPE_CHECKING:
    from rich.table import Table


@click.command(epilog="Example: pdxfer status --admin 127.0.0.1:7970")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--check", is_flag=True, help="Print only what keeps it from being ready; exit 1 if anything does.")
@_admin.options
def status(as_json: bool, check: bool, admin: str | None, config_file: str | None) -> None:
    """Show node, engine, peers, workers, rooms, pages, slots and services."""
    address = _admin.find(admin, config_file)
    if check:
        code, answer = _admin.ask(address, "GET", "/readyz")
        click.echo(
            json.dumps(answer) if as_json else "ready" if code == 200 else "not ready: " + "; ".join(answer["reasons"])
        )
        raise SystemExit(0 if code == 200 else FAILED)
    found = _admin.get(address, "/status")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)


def _print(s: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    ready = "[green]ready[/]" if s["ready"] else "[red]not ready[/]: " + "; ".join(s["reasons"])
    console.print(f"[bold]node {s['node']}[/]  {ready}{'  [yellow]draining[/]' if s['draining'] else ''}")
    console.print(
        f"  pdxfer {s['release']}, pid {s['pid']}, up {_age(s['uptime_seconds'])}, incarnation {s['incarnation']:x}, at {s['address']}"
    )
    engine = s["engine"]
    if engine["up"]:
        console.print(
            f"  engine {engine['agent']}, pid {engine['pid']}, up {_age(engine['since_seconds'])}, nixl {engine['nixl']},"
            f" slots of {engine['slot_bytes'] / 2**20:g} MiB"
        )
    else:
        console.print(f"  engine [red]down[/] for {_age(engine['since_seconds'])}")
    _services(console, s)
    _rooms(console, s)
    workers = _table("workers", "engine id", "role", "pid", "heard", "rooms", "pages home", "read", "write")
    for w in s["workers"]:
        workers.add_row(
            w["engine_id"], w["role"], str(w["pid"]), f"{_age(w['silent_seconds'])} ago", str(w["rooms"]),
            *(str(w["pages"].get(state, 0)) for state in ("home", "read", "write")),
        )  # fmt: skip
    console.print(workers if s["workers"] else "  no workers attached")
    peers = _table("peers", "node", "state", "heard", "incarnation", "engine", "rooms")
    for p in s["peers"]:
        peers.add_row(
            p["node"], p["state"], f"{_age(p['silent_seconds'])} ago", f"{p['incarnation']:x}",
            f"{p['engine_incarnation']:x}" if p["engine_incarnation"] else "none", str(p["rooms"]),
        )  # fmt: skip
    console.print(peers if s["peers"] else "  no peers known")


def _services(console: Any, s: dict[str, Any]) -> None:
    table = _table("services", "service", "phase", "heartbeat", "restarts", "last cause")
    for name, service in s["services"].items():
        colour = "green" if service["phase"] == "serving" else "red"
        table.add_row(name, f"[{colour}]{service['phase']}[/]", f"{_age(service['heartbeat_age_seconds'])} ago",
                      str(service["restarts"]), service["last_cause"])  # fmt: skip
    console.print(table)


def _rooms(console: Any, s: dict[str, Any]) -> None:
    table = _table("rooms and slots", "side", "rooms by state", "oldest", "slots by state")
    for side in ("send", "receive"):
        rooms = ", ".join(f"{state} {n}" for state, n in s["rooms_by_state"][side].items() if n) or "none"
        slots = ", ".join(f"{state} {n}" for state, n in s["slots"][side].items() if n) or "none"
        table.add_row(side, rooms, _age(s["oldest_room_seconds"][side]), slots)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
