"""``pdxfer probe``: whether sparse attention selects the same tokens after a cache was moved as before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from ..cli import FAILED, UNAVAILABLE, Failure
from .bench import NARROWEST, _counts

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(epilog="Example: pdxfer probe needle --concurrency 1,80 --json needle.json --png needle.png")
def probe() -> None:
    """Whether sparse attention (DSA) selects the same tokens after index keys were moved as before."""


def _names(known: tuple[str, ...]) -> Any:
    """A callback for a comma-separated list of names."""

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        if unknown := [name for name in found if name not in known]:
            raise click.BadParameter(f"{unknown[0]!r}: expected some of {', '.join(known)}", ctx, param)
        return found

    return convert


def _contexts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 600 <= int(part) <= 1 << 20 for part in parts):
        raise click.BadParameter(f"{value!r}: expected numbers from 600 to 1048576, for example 955,4500", ctx, param)
    return tuple(sorted(set(map(int, parts))))


@probe.command(
    epilog="Example: pdxfer probe needle --path nixl,respawn --index-dtype bf16,fp8,fp32 --contexts 955,4500\n\n"
    "\b\nExit codes: 0 when every set is identical, 1 when one differs or the probe could not go on."
)
@click.option(
    "--path", "paths", metavar="NAME,…", default="all", show_default=True, help="Paths to run; --list names them."
)
@click.option("--list", "list_paths", is_flag=True, help="Name the paths, and end.")
@click.option(
    "--index-dtype",
    "dtypes",
    callback=_names(("fp8", "bf16", "fp32")),
    metavar="NAME,…",
    default="bf16,fp8",
    show_default=True,
    help="Formats of the index keys that are moved: bf16, fp8 (e4m3 with a scale), fp32.",
)
@click.option(
    "--contexts",
    callback=_contexts,
    metavar="N,…",
    default="955,4500,16384,65536",
    show_default=True,
    help="Tokens of a prompt.",
)
@click.option(
    "--concurrency",
    callback=_counts,
    metavar="N,…",
    default="1,80",
    show_default=True,
    help="Rooms that are under way at a time.",
)
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=64, show_default=True, help="Tokens of a page.")
@click.option("--tls", default="", help="UCX_TLS, for example tcp; left out, UCX chooses.")
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the result as JSON.")
@click.option("--png", "png_file", metavar="FILE", type=_FILE, help="Draw the result; needs pdxfer[plot].")
def needle(
    paths: str, list_paths: bool, dtypes: tuple[str, ...], contexts: tuple[int, ...], concurrency: tuple[int, ...], page_tokens: int,
    tls: str, json_file: Path | None, png_file: Path | None,
) -> None:  # fmt: skip
    """Plant needles in index keys, move them, and compare the top-k sets with those before.

    Two sidecars and two workers run on this machine. Every prompt has one needle, or 600 copies of one, near its start, in its
    middle or within its last 30 tokens; prompts share prefixes. After each path the sets of the top 512 and the top 2048
    must be identical to those before it: the transfer moved what it was given. Then needles of graded strength show what each
    format finds without any transfer: so a fault of a transfer can be told from a limit of the selection itself. The defaults
    take memory for two pools of 700,000 tokens (700 MB); less with smaller --contexts.
    """
    from rich.console import Console

    from ..bench.child import BenchError
    from ..demo.processes import DemoError
    from ..probe import needle as needles
    from ..probe import show
    from ..probe.paths import PATHS

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=NARROWEST)
    if list_paths:
        for path in PATHS.values():
            console.print(f"{path.name:<10} {path.what}", soft_wrap=True)
        return
    chosen = tuple(PATHS) if paths == "all" else tuple(dict.fromkeys(part.strip() for part in paths.split(",")))
    if unknown := [name for name in chosen if name not in PATHS]:
        raise click.BadParameter(f"{unknown[0]!r}: expected all, or some of {', '.join(PATHS)}", param_hint="--path")
    draw = _drawing() if png_file is not None else None
    options = needles.Options(chosen, dtypes, contexts, concurrency, page_tokens, tls)  # type: ignore[arg-type]  # checked by _names
    try:
        with Console(stderr=True, highlight=False).status("pdxfer probe needle") as status:
            result = asyncio.run(needles.run(options, lambda text: status.update(f"{text} …")))
    except (BenchError, DemoError) as error:
        raise Failure(str(error), FAILED) from None
    except KeyboardInterrupt:
        raise Failure("ended by ^C; every process is gone", 130) from None
    show.show(result, console)
    if json_file is not None:
        _written(
            "--json", json_file, lambda: json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n", "utf-8")
        )
    if png_file is not None and draw is not None:
        _written("--png", png_file, lambda: draw(result, png_file))
    raise SystemExit(0 if result.identical else FAILED)


@probe.command(epilog="Example: pdxfer probe model --index-dtype bf16,fp8 --prompts 8 --json model.json")
@click.option(
    "--index-dtype",
    "dtypes",
    callback=_names(("fp8", "bf16", "fp32")),
    metavar="NAME,…",
    default="bf16,fp8",
    show_default=True,
    help="Formats that the model keeps its index keys in.",
)
@click.option("--prompts", type=click.IntRange(1, 1000), default=8, show_default=True, help="Prompts, all at a time.")
@click.option("--new-tokens", type=click.IntRange(2, 1000), default=16, show_default=True, help="Tokens of an answer.")
@click.option(
    "--top-k", type=click.IntRange(1, 100_000), default=512, show_default=True, help="Tokens that attention sees."
)
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=64, show_default=True, help="Tokens of a page.")
@click.option("--tls", default="", help="UCX_TLS, for example tcp; left out, UCX chooses.")
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the result, with every token, as JSON.")
def model(
    dtypes: tuple[str, ...],
    prompts: int,
    new_tokens: int,
    top_k: int,
    page_tokens: int,
    tls: str,
    json_file: Path | None,
) -> None:
    """Decode a tiny random DeepSeek V3.2 across a transfer: the same tokens and top-k sets as in one process.

    A prefill worker computes prompts of 530 to 955 tokens and sends its two pools, latents and index keys, through two sidecars to a
    decode worker, which answers. A third process does all of it alone. Every token, and for every token and layer the set of
    positions that the model's own indexer selects, must be the same. Needs pdxfer[demo] (torch and transformers).
    """
    import importlib.util

    from rich.console import Console

    from ..bench.child import BenchError
    from ..demo.processes import DemoError
    from ..probe import model as models
    from ._tables import add, new_table

    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise Failure(
                f"pdxfer probe model needs the Python module {name!r}: pip install 'pdxfer[demo]'", UNAVAILABLE
            )
    options = models.Options(dtypes, prompts, new_tokens, top_k, page_tokens, tls)  # type: ignore[arg-type]  # checked by _names
    try:
        with Console(stderr=True, highlight=False).status("pdxfer probe model") as status:
            result = asyncio.run(models.run(options, lambda text: status.update(f"{text} …")))
    except (BenchError, DemoError) as error:
        raise Failure(str(error), FAILED) from None
    except KeyboardInterrupt:
        raise Failure("ended by ^C; every process is gone", 130) from None
    numbers = ("prompts", "tokens", "tokens differ", "top-k sets", "sets differ")
    table = new_table(
        "a tiny DeepSeek V3.2 across a transfer, against one process", "index-K", *numbers, numbers=numbers
    )
    for run in result.runs:
        add(table, run.dtype, run.prompts, run.tokens, run.tokens_differ, run.sets, run.sets_differ)
    console = Console(highlight=False, markup=False)
    console.print(table)
    text = (
        "the same tokens and the same sets" if result.identical else "tokens or sets differ from those of one process"
    )
    console.print(text, style="bold green" if result.identical else "bold red")
    if json_file is not None:
        _written(
            "--json", json_file, lambda: json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n", "utf-8")
        )
    raise SystemExit(0 if result.identical else FAILED)


def _drawing() -> Any:
    """Before anything is run: a picture that cannot be drawn is told at once."""
    try:
        from ..probe.picture import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pdxfer":
            raise
        raise Failure(
            f"--png needs the Python module {error.name!r}: pip install 'pdxfer[plot]'", UNAVAILABLE
        ) from None
    return draw


def _written(option: str, file: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise Failure(f"{option} {file} cannot be written: {error.strerror}; the figures are above", FAILED) from None
