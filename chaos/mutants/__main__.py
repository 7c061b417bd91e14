"""``python -m pdxfer.chaos.mutants NAME [pdxfer's arguments …]``: the pdxfer command with a bug in it."""

from __future__ import annotations

import sys

from pdxfer.cli import main

from . import mirror  # noqa: F401 - it registers its bugs
from .live import BUGS


def launch() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in BUGS:
        print(f"usage: python -m pdxfer.chaos.mutants NAME serve ...; names: {', '.join(BUGS)}", file=sys.stderr)
        sys.exit(2)
    name = sys.argv.pop(1)
    what, put = BUGS[name]
    put()
    print(f"mutant {name}: {what}", file=sys.stderr)
    main()


if __name__ == "__main__":
    launch()
