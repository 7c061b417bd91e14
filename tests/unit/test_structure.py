"""The claims of docs/architecture.md that can be read off the source: who imports whom, and how a module looks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("bootstrap", "pools", "chaos")  # top-level folders that pdxfer/ holds as links
LONGEST = 500  # lines of a module
WIDEST = 120

# part: what it may import of pdxfer. Whatever is not named here belongs to "daemon".
ARROWS = {
    "core": set(),
    "pools": {"core"},
    "bootstrap": {"core"},
    "engine": {"core", "pools"},
    "client": {"core", "pools"},
    "daemon": {"core", "pools", "bootstrap", "engine"},
    "sim": {"core"},
    "demo": {"core", "pools", "bootstrap", "client"},
    "bench": {"core", "pools", "bootstrap", "client", "engine", "demo"},
    "probe": {"core", "pools", "bootstrap", "client", "demo", "bench"},
    "chaos": {"core", "pools", "bootstrap", "engine", "client", "daemon", "demo", "sim"},
    "commands": {
        "core",
        "bootstrap",
        "daemon",
        "bench",
        "demo",
        "pools",
        "probe",
        "chaos",
        "sim",
    },  # the last five only when they are called
}
EXIT_CODES = {"OK", "FAILED", "USAGE", "UNAVAILABLE", "INTERNAL", "BUSY"}

NATIVE = {"nixl", "nixl_cu12", "nixl_cu13", "torch", "triton", "cupy"}
IMPURE = NATIVE | {
    "zmq", "asyncio", "threading", "multiprocessing", "concurrent", "socket", "select", "selectors", "subprocess", "signal",
    "time", "datetime", "random", "secrets", "uuid", "os", "pathlib", "logging", "tempfile", "http", "urllib", "io",
}  # fmt: skip


class Import(NamedTuple):
    module: str
    names: frozenset[str]
    line: int


def modules() -> list[Path]:
    found = [p for folder in (*LINKED, "pdxfer") for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if not any(parent.is_symlink() for parent in p.parents)]


def name_of(path: Path) -> str:
    """The module's name as everybody imports it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "pdxfer" else ("pdxfer", *parts))


def part_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) < 2 or parts[0] != "pdxfer":
        return ""
    if parts[-1] in ("cli", "__main__"):
        return "commands"
    if parts[1:3] == ["chaos", "sim"]:
        return "sim"
    return parts[1] if parts[1] in ARROWS else "daemon"


def imports(path: Path) -> Iterator[Import]:
    """Every import of a module at run time, those inside functions included, those for type checkers not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name_of(path).split(".")[:-1]
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, frozenset(), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            names = frozenset(alias.name for alias in node.names)
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if module == "pdxfer":  # from pdxfer import x, from . import x
                for name in names:
                    yield Import(f"pdxfer.{name}", frozenset(), node.lineno)
            else:
                yield Import(module, names, node.lineno)


MODULES = modules()
ids = [str(path.relative_to(ROOT)) for path in MODULES]


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(name_of(path))
    if not part:
        return
    for found in imports(path):
        other = part_of(found.module)
        if not other or other == part or found.module == "pdxfer.__version__":
            continue
        if other == "commands" and found.names <= EXIT_CODES:
            continue  # the daemon ends with the codes that `pdxfer --help` lists
        assert other in ARROWS[part], (
            f"{path.relative_to(ROOT)}:{found.line}: {part} imports {found.module} ({other}), which only"
            f" {sorted(p for p, may in ARROWS.items() if other in may)} may"
        )


def test_the_arrows_are_those_of_the_document_and_go_down() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| part | imports |\n|---|---|\n")[2].partition("\n\n")[0]
    described = {}
    for line in table.splitlines():
        part, may = (cell.strip() for cell in line.strip("|").split("|"))
        described[part] = set(may.split(", ")) - {""}
    assert described == ARROWS
    order = list(described)
    for part, may in described.items():
        assert all(order.index(other) > order.index(part) for other in may), part


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(name_of(p)) == "core"], ids=str)
def test_the_core_is_pure(path: Path) -> None:
    """R3: no clock, socket, thread, randomness, file or native code."""
    for found in imports(path):
        assert found.module.split(".")[0] not in IMPURE, f"{path.name}:{found.line}: the core imports {found.module}"


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(name_of(p)) == "client"], ids=str)
def test_the_client_brings_nothing_into_an_engine(path: Path) -> None:
    for found in imports(path):
        top = found.module.split(".")[0]
        assert top not in NATIVE | {"zmq", "threading", "multiprocessing"}, (
            f"{path.name}:{found.line}: the client imports {found.module}"
        )


@pytest.mark.parametrize(
    "path", [p for p in MODULES if part_of(name_of(p)) in ("daemon", "bootstrap", "core")], ids=str
)
def test_the_parent_loads_no_native_transfer_code(path: Path) -> None:
    """R1: NIXL, UCX and CUDA are the engine's."""
    for found in imports(path):
        assert found.module.split(".")[0] not in NATIVE, f"{path.name}:{found.line}: the parent imports {found.module}"
        assert found.module not in ("pdxfer.engine.nixl", "pdxfer.engine.agent", "pdxfer.engine.loop")


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_says_what_it_is_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a docstring on top says what the module owns"
    lines = text.splitlines()
    assert len(lines) <= LONGEST, f"{len(lines)} lines: one subject each"


def sources() -> list[Path]:
    texts = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.service", "Makefile", "run")
    folders = (*LINKED, "pdxfer", "tests", "docs", "deploy", "benchmarks", ".ci")
    found = [p for folder in folders for kind in texts for p in sorted((ROOT / folder).rglob(kind))]
    found += [p for kind in texts for p in ROOT.glob(kind)]
    return [p for p in found if not any(parent.is_symlink() for parent in p.parents)]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_left_to_be_done_later(path: Path) -> None:
    words = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX"))
    found = re.search(rf"\b({words})\b", path.read_text(encoding="utf-8"))
    assert found is None, f"{path.name} holds {found and found[0]}"


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative_and_right(name: str) -> None:
    link = ROOT / "pdxfer" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()


def test_one_name_for_each_module() -> None:
    """`import bootstrap` must never load a second copy of `pdxfer.bootstrap`."""
    for path in sources():
        if path.suffix == ".py":
            for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                tops = []
                if isinstance(found, ast.Import):
                    tops = [alias.name.split(".")[0] for alias in found.names]
                elif isinstance(found, ast.ImportFrom) and not found.level and found.module:
                    tops = [found.module.split(".")[0]]
                assert not set(tops) & set(LINKED), f"{path}: import pdxfer.{tops[0]} instead"


@pytest.mark.parametrize("module", ["pdxfer.client, pdxfer.pools", "pdxfer.core.node", "pdxfer.cli"])
def test_what_is_loaded_in_the_end(module: str) -> None:
    """Seen from outside, in a fresh interpreter: no import of an import breaks the promise."""
    heavy = ["zmq", "torch", "nixl", "nixl_cu12", "nixl_cu13", "rich", "transformers"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert found.stdout.strip() == "[]"
