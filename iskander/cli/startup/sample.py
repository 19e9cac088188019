"""Sample data: comparison with a model's contract, and a manifest derived from it.

Runs on: the operator's tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from iskander.arrow.types import as_tensor, element_name
from iskander.contract.column_types import NUMBER
from iskander.contract.compile import derive_manifest
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.inputs import columns_of, entries_of
from iskander.contract.manifest import InputColumn, Manifest, Passthrough
from iskander.contract.tensors import Contract
from iskander.errors import IskanderError, ManifestError, shorten
from iskander.gateway.protocols.flight.columns.inputs import InputBuilder

ROWS = 65_536
"""Rows of a sample that are checked for nulls and for values that do not fit a tensor."""
COLUMNS_CHARACTERS_MAX = 200


class Sample(NamedTuple):
    """The first rows of a file."""

    name: str
    batch: pa.RecordBatch


class Line(NamedTuple):
    """The verdict on one column; `problem` is empty if the column fits."""

    column: str
    expected: str
    found: str
    problem: str


def read_sample(file: Path) -> Sample:
    """Read the first rows of a Parquet file, or of an Arrow file or stream."""
    try:
        if file.suffix == ".parquet":
            source = pq.ParquetFile(file)
            schema = source.schema_arrow
            batch = next(source.iter_batches(ROWS), None)
        else:
            with pa.OSFile(str(file)) as raw:
                is_file = raw.read(6) == b"ARROW1"
            with pa.OSFile(str(file)) as raw:
                reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
                count = reader.num_record_batches if is_file else 0
                batches = map(reader.get_batch, range(count)) if is_file else iter(reader)
                schema, batch = reader.schema, next(batches, None)
    except (OSError, pa.ArrowException) as error:
        text = str(error).split("\n", 1)[0]
        raise ManifestError(f"`{file.name}` cannot be read as Parquet or Arrow: {text}") from None
    if batch is None:
        batch = pa.RecordBatch.from_pylist([], schema=schema)
    return Sample(file.name, batch.slice(0, ROWS))


def explain(sample: Sample, contract: Contract) -> list[Line]:
    """The verdict on each column of a sample, in the order of the inputs; others last."""
    schema = sample.batch.schema
    lines, used = [], set()
    for entry in entries_of(contract):
        builder = InputBuilder(entry, contract, schema)
        names = builder.names
        texts = builder.problems
        problems = {name: text for name in names for text in texts if f"`{name}`" in text}
        values = "" if problems else _value_problem(builder, sample.batch)
        for name in columns_of(entry):
            index = schema.get_field_index(name.split(".")[0])
            found = str(schema.field(index).type) if index >= 0 else "-"
            problem = problems.get(name, "").removeprefix(f"column `{name}`").lstrip(": ")
            if not problem and (f"`{name}`" in values or name == names[0]):
                problem = values
            used.add(name.split(".")[0])
            lines.append(Line(name, str(builder.sent), found, problem))
    passed = contract.passthrough
    for field in schema:
        if field.name in used:
            continue
        is_passed = passed == "all" or (isinstance(passed, tuple) and field.name in passed)
        is_ranked = any(rank.within == field.name for rank in contract.ranks)
        problem = "" if is_passed or is_ranked else "neither an input nor passed through"
        expected = "passed through" if is_passed else "rank group" if is_ranked else "-"
        lines.append(Line(field.name, expected, str(field.type), problem))
    missing = [n for n in passed if n not in schema.names] if isinstance(passed, tuple) else []
    lines += [Line(name, "passed through", "-", "") for name in missing]
    return lines


def _value_problem(builder: InputBuilder, batch: pa.RecordBatch) -> str:
    """The error in the values of a column with a valid type; empty if there is none."""
    try:
        tensor = builder.make(batch)
        tensor.buffers(None, 0 if tensor.lengths is None else int(tensor.lengths.max(initial=0)))
    except IskanderError as error:
        return error.message.removeprefix(f"column `{builder.names[0]}` ")
    return ""


def manifest_for(sample: Sample, graph: Graph) -> Manifest:
    """A manifest with which a model accepts a sample unchanged.

    A column feeds the input with its name. If the graph has one input with as many values a row as
    the sample has numeric columns, they are packed into it. Other columns are passed through.

    Raises:
        ManifestError: The columns match neither the names nor the number of values.
    """
    schema = sample.batch.schema
    names = {tensor.name for tensor in graph.inputs}
    outputs = derive_manifest(graph).outputs
    if names <= set(schema.names):
        entries = [_entry(tensor, sample) for tensor in graph.inputs]
        used = names
    else:
        results = {output.column for output in outputs}
        numbers = [f.name for f in schema if _is_number(f.type) and f.name not in results]
        (tensor, *others) = graph.inputs
        values = tensor.shape[1] if len(tensor.shape) == 2 else 0
        if others or values != len(numbers):
            missing = sorted(names - set(schema.names))
            problem = f"`{sample.name}` has no column for the inputs {', '.join(missing)}"
            if others:
                raise ManifestError(f"{problem}; name its columns as the inputs")
            raise ManifestError(
                f"{problem}, and {len(numbers)} numeric columns where a row of `{tensor.name}` has "
                f"{values} values: {shorten(', '.join(numbers), COLUMNS_CHARACTERS_MAX)}; give a "
                "sample with the columns of the input only"
            )
        element = _element(tensor)
        is_same = {element_name(schema.field(name).type) for name in numbers} == {element}
        entries = [
            InputColumn(
                tensor=tensor.name,
                columns=tuple(numbers),
                type=element if is_same else NUMBER,
                cast=not is_same,
                nulls=_nulls(sample, numbers, element),
            )
        ]
        used = set(numbers)
    passthrough: Passthrough = "none" if used.issuperset(schema.names) else "all"
    return Manifest(format=1, inputs=tuple(entries), outputs=outputs, passthrough=passthrough)


def _element(tensor: GraphTensor) -> str:
    """The element type of a tensor, as spelled in manifests."""
    (entry,) = derive_manifest(Graph((tensor,), ())).inputs
    return entry.type.split("<")[-1].partition(">")[0]


def _entry(tensor: GraphTensor, sample: Sample) -> InputColumn:
    """The entry of an input for the column with its name."""
    (plain,) = derive_manifest(Graph((tensor,), ())).inputs
    found = as_tensor(sample.batch.schema.field(tensor.name).type)
    is_same = found is None or str(found) == plain.type
    return InputColumn(
        tensor=tensor.name,
        column=tensor.name,
        type=plain.type if is_same else str(found),
        cast=not is_same,
        nulls=_nulls(sample, [tensor.name], _element(tensor)),
    )


def _nulls(sample: Sample, names: list[str], kind: str) -> Literal["nan"] | None:
    """`nan` for a sample with nulls, if the tensor has a NaN."""
    has_nulls = any(sample.batch.column(name).null_count for name in names)
    return "nan" if has_nulls and kind.startswith(("float", "bfloat")) else None


def _is_number(kind: pa.DataType) -> bool:
    return as_tensor(kind) is not None and pa.types.is_primitive(kind)
