"""The result for people and as JSON.

Owns: the table and its words. Must not: measure.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from . import mirror
from .run import WAYS, Figures, Outcome, Result


def show(result: Result, console: Console) -> None:
    """Print everything."""
    m = result.machine
    console.print(
        f"pdxfer {m['pdxfer']}, NIXL {m['nixl']}, UCX_TLS {m['tls']}, slots of {m['slot_bytes'] / 2**20:g} MiB;"
        f" {m['processor']}, {m['cores']} cores, load before the start {m['load_before']}"
    )
    for outcome in result.outcomes:
        console.print(_table(outcome))
        if outcome.one_page is not None:
            one = outcome.one_page
            console.print(
                f"A room of one page ({outcome.page_bytes * outcome.planes / 1024:g} KiB in {outcome.planes} planes), one at a time:"
                f" p50 {one.p50_ms:.2f} ms, p99 {one.p99_ms:.2f} ms."
            )
        for f in outcome.figures:
            if f.way == WAYS[0]:
                console.print(
                    f"Processor time of both sidecars, {f.concurrency} at a time: {f.parents + f.engines:.2f} s for each GB"
                    f" (parents {f.parents:.2f}, engines {f.engines:.2f})."
                )
        parts = ", ".join(f"{part} {rate:.1f} GB/s" for part, rate in outcome.parts.items())
        console.print(f"While it ran: {parts}.")
        console.print(
            f"Checked: all bytes of {outcome.rooms_checked_whole} rooms and {outcome.cells_checked} pages in all, none wrong;"
            f" plain NIXL: all bytes of {outcome.transfers_checked} transfers."
        )
    console.print(
        "[dim]one descriptor: one WRITE of a room's bytes in one piece, both sides polling without pause: the limit. per page: one WRITE with a"
        " descriptor for each of the scattered pages, by NIXL's progress thread, as engines do; spinning: the same, but both sides poll without"
        " pause. pdxfer: rooms through two sidecars, gathered, written, digested twice, scattered.[/dim]"
    )


def _table(outcome: Outcome) -> Table:
    table = Table(
        title=f"pages of {outcome.page_bytes} bytes, rooms of {outcome.room_bytes / 2**20:g} MiB"
        f" ({outcome.pages} pages in {outcome.planes} planes: {outcome.pages * outcome.planes} scattered places)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("at a time", justify="right")
    table.add_column("way")
    for column in ("GB/s", "rooms/s", "p50 ms", "p99 ms", "× per page", "× spinning", "of the limit"):
        table.add_column(column, justify="right")
    for concurrency in sorted({f.concurrency for f in outcome.figures}):
        limit, *per_page = (outcome.of(way, concurrency).gigabytes_per_second for way in WAYS[1:])
        for way in WAYS:
            table.add_row(*_row(outcome.of(way, concurrency), limit, per_page), end_section=way == WAYS[-1])
    return table


def _row(f: Figures, limit: float, per_page: list[float]) -> list[str]:
    rate = f.gigabytes_per_second
    return [
        str(f.concurrency), f.way, f"{rate:.2f}", f"{f.rooms_per_second:.0f}", f"{f.p50_ms:.2f}", f"{f.p99_ms:.2f}",
        *(f"{rate / other:.2f}" for other in per_page), f"{rate / limit:.0%}",
    ]  # fmt: skip


def show_mirror(result: mirror.Result, console: Console) -> None:
    """Print what ``pdxfer bench mirror`` found."""
    m = result.machine
    console.print(
        f"pdxfer {m['pdxfer']}; {m['processor']}, {m['cores']} cores, load before the start {m['load_before']}"
    )
    for outcome in result.outcomes:
        table = Table(
            title=f"pages of {outcome.page_bytes} bytes in {outcome.planes} planes: entries of {outcome.entry_bytes / 1024:g} KiB,"
            f" {outcome.blocks} of them at a time",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for column in ("at a time", "way", "GB/s", "p50 ms", "p99 ms", "of memcpy"):
            table.add_column(column, justify="left" if column == "way" else "right")
        for f in outcome.figures:
            table.add_row(
                str(f.concurrency), f.way, f"{f.gigabytes_per_second:.2f}", f"{f.p50_ms:.2f}", f"{f.p99_ms:.2f}",
                f"{f.of_memcpy:.0%}", end_section=f.way == mirror.WAYS[-1],
            )  # fmt: skip
        console.print(table)
        console.print(
            f"In the engine, digest and all: stores {outcome.engine['store']:.1f} GB/s, loads {outcome.engine['load']:.1f} GB/s. The digest"
            f" alone: {outcome.digest_gigabytes_per_second:.1f} GB/s. Checked: every byte of {outcome.blocks_checked}"
            " loaded blocks, none wrong."
        )
    found = result.lookup
    console.print(
        f"Lookup of {found['tokens']:.0f} tokens ({found['blocks']:.0f} blocks, all held): p50 {found['p50_ms']:.2f} ms, p99"
        f" {found['p99_ms']:.2f} ms; of these the keys take {found['hash_p50_ms']:.2f} ms and the index {found['find_p50_ms']:.2f} ms."
    )
    index = result.index
    console.print(
        f"Index of {index['entries']:.0f} entries: {index['bytes_per_entry']:.0f} bytes for each,"
        f" {index['bytes_per_entry_after_churn']:.0f} after as many evictions."
    )
