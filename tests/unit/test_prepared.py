"""What msgspec learns of our types ends no process.

Neither where two threads decode a type for the first time, nor when it lets go of what it learned.
"""

from __future__ import annotations

import os
import subprocess
import sys

ALL = """
import importlib, inspect, pkgutil
import msgspec
import iskander, iskander_worker
from iskander.scheduling.worker_slot import InFlightBatch, BatchPart

learned = 0
for package in (iskander, iskander_worker):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith(("__main__", ".torch")):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if kind in (InFlightBatch, BatchPart):  # Never decoded.
                continue
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
                try:
                    msgspec.json.Decoder(kind)
                except TypeError:  # It is only ever made.
                    continue
                learned += 1
assert learned > 50
"""

RACE = """
import random, sys, threading, time
sys.setswitchinterval(0.0002)
import msgspec
from iskander.config.repository import ModelFile
from iskander.contract.manifest import Manifest

FILE = {"versions": [1], "aliases": {"a": 1}, "lane": {"policy": "fifo"}}
MANIFEST = {"inputs": [{"column": "x", "tensor": "y"}], "sha256": {"a": "b"}}
together = threading.Barrier(6)

def decode(kind, said):
    together.wait()
    until = time.perf_counter() + random.random() * 0.004
    while time.perf_counter() < until:
        pass
    try:
        msgspec.convert(said, kind)
    except msgspec.ValidationError:
        pass

asked = [(ModelFile, FILE), (Manifest, MANIFEST)] * 3
threads = [threading.Thread(target=decode, args=each) for each in asked]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_a_type_for_the_first_time_end_nothing() -> None:
    """Not prepared, five of six of these processes end by SIGSEGV."""
    started = [subprocess.Popen([sys.executable, "-c", RACE]) for _ in range(4)]
    assert [each.wait(60) for each in started] == [0] * len(started)


def test_the_end_of_a_process_lets_go_of_every_type() -> None:
    """With the allocator that fills what it frees: a wrong reference shows at once."""
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", ALL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
