"""``pdxfer status``: the state of a running sidecar, for people or as JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from ..cli import FAILED
from . import _admin


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
    from ._tables import new_console

    console = new_console()
    console.print(
        f"node {s['node']}  {'ready' if s['ready'] else 'NOT READY: ' + '; '.join(s['reasons'])}", style="bold"
    )
    console.print(
        f"  pdxfer {s['release']}, pid {s['pid']}, up {_age(s['uptime_seconds'])},"
        f" incarnation {s['incarnation']:x}, at {s['address']}"
    )
    engine = s["engine"]
    if engine["up"]:
        console.print(
            f"  engine {engine['agent']}, pid {engine['pid']}, up {_age(engine['since_seconds'])}, nixl {engine['nixl']},"
            f" slots of {engine['slot_bytes'] / 2**20:g} MiB"
        )
    else:
        console.print(f"  engine down for {_age(engine['since_seconds'])}", style="red")
    for part in (_services(s), _rooms(s), _mirror(s["mirror"]), _workers(s), _peers(s)):
        console.print(part)


def _services(s: dict[str, Any]) -> object:
    from rich.text import Text

    from ._tables import add, new_table

    table = new_table("services", "service", "phase", "heartbeat", "restarts", "last cause", numbers=("restarts",))
    for name, service in s["services"].items():
        phase = Text(service["phase"], "green" if service["phase"] == "serving" else "red")
        heartbeat = f"{_age(service['heartbeat_age_seconds'])} ago"
        add(table, name, phase, heartbeat, service["restarts"], service["last_cause"])
    return table


def _rooms(s: dict[str, Any]) -> object:
    from ._tables import add, new_table

    table = new_table("rooms and slots", "side", "rooms by state", "oldest", "slots by state")
    for side in ("send", "receive"):
        rooms = ", ".join(f"{state} {n}" for state, n in s["rooms_by_state"][side].items() if n) or "none"
        slots = ", ".join(f"{state} {n}" for state, n in s["slots"][side].items() if n) or "none"
        add(table, side, rooms, _age(s["oldest_room_seconds"][side]), slots)
    return table


def _mirror(mirror: dict[str, Any]) -> str:
    if not mirror["bytes"]:
        return "  no host mirror (mirror.bytes is 0)"
    entries = ", ".join(f"{state} {n}" for state, n in mirror["entries"].items() if n) or "none yet"
    dropped = ", ".join(f"{why} {n}" for why, n in mirror["dropped"].items() if n) or "none"
    totals = mirror["totals"]
    return (
        f"  host mirror of {mirror['bytes'] / 2**20:g} MiB, blocks of {mirror['block_tokens']} tokens: entries {entries};"
        f" {totals['blocks_found']} of {totals['blocks_asked']} blocks found in {totals['lookups']} lookups; dropped {dropped};"
        f" {mirror['leases']} leases, {mirror['operations']} stores and loads under way"
    )


def _workers(s: dict[str, Any]) -> object:
    from ._tables import add, new_table

    if not s["workers"]:
        return "  no workers attached"
    numbers = ("pid", "rooms", "pages home", "read", "write")
    table = new_table("workers", "engine id", "role", "heard", *numbers, numbers=numbers)
    for w in s["workers"]:
        pages = (w["pages"].get(state, 0) for state in ("home", "read", "write"))
        add(table, w["engine_id"], w["role"], f"{_age(w['silent_seconds'])} ago", w["pid"], w["rooms"], *pages)
    return table


def _peers(s: dict[str, Any]) -> object:
    from ._tables import add, new_table

    if not s["peers"]:
        return "  no peers known"
    table = new_table("peers", "node", "state", "heard", "incarnation", "engine", "rooms", numbers=("rooms",))
    for p in s["peers"]:
        engine = f"{p['engine_incarnation']:x}" if p["engine_incarnation"] else "none"
        heard = f"{_age(p['silent_seconds'])} ago"
        add(table, p["node"], p["state"], heard, f"{p['incarnation']:x}", engine, p["rooms"])
    return table


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
