"""``pdxfer layouts``: the page formats that are known by name, and the check of a real buffer against one.

Owns: the table, the JSON, and reading a tensor's type and shape from a file. Must not: know a size (``pools.presets`` does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..cli import FAILED, UNAVAILABLE, USAGE, Failure
from ..core.reasons import Refused

TOKENS = 64  # of a page, in the table; a format whose rows take more has that


def _entry(spec: str) -> dict[str, Any]:
    from ..pools.presets import preset

    found = preset(spec)
    tokens = max(TOKENS, found.row_tokens)
    return {
        "spec": spec,
        "about": found.about,
        "bytes_per_token_and_layer": found.token_bytes,
        "page_tokens": tokens,
        "page_bytes": found.page_bytes(tokens),
        "padding_bytes": found.padding(tokens),
        "planes_per_layer": found.planes,
        "row_tokens": found.row_tokens,
        "planar": found.planar,
        "heads": found.heads,
        "tp_size": found.tp_size,
        "tensor_dtype": found.dtype,
        "row": found.row,
        "fields": [
            {
                "name": field.name,
                "dtype": field.dtype,
                "count": field.count,
                "bytes": field.bytes,
                "offset": at,
                "step": step,
            }
            for field, at, step in found.places(tokens)
        ],
    }


@click.group(
    invoke_without_command=True,
    epilog="Example: pdxfer layouts check dsa_index_k_bf16 index_k.safetensors --key model.layers.0.index_k",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def layouts(context: click.Context, as_json: bool) -> None:
    """List the page formats that are known by name: what a row is made of, and what a page of 64 tokens takes.

    A worker that names one when it hands over its tensors (SharedPool.adopt(…, preset=NAME)) has them checked against it.
    """
    if context.invoked_subcommand is not None:
        return
    from ..pools.presets import EXAMPLES

    entries = [_entry(spec) for spec in EXAMPLES]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    for entry in entries:
        click.echo(f"{entry['spec']}\n  {entry['about']}")
        padded = f", {entry['padding_bytes']} of them padding" if entry["padding_bytes"] else ""
        planes = f" in each of {entry['planes_per_layer']} planes" if entry["planes_per_layer"] > 1 else ""
        click.echo(
            f"  {entry['bytes_per_token_and_layer']:g} bytes a token and layer; a page of {entry['page_tokens']} tokens:"
            f" {entry['page_bytes']} bytes{planes}{padded}; tensors of {entry['tensor_dtype']}, or of uint8"
        )
        for field in entry["fields"]:
            click.echo(
                f"    {field['name']:8} {field['count']:4} × {field['dtype']:14} from byte {field['offset']}, each row's"
                f" {field['step']} bytes after the last one's"
            )


@layouts.command(epilog="Example: pdxfer layouts check mla_fp8_ds cache.safetensors --key layers.0 --json")
@click.argument("spec")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--key", "keys", multiple=True, metavar="NAME", help="A tensor of the file; all of them if left out.")
@click.option(
    "--page-dim", type=click.IntRange(0), default=0, show_default=True, help="Which dimension counts the pages."
)
@click.option(
    "--page-tokens",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Tokens of a page; else the dimension after --page-dim.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(spec: str, file: Path, keys: tuple[str, ...], page_dim: int, page_tokens: int, as_json: bool) -> None:
    """Check the tensors of FILE (safetensors) against the format SPEC, as an attach does. Exit code 1 when one disagrees."""
    from ..pools import presets
    from ..pools.tensors import torch_name

    try:
        presets.preset(spec)
    except Refused as why:
        raise Failure(why.detail, USAGE) from None
    found = []
    for key, dtype, shape in _tensors(file, keys):
        entry: dict[str, Any] = {
            "key": key,
            "dtype": torch_name(dtype),
            "shape": shape,
            "problem": "",
        }
        try:
            layout, pages = presets.check_dense(spec, key, dtype, shape, page_tokens, page_dim)
            entry |= {"pages": pages, "page_tokens": layout.page_tokens, "page_bytes": layout.page_bytes}
        except Refused as why:
            entry["problem"] = why.detail
        found.append(entry)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for entry in found:
            if not entry["problem"]:
                click.echo(
                    f"ok    {entry['key']}: {entry['pages']} pages of {entry['page_tokens']} tokens, {entry['page_bytes']} bytes each"
                )
    problems = [entry for entry in found if entry["problem"]]
    for entry in problems:
        click.echo(f"FAIL  {entry['problem']}", err=as_json)
    if problems:
        raise SystemExit(FAILED)


def _tensors(file: Path, keys: tuple[str, ...]) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of each; no byte of their content is read."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise Failure(
            "reading a safetensors file needs the Python module 'safetensors': pip install safetensors", UNAVAILABLE
        ) from None
    try:
        with safe_open(str(file), framework="np") as opened:
            names = list(opened.keys())
            if missing := [key for key in keys if key not in names]:
                raise Failure(f"{file} has no tensor {missing[0]!r}; it has {', '.join(names[:8]) or 'none'}", USAGE)
            slices = [(key, opened.get_slice(key)) for key in keys or names]
            found = [(key, str(part.get_dtype()), list(part.get_shape())) for key, part in slices]
    except (OSError, SafetensorError) as error:
        raise Failure(f"{file} cannot be read as safetensors: {error}", USAGE) from None
    if not found:
        raise Failure(f"{file} holds no tensor", USAGE)
    return found
