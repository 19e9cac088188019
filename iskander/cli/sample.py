"""A file of a caller's data held against a model: does it fit, and what would a manifest say of it.

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
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.tensors import Contract
from iskander.errors import IskanderError, ManifestError
from iskander.protocols.flight.inputs import InputBuilder

ROWS = 65_536
"""Of a sample that are looked at, for nulls and for values that a tensor cannot hold."""


class Sample(NamedTuple):
    """The first rows of a file."""

    name: str
    batch: pa.RecordBatch


class Line(NamedTuple):
    """What is said of one column; `problem` is empty where there is none."""

    column: str
    wanted: str
    found: str
    problem: str


def read_sample(file: Path) -> Sample:
    """Read the first rows of a Parquet file, or of an Arrow file or stream.

    Raises:
        ManifestError: It is none of them.
    """
    try:
        if file.suffix == ".parquet":
            source = pq.ParquetFile(file)
            schema = source.schema_arrow
            batch = next(source.iter_batches(ROWS), None)
        else:
            with pa.OSFile(str(file)) as raw:
                magic = raw.read(6)
            with pa.OSFile(str(file)) as raw:
                is_file = magic == b"ARROW1"
                reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
                schema = reader.schema
                if is_file:
                    batch = reader.get_batch(0) if reader.num_record_batches else None
                else:
                    batch = next(iter(reader), None)
    except (OSError, pa.ArrowException) as error:
        text = str(error).split("\n", 1)[0]
        raise ManifestError(f"`{file.name}` cannot be read as Parquet or Arrow: {text}") from None
    if batch is None:
        batch = pa.RecordBatch.from_pylist([], schema=schema)
    return Sample(file.name, batch.slice(0, ROWS))


def explain(sample: Sample, contract: Contract) -> list[Line]:
    """What a model makes of each column of a sample, in the order of its inputs; others last."""
    schema = sample.batch.schema
    lines, used = [], set()
    for entry in entries_of(contract):
        maker = InputBuilder(entry, contract, schema)
        problems = {
            name: text for name in maker.names for text in maker.problems if f"`{name}`" in text
        }
        values = "" if problems else _refusal(maker, sample.batch)
        for name in columns_of(entry):
            index = schema.get_field_index(name.split(".")[0])
            found = str(schema.field(index).type) if index >= 0 else "-"
            problem = problems.get(name, "").removeprefix(f"column `{name}`").lstrip(": ")
            is_blamed = len(maker.names) == 1 or f"`{name}`" in values or name == maker.names[0]
            used.add(name.split(".")[0])
            lines.append(
                Line(name, str(maker.sent), found, problem or (values if is_blamed else ""))
            )
    passed = contract.passthrough
    for field in schema:
        if field.name in used:
            continue
        is_passed = passed == "all" or (isinstance(passed, tuple) and field.name in passed)
        is_ranked = any(rank.within == field.name for rank in contract.ranks)
        problem = "" if is_passed or is_ranked else "neither an input nor passed through"
        wanted = "passed through" if is_passed else "to rank within" if is_ranked else "-"
        lines.append(Line(field.name, wanted, str(field.type), problem))
    missing = [n for n in passed if n not in schema.names] if isinstance(passed, tuple) else []
    lines += [Line(name, "passed through", "-", "") for name in missing]
    return lines


def _refusal(maker: InputBuilder, batch: pa.RecordBatch) -> str:
    """Why the values of a column that has the right type cannot be taken."""
    try:
        made = maker.make(batch)
        made.buffers(None, 0 if made.lengths is None else int(made.lengths.max(initial=0)))
    except IskanderError as error:
        return error.message.removeprefix(f"column `{maker.names[0]}` ")
    return ""


def manifest_for(sample: Sample, graph: Graph) -> Manifest:
    """The manifest that lets a model take a sample as it is.

    A column goes to the input of its name; where a graph has one input of as many values a row as
    there are columns, all of them are packed into it. Every other column is passed through.

    Raises:
        ManifestError: The columns do not say which tensor they are.
    """
    schema = sample.batch.schema
    names = {tensor.name for tensor in graph.inputs}
    outputs = derive_manifest(graph).outputs
    made = {output.column for output in outputs}
    if names <= set(schema.names):
        entries = [_entry(tensor, sample) for tensor in graph.inputs]
        used = names
    else:
        numbers = [f.name for f in schema if _is_number(f.type) and f.name not in made]
        (tensor, *others) = graph.inputs
        wanted = tensor.shape[1] if len(tensor.shape) == 2 else 0
        if others or wanted != len(numbers):
            missing = sorted(names - set(schema.names))
            raise ManifestError(
                f"`{sample.name}` has no column for the inputs {', '.join(missing)}, and its "
                f"{len(numbers)} columns of numbers are not the values of one tensor"
            )
        kinds = {element_name(schema.field(name).type) for name in numbers}
        plain = _kind(tensor)
        is_plain = kinds == {plain}
        entries = [
            InputColumn(
                tensor=tensor.name,
                columns=tuple(numbers),
                type=plain if is_plain else NUMBER,
                cast=not is_plain,
                nulls=_nulls(sample, numbers, plain),
            )
        ]
        used = set(numbers)
    left = any(name not in used for name in schema.names)
    return Manifest(
        format=1,
        inputs=tuple(entries),
        outputs=outputs,
        passthrough="all" if left else "none",
    )


def _kind(tensor: GraphTensor) -> str:
    """The name of a tensor's elements, as manifests spell it."""
    (entry,) = derive_manifest(Graph((tensor,), ())).inputs
    return entry.type.split("<")[-1].partition(">")[0]


def _entry(tensor: GraphTensor, sample: Sample) -> InputColumn:
    """The entry of an input for the column of its name."""
    (plain,) = derive_manifest(Graph((tensor,), ())).inputs
    found = as_tensor(sample.batch.schema.field(tensor.name).type)
    nulls = _nulls(sample, [tensor.name], _kind(tensor))
    if found is None or str(found) == plain.type:
        return InputColumn(tensor=tensor.name, column=tensor.name, type=plain.type, nulls=nulls)
    return InputColumn(
        tensor=tensor.name, column=tensor.name, type=str(found), cast=True, nulls=nulls
    )


def _nulls(sample: Sample, names: list[str], kind: str) -> Literal["nan"] | None:
    """What nulls become, where there are some and the tensor has a word for them."""
    has_nulls = any(sample.batch.column(name).null_count for name in names)
    return "nan" if has_nulls and kind.startswith(("float", "bfloat")) else None


def _is_number(kind: pa.DataType) -> bool:
    return as_tensor(kind) is not None and pa.types.is_primitive(kind)
