"""Prepared msgspec types: no crash by concurrent first decoding or at process exit.

msgspec caches information on a type when it is first decoded, and frees it at process exit.
"""

from __future__ import annotations

import os
import subprocess
import sys

DECODE_ALL = """
import importlib, inspect, pkgutil
import msgspec
import iskander, iskander_worker
from iskander.scheduling.worker_slot import InFlightBatch, BatchPart

prepared = 0
for package in (iskander, iskander_worker):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith(("__main__", ".torch")):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(kind) or kind in (InFlightBatch, BatchPart):  # Never decoded.
                continue
            if issubclass(kind, msgspec.Struct):
                try:
                    msgspec.json.Decoder(kind)
                except TypeError:  # It is only encoded.
                    continue
                prepared += 1
assert prepared > 50
"""

RACE = """
import random, sys, threading, time
sys.setswitchinterval(0.0002)
import msgspec
from iskander.config.repository import ModelFile
from iskander.contract.manifest import Manifest

FILE = {"versions": [1], "aliases": {"a": 1}, "lane": {"policy": "fifo"}}
MANIFEST = {"inputs": [{"column": "x", "tensor": "y"}], "sha256": {"a": "b"}}
barrier = threading.Barrier(6)

def decode(kind, value):
    barrier.wait()
    until = time.perf_counter() + random.random() * 0.004
    while time.perf_counter() < until:
        pass
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass

arguments = [(ModelFile, FILE), (Manifest, MANIFEST)] * 3
threads = [threading.Thread(target=decode, args=each) for each in arguments]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_concurrent_first_decoding_does_not_crash() -> None:
    """Without the preparation, 5 of 6 such processes crash with SIGSEGV."""
    processes = [subprocess.Popen([sys.executable, "-c", RACE]) for _ in range(4)]
    assert [each.wait(60) for each in processes] == [0] * len(processes)


def test_process_exit_after_decoding_every_type_succeeds() -> None:
    """The debug allocator overwrites freed memory, which exposes invalid references."""
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    completed = subprocess.run(
        [sys.executable, "-c", DECODE_ALL],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
