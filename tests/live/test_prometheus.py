"""A real Prometheus: the alert rules are valid, each fires on what it is for and on nothing else, and a real sidecar's series feed them.

Skipped by name where there is no Prometheus (Debian, Ubuntu: apt-get install prometheus).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecars import Sidecar, until

pytest.importorskip("nixl", reason="needs pdxfer[engine]")

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt-get install prometheus)")
def test_each_alert_fires_on_what_it_is_for() -> None:
    assert PROMTOOL is not None
    for arguments in (["check", "rules", "--lint-fatal", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        found = subprocess.run(
            [PROMTOOL, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False
        )
        assert found.returncode == 0, found.stdout + found.stderr


def test_every_alert_has_a_test() -> None:
    names = re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yaml").read_text())
    tested = (DEPLOY / "alerts_test.yaml").read_text()
    assert names and [name for name in names if name not in tested] == []


class Prometheus:
    def __init__(self, directory: Path, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        shutil.copy(DEPLOY / "alerts.yaml", directory)
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yaml]\n"
            f"scrape_configs: [{{job_name: pdxfer, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        self.log = (directory / "prometheus.log").open("w+")
        assert PROMETHEUS is not None
        self.process = subprocess.Popen(
            [
                PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def ask(self, path: str) -> Any:
        assert self.process.poll() is None, "prometheus ended"
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None  # it is starting

    def up(self) -> bool:
        found = self.ask("targets")
        return bool(found) and [t["health"] for t in found["activeTargets"]] == ["up"]

    def names(self) -> set[str]:
        return set(self.ask("label/__name__/values") or ())

    def alerts(self) -> dict[str, str]:
        return {a["labels"]["alertname"]: a["state"] for a in (self.ask("alerts") or {"alerts": ()})["alerts"]}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    one = Sidecar(tmp_path, supervisor_backoff_first=0.0)
    try:
        yield one.start()
    finally:
        one.end()


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt-get install prometheus)")
def test_a_real_sidecar_feeds_the_alerts(tmp_path: Path, sidecar: Sidecar) -> None:
    prometheus = Prometheus(tmp_path, "{}:{}".format(*sidecar.address))
    try:
        until(prometheus.up, 30, "the sidecar is scraped")
        wanted = set(re.findall(r"\bpdxfer_\w+", (DEPLOY / "alerts.yaml").read_text()))
        until(lambda: wanted <= prometheus.names(), 10, "every series that an alert names exists from the start")
        until(
            lambda: all(r["health"] == "ok" for g in prometheus.ask("rules")["groups"] for r in g["rules"]),
            10,
            "evaluated",
        )
        time.sleep(3.0)
        assert prometheus.alerts() == {}, "a quiet node rings no bell"
        for _ in range(5):
            before = sidecar.engine_pid
            os.kill(before, signal.SIGKILL)
            until(lambda before=before: sidecar.engine_pid not in (0, before) and sidecar.ready(), 20, "a new engine")
            time.sleep(1.2)  # a scrape sees each
        until(lambda: prometheus.alerts().get("PdxferRestarts") == "firing", 20, "the restarts ring")
    finally:
        prometheus.close()
