"""Types are known before two threads decode them: else the process ends, now and then."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import random, sys, threading, time
sys.setswitchinterval(0.0002)
import msgspec
from iskander.config_repository import ModelFile
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
