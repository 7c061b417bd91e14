"""A tiny random DeepSeek V3.2: across a transfer it answers as in one process, and wrong index keys would show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from pdxfer.pools.dsa import IndexFormat
from pdxfer.probe import model
from pdxfer.probe.tiny import LAYERS, Answer, Request, TinyModel

ROOT = Path(__file__).parents[2]


def test_the_same_tokens_and_sets_across_a_transfer(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "pdxfer",
        "probe",
        "model",
        "--prompts",
        "4",
        "--new-tokens",
        "6",
        "--json",
        str(out),
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(out.read_text())
    assert result["identical"] is True
    assert [(run["dtype"], run["prompts"]) for run in result["runs"]] == [("bf16", 4), ("fp8", 4)]
    for run in result["runs"]:
        assert (run["tokens"], run["tokens_differ"], run["sets"], run["sets_differ"]) == (24, 0, 24 * LAYERS, 0)
        assert run["answers"] == run["decoded"]
        assert len({tuple(answer) for answer in run["answers"]}) == 4  # what is compared is not the same all over
    assert list(tmp_path.iterdir()) == [out]


def test_keys_of_another_page_change_what_is_selected() -> None:
    """So equal sets mean equal keys."""
    options = model.Options(prompts=1, new_tokens=3)
    (text,) = model.prompts(options)
    (table,) = model.tables(options, [text], 1)
    tiny = TinyModel(options.top_k)
    tiny.allocate(IndexFormat("bf16"), len(table))

    def answered(*, spoil: bool) -> Answer:
        request = Request(table, text)
        tiny.prefill(request)
        if spoil:
            pages = tiny.pools[1].pages()[1]
            pages[table[3]] = pages[table[9]]
        tiny.decode(request)
        tiny.decode(request)
        return request.answer

    right, again, wrong = (answered(spoil=spoil) for spoil in (False, False, True))
    assert right == again
    assert right.sets[:LAYERS] == wrong.sets[:LAYERS]
    assert right.sets[LAYERS] == wrong.sets[LAYERS]  # the first layer's keys are those that they were
    assert right.sets[LAYERS + 1] != wrong.sets[LAYERS + 1]
    (run,) = [
        model.compare(
            "bf16", [right], [wrong._replace(sets=wrong.sets[:LAYERS])], [wrong._replace(sets=wrong.sets[LAYERS:])]
        )
    ]
    assert not run.identical
    assert run.sets_differ >= 2
    assert np.frombuffer(right.sets[0], np.int32).size == options.top_k


def test_what_is_missing_differs() -> None:
    one = Answer([1, 2], [b"a", b"b"])
    run = model.compare("bf16", [one], [Answer([1], [b"a"])], [Answer([1], [])])
    assert (run.tokens_differ, run.sets_differ, run.identical) == (1, 1, False)
    assert not model.Result(model.Options(), {}).identical
