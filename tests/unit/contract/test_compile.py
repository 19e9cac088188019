"""Contract compilation: matching and mismatching manifests and graphs, and body layout."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.contract.column_types import (
    NOT_IN_TENSORS,
    RANK_MAX,
    ColumnType,
    parse_column_type,
    parse_sent_type,
)
from iskander.contract.compile import compile_contract, derive_manifest
from iskander.contract.dtypes import BY_ARROW, DTYPES
from iskander.contract.formats.render import render_manifest
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import (
    MANIFEST_BYTES_MAX,
    InputColumn,
    Manifest,
    OutputColumn,
    Passthrough,
    model_file,
    read_manifest,
)
from iskander.contract.tensors import (
    ALIGNMENT,
    STRING_BYTES,
    Contract,
    TensorSpec,
    body_layout,
    require_output_space,
)
from iskander.errors import ManifestError
from iskander.interprocess.memory.arena import GRAIN_BYTES, Arena, usable_bytes

Shape = tuple[int | str | None, ...]


def tensor(name: str, *shape: int | str | None, element: str = "tensor(float)") -> GraphTensor:
    return GraphTensor(name, element, shape)


def graph(*, inputs: list[GraphTensor], outputs: list[GraphTensor] | None = None) -> Graph:
    return Graph(tuple(inputs), tuple(outputs or [tensor("y", "N")]))


def manifest(
    *,
    inputs: list[InputColumn] | None = None,
    outputs: list[OutputColumn] | None = None,
    passthrough: Passthrough = "none",
) -> Manifest:
    return Manifest(
        format=1,
        inputs=tuple(inputs or [InputColumn(column="x", type="float32", tensor="x")]),
        outputs=tuple(outputs or [OutputColumn(tensor="y", column="y", type="float32")]),
        passthrough=passthrough,
    )


def with_input(type_text: str) -> Manifest:
    """Return a manifest with one input of this type."""
    return manifest(inputs=[InputColumn(column="x", type=type_text, tensor="x")])


def with_output(type_text: str) -> Manifest:
    """Return a manifest with one output of this type."""
    return manifest(outputs=[OutputColumn(tensor="y", column="y", type=type_text)])


# Column types in manifests.

TYPES = [
    ("float32", ColumnType("float32")),
    ("  bool ", ColumnType("bool")),
    ("fixed_size_list<int8>[3]", ColumnType("int8", (3,))),
    ("fixed_size_list< int8 > [ 3 ]", ColumnType("int8", (3,))),
    ("fixed_size_list<fixed_size_list<int8>[3]>[2]", ColumnType("int8", (2, 3))),
    ("fixed_shape_tensor<float16>[4]", ColumnType("float16", (4,), is_tensor=True)),
    ("fixed_shape_tensor<float16>[2, 3,4]", ColumnType("float16", (2, 3, 4), is_tensor=True)),
    ("fixed_shape_tensor< float16 > [2, 3]", ColumnType("float16", (2, 3), is_tensor=True)),
    (
        "fixed_size_list<" * RANK_MAX + "int8" + ">[1]" * RANK_MAX,
        ColumnType("int8", (1,) * RANK_MAX),
    ),
]


@pytest.mark.parametrize(("text", "column_type"), TYPES)
def test_column_type_is_parsed(text: str, column_type: ColumnType) -> None:
    assert parse_column_type(text) == column_type


@pytest.mark.parametrize(
    "text",
    [
        "",
        "float",
        "Float32",
        "string",
        "list<float32>",
        "float32[3]",
        "fixed_size_list<float32>",
        "fixed_size_list<float32>[]",
        "fixed_size_list<float32>[0]",
        "fixed_size_list<float32>[-1]",
        "fixed_size_list<float32>[2, 3]",
        "fixed_size_list<float32>[N]",
        "fixed_size_list<string>[3]",
        "fixed_size_list<float32>[99999999999999999999]",
        "fixed_size_list<fixed_shape_tensor<float32>[2]>[3]",
        "fixed_size_list<" * (RANK_MAX + 1) + "int8" + ">[1]" * (RANK_MAX + 1),
        "fixed_shape_tensor<float32>",
        "fixed_shape_tensor<float32>[]",
        "fixed_shape_tensor<float32>[ ]",
        "fixed_shape_tensor<float32>[,]",
        "fixed_shape_tensor<float32>[2,,3]",
        "fixed_shape_tensor<float32>[2 3]",
        "fixed_shape_tensor<float32>[2, 0]",
        "fixed_shape_tensor<float32>[-1]",
        "fixed_shape_tensor<string>[2]",
        "fixed_shape_tensor<utf8>[2]",
        "fixed_shape_tensor<bfloat16>[2]",
        f"fixed_shape_tensor<int8>[{', '.join('1' * (RANK_MAX + 1))}]",
        "fixed_shape_tensor<float32>[99999999999999999999]",
        "float32\n>[2]",
    ],
)
def test_invalid_type_is_rejected_with_its_text(text: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"`{text}`")):
        parse_column_type(text)


def test_type_with_a_line_end_is_rejected() -> None:
    with pytest.raises(ManifestError, match="is not supported"):
        parse_sent_type("fixed_size_list<float32\n>[2]x")


@pytest.mark.parametrize("parse", [parse_column_type, parse_sent_type])
def test_long_type_is_rejected(parse: Callable[[str], object]) -> None:
    with pytest.raises(ManifestError, match=r"has 400001 characters, limit 1024"):
        parse(">[2]" * 100_000 + "x")


SHAPES = st.lists(st.integers(1, 10_000), max_size=RANK_MAX).map(tuple)
COLUMN_TYPES = st.builds(
    ColumnType, st.sampled_from([dtype.arrow for dtype in DTYPES]), SHAPES
) | st.builds(
    ColumnType,
    st.sampled_from([dtype.arrow for dtype in DTYPES if dtype.arrow not in NOT_IN_TENSORS]),
    SHAPES.filter(bool),
    is_tensor=st.just(True),
)


@settings(deadline=None)
@given(COLUMN_TYPES)
def test_column_type_round_trips_through_text(column_type: ColumnType) -> None:
    assert parse_column_type(str(column_type)) == column_type


@settings(deadline=None)
@given(st.text(alphabet="fixedsizelistshapetensor<>[](), _0123456789-\t", max_size=60))
def test_random_type_text_is_parsed_or_a_manifest_error(text: str) -> None:
    for wrapped in (text, f"fixed_shape_tensor<int8>[{text}]", f"fixed_size_list<int8>[{text}]"):
        try:
            column_type = parse_column_type(wrapped)
        except ManifestError:
            continue
        assert all(size > 0 for size in column_type.shape)


# Matching and mismatching types.

FITS = [
    # (shape in the graph, type in the manifest, rows_fixed, shape without rows)
    (("N",), "float32", None, ()),
    ((None,), "float32", None, ()),
    ((8,), "float32", 8, ()),
    (("N", 1), "float32", None, (1,)),
    (("N", 1, 1), "float32", None, (1, 1)),
    (("N", 1), "fixed_size_list<float32>[1]", None, (1,)),
    (("N", 3), "fixed_size_list<float32>[3]", None, (3,)),
    ((4, 3), "fixed_size_list<float32>[3]", 4, (3,)),
    (("N", 2, 3), "fixed_size_list<fixed_size_list<float32>[3]>[2]", None, (2, 3)),
    (("N", 2, 3), "fixed_shape_tensor<float32>[2, 3]", None, (2, 3)),
    (("N", "M"), "fixed_size_list<float32>[7]", None, (7,)),
    (("N", None, 3), "fixed_shape_tensor<float32>[9, 3]", None, (9, 3)),
]


@pytest.mark.parametrize(("shape", "type_text", "rows_fixed", "expected"), FITS)
def test_matching_input_is_compiled(
    shape: Shape, type_text: str, rows_fixed: int | None, expected: tuple[int, ...]
) -> None:
    contract = compile_contract(with_input(type_text), graph(inputs=[tensor("x", *shape)]))

    (spec,) = contract.inputs
    assert (spec.column, spec.tensor, spec.shape) == ("x", "x", expected)
    assert spec.type == parse_column_type(type_text)
    assert contract.rows_fixed == rows_fixed


MISFITS = [
    # (input of the graph, type in the manifest, expected in the message, actual in it)
    (tensor("x", "N"), "fixed_size_list<float32>[1]", "[N]", "fixed_size_list<float32>[1]"),
    (tensor("x", "N", 3), "float32", "[N, 3]", "float32"),
    (tensor("x", "N", "M"), "float32", "[N, M]", "float32"),
    (tensor("x", "N", None), "float32", "[N, ?]", "float32"),
    (tensor("x", "N", 3), "fixed_size_list<float32>[4]", "[N, 3]", "[4]"),
    (tensor("x", "N", 2, 3), "fixed_size_list<float32>[6]", "[N, 2, 3]", "[6]"),
    (tensor("x", "N", 2, 3), "fixed_shape_tensor<float32>[3, 2]", "[N, 2, 3]", "[3, 2]"),
    (tensor("x", None, "M", 3), "fixed_shape_tensor<float32>[9, 4]", "[?, M, 3]", "[9, 4]"),
    (tensor("x", "N", 0), "fixed_size_list<float32>[1]", "[N, 0]", "[1]"),
    (tensor("x", "N"), "float64", "tensor(float)", "float64"),
    (tensor("x", "N", element="tensor(int64)"), "int32", "tensor(int64)", "int32"),
    (tensor("x", "N", element="tensor(string)"), "float32", "tensor(string)", "float32"),
    (tensor("x", "N", element="tensor(uint8)"), "binary", "tensor(uint8)", "binary"),
    (tensor("x", "N", element="tensor(int4)"), "int8", "tensor(int4)", "not supported"),
    (tensor("x", "N", element="seq(tensor(float))"), "float32", "seq(tensor(float))", "supported"),
    (tensor("x", "N", element="tensor(bfloat16)"), "float16", "tensor(bfloat16)", "float16"),
    (tensor("x", "N", element="tensor(bfloat16)"), "uint16", "tensor(bfloat16)", "uint16"),
    (tensor("x"), "float32", "scalar", "rows"),
    (tensor("x", 0), "float32", "0 rows", "batch axis"),
]


@pytest.mark.parametrize(("graph_tensor", "type_text", "expected", "actual"), MISFITS)
def test_mismatching_input_is_rejected(
    graph_tensor: GraphTensor, type_text: str, expected: str, actual: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        compile_contract(with_input(type_text), graph(inputs=[graph_tensor]))

    message = caught.value.message
    assert "`x`" in message or "an input" in message
    assert expected in message and actual in message


@pytest.mark.parametrize(("graph_tensor", "type_text", "expected", "actual"), MISFITS[:14])
def test_mismatching_output_is_rejected(
    graph_tensor: GraphTensor, type_text: str, expected: str, actual: str
) -> None:
    """Inputs and outputs have the same rules and messages."""
    outputs = [msgspec.structs.replace(graph_tensor, name="y")]

    with pytest.raises(ManifestError, match="output `y`") as caught:
        compile_contract(with_output(type_text), graph(inputs=[tensor("x", "N")], outputs=outputs))

    assert expected in caught.value.message and actual in caught.value.message


def test_scalar_output_is_rejected() -> None:
    with pytest.raises(ManifestError, match="output `y` is a scalar"):
        compile_contract(manifest(), graph(inputs=[tensor("x", "N")], outputs=[tensor("y")]))


@pytest.mark.parametrize(
    ("shapes", "rows_fixed"),
    [
        ([("N",), ("N",)], None),
        ([("N",), ("M",)], None),
        ([(4,), (4,)], 4),
        ([("N",), (4,)], 4),
        ([(None,), (4,)], 4),
    ],
)
def test_inputs_share_their_batch_axis(shapes: list[Shape], rows_fixed: int | None) -> None:
    inputs = [tensor(f"x{index}", *shape) for index, shape in enumerate(shapes)]

    assert compile_contract(None, graph(inputs=inputs)).rows_fixed == rows_fixed


def test_inputs_with_different_fixed_rows_are_rejected() -> None:
    with pytest.raises(ManifestError, match=r"different fixed numbers of rows: \[4, 5\]"):
        compile_contract(None, graph(inputs=[tensor("a", 5), tensor("b", 4)]))


@pytest.mark.parametrize("size", ["N", None])
def test_sequence_beside_a_state_of_one_row_needs_a_manifest(size: str | None) -> None:
    """Its open axis is no axis of rows, and each row would get a state of its own."""
    given = graph(inputs=[tensor("samples", size, 576), tensor("h", 1, 1, 128)])
    with pytest.raises(ManifestError, match="is open of `samples`, and 1 of `h`; if a row"):
        compile_contract(None, given)
    assert compile_contract(derive_manifest(given), given).rows_fixed == 1


@pytest.mark.parametrize(
    ("inputs", "output", "is_bound"),
    [
        ([("N",)], ("N",), True),
        ([("N",)], ("N", 3), True),
        ([("N",), ("M",)], ("M",), True),
        ([(4,)], (4,), True),
        ([("N",), (4,)], ("N",), True),
        ([("N",), (4,)], (4,), True),
        ([("N",)], ("K",), False),
        ([("N",)], (None,), False),
        ([(None,)], (None,), False),
        ([(4,)], (None,), False),
        ([(4,)], ("N",), False),
        ([("N",)], ("N", "M"), False),
        ([("N",)], ("N", None), False),
        ([(4,)], (4, "M"), False),
    ],
)
def test_only_outputs_of_known_shape_are_bound(
    inputs: list[Shape], output: Shape, is_bound: bool
) -> None:
    """A shape that depends on the data cannot be bound, even if the manifest declares it."""
    type_text = "float32" if len(output) == 1 else "fixed_size_list<float32>[3]"
    graph_inputs = [tensor(f"x{index}", *shape) for index, shape in enumerate(inputs)]
    columns = [
        InputColumn(column=each.name, type="float32", tensor=each.name) for each in graph_inputs
    ]

    contract = compile_contract(
        msgspec.structs.replace(with_output(type_text), inputs=tuple(columns)),
        graph(inputs=graph_inputs, outputs=[tensor("y", *output)]),
    )

    assert contract.outputs[0].is_bound is is_bound
    assert all(spec.is_bound for spec in contract.inputs)


@pytest.mark.parametrize(
    ("shape", "output", "actual"),
    [(("N",), 7, "any number"), ((4,), 1, "4"), ((4,), 5, "4")],
)
def test_output_with_different_rows_than_the_inputs_is_rejected(
    shape: Shape, output: int, actual: str
) -> None:
    with pytest.raises(ManifestError, match="output `y`") as caught:
        compile_contract(None, graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", output)]))

    assert f"always has {output} rows and the inputs have {actual}" in caught.value.message


def test_output_of_one_declared_row_is_not_bound() -> None:
    """LightGBM declares `[1]` for labels, one of each row: the load finds out by its runs."""
    contract = compile_contract(None, graph(inputs=[tensor("x", "N")], outputs=[tensor("y", 1)]))
    assert not contract.outputs[0].is_bound


def test_manifest_can_omit_outputs_but_not_inputs() -> None:
    two = graph(
        inputs=[tensor("x", "N"), tensor("z", "N")], outputs=[tensor("y", "N"), tensor("w", "N")]
    )
    both = [InputColumn(column=name, type="float32", tensor=name) for name in ("z", "x")]

    contract = compile_contract(manifest(inputs=both), two)
    with pytest.raises(ManifestError, match="inputs `z` are not in the manifest"):
        compile_contract(manifest(), two)

    assert [spec.tensor for spec in contract.inputs] == ["z", "x"]
    assert [spec.tensor for spec in contract.outputs] == ["y"]


REJECTED: list[tuple[str, Manifest, str]] = [
    (
        "an input that is not in the graph",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="q", type="float32", tensor="q"),
            ]
        ),
        "input tensor `q` is not in the graph, which has `x`",
    ),
    (
        "an output that is not in the graph",
        manifest(outputs=[OutputColumn(tensor="q", column="y", type="float32")]),
        "output tensor `q` is not in the graph, which has `y`, `w`",
    ),
    (
        "a nullable input",
        manifest(inputs=[InputColumn(column="x", type="float32", tensor="x", nullable=True)]),
        "input `x` is nullable, and no tensor can hold a null",
    ),
    (
        "an unknown type",
        with_input("interval"),
        "Arrow type `interval` is not supported",
    ),
    (
        "no outputs",
        msgspec.structs.replace(manifest(), outputs=()),
        "the manifest names no outputs",
    ),
    (
        "a duplicate input column",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="x", type="float32", tensor="z"),
            ]
        ),
        "[[inputs]] names the column `x` twice",
    ),
    (
        "a duplicate input tensor",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="z", type="float32", tensor="x"),
            ]
        ),
        "[[inputs]] names the tensor `x` twice",
    ),
    (
        "a duplicate output column",
        manifest(
            outputs=[
                OutputColumn(tensor="y", column="y", type="float32"),
                OutputColumn(tensor="w", column="y", type="float32"),
            ]
        ),
        "[[outputs]] names the column `y` twice",
    ),
    (
        "a duplicate passthrough column",
        manifest(passthrough=("id", "id")),
        "passthrough names the column `id` twice",
    ),
    (
        "a passthrough column that is also an output",
        manifest(passthrough=("id", "y")),
        "columns `y` are both passed through and produced",
    ),
]


@pytest.mark.parametrize(
    ("bad_manifest", "message"), [row[1:] for row in REJECTED], ids=[row[0] for row in REJECTED]
)
def test_inconsistent_manifest_is_rejected(bad_manifest: Manifest, message: str) -> None:
    source = graph(inputs=[tensor("x", "N")], outputs=[tensor("y", "N"), tensor("w", "N")])

    with pytest.raises(ManifestError, match=re.escape(message)):
        compile_contract(bad_manifest, source)


@pytest.mark.parametrize("passthrough", ["all", "none", (), ("id", "x")])
def test_valid_passthrough_is_kept(passthrough: Passthrough) -> None:
    """Both extra columns and input columns can be passed through."""
    contract = compile_contract(manifest(passthrough=passthrough), graph(inputs=[tensor("x", "N")]))

    assert contract.passthrough == passthrough


def test_graph_without_inputs_is_rejected() -> None:
    with pytest.raises(ManifestError, match="no inputs"):
        compile_contract(manifest(), Graph((), (tensor("y", "N"),)))


# Graphs without a manifest.

DERIVED = [
    (("N",), "float32"),
    ((None,), "float32"),
    (("N", 3), "fixed_size_list<float32>[3]"),
    (("N", 1), "fixed_size_list<float32>[1]"),
    ((4, 2, 3), "fixed_size_list<fixed_size_list<float32>[3]>[2]"),
]


@pytest.mark.parametrize(("shape", "type_text"), DERIVED)
def test_manifest_is_derived_from_the_graph(shape: Shape, type_text: str) -> None:
    source = graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", *shape)])

    assert derive_manifest(source) == Manifest(
        format=1,
        inputs=(InputColumn(column="x", type=type_text, tensor="x"),),
        outputs=(OutputColumn(tensor="y", column="y", type=type_text),),
    )
    assert compile_contract(None, source) == compile_contract(derive_manifest(source), source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_can_be_derived(dtype: Any) -> None:
    source = graph(inputs=[tensor("x", "N", 2, element=dtype.onnx)])

    (spec,) = compile_contract(None, source).inputs

    if dtype.arrow == "binary":
        # Without a manifest, strings of a graph are text.
        dtype = BY_ARROW["utf8"]
    assert spec.type == ColumnType(dtype.arrow, (2,))
    assert spec.type.dtype is dtype


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(
    ("graph_tensor", "message"),
    [
        (tensor("t", "N", "M"), "has the shape [N, M]"),
        (tensor("t", "N", None), "has the shape [N, ?]"),
        (tensor("t", "N", 3, 0), "has the shape [N, 3, 0]"),
        (tensor("t"), "is a scalar"),
        (tensor("t", "N", element="tensor(int4)"), "is a tensor(int4)"),
    ],
)
def test_graph_that_needs_a_manifest_is_rejected_without_one(
    side: str, graph_tensor: GraphTensor, message: str
) -> None:
    inputs, outputs = [tensor("x", "N")], [tensor("y", "N")]
    given_graph = Graph(
        tuple([*inputs, graph_tensor] if side == "input" else inputs),
        tuple([*outputs, graph_tensor] if side == "output" else outputs),
    )

    with pytest.raises(ManifestError, match=re.escape(f"{side} `t` {message}")):
        compile_contract(None, given_graph)


def test_open_dimension_is_accepted_with_a_manifest() -> None:
    """The manifest declares the dimension that the graph leaves open."""
    contract = compile_contract(
        with_input("fixed_size_list<float32>[5]"), graph(inputs=[tensor("x", "N", "M")])
    )

    assert contract.inputs[0].shape == (5,)


# Manifest files.

# TOML and UTF-8 cannot encode surrogates.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def contracts(draw: st.DrawFn) -> tuple[Contract, Graph]:
    """Return a contract and its graph."""
    names = draw(st.lists(NAMES, min_size=2, max_size=6, unique=True))
    split = draw(st.integers(1, len(names) - 1))
    leading = draw(st.sampled_from(["N", None, 4]))
    specs, tensors = [], []
    for name in names:
        column_type = draw(COLUMN_TYPES)
        shape = column_type.shape
        if not shape and draw(st.booleans()):
            shape = (1,)
        is_input, is_string = len(specs) < split, not column_type.dtype.arrow_bits
        is_bound = is_input or (leading is not None and not is_string)
        string_bytes = STRING_BYTES if is_string and not is_input else 0
        specs.append(TensorSpec(name, f"tensor {name}", column_type, shape, is_bound, string_bytes))
        tensors.append(GraphTensor(f"tensor {name}", column_type.dtype.onnx, (leading, *shape)))
    has_strings = any(spec.is_string for spec in specs)
    assume(not has_strings or all(s.type.dtype_name != "bfloat16" for s in specs[split:]))
    passthrough = draw(st.sampled_from(["all", "none", ()]) | st.just((names[0],)))
    contract = Contract(
        tuple(specs[:split]), tuple(specs[split:]), passthrough, 4 if leading == 4 else None
    )
    return contract, Graph(tuple(tensors[:split]), tuple(tensors[split:]))


@settings(deadline=None, max_examples=up_to(200))
@given(contracts())
def test_rendered_manifest_compiles_to_the_same_contract(example: tuple[Contract, Graph]) -> None:
    contract, source = example

    written = manifest(
        outputs=[
            OutputColumn(column=spec.column, type=str(spec.type), tensor=spec.tensor)
            for spec in contract.outputs
        ]
    )
    decoded = msgspec.toml.decode(render_manifest(contract, written), type=Manifest)

    assert decoded.outputs == written.outputs
    assert compile_contract(decoded, source) == contract


@pytest.mark.parametrize(
    "name", ["a b", 'a"b', "a\\b", "a\nb", "é", "", "\x7f", *string.punctuation]
)
def test_any_name_round_trips_through_a_manifest(name: str) -> None:
    source = graph(inputs=[tensor(name, "N")], outputs=[tensor(f"y{name}", "N")])
    derived = derive_manifest(source)

    text = render_manifest(compile_contract(derived, source), derived)

    decoded = msgspec.toml.decode(text, type=Manifest)
    assert (decoded.inputs[0].column, decoded.outputs[0].tensor) == (name, f"y{name}")


def test_manifest_is_read_from_the_folder_of_the_model(tmp_path: Path) -> None:
    """The configuration can name the folder or the file."""
    contract = compile_contract(None, graph(inputs=[tensor("x", "N")]))
    (tmp_path / "manifest.toml").write_text(render_manifest(contract, manifest()))

    for path in (tmp_path, tmp_path / "model.onnx", tmp_path / "other.onnx"):
        read = read_manifest(path)
        assert read is not None and read.inputs[0].column == "x"
    assert model_file(tmp_path) == tmp_path / "model.onnx"
    assert model_file(tmp_path / "other.onnx") == tmp_path / "other.onnx"


def test_missing_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


GOOD = 'format = 1\n[[inputs]]\ncolumn = "x"\ntype = "int8"\ntensor = "x"\n'
GOOD += '[[outputs]]\ntensor = "y"\ncolumn = "y"\ntype = "int8"\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GOOD.replace("format = 1", "format = 2"), "format"),
        (GOOD.replace("format = 1\n", ""), "missing required field `format`"),
        (
            GOOD.replace('tensor = "x"\n', "", 1),
            "missing required field `tensor` - at `$.inputs[0]`",
        ),
        (GOOD + "batch = true\n", "unknown field `batch`"),
        ("extra = 1\n" + GOOD, "unknown field `extra`"),
        ('passthrough = "some"\n' + GOOD, "passthrough"),
        ("passthrough = [1]\n" + GOOD, "passthrough"),
        (GOOD.replace('"x"', "1", 1), "got `int` - at `$.inputs[0].column`"),
        ("format = ", "manifest.toml"),
        ("format = " + "9" * 5000, "manifest.toml: Exceeds the limit"),
        ("#" * (MANIFEST_BYTES_MAX + 1), f"larger than {MANIFEST_BYTES_MAX} bytes"),
    ],
    ids=lambda value: value[-40:],
)
def test_invalid_manifest_file_is_rejected(tmp_path: Path, raw: str, message: str) -> None:
    (tmp_path / "manifest.toml").write_text(raw)

    with pytest.raises(ManifestError, match=re.escape(message)) as caught:
        read_manifest(tmp_path)

    assert caught.value.message.startswith("manifest.toml")


def test_valid_manifest_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").write_text('passthrough = ["id"]\n' + GOOD)

    read = read_manifest(tmp_path)

    assert read is not None and read.passthrough == ("id",)


def test_manifest_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ManifestError, match=r"^manifest\.toml"):
        read_manifest(tmp_path)


def test_manifest_that_is_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").mkdir()

    with pytest.raises(ManifestError, match=r"`manifest\.toml` beside the model is not a file"):
        read_manifest(tmp_path)


# Layout of a body.

SPECS = st.builds(
    lambda dtype, shape: TensorSpec("c", "t", ColumnType(dtype.arrow, shape), shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=up_to(200))
@given(st.lists(SPECS, max_size=12).map(tuple), st.integers(0, 5000))
def test_columns_of_a_body_are_aligned_and_do_not_overlap(
    specs: tuple[TensorSpec, ...], rows: int
) -> None:
    offsets, end = body_layout(specs, rows)

    starts = [*offsets, end]
    assert len(offsets) == len(specs) and starts[0] == 0
    assert all(start % ALIGNMENT == 0 for start in starts)
    for spec, start, next_start in zip(specs, starts, starts[1:], strict=False):
        expected, values = spec.buffer_bytes(rows), rows * spec.elements
        if spec.is_string:
            assert expected == 4 * (values + 1)
        else:
            assert 8 * expected >= values * spec.type.dtype.arrow_bits > 8 * expected - 8
        assert 0 <= next_start - (start + expected) < ALIGNMENT


@pytest.mark.parametrize(
    ("column_type", "rows", "length_bytes"),
    [
        (ColumnType("bool"), 0, 0),
        (ColumnType("bool"), 1, 1),
        (ColumnType("bool"), 8, 1),
        (ColumnType("bool"), 9, 2),
        (ColumnType("bool", (3,)), 3, 2),
        (ColumnType("int64"), 3, 24),
        (ColumnType("float16", (2, 5)), 3, 60),
        (ColumnType("bfloat16", (2, 5)), 3, 60),
        (ColumnType("utf8"), 0, 4),
        (ColumnType("utf8", (2,)), 3, 28),
        (ColumnType("binary"), 3, 16),
    ],
)
def test_values_buffer_size(column_type: ColumnType, rows: int, length_bytes: int) -> None:
    assert TensorSpec("c", "t", column_type, column_type.shape).buffer_bytes(rows) == length_bytes


@pytest.mark.parametrize(
    ("rows_fixed", "rows_max", "output_bytes"),
    [
        (None, GRAIN_BYTES // 4, GRAIN_BYTES),
        (None, GRAIN_BYTES // 2, 2 * GRAIN_BYTES),
        (GRAIN_BYTES // 4, 1, GRAIN_BYTES),
    ],
)
def test_largest_batch_must_fit_in_the_output_arena(
    rows_fixed: int | None, rows_max: int, output_bytes: int
) -> None:
    """A row has four bytes, and a batch uses whole grains; both sides of the limit."""
    shape = ("N",) if rows_fixed is None else (rows_fixed,)
    source = graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", *shape)])
    contract = compile_contract(None, source)

    require_output_space(contract, rows_max, output_bytes)
    with pytest.raises(ManifestError, match=f"{output_bytes} bytes of results") as caught:
        require_output_space(contract, rows_max, output_bytes - 1)

    assert f"arena.output_bytes is {output_bytes - 1}" in caught.value.message


def test_result_strings_must_fit_in_the_output_arena() -> None:
    """Space for offsets and for strings of the maximum length; both sides of the limit."""
    message = tensor("y", "N", 2, element="tensor(string)")
    contract = compile_contract(None, graph(inputs=[tensor("x", "N")], outputs=[message]), 100)

    require_output_space(contract, 10, 128 + 2048)
    with pytest.raises(
        ManifestError, match="lower max_batch_rows or result_string_bytes, or raise"
    ):
        require_output_space(contract, 10, 128 + 2047)

    (spec,) = contract.outputs
    assert (spec.is_bound, spec.string_bytes) == (False, 100)
    assert body_layout(contract.outputs, 10) == ([0], 128 + 2048)


def test_bfloat16_output_of_a_graph_with_strings_is_rejected() -> None:
    half = tensor("y", "N", element="tensor(bfloat16)")
    message = tensor("x", "N", element="tensor(string)")

    with pytest.raises(ManifestError, match=r"`y` is a tensor.bfloat16. of a graph with strings"):
        compile_contract(None, graph(inputs=[message], outputs=[half]))

    compile_contract(None, graph(inputs=[tensor("x", "N")], outputs=[half]))


@settings(deadline=None)
@given(st.integers(1, 4 * GRAIN_BYTES), st.integers(1, 4 * GRAIN_BYTES))
def test_accepted_output_space_can_be_leased(rows: int, output_bytes: int) -> None:
    """The check at load time must agree with the arena's allocator."""
    outputs = (TensorSpec("y", "y", ColumnType("int8"), ()),)
    try:
        require_output_space(Contract((), outputs), rows, usable_bytes(output_bytes))
    except ManifestError:
        return

    lease = Arena(output_bytes).lease(body_layout(outputs, rows)[1])

    assert lease is not None
