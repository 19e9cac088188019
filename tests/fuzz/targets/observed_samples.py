"""Input of a gateway from its observer process, and of that process from memory of a worker.

Layout of an input: kind (1 byte: messages to the gateway, requests, results). Messages follow each
with its length (2 bytes), and reach the sampler of a gateway that holds samples, by a socket.
Requests and results are the bytes of a sample's leases, of which pyarrow's full validation is the
reference. No exception leaves the sampler, each lease is given back once, and damaged memory is one
of the declared errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from support.lanes import lane_of, request_of
from support.observed import make_worker

from fuzz import mutation
from fuzz.serving import LOOP
from fuzz.targets.hostile_worker import join, split
from fuzz.targets.shadow_results import ROWS, SERVED, SPECS
from fuzz.targets.wire_messages import with_changed_value
from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.observation.messages import Copied, Model, OutputPart, Report, encode
from iskander.gateway.observation.process import ObserverProcess
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.worker_slot import InFlightBatch
from iskander.sampling.tensors import DAMAGE_ERRORS, Tensors

ITERATIONS = 400
HELD = 3
INPUTS = (
    TensorSpec("x", "x", ColumnType("float32", (2,)), (2,)),
    TensorSpec("s", "s", ColumnType("utf8"), ()),
    TensorSpec("b", "b", ColumnType("bool"), ()),
)
SETTINGS = ModelConfig(name="m", path="p")
TENSORS = tuple(
    Tensors(Model(0, 0, "m", "1", Contract(INPUTS, specs), SETTINGS)) for specs in SPECS
)
INPUT_ARENA = InputArena(1 << 20)
LANE = lane_of()


def seeds() -> list[bytes]:
    batch = pa.record_batch(
        [
            pa.FixedSizeListArray.from_arrays(pa.array(np.arange(10, dtype=np.float32)), 2),
            pa.array(["a", "", "text", "ü", "z"]),
            pa.array([True, False, True, True, False]),
        ],
        schema=TENSORS[0]._inputs,
    )
    reports = [
        Report({"observer": {"counts": {"consumed": 3}}, "drift": {"failure": "m/1: no file"}}),
        Report({"prediction_log": {"counts": {"rows": 1}, "failure": "", "files": [1]}}),
    ]
    frames: list[bytes] = [
        *map(encode, reports),
        encode(Copied([1, 2], [])),
        encode(Copied([1, 1, 99], [2, 3])),
        encode({"type": "Report", "values": {"observer": {"counts": {"x": "1"}}}}),
        b"\x92" * 3000,
        b"\x82\xa4type\xa6Report\xa6values\x81\xa1a\x81\xa1b" + b"\x91" * 3000,
        bytes(70_000),
    ]
    return [
        *(b"\0" + join([frame]) for frame in frames),
        b"\0" + join(frames[:4] * 2),
        b"\1" + batch.serialize().to_pybytes(),
        *(bytes((2 + 4 * kind,)) + body for kind, body in enumerate(SERVED)),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    kind, rest = raw[:1], raw[1:]
    if kind and kind[0] % 4:
        return kind + mutation.patch(rest, random)

    def change(frame: bytes) -> bytes:
        return mutation.patch_document(frame, other, random, changed, encode)

    return kind + join(mutation.shuffle(split(rest), split(other[1:]), random, change))


def changed(document: Any, random: Random) -> Any:
    """Change one value, at any depth of maps and arrays."""
    if isinstance(document, dict) and document and random.randrange(8):
        name = random.choice(list(document))
        return document | {name: changed(document[name], random)}
    return with_changed_value(document, random)


def run(raw: bytes) -> None:
    kind = raw[0] if raw else 0
    if kind % 4 == 0:
        LOOP.run_until_complete(check_messages(split(raw[1:])))
    elif kind % 4 == 1:
        check_memory(TENSORS[0], raw[1:], is_input=True)
    else:
        at = kind // 4 % len(TENSORS)
        if len(raw) > body_layout(SPECS[at], ROWS)[0][-1] + SPECS[at][-1].buffer_bytes(ROWS):
            check_memory(TENSORS[at], raw[1:], is_input=False)


async def check_messages(frames: list[bytes]) -> None:
    """Send messages to a gateway that holds samples."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    process = ObserverProcess(Config(), INPUT_ARENA, lambda name, version: None)
    process._process = mock.Mock(started_ns=0, is_stopping=False, was_killed=False)
    sampler, worker = process.sampler, make_worker()
    failed: list[dict[str, Any]] = []
    LOOP.set_exception_handler(lambda _, context: failed.append(context))
    with ours, theirs, contextlib.ExitStack() as stack:
        process._on_start(ours)
        stack.callback(INPUT_ARENA.reclaimers.remove, sampler._reclaim_input)
        for _ in range(HELD):
            hold(process, worker)
        for frame in frames:
            with contextlib.suppress(OSError):
                theirs.send(frame)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        sampler.reclaim_output(worker)
        check_process(process)
        process._on_exit(1)
        check_process(process)
    for context in failed:
        raise context.get("exception") or AssertionError(context["message"])
    assert not len(sampler.holds) and not sampler.holds.bytes
    assert not INPUT_ARENA.arena.leased_bytes and not worker.output_arena.leased_bytes
    assert sum(sampler.counts.values()) == HELD, f"{dict(sampler.counts)}"


def hold(process: ObserverProcess, worker: Any) -> None:
    """Hold the leases of one sample."""
    holds, request = process.sampler.holds, request_of(LANE)
    lease = worker.output_arena.lease(64)
    request.lease = INPUT_ARENA.arena.lease(64)
    assert lease is not None and request.lease is not None
    part = OutputPart(worker.incarnation, lease.offset, 8, 0, 1)
    assert holds.add_part(request, worker, InFlightBatch(LANE, [], lease, 1, 0, 0), part, 1)
    holds.complete(request, request.lease)
    assert holds.keep_output(lease)


def check_process(process: ObserverProcess) -> None:
    """Check the parts of a report that a gateway reads."""
    for consumer in ("observer", "prediction_log", "drift"):
        for count in process.counts(consumer).values():
            assert isinstance(count, int)
    process.stats()


def check_memory(tensors: Tensors, raw: bytes, *, is_input: bool) -> None:
    """Read the copy of a sample's memory, which has at least the size of its layout."""
    try:
        if is_input:
            batch = tensors.read_inputs(tensors.copy_inputs(memoryview(raw)))
        else:
            parts = (OutputPart(7, 0, len(raw), 0, ROWS),)
            copies = [tensors.copy_outputs(memoryview(raw))]
            batch = tensors.read_outputs(parts, copies)
    except DAMAGE_ERRORS:
        return
    batch.validate(full=True)
    expected = tensors._inputs if is_input else tensors._outputs
    assert batch.schema == expected
    assert is_input or batch.num_rows == ROWS
    for column in batch.columns:
        column.to_pylist()
