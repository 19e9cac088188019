"""Fixtures of all tests, including leak checks for tests with processes."""

from __future__ import annotations

import contextlib
import gc
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
PROCESSES = ("children", "orphans")
"""Parts of a footprint that are lists of processes."""
SLOW = "ISKANDER_SLOW"
RUN_MARK, RUN = "TESTS_RUN", uuid.uuid4().hex
os.environ[RUN_MARK] = RUN
# Set before any test imports onnxruntime, which uploads usage data by default.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Hundreds of servers start: their bytecode is cached.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The servers' cache of models is private to this process, and inside that of the process that
# started the workers of pytest-xdist: it removes all of them, because a worker may be killed first.
IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
PARENT_CACHE = os.environ["XDG_CACHE_HOME"] if IS_XDIST_WORKER else None
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="isk-cache-", dir=PARENT_CACHE)
# A slow machine is no failure: examples have no deadline.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
settings.register_profile("fast", deadline=None, max_examples=10)
# For `benchmarks`, which is in no wheel; last, so that the tests use an installed `iskander`.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests unless they are enabled."""
    if SLOW not in os.environ:
        skip = pytest.mark.skip(reason=f"slow: `make test-all`, or {SLOW}=1")
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude what now exists from garbage collections: a test's own one takes a tenth of the time.

    Ten thousand items and the libraries of all test modules would be searched each time.
    """
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests that depend on the channel between gateway and worker over both kinds of it."""
    mark = metafunc.definition.get_closest_marker("over_zmq")
    if mark is not None:
        marks = () if mark.kwargs.get("is_slow") is False else (pytest.mark.slow,)
        kinds = ["seqpacket", pytest.param("zmq", marks=marks)]
        metafunc.parametrize("channel", kinds, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def channel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Default channel of the servers in the tests."""
    from support import processes

    processes.CHANNEL = getattr(request, "param", "seqpacket")
    yield
    processes.CHANNEL = "seqpacket"


def pytest_unconfigure() -> None:
    """Remove the caches of all processes."""
    if not IS_XDIST_WORKER:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name, because paths of sockets are limited to 107 bytes.

    It is removed after its test: thousands of folders, some with large models, take long to remove.
    """
    with tempfile.TemporaryDirectory(prefix="isk-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind_by_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leak check of a module's own servers."""
    yield from _compare(request)


@pytest.fixture(autouse=True, scope="module")
def environment_of_its_own() -> Iterator[None]:
    """Restore variables set by model converters, which servers of later modules would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leak check of one test."""
    yield from _compare(request)


def _compare(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare children, threads, shared mappings and /dev/shm before and after."""
    if request.path.parent.name not in ("interop", "process", "system"):
        yield
        return
    before = _footprint()
    yield
    # A killed process takes a moment to disappear.
    deadline = time.monotonic() + GONE_WITHIN_S
    while _by_pid(after := _footprint()) != _by_pid(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _by_pid(after) == _by_pid(before), f"left behind: {after} where {before} was"


def _by_pid(footprint: dict[str, list[str]]) -> dict[str, list[str]]:
    """The footprint without the names of processes: a process names itself after its start."""
    processes = {key: [each.split()[0] for each in footprint[key]] for key in PROCESSES}
    return footprint | processes


def _footprint() -> dict[str, list[str]]:
    from support.processes import shared_mappings

    parents = _parents()
    ours, found = {os.getpid()}, 0
    while len(ours) > found:
        found = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    # Only those of this run: all of its processes inherit the mark.
    orphans = [pid for pid, parent in parents.items() if parent == 1 and _is_of_this_run(pid)]
    children = _named(ours - {os.getpid()})
    return {
        # A worker's sandbox server exits when it is idle.
        "children": [each for each in children if not each.endswith(" isk-sandbox")],
        "orphans": _named(orphans),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("iskander")),
        "mappings": shared_mappings(),
        # Semaphores are those of the test runner's processes.
        "shm": sorted(
            path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")
        ),
        "descriptors": _shared_descriptors(),
    }


def _parents() -> dict[int, int]:
    """Every process and its parent; much faster than a query for each process."""
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
