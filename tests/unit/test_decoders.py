"""Prepared msgspec types: no crash by concurrent first decoding or at process exit; deep nesting.

msgspec caches information on a type when it is first decoded, and frees it at process exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable

import pytest

from iskander.errors import MalformedInput, ProtocolError, ReaderLost
from iskander.gateway.protocols.flight.service import _read_query
from iskander.gateway.protocols.terms import read_metadata
from iskander.gateway.sources.messages import read_error
from iskander.interprocess.control.attach import read_hello
from iskander.lake.reader.parts import decode_part

DEPTH = 5000
DEEP = b"\x91" * DEPTH + b"\xc0"
DEEP_JSON = b"[" * DEPTH + b"]" * DEPTH
PART = b"\x99\xa0\xc4\x00\x90\xc0\x00\x90\x90\xa0"
"""Its eight fields, and a ninth one of a later version."""
READERS: dict[str, tuple[Callable[[bytes], object], bytes, type[Exception]]] = {
    "metadata": (read_metadata, b'{"mine": %b}' % DEEP_JSON, MalformedInput),
    "packed metadata": (read_metadata, b"\x81\xa1x" + DEEP, MalformedInput),
    "terms": (read_metadata, b'{"iskander": {"x": %b}}' % DEEP_JSON, MalformedInput),
    "action": (
        lambda raw: _read_query("stats", raw), b'{"model": "m", "x": %b}' % DEEP_JSON,
        MalformedInput,
    ),
    "hello": (read_hello, b"\x98\xa5hello\x01\xa11\xc0\xc0\x90\xa0" + DEEP, ProtocolError),
    "part": (decode_part, zlib.compress(PART + DEEP), ProtocolError),
}  # fmt: skip

DECODE_ALL = """
import importlib, inspect, pkgutil
import msgspec
import iskander, iskander_worker
from iskander.gateway.scheduling.worker_slot import InFlightBatch, BatchPart

prepared = 0
for package in (iskander, iskander_worker):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith(("__main__", ".torch", ".torch_device")):
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


@pytest.mark.long
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


@pytest.mark.parametrize("name", READERS)
def test_deeply_nested_bytes_are_rejected_by_name(name: str) -> None:
    """msgspec raises RecursionError, even for a part that is not decoded."""
    read, raw, error = READERS[name]
    with pytest.raises(error):
        read(raw)


def test_deeply_nested_error_of_a_reader_is_a_lost_reader() -> None:
    assert isinstance(read_error(memoryview(b"\x81\xa1x" + DEEP)), ReaderLost)
