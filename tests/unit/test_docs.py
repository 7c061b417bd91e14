"""The documents say what the code says: names, defaults and lists are compared both ways."""

from __future__ import annotations

import ast
import re
import types
import typing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pdxfer import cli, config
from pdxfer.core import limits, messages, worker
from pdxfer.core.ledger import PAGE_STATES, SlotState
from pdxfer.core.mirror import ENTRY_STATES
from pdxfer.core.reasons import ENDS, REFUSALS
from pdxfer.core.snapshot import PEER_STATES, RECV_STATES, SEND_STATES
from pdxfer.engine.counters import Counters
from pdxfer.metrics import Metrics
from pdxfer.probe.paths import PATHS

ROOT = Path(__file__).parents[2]
DOCS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but the headings."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def first_cells(text: str) -> list[str]:
    """The code in the first cells of a section's table."""
    found = [re.match(r"`([^`]+)`", row[0]) for row in rows(text)]
    return [match[1] for match in found if match is not None]


# protocol.md -------------------------------------------------------------------------------------------------------


def structs(union: object) -> dict[str, type[msgspec.Struct]]:
    return {kind.__name__: kind for kind in typing.get_args(union)}


def test_every_message_between_nodes_has_its_section_and_every_section_its_message() -> None:
    under = section(PROTOCOL, "## Between nodes")
    headings = set(re.findall(r"^### (\w+)$", under, re.MULTILINE))
    expected = structs(messages.Message) | {"Envelope": messages.Envelope, "EngineInfo": messages.EngineInfo}
    assert headings == set(expected)
    for name, kind in expected.items():
        text = section(PROTOCOL, f"### {name}")
        for field in kind.__struct_fields__:
            assert f"`{field}`" in text, f"{name}.{field} is not described"


@pytest.mark.parametrize(
    ("union", "after"), [(worker.WorkerFrame, "Worker to sidecar:"), (worker.SidecarFrame, "Sidecar to worker:")]
)
def test_every_worker_frame_has_its_row(union: object, after: str) -> None:
    text = section(PROTOCOL, "## Between a worker and its sidecar").partition(after)[2]
    table = re.match(r"\n\n((?:\|.*\n)+)", text)
    assert table is not None
    described = {row[0].strip("`"): row for row in rows(table[1])[1:]}
    expected = structs(union)
    assert set(described) == set(expected)
    for name, kind in expected.items():
        fields = re.findall(r"`(\w+)`", described[name][1])
        own = [f for f in kind.__struct_fields__ if f != "req" or after.startswith("Sidecar")]
        assert fields == own, f"{name}: described with {fields}, it has {own}"


@pytest.mark.parametrize(
    ("heading", "states"),
    [
        ("### Of a send", SEND_STATES),
        ("### Of a receive", RECV_STATES),
        ("### Of pages", PAGE_STATES),
        ("### Of mirror entries", ENTRY_STATES),
        ("### Of slots", tuple(SlotState)),
        ("### Of a peer", PEER_STATES),
    ],
)
def test_every_state_is_listed(heading: str, states: tuple[str, ...]) -> None:
    assert first_cells(section(PROTOCOL, heading)) == [str(state) for state in states]


def test_every_end_is_listed_in_its_own_words() -> None:
    expected = [[f"`{e.name}`", e.state, "yes" if e.retriable else "no", e.meaning, e.advice] for e in ENDS.values()]
    assert rows(section(PROTOCOL, "## How a room can end"))[1:] == expected


def test_every_refusal_is_listed_in_its_own_words() -> None:
    expected = [[f"`{r.name}`", r.meaning, r.advice] for r in REFUSALS.values()]
    assert rows(section(PROTOCOL, "## Why a request or frame is refused"))[1:] == expected


def test_limits_that_the_protocol_names_exist() -> None:
    known = set(limits.Limits.__struct_fields__)
    for name in re.findall(r"`(\w+_(?:timeout|deadline|limit|window|interval|grace|ttl|first|most))`", PROTOCOL):
        assert name in known | {"attach_timeout"} | set(ENDS) | set(REFUSALS), name


# operations.md -----------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return {"": '""', (): "[]"}.get(value, f'"{value}"' if isinstance(value, str) else str(value))  # type: ignore[call-overload]


def test_every_key_is_listed_with_its_default() -> None:
    under = section(OPERATIONS, "## Configuration")
    defaults = config.Config()
    expected = {key.path: shown(getattr(getattr(defaults, key.table), key.name)) for key in config.every_key()}
    described = {
        re.findall(r"`([^`]+)`", row[0])[0]: row[1].strip("`") for row in rows(under) if row[0].startswith("`")
    }
    assert described == expected
    assert re.findall(r"^### `\[(\w+)\]`$", under, re.MULTILINE) == list(config.Config.__struct_fields__)


def test_every_metric_is_listed_with_its_kind_and_labels() -> None:
    known = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in Metrics("n", 1, "0", ("main", "engine", "bootstrap", "admin")).registry.collect()
        if family.name.startswith("pdxfer_")
    }
    known |= {f"pdxfer_engine_{name}_total": ("counter", set()) for name in Counters().snapshot()}
    known["pdxfer_pages"] = ("gauge", {"worker", "state"})  # its children come with workers
    described = {
        row[0].strip("`"): (row[1], {label for label in row[2].split(", ") if label})
        for row in rows(section(OPERATIONS, "## Metrics"))[1:]
    }
    assert described == known


def test_every_alert_is_listed_and_names_metrics_that_exist() -> None:
    alerts = (ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    assert first_cells(section(OPERATIONS, "## Alerts")) == re.findall(r"- alert: (\w+)", alerts)
    described = set(first_cells(section(OPERATIONS, "## Metrics")))
    for name in re.findall(r"\bpdxfer_\w+", alerts):
        assert name in described or name.removesuffix("_bucket") in described, f"deploy/alerts.yaml names {name}"


def test_every_exit_code_is_listed() -> None:
    under = section(OPERATIONS, "## Signals and exit codes")
    codes = {int(row[0]) for row in rows(under) if row[0].isdecimal()}
    assert codes == {cli.OK, cli.FAILED, cli.USAGE, cli.UNAVAILABLE, cli.INTERNAL, cli.BUSY}


# architecture.md and the others ------------------------------------------------------------------------------------


def defined(path: Path) -> set[str]:
    """Every name of a module: functions, classes, their methods, and what is assigned on top."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_files_and_functions_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:pdxfer|bootstrap|pools|chaos|tests|deploy|docs|benchmarks)/[\w./*-]*)`", text):
        assert list(ROOT.glob(name.rstrip("/"))), f"{document.name} names {name}, which is not there"
    for path, names in re.findall(r"`([\w/]+\.py)`,?((?:,? `[A-Z_a-z][\w.]*`)+)", text):
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in defined(ROOT / path), f"{document.name} names {name} in {path}, where it is not"


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_each_rule_says_where_it_is_kept() -> None:
    under = section(ARCHITECTURE, "## Five rules, and where each is kept")
    rules = re.findall(r"^### (R\d)\.", under, re.MULTILINE)
    assert rules == ["R1", "R2", "R3", "R4", "R5"]
    for rule in re.split(r"^### ", under, flags=re.MULTILINE)[1:]:
        assert len(re.findall(r"`[\w/]+\.py` `", rule)) >= 3, rule[:60]


def code(text: str) -> list[str]:
    """The lines of fenced blocks, and what stands between backticks."""
    fenced = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_commands_that_are_shown_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([a-z ]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    for line in code(document.read_text(encoding="utf-8")):
        line = line.partition("#")[0]
        if match := re.match(r"make ([a-z]+)", line):
            assert match[1] in targets, f"{document.name}: {line}"
        if match := re.match(r"(?:[A-Z_]+=\S+ )*pdxfer ([a-z]+)(.*)", line):
            assert match[1] in cli.COMMANDS, f"{document.name}: {line}"
            command = (
                [match[1], *re.findall(r"^ ([a-z]+)", match[2])]
                if match[1] in ("chaos", "probe", "bench")
                else [match[1]]
            )
            help_text = CliRunner().invoke(cli.cli, [*command, "--help"]).output
            for option in re.findall(r"(?<!\S)(--[a-z-]+)", match[2]):
                assert option in help_text, f"{document.name}: {line}"


def test_the_paths_of_the_probe_are_those_of_its_document() -> None:
    table = section((ROOT / "docs" / "probe.md").read_text(encoding="utf-8"), "## `pdxfer probe needle`")
    assert first_cells(table) == list(PATHS)


def test_the_sample_in_the_readme_is_real() -> None:
    """Its imports resolve and its calls have the client's own parameters."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    samples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert samples
    for sample in samples:
        tree = ast.parse(sample)
        names: dict[str, object] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pdxfer"):
                module = __import__(node.module, fromlist=["x"])
                names |= {alias.name: getattr(module, alias.name) for alias in node.names}
        client = names["Client"]
        for call in [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]:
            assert isinstance(call.func, ast.Attribute)
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id == "client":
                method = getattr(client, call.func.attr)
                assert isinstance(method, types.FunctionType)
                accepted = method.__code__.co_varnames[
                    : method.__code__.co_argcount + method.__code__.co_kwonlyargcount
                ]
                assert {k.arg for k in call.keywords} <= set(accepted), ast.unparse(call)
