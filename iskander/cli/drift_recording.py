"""Recording of a reference from training data, by a private server that samples all rows.

So the reference has the same columns as the samples of a server, also those of the results.

Runs in: the operator's tool.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from iskander.client import Client
from iskander.client.matching import Matching
from iskander.contract.manifest import model_file
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S, now_ns, pause_s
from iskander.lake.planning import cut_for_calls, describe
from iskander.lake.run.server import model_name, model_path, prepared_server
from iskander.lake.sources import JobSource, open_source
from iskander.lake.whole import whole_if_needed
from iskander.sampling.drift.reference import (
    FILE,
    InvalidReference,
    Reference,
    read_reference,
    write_reference,
)

BATCH_ROWS: Final = 4096
SETTLE_S: Final = 3.0
"""Time without newly summarized rows after which the others count as dropped."""
POLL_S: Final = 0.2
SETTINGS: Final[Mapping[str, Any]] = {
    "drift.enabled": True,
    "drift.references": ["live"],
    "drift.record_rows": 10**12,
    "drift.window_s": 6,
    "drift.columns": 1024,
    "observation.held_requests": 16_384,
    "observation.held_s": 60,
}


class Recorded(NamedTuple):
    """A written reference: rows that were sent, and those of them that were summarized."""

    file: Path
    sent: int
    rows: int
    columns: int


def record(
    model: str,
    inputs: Sequence[str],
    *,
    config: str | None,
    output: Path | None,
    columns: Mapping[str, str],
    plain_files: bool = False,
) -> Recorded:
    """Record a reference.

    Args:
        model: Model file or folder; with a configuration, the name of a model.
        inputs: Files, folders, URIs, or a table.
        config: Configuration that serves the model.
        output: File to write; None: beside the model.
        columns: Column of the data for the name of an input, where they differ.
        plain_files: Read the files of a table as they are.

    Raises:
        InvalidReference: Nothing was recorded, or the file cannot be written.
        IskanderError: The model cannot be served, or rejects the data.
    """
    if config is not None and output is None:
        raise ConfigError("--config needs --output")
    file = output or model_file(model_path(model)).parent / FILE
    name = model if config is not None else model_name(model)
    with tempfile.TemporaryDirectory(prefix="isk-drift-") as folder:
        references = Path(folder, "references")
        settings = {**SETTINGS, "drift.folder": str(references)}
        if config is not None:
            # Training data is no prediction; the folder is deleted.
            settings |= {"prediction_log.path": folder, "prediction_log.spool": ""}
        with prepared_server(
            None if config is not None else model,
            config=config,
            settings=settings,
            model_settings={} if config is not None else {"drift.share": 1.0},
        ) as server:
            server.start()
            with Client(server.address) as client:
                sent = _send(client, name, inputs, columns, plain_files=plain_files)
                _wait_summarized(client, sent)
        reference = _read(references, name)
    write_reference(file, msgspec.structs.replace(reference, origin="training", is_complete=True))
    return Recorded(file, sent, reference.rows, len(reference.columns))


def _send(
    client: Client,
    name: str,
    inputs: Sequence[str],
    columns: Mapping[str, str],
    *,
    plain_files: bool,
) -> int:
    """Score all rows; return their number."""
    description = describe(client, name, None)
    schema = description.input_schema
    types = {
        columns.get(each, each): schema.field(each).type
        for each in description.input_types
        if each in schema.names and not pa.types.is_nested(schema.field(each).type)
    }
    source = open_source(inputs, types=types, plain_files=plain_files)
    source = whole_if_needed(source, description)
    try:
        matching = Matching(description, source.schema, columns=columns, decimals=source.decimals)
        matched = map(matching.apply, _batches(source))
        batches = (part for batch in matched for part in cut_for_calls(batch, description))
        return sum(each.num_rows for each in client.stream(name, batches))
    finally:
        source.close()


def _batches(source: JobSource) -> Iterator[pa.RecordBatch]:
    for unit in source.units():
        yield from source.read(unit, None, None, BATCH_ROWS)


def _wait_summarized(client: Client, sent: int) -> None:
    """Wait until all rows are summarized, or no more."""
    rows, changed_ns = 0, now_ns()
    while rows < sent and now_ns() - changed_ns < SETTLE_S * NS_PER_S:
        pause_s(POLL_S)
        report = client.stats().get("observation", {}).get("report", {})
        found = report.get("drift", {}).get("counts", {}).get("rows", 0)
        if found != rows:
            rows, changed_ns = found, now_ns()


def _read(folder: Path, name: str) -> Reference:
    """Read the recording that the private server has left."""
    for file in folder.iterdir() if folder.is_dir() else ():
        reference = read_reference(file)
        if reference is not None and reference.model == name:
            return reference
    raise InvalidReference(
        f"no row of `{name}` was recorded: the data has no rows, or with --config the model's "
        "[models.drift] has no share"
    )
