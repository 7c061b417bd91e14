"""Tables for people: shared by status and rooms. Imports rich, so it is imported only when something is printed.

What comes from a sidecar is printed as it is: a room id may hold what rich would take for markup.
"""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def new_console() -> Console:
    """As wide as the terminal; wide enough for anything when nobody looks at a terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def new_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """``numbers``: the columns that are set to the right."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return table


def add(table: Table, *cells: object) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
