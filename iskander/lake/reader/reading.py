"""Read of a part: files -> model -> Arrow IPC messages.

Runs in: reader processes, main thread and those of `UnitRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from iskander.client import Client
from iskander.client.model import read_description
from iskander.gateway.sources.messages import BATCH_BYTES, Kind, ReadRequest
from iskander.lake.job import STREAM
from iskander.lake.plan import Unit
from iskander.lake.planning import plan_job
from iskander.lake.reader.confined import filesystem_of
from iskander.lake.reader.parts import decode_part
from iskander.lake.reader.planning import answer_schema, scoring_job
from iskander.lake.rows import ErrorBudget
from iskander.lake.run.report import Counters
from iskander.lake.run.unit_run import UnitContext, UnitRun
from iskander.lake.sinks.schemas import conform
from iskander.lake.sinks.writing import Staged
from iskander.lake.sources.base import FrozenSource
from iskander.lake.sources.reading import FileReader, decimals

PRIORITY: Final = 9
"""Below the priority of clients that set none, so that a scan does not delay them."""
CLIENT_CHARACTERS_MAX: Final = 128
_PREFIX_BYTES: Final = 8
"""Bytes before the metadata of an encapsulated message: a marker, and the metadata's length."""

Send = Callable[[Kind, int, memoryview, memoryview], None]


def read(request: ReadRequest, client: Client, send: Send) -> None:
    """Read and score a part, and send its schema and batches.

    Args:
        request: The part.
        client: Client of the gateway.
        send: Sends a frame: kind, rows, metadata and body.

    Raises:
        SourceChanged: A file has changed since the ticket was made.
        IskanderError: The files cannot be read, or the model fails.
    """
    part = decode_part(request.part)
    description = read_description(request.contract)
    files, _ = filesystem_of(request.source, request.root)
    unit = part.unit
    schema = pa.ipc.read_schema(pa.py_buffer(part.schema))
    source = FrozenSource(
        schema,
        {},
        [unit],
        FileReader(part.format, schema, [files]),
        decimals=decimals(part.format, schema, part.files[0].get("hive", ()) if part.files else ()),
    )
    job = scoring_job(description.name, part.filter, part.keep)
    planned = plan_job(job, source, description)
    answer = answer_schema(planned.output, part.columns)
    shared = UnitContext(
        job=job,
        planned=planned,
        source=source,
        stager=_Sender(answer, send),
        client=client,
        counters=Counters(),
        budget=ErrorBudget(),
        quarantine=None,
        on_rows=lambda rows: None,
        terms={
            "client": f"source-{request.source}"[:CLIENT_CHARACTERS_MAX],
            "priority": PRIORITY,
            "read": request.read,
        },
    )
    send(Kind.SCHEMA, 0, *_split_message(answer.serialize()))
    UnitRun(shared, unit).run()


class _Sender:
    """Implements `Stager`; sends the results of a unit to the gateway."""

    def __init__(self, answer: pa.Schema, send: Send) -> None:
        self._answer = answer
        self._send = send

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        rows = size = 0
        for batch in batches:
            answer = conform(batch.select(self._answer.names), self._answer)
            for part in _cut_to_messages(answer):
                self._send(Kind.BATCH, part.num_rows, *_split_message(part.serialize()))
            rows, size = rows + batch.num_rows, size + answer.nbytes
        return Staged(unit.index, STREAM, rows, size)


def _cut_to_messages(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into messages of about `BATCH_BYTES`."""
    rows = max(batch.num_rows * BATCH_BYTES // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _split_message(message: pa.Buffer) -> tuple[memoryview, memoryview]:
    """Split an encapsulated IPC message into metadata and body."""
    view = memoryview(message)
    end = _PREFIX_BYTES + int.from_bytes(view[4:_PREFIX_BYTES], "little")
    return view[_PREFIX_BYTES:end], view[end:]
