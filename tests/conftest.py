"""What holds for every test: hypothesis's profiles, and that no test leaves a process behind.

Run more examples of the property tests with HYPOTHESIS_PROFILE=long, or one test's with --hypothesis-seed=N to repeat a run.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import hypothesis
import psutil
import pytest

SETTLE = 5.0  # seconds for the last children to be gone

# No deadline for a single example: a shared machine with two cores may pause for longer than any that would mean something.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> object:
    """Sidecars, engines and workers that outlive the tests are a defect of the tests, or of pdxfer."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield None
    end = time.monotonic() + SETTLE
    while (left := _left(before)) and time.monotonic() < end:
        time.sleep(0.05)
    names = [f"{p.pid}: {' '.join(p.cmdline())[:120]}" for p in left if p.is_running()]
    for process in left:
        process.kill()
    assert not names, f"processes outlive the tests: {names}"


def _left(before: set[int]) -> list[psutil.Process]:
    multiprocessing.active_children()  # reaps those that are over
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            ours = child.pid not in before and child.status() != psutil.STATUS_ZOMBIE
            if ours and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
