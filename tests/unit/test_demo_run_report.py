"""The demo's report: when it passes, what it says, and that JSON and HTML hold what they promise."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from pdxfer.demo import page
from pdxfer.demo.report import Parity, Report, Round, ended_text, table

KEYS = {
    "fault",
    "sessions",
    "done",
    "aborted",
    "failed",
    "unresolved",
    "recovery_seconds",
    "pages_leaked",
    "slots_leaked",
    "wrong_bytes",
}


def good_round(fault: str = "SIGKILL agent") -> Round:
    return Round(
        fault, sessions=16, hit=9, done=10, aborted=2, failed=4, recovery_seconds=1.25, injected=True,
        proof="pid 7 is gone",         answers=3, answers_equal=3, ends={"done": 10, "aborted": 2, "engine_lost": 4},
    )  # fmt: skip


def good_report() -> Report:
    report = Report("synthetic", "bf16", 5, expected_rounds=2, seconds=12.3456)
    report.parity = Parity(prompts=8, identical=8, kv_identical=8)
    report.rounds = [good_round(), good_round("SIGKILL <engine> & co")]
    return report


def test_a_good_report_passes_and_has_the_keys_that_the_issue_names() -> None:
    found = good_report().as_json()
    assert found["verdict"] == "pass" and found["problems"] == []
    assert found["parity"]["identical"] == found["parity"]["prompts"] == 8
    assert len(found["rounds"]) == 2
    assert all(set(item) >= KEYS for item in found["rounds"])
    assert found["rounds"][0]["recovery_seconds"] == 1.25
    assert good_report().verdict_line().startswith("PASS: 8/8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"injected": False, "proof": ""}, "fault not injected"),
        ({"unresolved": 1, "done": 9}, "1 sessions did not end"),
        ({"done": 9}, "15 of 16 sessions are accounted for"),
        ({"pages_leaked": 2}, "2 pages"),
        ({"slots_leaked": 1}, "1 slots"),
        ({"wrong_bytes": 64}, "64 bytes were delivered wrong"),
        ({"answers_equal": 2}, "2 of 3 prompts"),
        ({"answers": 0, "answers_equal": 0}, "0 of 0 prompts"),
        ({"recovery_seconds": None}, "did not recover"),
        ({"problems": ["something else"]}, "something else"),
    ],
)
def test_each_thing_that_must_hold_fails_the_demo(change: dict[str, object], words: str) -> None:
    report = good_report()
    for name, value in change.items():
        setattr(report.rounds[1], name, value)
    assert report.as_json()["verdict"] == "fail"
    assert any(words in problem for problem in report.all_problems())
    assert report.verdict_line().startswith("FAIL: SIGKILL <engine> & co: ")


def test_parity_missing_rounds_and_leftovers_fail_it_too() -> None:
    for spoil in (
        lambda r: setattr(r.parity, "identical", 7),
        lambda r: setattr(r, "parity", Parity()),
        lambda r: r.rounds.pop(),
        lambda r: r.problems.append("processes were left behind"),
    ):
        report = good_report()
        spoil(report)
        assert not report.passed and report.all_problems(), spoil


def test_the_table_and_words() -> None:
    assert ended_text(good_round()) == "10 done, 2 aborted, 4 failed (engine_lost 4)"
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(good_report()))
    text = console.export_text()
    assert "SIGKILL agent" in text and "9 of 16" in text and "1.2" in text
    console.file.close()


def test_json_is_written_whole(tmp_path: Path) -> None:
    good_report().write_json(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "pass"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


class Tags(HTMLParser):
    """Collects what a browser would fetch or run, and checks nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        if tag in ("script", "link", "img", "iframe") or any(name in ("src", "href") for name, _ in attrs):
            self.outside.append(tag)


def test_the_page_is_complete_and_needs_no_network(tmp_path: Path) -> None:
    timeline = page.Timeline(
        12.0,
        {
            "p": [
                page.Point(0.0, {}),
                page.Point(1.0, {"send open": 3}),
                page.Point(2.0, None),
                page.Point(3.0, {"send odd": 1}),
            ],
            "d": [page.Point(0.5, {"receive wanting": 2, "receive receiving": 1})],
        },
        [page.Mark(2.0, True, "SIGKILL <x>"), page.Mark(3.0, False, "engine of p came up")],
        [page.Band(0.0, 5.0, "parity"), page.Band(5.0, 12.0, "SIGKILL agent")],
    )
    page.write(tmp_path / "out.html", good_report(), timeline)
    text = (tmp_path / "out.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.outside == [] and "http" not in text and tags.rows == 3
    assert "SIGKILL &lt;engine&gt; &amp; co" in text and "SIGKILL &lt;x&gt;" in text and "<x>" not in text
    svg = xml.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert len(svg.findall(".//line[@class='fault']")) == 1
    assert len(svg.findall(".//path[@class='restart']")) == 1
    assert len(svg.findall(".//rect[@class='silent']")) == 1


def test_a_page_without_any_sample_is_still_a_page() -> None:
    report = Report("smollm2", "fp32", 0, expected_rounds=7, problems=["sidecar p is not up"])
    assert "sidecar p is not up" in page.render(report, page.Timeline(0.0, {}, [], []))
