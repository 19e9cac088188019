"""Manifests compiled against a graph, with `tomllib`, the graph and the rendered manifest as the
references.

Layout of an input: number of a graph (1 byte), then the manifest. The only error is
`ManifestError`. A contract names every tensor of the graph's inputs once, survives the wire, and is
compiled again from its own rendered manifest.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import msgspec

from fuzz import mutation
from iskander.contract.column_types import parse_column_type, parse_sent_type
from iskander.contract.compile import compile_contract, declared_graph, derive_manifest
from iskander.contract.formats.render import render_entries
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.inputs import entries_of
from iskander.contract.manifest import read_manifest
from iskander.contract.tensors import Contract
from iskander.errors import ManifestError

ITERATIONS = 250
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
PATH = Path(FOLDER.name, "manifest.toml")
FLOAT, INT, TEXT, BOOL = "tensor(float)", "tensor(int64)", "tensor(string)", "tensor(bool)"
GRAPHS = (
    Graph(
        (GraphTensor("x", FLOAT, ("rows", 3)), GraphTensor("n", INT, ("rows",))),
        (GraphTensor("y", FLOAT, ("rows", 2)), GraphTensor("label", INT, ("rows",))),
    ),
    Graph(
        (GraphTensor("ids", INT, ("rows", None)), GraphTensor("mask", BOOL, ("rows", None))),
        (GraphTensor("p", FLOAT, ("rows", 10)), GraphTensor("w", TEXT, ("rows",))),
    ),
    Graph(
        (GraphTensor("x", "tensor(float16)", (4, 2)),),
        (GraphTensor("m", "seq(map(int64,tensor(float)))", ()), GraphTensor("s", FLOAT, ())),
    ),
)
ENTRIES = (
    '[[inputs]]\ntensor = "x"\ncolumns = ["a", "b", "c"]\ntype = "number"\ncast = true\n',
    '[[inputs]]\ntensor = "n"\ncolumn = "day"\ntype = "timestamp[us]"\nunit = "s"\nnulls = "fill"\n'
    "fill = 0\n",
    '[[inputs]]\ntensor = "ids"\ncolumn = "t"\ntype = "list<int64>"\nmax_length = 8\n'
    'buckets = [4, 8]\nmask = "mask"\ntruncate = "head"\n',
    '[[outputs]]\ntensor = "y"\ncolumn = "p"\ntype = "float32"\nindex = 1\n',
    '[[outputs]]\ntensor = "p"\ncolumn = "top"\ntype = "list<struct<index: int64>>"\ntop_k = 3\n',
    '[[outputs]]\ntensor = "p"\ncolumn = "best"\ntype = "int64"\nsteps = ["softmax", "argmax"]\n',
)
WORDS = [
    "tensor", "column", "columns", "type", "nulls", "fill", "mask", "cast", "unit", "as", "steps",
    "max_length", "buckets", "padding", "truncate", "lengths", "vocabulary", "one_hot", "unknown",
    "softmax", "labels", "top_k", "rank", "keys", "sequence", "format = 1", "passthrough", "all",
    "float32", "int64", "bool8", "list<int64>", "large_list<float32>", "decimal128(10, 2)",
    "timestamp[ns]", "date", "fixed_size_list<float32>[3]", "fixed_shape_tensor<int8>[2, 3]",
    "fixed_size_list<" * 40, ">[2]" * 40, "list<" * 300, "[0]", "[99999999999]", "true", "-1", "0",
    "nan", "[]", "[[inputs]]", "[[outputs]]", "[warm_up]", "[graph]", "a.b", "a.b.c.d", '""', "=",
    "x" * 200, "\n", "٣", "head", "tail", "refuse", "number", "unscaled", "s", "h",
]  # fmt: skip


def seeds() -> list[bytes]:
    derived = b"\0format = 1\n" + render_entries(derive_manifest(GRAPHS[0])).encode()
    head = b'format = 1\npassthrough = ["k"]\n'
    return [
        derived,
        *(bytes((at % 3,)) + head + "".join(ENTRIES[at:]).encode() for at in range(len(ENTRIES))),
        b"\0" + head + (ENTRIES[0] + ENTRIES[1] + ENTRIES[3]).encode(),
        b"\1" + head + (ENTRIES[2] + ENTRIES[4]).encode(),
        b"\1" + head + (ENTRIES[2] + ENTRIES[5]).encode(),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    lines, more = (each[1:].decode(errors="replace").split("\n") for each in (raw, other))

    def change(line: str) -> str:
        at = random.randrange(len(line) + 1)
        end = min(at + random.choice((0, 0, 1, 4, 12)), len(line))
        return line[:at] + random.choice(WORDS) + line[end:]

    lines = mutation.shuffle(lines, more, random, change)
    return raw[:1] + "\n".join(lines).encode(errors="replace")


def run(raw: bytes) -> None:
    graph, text = GRAPHS[raw[0] % len(GRAPHS)] if raw else GRAPHS[0], raw[1:]
    check_types(text.decode(errors="replace"))
    PATH.write_bytes(text)
    try:
        manifest = read_manifest(PATH)
        assert manifest is not None
    except ManifestError as error:
        assert str(error)
        return
    try:
        declared_graph(manifest)
    except ManifestError as error:
        assert str(error)
    try:
        contract = compile_contract(manifest, graph)
    except ManifestError as error:
        assert str(error)
        return
    fed = sorted(spec.tensor for spec in contract.inputs)
    assert fed == sorted(tensor.name for tensor in graph.inputs)
    decode = msgspec.msgpack.Decoder(Contract).decode
    assert decode(msgspec.msgpack.encode(contract)) == contract
    assert entries_of(contract)


def check_types(text: str) -> None:
    """Checks that types in quotes print as a type that is parsed to the same."""
    for part in text.split('"')[1::2]:
        for parse in (parse_sent_type, parse_column_type):
            try:
                kind = parse(part)
            except ManifestError:
                continue
            assert parse(str(kind)) == kind, f"`{part}` prints as `{kind}`"
