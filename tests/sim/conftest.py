"""The scenarios of tests/unit are run again here, under mutants."""

from __future__ import annotations

import sys
from pathlib import Path

for place in (Path(__file__).parent, Path(__file__).parent.parent / "unit"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
