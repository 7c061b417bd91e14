"""``pdxfer keygen``: the key pair by which a node is known to its peers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..bootstrap import keys
from ..cli import Failure


@click.command(epilog="Example: pdxfer keygen /etc/pdxfer/node.key")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--show", is_flag=True, help="Make nothing: print the public key of an existing FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def keygen(file: Path, show: bool, as_json: bool) -> None:
    """Write a new key pair to FILE (mode 0600) and print its public key.

    The public key goes into registry.nodes or bootstrap.authorized_keys of the other nodes; FILE into bootstrap.key_file of
    this one. The secret key never leaves the file.
    """
    try:
        if show:
            pair = keys.load(file)
        else:
            pair = keys.generate()
            keys.save(file, pair)
    except keys.BadKeyFile as error:
        raise Failure(str(error)) from None
    click.echo(json.dumps({"file": str(file), "public": pair.public}) if as_json else pair.public)
