"""Contracts: which manifests and graphs fit together, and in which words the others are refused."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from iskander.contract.column_types import NOT_IN_TENSORS, RANK_MAX, ColumnType, parse_column_type
from iskander.contract.compile import compile_contract, derive_manifest
from iskander.contract.dtypes import BY_ARROW, DTYPES
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
from iskander.contract.render import render_manifest
from iskander.contract.tensors import (
    ALIGNMENT,
    STRING_BYTES,
    Contract,
    TensorSpec,
    body_layout,
    require_output_space,
)
from iskander.errors import ManifestError
from iskander.memory.arena import GRAIN_BYTES, Arena, usable_bytes

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


def taking(type_text: str) -> Manifest:
    """A manifest whose only input is of that type."""
    return manifest(inputs=[InputColumn(column="x", type=type_text, tensor="x")])


def making(type_text: str) -> Manifest:
    """A manifest whose only output is of that type."""
    return manifest(outputs=[OutputColumn(tensor="y", column="y", type=type_text)])


# Types, as manifests spell them.

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
def test_a_type_is_read(text: str, column_type: ColumnType) -> None:
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
    ],
)
def test_a_type_that_is_none_is_refused_as_it_was_spelled(text: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"`{text}`")):
        parse_column_type(text)


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
def test_a_type_that_was_written_is_read_back(column_type: ColumnType) -> None:
    assert parse_column_type(str(column_type)) == column_type


@settings(deadline=None)
@given(st.text(alphabet="fixedsizelistshapetensor<>[](), _0123456789-\t", max_size=60))
def test_any_other_text_is_a_manifest_error(text: str) -> None:
    for wrapped in (text, f"fixed_shape_tensor<int8>[{text}]", f"fixed_size_list<int8>[{text}]"):
        try:
            column_type = parse_column_type(wrapped)
        except ManifestError:
            continue
        assert all(size > 0 for size in column_type.shape)


# What fits together.

FITS = [
    # (graph's input shape, manifest's type, rows_fixed, the tensor's shape without rows)
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
def test_an_input_that_fits(
    shape: Shape, type_text: str, rows_fixed: int | None, expected: tuple[int, ...]
) -> None:
    contract = compile_contract(taking(type_text), graph(inputs=[tensor("x", *shape)]))

    (spec,) = contract.inputs
    assert (spec.column, spec.tensor, spec.shape) == ("x", "x", expected)
    assert spec.type == parse_column_type(type_text)
    assert contract.rows_fixed == rows_fixed


MISFITS = [
    # (graph's input, manifest's type, wanted, got)
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


@pytest.mark.parametrize(("found", "type_text", "wanted", "got"), MISFITS)
def test_an_input_that_does_not_fit(
    found: GraphTensor, type_text: str, wanted: str, got: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        compile_contract(taking(type_text), graph(inputs=[found]))

    message = caught.value.message
    assert "`x`" in message or "an input" in message
    assert wanted in message and got in message


@pytest.mark.parametrize(("found", "type_text", "wanted", "got"), MISFITS[:14])
def test_an_output_that_does_not_fit(
    found: GraphTensor, type_text: str, wanted: str, got: str
) -> None:
    """What is refused for an input is refused for an output, in the same words."""
    outputs = [msgspec.structs.replace(found, name="y")]

    with pytest.raises(ManifestError, match="output `y`") as caught:
        compile_contract(making(type_text), graph(inputs=[tensor("x", "N")], outputs=outputs))

    assert wanted in caught.value.message and got in caught.value.message


def test_a_scalar_output_is_refused() -> None:
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


def test_inputs_with_different_fixed_rows_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"different fixed numbers of rows: \[4, 5\]"):
        compile_contract(None, graph(inputs=[tensor("a", 5), tensor("b", 4)]))


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
def test_only_an_output_whose_shape_is_known_is_bound(
    inputs: list[Shape], output: Shape, is_bound: bool
) -> None:
    """A shape that depends on the data cannot be bound ahead, whatever the manifest says of it."""
    type_text = "float32" if len(output) == 1 else "fixed_size_list<float32>[3]"
    given_inputs = [tensor(f"x{index}", *shape) for index, shape in enumerate(inputs)]
    columns = [
        InputColumn(column=each.name, type="float32", tensor=each.name) for each in given_inputs
    ]

    contract = compile_contract(
        msgspec.structs.replace(making(type_text), inputs=tuple(columns)),
        graph(inputs=given_inputs, outputs=[tensor("y", *output)]),
    )

    assert contract.outputs[0].is_bound is is_bound
    assert all(spec.is_bound for spec in contract.inputs)


@pytest.mark.parametrize(
    ("shape", "output", "got"),
    [(("N",), 1, "any number"), (("N",), 7, "any number"), ((4,), 1, "4"), ((4,), 5, "4")],
)
def test_an_output_with_other_rows_than_the_inputs_is_refused(
    shape: Shape, output: int, got: str
) -> None:
    with pytest.raises(ManifestError, match="output `y`") as caught:
        compile_contract(None, graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", output)]))

    assert f"always has {output} rows and the inputs have {got}" in caught.value.message


def test_an_output_may_be_left_out_and_an_input_may_not() -> None:
    two = graph(
        inputs=[tensor("x", "N"), tensor("z", "N")], outputs=[tensor("y", "N"), tensor("w", "N")]
    )
    both = [InputColumn(column=name, type="float32", tensor=name) for name in ("z", "x")]

    contract = compile_contract(manifest(inputs=both), two)
    with pytest.raises(ManifestError, match="inputs `z` are not in the manifest"):
        compile_contract(manifest(), two)

    assert [spec.tensor for spec in contract.inputs] == ["z", "x"]
    assert [spec.tensor for spec in contract.outputs] == ["y"]


REFUSED: list[tuple[str, Manifest, str]] = [
    (
        "an input that the graph has not",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="q", type="float32", tensor="q"),
            ]
        ),
        "input tensor `q` is not in the graph, which has `x`",
    ),
    (
        "an output that the graph has not",
        manifest(outputs=[OutputColumn(tensor="q", column="y", type="float32")]),
        "output tensor `q` is not in the graph, which has `y`, `w`",
    ),
    (
        "a nullable input",
        manifest(inputs=[InputColumn(column="x", type="float32", tensor="x", nullable=True)]),
        "input `x` is nullable, and no tensor can hold a null",
    ),
    (
        "a type that is none",
        taking("interval"),
        "Arrow type `interval` is not supported",
    ),
    (
        "no outputs",
        msgspec.structs.replace(manifest(), outputs=()),
        "the manifest names no outputs",
    ),
    (
        "an input column twice",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="x", type="float32", tensor="z"),
            ]
        ),
        "[[inputs]] names the column `x` twice",
    ),
    (
        "an input tensor twice",
        manifest(
            inputs=[
                InputColumn(column="x", type="float32", tensor="x"),
                InputColumn(column="z", type="float32", tensor="x"),
            ]
        ),
        "[[inputs]] names the tensor `x` twice",
    ),
    (
        "an output column twice",
        manifest(
            outputs=[
                OutputColumn(tensor="y", column="y", type="float32"),
                OutputColumn(tensor="w", column="y", type="float32"),
            ]
        ),
        "[[outputs]] names the column `y` twice",
    ),
    (
        "a passed-through column twice",
        manifest(passthrough=("id", "id")),
        "passthrough names the column `id` twice",
    ),
    (
        "a passed-through column that is produced",
        manifest(passthrough=("id", "y")),
        "columns `y` are both passed through and produced",
    ),
]


@pytest.mark.parametrize(
    ("refused", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_manifest_that_cannot_be_meant_is_refused(refused: Manifest, words: str) -> None:
    found = graph(inputs=[tensor("x", "N")], outputs=[tensor("y", "N"), tensor("w", "N")])

    with pytest.raises(ManifestError, match=re.escape(words)):
        compile_contract(refused, found)


@pytest.mark.parametrize("passthrough", ["all", "none", (), ("id", "x")])
def test_a_passthrough_that_is_taken(passthrough: Passthrough) -> None:
    """Columns that no tensor has, and inputs, which come back beside the results."""
    contract = compile_contract(manifest(passthrough=passthrough), graph(inputs=[tensor("x", "N")]))

    assert contract.passthrough == passthrough


def test_a_graph_without_inputs_is_refused() -> None:
    with pytest.raises(ManifestError, match="no inputs"):
        compile_contract(manifest(), Graph((), (tensor("y", "N"),)))


# Graphs that come without a manifest.

DERIVED = [
    (("N",), "float32"),
    ((None,), "float32"),
    (("N", 3), "fixed_size_list<float32>[3]"),
    (("N", 1), "fixed_size_list<float32>[1]"),
    ((4, 2, 3), "fixed_size_list<fixed_size_list<float32>[3]>[2]"),
]


@pytest.mark.parametrize(("shape", "type_text"), DERIVED)
def test_a_graph_alone_is_a_manifest(shape: Shape, type_text: str) -> None:
    found = graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", *shape)])

    assert derive_manifest(found) == Manifest(
        format=1,
        inputs=(InputColumn(column="x", type=type_text, tensor="x"),),
        outputs=(OutputColumn(tensor="y", column="y", type=type_text),),
    )
    assert compile_contract(None, found) == compile_contract(derive_manifest(found), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_can_be_derived(dtype: Any) -> None:
    found = graph(inputs=[tensor("x", "N", 2, element=dtype.onnx)])

    (spec,) = compile_contract(None, found).inputs

    if dtype.arrow == "binary":
        # A graph's strings are text where no manifest says that they are bytes.
        dtype = BY_ARROW["utf8"]
    assert spec.type == ColumnType(dtype.arrow, (2,))
    assert spec.type.dtype is dtype


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (tensor("t", "N", "M"), "has the shape [N, M]"),
        (tensor("t", "N", None), "has the shape [N, ?]"),
        (tensor("t", "N", 3, 0), "has the shape [N, 3, 0]"),
        (tensor("t"), "is a scalar"),
        (tensor("t", "N", element="tensor(int4)"), "is a tensor(int4)"),
    ],
)
def test_what_a_graph_alone_does_not_say_is_asked_for(
    side: str, found: GraphTensor, words: str
) -> None:
    inputs, outputs = [tensor("x", "N")], [tensor("y", "N")]
    given_graph = Graph(
        tuple([*inputs, found] if side == "input" else inputs),
        tuple([*outputs, found] if side == "output" else outputs),
    )

    with pytest.raises(ManifestError, match=re.escape(f"{side} `t` {words}")):
        compile_contract(None, given_graph)


def test_the_same_open_dimension_is_fine_with_a_manifest() -> None:
    """The accepted case beside the refused one: the manifest says what the graph leaves open."""
    contract = compile_contract(
        taking("fixed_size_list<float32>[5]"), graph(inputs=[tensor("x", "N", "M")])
    )

    assert contract.inputs[0].shape == (5,)


# Manifests as files.

# TOML has no way to write a surrogate, and nor has UTF-8.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def contracts(draw: st.DrawFn) -> tuple[Contract, Graph]:
    """A contract and the graph that it is of."""
    names = draw(st.lists(NAMES, min_size=2, max_size=6, unique=True))
    split = draw(st.integers(1, len(names) - 1))
    leading = draw(st.sampled_from(["N", None, 4]))
    specs, found = [], []
    for name in names:
        column_type = draw(COLUMN_TYPES)
        shape = column_type.shape
        if not shape and draw(st.booleans()):
            shape = (1,)
        is_input, is_string = len(specs) < split, not column_type.dtype.arrow_bits
        is_bound = is_input or (leading is not None and not is_string)
        room = STRING_BYTES if is_string and not is_input else 0
        specs.append(TensorSpec(name, f"tensor {name}", column_type, shape, is_bound, room))
        found.append(GraphTensor(f"tensor {name}", column_type.dtype.onnx, (leading, *shape)))
    has_strings = any(spec.is_string for spec in specs)
    assume(not has_strings or all(s.type.dtype_name != "bfloat16" for s in specs[split:]))
    passthrough = draw(st.sampled_from(["all", "none", ()]) | st.just((names[0],)))
    contract = Contract(
        tuple(specs[:split]), tuple(specs[split:]), passthrough, 4 if leading == 4 else None
    )
    return contract, Graph(tuple(found[:split]), tuple(found[split:]))


@settings(deadline=None, max_examples=200)
@given(contracts())
def test_a_rendered_manifest_gives_the_same_contract(example: tuple[Contract, Graph]) -> None:
    contract, found = example

    written = manifest(
        outputs=[
            OutputColumn(column=spec.column, type=str(spec.type), tensor=spec.tensor)
            for spec in contract.outputs
        ]
    )
    again = msgspec.toml.decode(render_manifest(contract, written), type=Manifest)

    assert again.outputs == written.outputs
    assert compile_contract(again, found) == contract


@pytest.mark.parametrize(
    "name", ["a b", 'a"b', "a\\b", "a\nb", "é", "", "\x7f", *string.punctuation]
)
def test_any_name_survives_a_manifest(name: str) -> None:
    found = graph(inputs=[tensor(name, "N")], outputs=[tensor(f"y{name}", "N")])
    derived = derive_manifest(found)

    text = render_manifest(compile_contract(derived, found), derived)

    again = msgspec.toml.decode(text, type=Manifest)
    assert (again.inputs[0].column, again.outputs[0].tensor) == (name, f"y{name}")


def test_a_manifest_is_read_from_beside_the_model(tmp_path: Path) -> None:
    """Whether the configuration names the folder or the file."""
    contract = compile_contract(None, graph(inputs=[tensor("x", "N")]))
    (tmp_path / "manifest.toml").write_text(render_manifest(contract, manifest()))

    for path in (tmp_path, tmp_path / "model.onnx", tmp_path / "other.onnx"):
        read = read_manifest(path)
        assert read is not None and read.inputs[0].column == "x"
    assert model_file(tmp_path) == tmp_path / "model.onnx"
    assert model_file(tmp_path / "other.onnx") == tmp_path / "other.onnx"


def test_a_model_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


GOOD = 'format = 1\n[[inputs]]\ncolumn = "x"\ntype = "int8"\ntensor = "x"\n'
GOOD += '[[outputs]]\ntensor = "y"\ncolumn = "y"\ntype = "int8"\n'


@pytest.mark.parametrize(
    ("raw", "words"),
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
        ("#" * (MANIFEST_BYTES_MAX + 1), f"larger than {MANIFEST_BYTES_MAX} bytes"),
    ],
    ids=lambda value: value[-40:],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, raw: str, words: str) -> None:
    (tmp_path / "manifest.toml").write_text(raw)

    with pytest.raises(ManifestError, match=re.escape(words)) as caught:
        read_manifest(tmp_path)

    assert caught.value.message.startswith("manifest.toml")


def test_the_manifest_beside_the_refused_ones_is_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").write_text('passthrough = ["id"]\n' + GOOD)

    read = read_manifest(tmp_path)

    assert read is not None and read.passthrough == ("id",)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ManifestError, match=r"^manifest\.toml"):
        read_manifest(tmp_path)


def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").mkdir()

    with pytest.raises(ManifestError, match=r"manifest\.toml cannot be read: it is not a file"):
        read_manifest(tmp_path)


# Layout of a body.

SPECS = st.builds(
    lambda dtype, shape: TensorSpec("c", "t", ColumnType(dtype.arrow, shape), shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(SPECS, max_size=12).map(tuple), st.integers(0, 5000))
def test_columns_of_a_body_are_aligned_and_do_not_overlap(
    specs: tuple[TensorSpec, ...], rows: int
) -> None:
    offsets, end = body_layout(specs, rows)

    starts = [*offsets, end]
    assert len(offsets) == len(specs) and starts[0] == 0
    assert all(start % ALIGNMENT == 0 for start in starts)
    for spec, start, following in zip(specs, starts, starts[1:], strict=False):
        wanted, values = spec.buffer_bytes(rows), rows * spec.elements
        if spec.is_string:
            assert wanted == 4 * (values + 1)
        else:
            assert 8 * wanted >= values * spec.type.dtype.arrow_bits > 8 * wanted - 8
        assert 0 <= following - (start + wanted) < ALIGNMENT


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
def test_bytes_of_a_values_buffer(column_type: ColumnType, rows: int, length_bytes: int) -> None:
    assert TensorSpec("c", "t", column_type, column_type.shape).buffer_bytes(rows) == length_bytes


@pytest.mark.parametrize(
    ("rows_fixed", "rows_max", "output_bytes"),
    [
        (None, GRAIN_BYTES // 4, GRAIN_BYTES),
        (None, GRAIN_BYTES // 2, 2 * GRAIN_BYTES),
        (GRAIN_BYTES // 4, 1, GRAIN_BYTES),
    ],
)
def test_a_model_needs_room_for_its_largest_batch(
    rows_fixed: int | None, rows_max: int, output_bytes: int
) -> None:
    """A row makes four bytes, and the batch fills whole grains; both sides of the limit."""
    shape = ("N",) if rows_fixed is None else (rows_fixed,)
    found = graph(inputs=[tensor("x", *shape)], outputs=[tensor("y", *shape)])
    contract = compile_contract(None, found)

    require_output_space(contract, rows_max, output_bytes)
    with pytest.raises(ManifestError, match=f"{output_bytes} bytes of results") as caught:
        require_output_space(contract, rows_max, output_bytes - 1)

    assert f"arena.output_bytes is {output_bytes - 1}" in caught.value.message


def test_strings_in_results_need_room() -> None:
    """Offsets, and every string at its longest; both sides of the limit."""
    words = tensor("y", "N", 2, element="tensor(string)")
    contract = compile_contract(None, graph(inputs=[tensor("x", "N")], outputs=[words]), 100)

    require_output_space(contract, 10, 128 + 2048)
    with pytest.raises(
        ManifestError, match="lower max_batch_rows or result_string_bytes, or raise"
    ):
        require_output_space(contract, 10, 128 + 2047)

    (spec,) = contract.outputs
    assert (spec.is_bound, spec.string_bytes) == (False, 100)
    assert body_layout(contract.outputs, 10) == ([0], 128 + 2048)


def test_bfloat16_cannot_come_out_of_a_graph_with_strings() -> None:
    half = tensor("y", "N", element="tensor(bfloat16)")
    words = tensor("x", "N", element="tensor(string)")

    with pytest.raises(ManifestError, match=r"`y` is a tensor.bfloat16. of a graph with strings"):
        compile_contract(None, graph(inputs=[words], outputs=[half]))

    compile_contract(None, graph(inputs=[tensor("x", "N")], outputs=[half]))


@settings(deadline=None)
@given(st.integers(1, 4 * GRAIN_BYTES), st.integers(1, 4 * GRAIN_BYTES))
def test_what_is_said_to_have_room_can_be_leased(rows: int, output_bytes: int) -> None:
    """The rule for a model that is loaded and the arena that its batches go to must agree."""
    outputs = (TensorSpec("y", "y", ColumnType("int8"), ()),)
    try:
        require_output_space(Contract((), outputs), rows, usable_bytes(output_bytes))
    except ManifestError:
        return

    lease = Arena(output_bytes).lease(body_layout(outputs, rows)[1])

    assert lease is not None
