"""Outputs of a manifest: types, what is made of what, and in which words the rest is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.contract.column_types import RANK_MAX
from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.labels import LABELS_BYTES_MAX, read_labels
from iskander.contract.manifest import Manifest, read_manifest
from iskander.contract.postprocess import RESULTS_MAX
from iskander.contract.render import render_manifest
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


def compiled(outputs: str, more: str = "") -> Contract:
    return compile_contract(read(outputs, more), GRAPH, labels=LABELS)


def output(kind: str, **keys: str) -> str:
    """An entry; values as TOML."""
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
def test_a_type_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_result_type(text)) == text
    loose = text.replace("<", " < ").replace(">", " > ").replace(",", " , ").replace("[", " [ ")
    assert str(parse_result_type(loose)) == text


def test_the_leaves_of_a_type() -> None:
    kind = parse_result_type("list<struct<a: fixed_size_list<int8>[4], b: struct<c: utf8>>>")
    assert kind is not None
    assert leaves_of(kind) == [
        (("a",), "int8", (None, 4)),
        (("b", "c"), "utf8", (None,)),
    ]


@pytest.mark.parametrize("text", ["float32", "fixed_size_list<float32>[3]", "nonsense"])
def test_a_type_of_one_tensor_is_anothers_to_read(text: str) -> None:
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
def test_a_type_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ManifestError):
        parse_result_type(text)


# What is made.


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
def test_what_an_entry_makes(entry: str, kind: str | None, shape: tuple[int, ...]) -> None:
    """A column of one tensor, which is called as the column is."""
    contract = compiled(entry)
    (spec,) = contract.outputs
    assert (spec.column, spec.shape, spec.is_bound) == ("made", shape, False)
    assert kind is None or str(spec.type) == kind
    assert spec.tensor == ("parts" if "parts" in entry and "post" not in entry else "made")
    (column,) = contract.columns
    assert (column.outputs, column.type, column.is_assembled) == ((0,), str(spec.type), False)


@pytest.mark.parametrize("name", ["maps", "named", "parts"])
def test_a_sequence_is_no_column_by_itself(name: str) -> None:
    outputs = tuple(each for each in GRAPH.outputs if each.name == name)
    with pytest.raises(ManifestError, match="to a column with `keys` or `sequence`"):
        compile_contract(None, Graph(GRAPH.inputs, outputs))


def test_labels_need_no_more_room_than_the_longest() -> None:
    (spec,) = compiled(of("class", "utf8", labels='"labels.txt"')).outputs
    assert spec.string_bytes == len("ünï".encode())


def test_top_k_is_labels_and_scores() -> None:
    contract = compiled(of("logits", TOP, post="[{top_k = 2}]", labels='"labels.txt"'))
    assert [(spec.tensor, str(spec.type)) for spec in contract.outputs] == [
        ("made.label", "fixed_size_list<utf8>[2]"),
        ("made.score", "fixed_size_list<float32>[2]"),
    ]
    (column,) = contract.columns
    assert (column.outputs, column.is_assembled) == ((0, 1), True)
    assert column.source == "logits, top_k 2, labels labels.txt"


def test_a_struct_of_several_tensors() -> None:
    fields = '{ a = {tensor = "class"}, "b.c" = {tensor = "logits", post = ["argmax"]} }'
    contract = compiled(output("struct<a: int64, b: struct<c: int64>>", fields=fields))
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
def test_a_list_with_a_length_of_its_own_has_it_beside_it(
    entry: str, shape: tuple[int, ...]
) -> None:
    contract = compiled(entry)
    values, length = contract.outputs
    assert (values.tensor, values.shape) == ("made", shape)
    assert (length.tensor, str(length.type), length.shape) == ("made.length", "int32", ())
    assert contract.columns[0].outputs == (0, 1)


def test_one_tensor_can_be_several_columns() -> None:
    more = '[[outputs]]\ncolumn = "raw"\ntype = "' + LIST + '"\ntensor = "logits"\n'
    again = more.replace("raw", "again")
    contract = compiled(of("logits", LIST, post='["softmax"]') + more + again)
    assert [spec.tensor for spec in contract.outputs] == ["made", "logits", "again"]
    assert not any(spec.is_bound for spec in contract.outputs)


def test_so_many_results_and_no_more() -> None:
    def struct(count: int) -> str:
        names = [f"f{n}" for n in range(count)]
        kind = ", ".join(f"{name}: int64" for name in names)
        fields = ", ".join(f'{name} = {{tensor = "class"}}' for name in names)
        return output(f"struct<{kind}>", fields=f"{{{fields}}}")

    assert len(compiled(struct(RESULTS_MAX)).outputs) == RESULTS_MAX
    with pytest.raises(ManifestError, match="the model has 4097 result tensors, limit 4096"):
        compiled(struct(RESULTS_MAX + 1))


def test_a_usual_model_has_no_columns_of_its_own() -> None:
    contract = compiled(of("logits", LIST))
    assert contract.columns == ()
    assert contract.outputs[0].is_bound


RANKED = of("score", "float64") + (
    '[[outputs]]\ncolumn = "place"\ntype = "int32"\nrank = {of = "made", within = "query"}\n'
)


def test_a_rank_is_a_column_and_no_tensor() -> None:
    contract = compiled(RANKED)
    assert len(contract.outputs) == 1
    assert contract.outputs[0].is_bound
    assert [column.outputs for column in contract.columns] == [(0,), (0,)]
    (rank,) = contract.ranks
    assert (rank.of, rank.within, rank.order) == ("made", "query", "descending")


MANY = {"columns": '["made", "id", "place"]', "passthrough": '["id"]'}


@pytest.mark.parametrize(
    "order", ['"outputs_first"', '"passthrough_first"', '["made", "id", "place"]']
)
def test_an_order_of_columns(order: str) -> None:
    contract = compiled(RANKED, f'passthrough = ["id"]\ncolumns = {order}\n')
    wanted = msgspec.json.decode(order)
    assert contract.column_order == (tuple(wanted) if isinstance(wanted, list) else wanted)


@pytest.mark.parametrize(
    ("more", "words"),
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
def test_an_order_that_cannot_be_meant(more: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        compiled(RANKED, more + "\n")


REFUSED = [
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


@pytest.mark.parametrize(("outputs", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused(outputs: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        compiled(outputs)


@pytest.mark.parametrize(
    ("outputs", "words"),
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
def test_keys_that_are_not_there_are_refused_by_name(
    tmp_path: Path, outputs: str, words: str
) -> None:
    (tmp_path / "manifest.toml").write_text(BEGIN + outputs)
    with pytest.raises(ManifestError, match=words):
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
def test_a_rendered_manifest_says_the_same(outputs: str) -> None:
    for more in ("", 'columns = "outputs_first"\n'):
        contract, written = compiled(outputs, more), read(outputs, more)
        again = msgspec.toml.decode(render_manifest(contract, written), type=Manifest)
        assert again == written


# Files of labels.


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
def test_a_line_is_a_label(tmp_path: Path, raw: bytes, lines: tuple[str, ...]) -> None:
    assert labels_of(tmp_path, raw) == lines


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty"),
        (b"\n" * (1 << 20) + b"a", "more than"),
        (b"\xff\n", "is not UTF-8"),
        (b"a" * (LABELS_BYTES_MAX + 1), "more than"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        labels_of(tmp_path, raw)


@pytest.mark.parametrize("name", ["../labels.txt", "a/b", "/etc/hostname", "..", ".", "none"])
def test_labels_are_beside_the_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="beside the model"):
        labels_of(tmp_path, b"a", name)


def test_labels_of_somebody_else_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret\n")
    (folder / "link").symlink_to("../secret")
    os.link(tmp_path / "secret", folder / "twice")
    for name, words in (("link", "is a link that leads out"), ("twice", "hard links")):
        with pytest.raises(ManifestError, match=words):
            labels_of(folder, b"a", name)


def test_a_model_without_labels_reads_none(tmp_path: Path) -> None:
    empty: dict[str, Any] = {}
    assert read_labels(tmp_path, None) == read_labels(tmp_path, read(of("class", "int64"))) == empty
