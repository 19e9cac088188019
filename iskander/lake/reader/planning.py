"""Planning of a read: turns the files and columns of a query into parts for tickets.

Runs in: reader processes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from iskander.client.calls.sharing import can_share
from iskander.client.model import read_description
from iskander.errors import LimitExceeded, PermissionDenied, Unsupported
from iskander.gateway.sources.messages import PARTS_BYTES_MAX, Planned, PlanRequest
from iskander.lake.filters import BYTES_MAX, parse_filter
from iskander.lake.job import STREAM, Job
from iskander.lake.plan import total_rows
from iskander.lake.planning import csv_types, plan_job
from iskander.lake.reader.confined import filesystem_of
from iskander.lake.reader.parts import Part, encode_part, join_units
from iskander.lake.sinks.schemas import plain_schema
from iskander.lake.sources.files import FileSource
from iskander.lake.sources.places import Place
from iskander.lake.sources.reading import needed_columns, select_fields
from iskander.lake.sources.tables import Advice

_GROUP_BYTES: Final = 1
"""Target bytes of a unit; with this value every row group is a unit of its own."""
_ADVICE: Final = Advice("`plain_files` of the source", has_tables=False)


def plan(request: PlanRequest) -> Planned:
    """Plan a read; this opens all files to read their footers.

    Raises:
        SourceError: There are no such files or columns, or the files do not fit together.
        FilterError: The filter is not valid for the files.
        ContractError: The files do not match the model.
        PermissionDenied: The source does not permit a column.
        LimitExceeded: There are more parts than endpoints, or too many files or columns.
    """
    description = read_description(request.contract)
    files, path = filesystem_of(request.source, request.root)
    if request.path is not None:
        if path != request.source:
            raise Unsupported(f"source `{request.source}` is one file; `path` needs a folder")
        path = f"{path}/{request.path}"
    place = Place(files, path, path, local=files)
    text = join_conditions(request.filters)
    job = scoring_job(description.name, text)
    source = FileSource(
        [place],
        unit_bytes=_GROUP_BYTES,
        types=csv_types(job, description),
        plain_files=request.plain_files,
        advice=_ADVICE,
    )
    results = description.output_schema.names
    kept = kept_columns(request, source.schema, results)
    planned = plan_job(scoring_job(description.name, text, kept), source, description)
    output = answer_schema(planned.output, request.columns)
    needed = needed_columns(planned.read, planned.filter)
    schema = select_fields(source.schema, needed).serialize().to_pybytes()
    units = join_units(source.units(), unit_rows=request.unit_rows, parts_max=request.parts_max)
    parts = [
        encode_part(
            Part(
                format=source.snapshot["format"],
                schema=schema,
                files=unit.locator["files"],
                rows=unit.rows,
                size=unit.bytes,
                keep=kept,
                columns=tuple(output.names),
                filter=text,
            )
        )
        for unit in units
    ]
    size = sum(map(len, parts))
    if size > PARTS_BYTES_MAX:
        raise LimitExceeded(
            f"the tickets of source `{request.source}` have {size:,} bytes together, limit "
            f"{PARTS_BYTES_MAX:,}; read a part of it (`path`), or fewer columns"
        )
    rows = None if text else total_rows(units)
    return Planned(output.serialize().to_pybytes(), parts, -1 if rows is None else rows)


def scoring_job(model: str, filter: str, keep: tuple[str, ...] | None = None) -> Job:
    """Describe a read as a scoring job; the caller provides its input and output."""
    return Job(
        model=model, inputs=(STREAM,), output=STREAM, keep=keep, filter=filter if filter else None
    )


def join_conditions(filters: Sequence[str]) -> str:
    """Join filters with `and`; every filter must be valid by itself, so that none undoes another.

    Raises:
        FilterError: A filter is not valid.
        LimitExceeded: The filters together are too long.
    """
    for each in filters:
        parse_filter(each)
    if len(filters) < 2:
        return "".join(filters)
    # A text is written anew from its tree, because a comment in it would end the whole line.
    trees = [ast.parse(each.strip(), mode="eval") for each in filters]
    text = " and ".join(f"({ast.unparse(tree)})" for tree in trees)
    if len(text.encode()) > BYTES_MAX:
        raise LimitExceeded(f"filters have {len(text.encode())} bytes together, limit {BYTES_MAX}")
    return text


def kept_columns(
    request: PlanRequest, schema: pa.Schema, results: Sequence[str]
) -> tuple[str, ...]:
    """Return the columns of the files that are in the answer: wanted and permitted columns.

    Raises:
        PermissionDenied: The source does not permit a column.
        SourceError: The files do not have a column.
    """
    permitted = request.permitted if request.permitted is not None else tuple(schema.names)
    for name in request.keep or ():
        if request.permitted is not None and name not in permitted:
            raise PermissionDenied(
                f"source `{request.source}` does not return column {name[:100]!r}; it returns "
                f"{', '.join(permitted) or 'none'}"
            )
    kept = permitted if request.keep is None else request.keep
    if request.columns is not None:
        wanted = set(request.columns) - set(results if request.keep is None else ())
        kept = tuple(name for name in kept if name in wanted)
    return tuple(dict.fromkeys(select_fields(schema, kept).names))


def answer_schema(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the columns of the answer with plain types.

    Raises:
        SourceError: There is no such column.
        Unsupported: A column has dictionaries inside of lists or structs.
    """
    plain = plain_schema(select_fields(schema, columns))
    for field in plain:
        if not can_share(pa.schema([field])):
            raise Unsupported(
                f"column {field.name!r} has dictionaries inside of {field.type}; leave it out "
                "with `keep` or `columns`"
            )
    return plain
