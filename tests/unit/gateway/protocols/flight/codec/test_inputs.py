"""Input tensors that the Flight codec reads from columns, by type and writer option."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from support.flight_streams import (
    CODECS,
    OTHER,
    ROWS,
    STRINGS,
    Stream,
    batch_of,
    contract_of,
    decode_error,
    fixed_list,
    messages,
    numbers,
    spec,
    tensor_of,
    x_of,
)

from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.manifest import InputColumn
from iskander.errors import MalformedInput


def flat(array: pa.Array) -> np.ndarray:
    """Returns the innermost values of a column without nulls, from its Python values."""
    nested = (
        array.storage.to_pylist() if isinstance(array, pa.ExtensionArray) else array.to_pylist()
    )
    return np.array(nested).reshape(-1)


FLOAT_16 = pa.array(np.arange(ROWS, dtype=np.float16) + np.float16(0.5))

INPUTS = {
    "int8": ("int8", numbers(ROWS, pa.int8())),
    "uint64": ("uint64", numbers(ROWS, pa.uint64())),
    "float16": ("float16", FLOAT_16),
    "float64": ("float64", numbers(ROWS, pa.float64())),
    "bool": ("bool", numbers(ROWS, pa.bool_())),
    "list": ("fixed_size_list<float32>[3]", fixed_list(numbers(3 * ROWS, pa.float32()), 3)),
    "list of bools": ("fixed_size_list<bool>[3]", fixed_list(numbers(3 * ROWS, pa.bool_()), 3)),
    "list of lists": (
        "fixed_size_list<fixed_size_list<int16>[3]>[2]",
        fixed_list(numbers(6 * ROWS, pa.int16()), 2, 3),
    ),
    "tensor": (
        "fixed_shape_tensor<float16>[2, 3]",
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float16(), [2, 3]),
            fixed_list(numbers(6 * ROWS, pa.float16()), 6),
        ),
    ),
    "tensor of two bools": (
        "fixed_shape_tensor<bool>[2]",
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.bool_(), [2], permutation=[0]),
            fixed_list(numbers(2 * ROWS, pa.bool_()), 2),
        ),
    ),
}


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", INPUTS)
def test_input_tensor_has_the_values_of_its_column(name: str, compression: str | None) -> None:
    """Also for slices, whose buffers begin before the values."""
    type_text, column = INPUTS[name]
    whole = batch_of(before=x_of(), x=column)
    for batch in (whole, whole.slice(1, 3), whole.slice(3), whole.slice(0, 0)):
        schema, *rest = messages(batch, compression=compression)
        stream = Stream(contract_of(spec("x", type_text)), schema[0])

        (parsed,) = stream.decode(rest)

        assert parsed.rows == batch.num_rows
        actual = tensor_of(parsed, 0, parse_column_type(type_text))
        np.testing.assert_array_equal(actual, flat(batch.column("x")).astype(actual.dtype))


@pytest.mark.parametrize("name", INPUTS)
def test_input_with_metadata_v4_is_read(name: str) -> None:
    type_text, column = INPUTS[name]
    schema, *rest = messages(
        batch_of(x=column, s=STRINGS["string"]), metadata_version=pa.ipc.MetadataVersion.V4
    )
    stream = Stream(contract_of(spec("x", type_text)), schema[0])

    (parsed,) = stream.decode(rest)
    (response,) = stream.read(stream.respond(rest))

    actual = tensor_of(parsed, 0, parse_column_type(type_text))
    np.testing.assert_array_equal(actual, flat(column).astype(actual.dtype))
    assert response.column("s").equals(STRINGS["string"])


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_columns_are_accepted_in_any_order(order: tuple[str, ...]) -> None:
    """Tensors follow the contract's order; the passthrough column keeps its position."""
    columns = {"a": x_of(), "b": numbers(ROWS, pa.bool_()), "c": STRINGS["string"]}
    contract = contract_of(spec("b", "bool"), spec("a", "int64"))
    schema, *rest = messages(batch_of(**{name: columns[name] for name in order}))
    stream = Stream(contract, schema[0])

    (parsed,) = stream.decode(rest)
    (response,) = stream.read(stream.respond(rest))

    assert tensor_of(parsed, 0, ColumnType("bool")).tolist() == columns["b"].to_pylist()
    assert tensor_of(parsed, 1, ColumnType("int64")).tolist() == columns["a"].to_pylist()
    assert response.column("c").equals(columns["c"])


WRITER_OPTIONS = {
    "metadata_version": [pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5],
    "allow_64bit": [False, True],
    "use_legacy_format": [False, True],
    "compression": CODECS,
    "emit_dictionary_deltas": [False, True],
    "unify_dictionaries": [False, True],
}


@pytest.mark.parametrize("names", list(itertools.combinations(WRITER_OPTIONS, 2)), ids="-".join)
def test_options_of_the_writer_change_no_value(names: tuple[str, str]) -> None:
    """All pairs of options of pyarrow's writer: the same inputs and columns, or an error."""
    grown = pa.DictionaryArray.from_arrays(
        pa.array([0, 4, 1, None, 3], pa.int32()), pa.array(["a", "b", "c", "d", "e"])
    )
    columns = [OTHER["dictionary"], grown]
    batches = [batch_of(x=x_of(), d=each, s=STRINGS["string"], l=OTHER["list"]) for each in columns]
    for values in itertools.product(*(WRITER_OPTIONS[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        schema, *rest = messages(*batches, **options)
        stream = Stream(contract_of(), schema[0])
        is_v4 = options.get("metadata_version") == pa.ipc.MetadataVersion.V4
        if is_v4 and options.get("compression"):
            decode_error(stream, rest, MalformedInput)
            continue
        for parsed, response, batch in zip(
            stream.decode(rest), stream.read(stream.respond(rest)), batches, strict=True
        ):
            assert tensor_of(parsed, 0, ColumnType("int64")).tolist() == list(range(ROWS))
            for name in ("d", "s", "l"):
                assert response.column(name).to_pylist() == batch.column(name).to_pylist()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8])
def test_model_with_fixed_rows_accepts_any_row_count(rows: int) -> None:
    """The lane splits and pads the rows."""
    schema, *rest = messages(batch_of(x=x_of(rows)))
    stream = Stream(contract_of(rows_fixed=4), schema[0])

    assert stream.decode(rest)[0].rows == rows


@pytest.mark.parametrize("dtype_name", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", [pa.decimal128(38, 10), pa.decimal256(50, 10)], ids=str)
def test_decimal_does_not_depend_on_other_rows(kind: pa.DataType, dtype_name: str) -> None:
    """Arrow's own cast, which values of over 64 bits need, rounds others differently."""
    texts = ["0.7", "1.15", "7e-10", "-0.0031149318", "922337203.6854775807"]
    entry = InputColumn(tensor="x", column="x", type="decimal", conversion="number")
    contract = msgspec.structs.replace(contract_of(spec("x", dtype_name)), sources=(entry,))

    def converted(values: list[Decimal]) -> list[Any]:
        schema, (header, body) = messages(batch_of(x=pa.array(values, kind)))
        stream = Stream(contract, schema[0])
        [parsed] = stream.decode([(header, body)])
        parsed_type = ColumnType(dtype_name)
        return tensor_of(parsed, 0, parsed_type).tolist()

    for text in texts:
        alone = converted([Decimal(text)])
        beside = converted([Decimal(2) ** 70, Decimal(text)])
        assert beside[1:] == alone
        if dtype_name == "float64":
            assert alone == [float(text)]
