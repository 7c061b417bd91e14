"""``pdxfer bench``: rooms between two sidecars against plain NIXL, and the host mirror against memcpy, measured in the same run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.console import Console

from ..cli import FAILED, Failure

NARROWEST = 120  # columns where there is no terminal to ask


class _Result(Protocol):
    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Result)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """One or more sizes in bytes: "16384", "8M", "4K,16K,64K"."""
    out = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", part.strip().lower())
        if match is None or not int(match[1]):
            raise click.BadParameter(f"{part!r} is no size; write for example 16384, 16K or 8M", ctx, param)
        out.append(int(match[1]) * _UNITS[match[2]])
    return tuple(out)


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """One or more positive numbers: "1,80"."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{value!r}: expected numbers from 1 to 10000, for example 1,80", ctx, param)
    return tuple(map(int, parts))


@click.group(
    invoke_without_command=True,
    epilog="Example: pdxfer bench --page-bytes 4K,16K --concurrency 1,80 --tls tcp --json out.json\n\n"
    "The sidecars take PDXFER_<TABLE>_<KEY> from the environment, so settings can be compared:"
    " PDXFER_ENGINE_SLOT_BYTES=4194304 pdxfer bench",
)
@click.option(
    "--concurrency",
    callback=_counts,
    metavar="N,…",
    default="1,80",
    show_default=True,
    help="Rooms that are under way at a time.",
)
@click.option(
    "--page-bytes",
    callback=_sizes,
    metavar="SIZE,…",
    default="16K",
    show_default=True,
    help="Bytes of a page in one plane.",
)
@click.option(
    "--planes",
    "--layers",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Planes (layers) of the pool.",
)
@click.option(
    "--room-bytes",
    callback=_sizes,
    metavar="SIZE,…",
    default="32M",
    show_default=True,
    help="Bytes of a room, rounded to whole pages.",
)
@click.option(
    "--rooms", type=click.IntRange(0), default=0, show_default=True, help="Rooms of a batch; 0: 1 GiB of them."
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How often the ways take turns."
)
@click.option(
    "--tls", default="tcp", show_default=True, help="UCX_TLS for all, for example tcp or cma,tcp; empty: UCX chooses."
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as JSON.",
)
@click.pass_context
def bench(
    ctx: click.Context, concurrency: tuple[int, ...], page_bytes: tuple[int, ...], planes: int, room_bytes: tuple[int, ...], rooms: int, rounds: int,
    tls: str, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure rooms between two sidecars on this machine against plain NIXL.

    Prints GB/s, rooms/s and percentiles of a room, beside one NIXL WRITE of one descriptor of the same bytes (the limit) and one NIXL
    WRITE with a descriptor per page (what engines do without pdxfer), once with NIXL's progress thread, its default, and once with
    both sides polling without pause. All take turns over the same pages, and bytes are checked. It takes memory for two pools of so many rooms: 5 GiB as it stands, less with a smaller --room-bytes.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ..bench import report, run

    options = run.Options(page_bytes, planes, room_bytes, concurrency, rooms, rounds=rounds, tls=tls)
    _measure(lambda say: run.run(options, say), report.show, json_file)


@bench.command(epilog="Example: pdxfer bench mirror --page-bytes 8K,72K --concurrency 1,80 --json mirror.json")
@click.option(
    "--concurrency",
    callback=_counts,
    metavar="N,…",
    default="1,80",
    show_default=True,
    help="Stores and loads that are under way at a time.",
)
@click.option(
    "--page-bytes",
    callback=_sizes,
    metavar="SIZE,…",
    default="8K,72K",
    show_default=True,
    help="Bytes of a page in one plane.",
)
@click.option("--planes", type=click.IntRange(1, 1024), default=32, show_default=True, help="Planes of the pool.")
@click.option(
    "--operation-bytes",
    callback=_sizes,
    metavar="SIZE",
    default="8M",
    show_default=True,
    help="Bytes of a store or load, rounded to whole blocks.",
)
@click.option(
    "--operations", type=click.IntRange(0), default=0, show_default=True, help="Of a batch; 0: 512 MiB of them."
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How often the ways take turns."
)
@click.option(
    "--entries",
    type=click.IntRange(5000),
    default=1_000_000,
    show_default=True,
    help="Entries of the index that is weighed.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as JSON.",
)
def mirror(
    concurrency: tuple[int, ...], page_bytes: tuple[int, ...], planes: int, operation_bytes: tuple[int, ...], operations: int, rounds: int, entries: int,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Measure the host mirror of a sidecar on this machine: stores and loads against one memcpy of the same bytes, the lookup of a
    prompt of 131072 tokens, and what the index takes for each entry.

    It takes memory: about 3 GiB as it stands, less with a smaller --operation-bytes.
    """
    from ..bench import mirror as measurement
    from ..bench import report

    options = measurement.Options(
        page_bytes, planes, operation_bytes[0], concurrency, operations, rounds=rounds, index_entries=entries
    )
    _measure(lambda say: measurement.run(options, say), report.show_mirror, json_file)


def _measure(
    run: Callable[[Callable[[str], None]], Coroutine[Any, Any, R]],
    show: Callable[[R, Console], None],
    json_file: Path | None,
) -> None:
    """Run it with a progress line, print what it found, and write that as JSON."""
    from ..bench.child import BenchError
    from ..demo.processes import DemoError

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NARROWEST)
    progress = Console(stderr=True, highlight=False)
    try:
        with progress.status("pdxfer bench") as status:
            result = asyncio.run(run(lambda text: status.update(f"{text} …")))
    except (BenchError, DemoError) as error:
        raise Failure(str(error), FAILED) from None
    except KeyboardInterrupt:
        raise Failure("ended by ^C; every process is gone", 130) from None
    show(result, console)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            message = f"--json {json_file} cannot be written: {error.strerror}; the figures are above"
            raise Failure(message, FAILED) from None
