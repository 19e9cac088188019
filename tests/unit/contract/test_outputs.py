"""Outputs of a manifest: types, post-processing, assembled columns, and label files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.contract.column_types import RANK_MAX
from iskander.contract.compile import compile_contract
from iskander.contract.formats.render import render_manifest
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.labels import LABELS_BYTES_MAX, read_labels
from iskander.contract.manifest import Manifest, read_manifest
from iskander.contract.processing.postprocess import RESULTS_MAX
from iskander.contract.result_types import leaves_of, parse_result_type
from iskander.contract.tensors import Contract
from iskander.errors import ManifestError

LABELS = {"labels.txt": ("cat", "dog", "ünï")}
GRAPH = Graph(
    (GraphTensor("x", "tensor(float)", ("N", 3)),),
    (
        GraphTensor("logits", "tensor(float)", ("N", 3)),
        GraphTensor("class", "tensor(int64)", ("N",)),
        GraphTensor("open", "tensor(float)", ("N", "width")),
        GraphTensor("score", "tensor(double)", ("N", 1)),
        GraphTensor("text", "tensor(string)", ("N",)),
        GraphTensor("truth", "tensor(bool)", ("N",)),
        GraphTensor("maps", "seq(map(int64,tensor(float)))", ()),
        GraphTensor("named", "seq(map(string,tensor(float)))", ()),
        GraphTensor("parts", "seq(tensor(float))", ()),
        GraphTensor("odd", "seq(map(float,tensor(float)))", ()),
        GraphTensor("half", "tensor(bfloat16)", ("N",)),
        GraphTensor("words", "tensor(float)", ("N", "length", 4)),
        GraphTensor("counts", "tensor(int64)", ("N",)),
    ),
)
BEGIN = """
format = 1
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[3]"
tensor = "x"
"""


def read(outputs: str, more: str = "") -> Manifest:
    return msgspec.toml.decode(more + BEGIN + outputs, type=Manifest)


def compile_outputs(outputs: str, more: str = "") -> Contract:
    return compile_contract(read(outputs, more), GRAPH, labels=LABELS)


def output(kind: str, **keys: str) -> str:
    """Return an `[[outputs]]` entry; values are TOML."""
    lines = [f"{key} = {value}" for key, value in keys.items()]
    return "\n".join(["[[outputs]]", 'column = "made"', f'type = "{kind}"', *lines, ""])


def of(tensor: str, kind: str, **keys: str) -> str:
    return output(kind, tensor=f'"{tensor}"', **keys)


LIST = "fixed_size_list<float32>[3]"
TOP = "fixed_size_list<struct<label: utf8, score: float32>>[2]"


# Types.


@pytest.mark.parametrize(
    "text",
    [
        "list<float32>",
        "struct<a: int64>",
        "struct<a b: int64, c: list<utf8>>",
        "fixed_size_list<struct<label: utf8, score: float32>>[5]",
        "list<fixed_size_list<struct<x: struct<y: bool>>>[2]>",
    ],
)
def test_result_type_round_trips_through_text(text: str) -> None:
    assert str(parse_result_type(text)) == text
    loose = text.replace("<", " < ").replace(">", " > ").replace(",", " , ").replace("[", " [ ")
    assert str(parse_result_type(loose)) == text


def test_leaves_of_a_result_type() -> None:
    kind = parse_result_type("list<struct<a: fixed_size_list<int8>[4], b: struct<c: utf8>>>")
    assert kind is not None
    assert leaves_of(kind) == [
        (("a",), "int8", (None, 4)),
        (("b", "c"), "utf8", (None,)),
    ]


@pytest.mark.parametrize("text", ["float32", "fixed_size_list<float32>[3]", "nonsense"])
def test_tensor_types_are_not_result_types(text: str) -> None:
    assert parse_result_type(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "list<>",
        "list<float32",
        "list<float32>[3]",
        "list<float32> x",
        "struct<>",
        "struct<a>",
        "struct<a: float32,>",
        "struct<a: float32 b: float32>",
        "struct<a.b: float32>",
        "struct<a: float32, a: utf8>",
        "fixed_size_list<struct<a: float32>>",
        "fixed_size_list<struct<a: float32>>[0]",
        "fixed_size_list<struct<a: float32>>[1234567890]",
        "list<map<utf8>>",
        "list<nonsense>",
        "list<" * (RANK_MAX + 2) + "int8" + ">" * (RANK_MAX + 2),
        "list<" * 100_000,
    ],
)
def test_invalid_result_type_is_rejected(text: str) -> None:
    with pytest.raises(ManifestError):
        parse_result_type(text)


# Columns and tensors of an entry.


@pytest.mark.parametrize(
    ("entry", "kind", "shape"),
    [
        (of("logits", LIST, post='["softmax"]'), LIST, (3,)),
        (of("logits", LIST, post='["l2", "sigmoid"]'), LIST, (3,)),
        (of("logits", "int64", post='["argmax"]'), "int64", ()),
        (of("logits", "int32", post='["argmax", {cast = "int32"}]'), "int32", ()),
        (of("logits", "utf8", post='["argmax"]', labels='"labels.txt"'), "utf8", ()),
        (of("class", "binary", labels='"labels.txt"'), "binary", ()),
        (of("logits", "float32", post="[{select = 2}]"), "float32", ()),
        (of("score", "bool", post="[{threshold = 0.5}]"), "bool", (1,)),
        (of("score", "int8", post="[{quantize = {scale = 0.1}}]"), "int8", (1,)),
        (of("open", LIST, post='["softmax"]'), LIST, (3,)),
        (of("maps", "fixed_size_list<float32>[2]", keys="[0, 1]"), None, (2,)),
        (of("named", "float32", keys='["yes"]'), "float32", (1,)),
        (of("maps", "int64", keys="[0, 1]", post='["argmax"]'), "int64", ()),
        (of("parts", LIST), LIST, (3,)),
        (of("parts", "int64", shape="[4]", sequence='"columns"', post='["argmax"]'), "int64", ()),
        (of("logits", "fixed_shape_tensor<float32>[3]", post='["l2"]'), None, (3,)),
        (of("truth", "float32", post='[{cast = "float32"}]'), "float32", ()),
    ],
)
def test_tensor_of_an_entry(entry: str, kind: str | None, shape: tuple[int, ...]) -> None:
    """A column of one tensor gives the tensor its name."""
    contract = compile_outputs(entry)
    (spec,) = contract.outputs
    assert (spec.column, spec.shape, spec.is_bound) == ("made", shape, False)
    assert kind is None or str(spec.type) == kind
    assert spec.tensor == ("parts" if "parts" in entry and "post" not in entry else "made")
    (column,) = contract.columns
    assert (column.outputs, column.type, column.is_assembled) == ((0,), str(spec.type), False)


@pytest.mark.parametrize("name", ["maps", "named", "parts"])
def test_sequence_needs_a_manifest(name: str) -> None:
    outputs = tuple(each for each in GRAPH.outputs if each.name == name)
    with pytest.raises(ManifestError, match="to a column with `keys` or `sequence`"):
        compile_contract(None, Graph(GRAPH.inputs, outputs))


def test_string_bytes_of_labels_equal_the_longest_label() -> None:
    (spec,) = compile_outputs(of("class", "utf8", labels='"labels.txt"')).outputs
    assert spec.string_bytes == len("ünï".encode())


def test_top_k_produces_labels_and_scores() -> None:
    contract = compile_outputs(of("logits", TOP, post="[{top_k = 2}]", labels='"labels.txt"'))
    assert [(spec.tensor, str(spec.type)) for spec in contract.outputs] == [
        ("made.label", "fixed_size_list<utf8>[2]"),
        ("made.score", "fixed_size_list<float32>[2]"),
    ]
    (column,) = contract.columns
    assert (column.outputs, column.is_assembled) == ((0, 1), True)
    assert column.source == "logits, top_k 2, labels labels.txt"


def test_struct_of_several_tensors() -> None:
    fields = '{ a = {tensor = "class"}, "b.c" = {tensor = "logits", post = ["argmax"]} }'
    contract = compile_outputs(output("struct<a: int64, b: struct<c: int64>>", fields=fields))
    assert [spec.tensor for spec in contract.outputs] == ["made.a", "made.b.c"]
    assert contract.columns[0].outputs == (0, 1)


@pytest.mark.parametrize(
    ("entry", "shape"),
    [
        (of("open", "list<float32>", list_max="9"), (9,)),
        (of("open", "list<float32>", list_max="9", post='["sigmoid"]'), (9,)),
        (of("logits", "list<float32>", lengths='"counts"'), (3,)),
        (of("words", "list<fixed_size_list<float32>[4]>", list_max="9", post='["l2"]'), (9, 4)),
        (of("words", "list<int64>", list_max="9", post='["argmax"]', lengths='"counts"'), (9,)),
        (of("parts", "list<float32>", list_max="9"), (9,)),
        (of("parts", "list<int64>", list_max="9", shape="[4]", post='["argmax"]'), (9,)),
    ],
)
def test_variable_list_has_a_length_tensor(entry: str, shape: tuple[int, ...]) -> None:
    contract = compile_outputs(entry)
    values, length = contract.outputs
    assert (values.tensor, values.shape) == ("made", shape)
    assert (length.tensor, str(length.type), length.shape) == ("made.length", "int32", ())
    assert contract.columns[0].outputs == (0, 1)


def test_one_tensor_can_be_several_columns() -> None:
    more = '[[outputs]]\ncolumn = "raw"\ntype = "' + LIST + '"\ntensor = "logits"\n'
    third = more.replace("raw", "again")
    contract = compile_outputs(of("logits", LIST, post='["softmax"]') + more + third)
    assert [spec.tensor for spec in contract.outputs] == ["made", "logits", "again"]
    assert not any(spec.is_bound for spec in contract.outputs)


def test_number_of_result_tensors_is_limited() -> None:
    def struct(count: int) -> str:
        names = [f"f{n}" for n in range(count)]
        kind = ", ".join(f"{name}: int64" for name in names)
        fields = ", ".join(f'{name} = {{tensor = "class"}}' for name in names)
        return output(f"struct<{kind}>", fields=f"{{{fields}}}")

    assert len(compile_outputs(struct(RESULTS_MAX)).outputs) == RESULTS_MAX
    with pytest.raises(ManifestError, match="the model has 4097 result tensors, limit 4096"):
        compile_outputs(struct(RESULTS_MAX + 1))


def test_plain_output_is_bound_and_not_assembled() -> None:
    contract = compile_outputs(of("logits", LIST))
    assert contract.columns == ()
    assert contract.outputs[0].is_bound


RANKED = of("score", "float64") + (
    '[[outputs]]\ncolumn = "place"\ntype = "int32"\nrank = {of = "made", within = "query"}\n'
)


def test_rank_is_a_column_without_a_tensor() -> None:
    contract = compile_outputs(RANKED)
    assert len(contract.outputs) == 1
    assert contract.outputs[0].is_bound
    assert [column.outputs for column in contract.columns] == [(0,), (0,)]
    (rank,) = contract.ranks
    assert (rank.of, rank.within, rank.order) == ("made", "query", "descending")


MANY = {"columns": '["made", "id", "place"]', "passthrough": '["id"]'}


@pytest.mark.parametrize(
    "order", ['"outputs_first"', '"passthrough_first"', '["made", "id", "place"]']
)
def test_column_order(order: str) -> None:
    contract = compile_outputs(RANKED, f'passthrough = ["id"]\ncolumns = {order}\n')
    expected = msgspec.json.decode(order)
    assert contract.column_order == (tuple(expected) if isinstance(expected, list) else expected)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('columns = ["made", "id"]\npassthrough = ["id"]', "does not name `place`"),
        ('columns = ["made", "place"]\npassthrough = ["id"]', "does not name `id`"),
        ('columns = ["made", "place", "id"]', "names `id`, neither produced nor passed"),
        ('columns = ["made", "made", "place"]', "names the column `made` twice"),
        ('columns = ["place", "made"]', "in another order than"),
        ('columns = ["made", "place"]\npassthrough = "all"', "`passthrough` has to name them"),
        ('passthrough = ["place"]', "both passed through and produced"),
    ],
)
def test_invalid_column_order_is_rejected(more: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        compile_outputs(RANKED, more + "\n")


REJECTED = [
    (of("logits", LIST, list_max="3"), "are for a column `list"),
    (
        of("open", "list<float32>", list_max="9", post='["softmax"]'),
        "an axis beside rows and list entries",
    ),
    (of("logits", "list<float32>", list_max="9"), "rows of the shape"),
    (of("parts", "list<float32>", list_max="9", sequence='"columns"'), "has fixed lengths"),
    (of("open", "list<float32>", list_max="9", lengths='"none"'), "lengths `none` has to be"),
    (of("open", "list<float32>", list_max="9", lengths='"score"'), "lengths `score` has to be"),
    (output("list<float32>", fields='{"" = {tensor = "logits"}}'), "`fields` are"),
    (of("logits", LIST, post='["softmax", "argmax"]'), "is int64 .. after all steps"),
    (of("class", "int64", post='["softmax"]'), "`softmax` needs floats with an axis"),
    (of("class", "int64", post='["argmax"]'), "needs numbers with an axis beside"),
    (of("score", "float64", post='["softmax", {select = 1}]'), "`select 1` needs more than 1"),
    (of("text", "utf8", post='["sigmoid"]'), "needs floats, got utf8"),
    (of("truth", "bool", post="[{threshold = 0.5}]"), "needs numbers, got bool"),
    (of("class", "int8", post="[{quantize = {scale = 1.0}}]"), "needs floats"),
    (of("logits", LIST, post='[{cast = "int8"}]'), "quantize converts floats to integers"),
    (of("logits", LIST, post='[{cast = "decimal"}]'), "needs one of float16"),
    (of("class", "bool", post='[{cast = "bool"}]'), "threshold to booleans"),
    (of("logits", TOP.replace("[2]", "[4]"), post="[{top_k = 4}]"), "at least 4 in the last axis"),
    (of("logits", TOP, post="[{top_k = 2}]"), "set `labels` to a file with the labels"),
    (of("logits", LIST, post="[{top_k = 3}]"), "top_k makes lists of structs"),
    (
        of("logits", "list<struct<index: int64>>", post='[{top_k = 2}, "l2"]'),
        "top_k has to be the last",
    ),
    (of("logits", TOP.replace("label", "name"), post="[{top_k = 2}]"), "and .* has `name`"),
    (of("logits", TOP, post="[{top_k = 3}]", labels='"labels.txt"'), "rows of the shape .3."),
    (of("logits", "struct<a: float32>"), "name the tensor of each field in `fields`"),
    (of("logits", "utf8", labels='"labels.txt"'), "and this is float32"),
    (of("truth", "utf8", labels='"labels.txt"'), "3 lines and there are 2 classes"),
    (
        of("maps", "utf8", keys="[0, 1]", post='["argmax"]', labels='"labels.txt"'),
        "3 lines and there are 2",
    ),
    (of("maps", "float32"), "set `keys` to those"),
    (of("maps", "float32", keys='["a"]'), "each key being a number"),
    (of("named", "float32", keys="[1]"), "each key being text"),
    (of("maps", "fixed_size_list<float32>[2]", keys="[1, 1]"), "names the key `1` twice"),
    (of("maps", "float32", keys="[1]", sequence='"rows"'), "are for sequences of tensors"),
    (of("odd", "float32", keys='["a"]'), "keys are int64 or string"),
    (of("parts", LIST, keys="[1]"), "keys are for maps"),
    (of("logits", LIST, keys="[1]"), "are for sequences of maps and of tensors"),
    (of("open", "list<float32>"), "rows of the shape"),
    (of("none", LIST, post='["l2"]'), "`none` is not in the graph"),
    (of("half", "bfloat16") + of("logits", LIST, post='["l2"]').replace("made", "b"), "bfloat16"),
    (output("int32"), "one of `tensor`, `fields` and `rank`, and has 0"),
    (output("int32", tensor='"class"', rank='{of = "made"}'), "and has 2"),
    (
        output("int32", rank='{of = "made"}', post='["l2"]'),
        "has no `tensor`, which its other keys need",
    ),
    (
        output("struct<a: int64>", fields='{b = {tensor = "class"}}'),
        "`fields` are `b` and .* has `a`",
    ),
    (
        output(
            "list<struct<a: float32, b: struct<c: float32>>>",
            fields='{a = {tensor = "logits"}, "b.c" = {tensor = "maps", keys = [1, 2]}}',
        ),
        "tensors of different lengths: 2, 3",
    ),
    (of("score", "float64") + RANKED.split("\n", 4)[4].replace("int32", "int64"), "is an int32"),
    (RANKED.replace('of = "made"', 'of = "x"'), "has to be an output column with one number"),
    (RANKED.replace('of = "made"', 'of = "place"'), "has to be an output column with one number"),
    (RANKED.replace('"score"', '"text"').replace("float64", "utf8"), "with one number"),
    (
        of("class", "int64") + of("logits", "int64", post='["argmax"]').replace("made", "class"),
        "two results would be the tensor `class`",
    ),
]


@pytest.mark.parametrize(("outputs", "message"), REJECTED)
def test_inconsistent_output_is_rejected(outputs: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        compile_outputs(outputs)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (of("logits", LIST, post='["softmx"]'), "post"),
        (of("logits", LIST, post="[{topk = 3}]"), "unknown field `topk`"),
        (of("logits", LIST, post="[{}]"), "exactly one key"),
        (of("logits", LIST, post="[{top_k = 2, select = 1}]"), "exactly one key"),
        (of("logits", LIST, post="[{top_k = 0}]"), ">= 1"),
        (of("logits", LIST, post="[{threshold = nan}]"), "threshold has to be finite"),
        (of("logits", LIST, post="[{quantize = {scale = 0.0}}]"), "scale has to be above 0"),
        (of("logits", LIST, post="[{quantize = {scale = inf}}]"), "scale has to be above 0"),
        (of("logits", LIST, post="[{quantize = {scale = 1.0, zero_point = 200}}]"), "<= 127"),
        (of("logits", LIST, labelz='"a"'), "unknown field `labelz`"),
        (output("int32", rank='{of = "a", order = "up"}'), "order"),
    ],
)
def test_invalid_keys_are_rejected_by_name(tmp_path: Path, outputs: str, message: str) -> None:
    (tmp_path / "manifest.toml").write_text(BEGIN + outputs)
    with pytest.raises(ManifestError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "outputs",
    [
        of("logits", TOP, post='["softmax", {top_k = 2}]', labels='"labels.txt"'),
        of("score", "int8", post="[{quantize = {scale = 0.1, zero_point = -3}}]"),
        of("maps", "fixed_size_list<float32>[2]", keys="[7, 3]"),
        of("named", "fixed_size_list<float32>[2]", keys='["a\\"b", "ü"]'),
        of("parts", "int64", shape="[4]", sequence='"columns"', post='["argmax"]'),
        of("words", "list<int64>", list_max="9", post='["argmax"]', lengths='"counts"'),
        output("struct<a: struct<b c: int64>>", fields='{"a.b c" = {tensor = "class"}}'),
        RANKED,
    ],
)
def test_rendered_manifest_is_equal(outputs: str) -> None:
    for more in ("", 'columns = "outputs_first"\n'):
        contract, written = compile_outputs(outputs, more), read(outputs, more)
        decoded = msgspec.toml.decode(render_manifest(contract, written), type=Manifest)
        assert decoded == written


# Label files.


def labels_of(folder: Path, raw: bytes, name: str = "labels.txt") -> tuple[str, ...]:
    (folder / "labels.txt").write_bytes(raw)
    manifest = read(of("class", "utf8", labels=f'"{name}"'))
    return read_labels(folder, manifest)[name]


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"a\nb", ("a", "b")),
        (b"a\nb\n", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        ("ü\n\nb c\n".encode(), ("ü", "", "b c")),
        ("a\u2028b\n".encode(), ("a\u2028b",)),
    ],
)
def test_each_line_is_a_label(tmp_path: Path, raw: bytes, lines: tuple[str, ...]) -> None:
    assert labels_of(tmp_path, raw) == lines


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"\n" * (1 << 20) + b"a", "more than"),
        (b"\xff\n", "is not UTF-8"),
        (b"a" * (LABELS_BYTES_MAX + 1), "more than"),
    ],
)
def test_invalid_label_file_is_rejected(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        labels_of(tmp_path, raw)


@pytest.mark.parametrize("name", ["../labels.txt", "a/b", "/etc/hostname", "..", ".", "none"])
def test_label_file_must_be_in_the_model_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="beside the model"):
        labels_of(tmp_path, b"a", name)


def test_linked_label_files_are_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret\n")
    (folder / "link").symlink_to("../secret")
    os.link(tmp_path / "secret", folder / "twice")
    for name, message in (("link", "is a link that leads out"), ("twice", "hard links")):
        with pytest.raises(ManifestError, match=message):
            labels_of(folder, b"a", name)


def test_model_without_labels_has_none(tmp_path: Path) -> None:
    empty: dict[str, Any] = {}
    assert read_labels(tmp_path, None) == read_labels(tmp_path, read(of("class", "int64"))) == empty
