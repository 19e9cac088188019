"""Fixtures of all tests; those of real processes check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

GONE_WITHIN_S = 5.0
RUN_MARK, RUN = "TESTS_RUN", uuid.uuid4().hex
os.environ[RUN_MARK] = RUN
# Before any test imports onnxruntime: it uploads usage data unless told not to.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Hundreds of servers are started: what they run is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What servers keep of models is the run's own, and goes with it.
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="isk-cache-")
# A busy machine is no failure: examples have no time limit of their own.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
# For `benchmarks`, which is in no wheel; last, so that an installed `iskander` is the one tested.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def pytest_unconfigure() -> None:
    """Not at the end of the process: those that run tests side by side end without a word."""
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """With a short name, since the paths of sockets below it have 107 bytes at most.

    It goes with its test: thousands of them, some with large models, take long to clear away.
    """
    with tempfile.TemporaryDirectory(prefix="isk-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind_by_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's own servers leave."""
    yield from _compare(request)


@pytest.fixture(autouse=True, scope="module")
def environment_of_its_own() -> Iterator[None]:
    """Some converters of models set variables, which the servers of later modules would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test leaves."""
    yield from _compare(request)


def _compare(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare children, threads, shared mappings and /dev/shm before and after."""
    if request.path.parent.name not in ("interop", "process", "system"):
        yield
        return
    before = _footprint()
    yield
    # A killed process takes a moment to be gone.
    deadline = time.monotonic() + GONE_WITHIN_S
    while (after := _footprint()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after == before, f"left behind: {after} where {before} was"


def _footprint() -> dict[str, list[str]]:
    from support.processes import shared_mappings

    parents = _parents()
    ours, found = {os.getpid()}, 0
    while len(ours) > found:
        found = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    # Those of this run only: every process of it inherits the mark.
    orphans = [pid for pid, parent in parents.items() if parent == 1 and _is_of_this_run(pid)]
    children = _named(ours - {os.getpid()})
    return {
        # A worker ends what tries models out when it was not needed for a while.
        "children": [each for each in children if not each.endswith(" isk-trials")],
        "orphans": _named(orphans),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("iskander")),
        "mappings": shared_mappings(),
        "shm": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "descriptors": _shared_descriptors(),
    }


def _parents() -> dict[int, int]:
    """Every process and its parent; far quicker than to ask for each by itself."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def _is_of_this_run(pid: int) -> bool:
    try:
        return f"{RUN_MARK}={RUN}" in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return False


def _named(pids: Iterable[int]) -> list[str]:
    named = []
    for pid in sorted(pids):
        with contextlib.suppress(psutil.Error):
            named.append(f"{pid} {psutil.Process(pid).name()}")
    return named


def _shared_descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if "memfd:iskander" in target:
            found.append(target)
    return sorted(found)
