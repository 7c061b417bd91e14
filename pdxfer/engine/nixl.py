"""Finding NIXL.

Owns: which of NIXL's packages is imported, and its version. Must not: make an agent.

``nixl`` itself is a shell that imports torch if there is one (1.5 s); ``nixl_cu12`` and ``nixl_cu13`` are what it loads in the
end, and on memory of the CPU they do the same.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any, Final, NamedTuple

from .exits import NO_NIXL, Fault

PACKAGES: Final = (("nixl_cu12", "nixl-cu12"), ("nixl_cu13", "nixl-cu13"), ("nixl", "nixl"))


class Nixl(NamedTuple):
    api: Any
    bindings: Any
    version: str
    package: str


def installed() -> tuple[str, str] | None:
    """Module and distribution of the first of NIXL's packages that is here, found without importing it."""
    return next((pair for pair in PACKAGES if importlib.util.find_spec(pair[0]) is not None), None)


def load() -> Nixl:
    """Raises Fault when no NIXL can be imported."""
    problems = []
    for module, distribution in PACKAGES:
        try:
            api = importlib.import_module(f"{module}._api")
            bindings = importlib.import_module(f"{module}._bindings")
        except ImportError as error:
            if getattr(error, "name", None) != module:
                problems.append(f"{module}: {error}")
            continue
        return Nixl(api, bindings, importlib.metadata.version(distribution), distribution)
    found = f" ({'; '.join(problems)})" if problems else ""
    raise Fault(NO_NIXL, f"NIXL is not installed: pip install 'pdxfer[engine]'{found}")
