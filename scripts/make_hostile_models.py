"""Writes a folder of hostile models: `python scripts/make_hostile_models.py FOLDER`.

Each is a folder `FOLDER/NAME` with a `model.onnx`, or a pipeline without one. They try to read
other users' files, to use all memory, time or disk, or to end the process that loads them.
`FOLDER/expected.json` maps each name to words of its load error, or to `null` for a valid model.
Files that are large are sparse.
"""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Make = Callable[[Path], None]
CASES: dict[str, tuple[Make, str | None]] = {}


def case(words: str | None) -> Callable[[Make], Make]:
    """Register a generator, with words of the load error."""

    def enter(make: Make) -> Make:
        CASES[make.__name__] = (make, words)
        return make

    return enter


def main() -> None:
    """Write all models."""
    parser = argparse.ArgumentParser(description="Write a folder of hostile models.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    for name, (make, _) in CASES.items():
        (folder / name).mkdir(parents=True)
        make(folder / name)
    expected = {name: words for name, (_, words) in CASES.items()}
    (folder / "expected.json").write_text(json.dumps(expected))


def value(
    name: str, element: int = FLOAT, shape: Sequence[int | str] = ("rows",)
) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, element, list(shape))


def save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    weights: Sequence[TensorProto] = (),
    inputs: list[onnx.ValueInfoProto] | None = None,
    outputs: list[onnx.ValueInfoProto] | None = None,
) -> None:
    """A graph from `x` to `y`, unchecked."""
    graph = helper.make_graph(
        nodes, "g", inputs or [value("x")], outputs or [value("y")], list(weights)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def outside(location: str, *, offset: int = 0, length: int = 4096, name: str = "w") -> TensorProto:
    """A tensor with its bytes in another file."""
    tensor = TensorProto(name=name, data_type=FLOAT, dims=[length // 4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=text)
    return tensor


def with_weights(folder: Path, *weights: TensorProto) -> None:
    """`y = x + max(w)`."""
    save(
        folder,
        [
            helper.make_node("ReduceMax", [weights[0].name], ["m"], keepdims=0),
            helper.make_node("Add", ["x", "m"], ["y"]),
        ],
        weights,
    )


@case("leads out of the model's folder")
def traversal(folder: Path) -> None:
    """Weights in the parent folder."""
    (folder.parent / "secret.bin").write_bytes(bytes(4096))
    with_weights(folder, outside("../secret.bin"))


@case("leads out of the model's folder")
def traversal_inside(folder: Path) -> None:
    """The same through a subfolder."""
    (folder / "sub").mkdir()
    with_weights(folder, outside("sub/../../secret.bin"))


@case("leads out of the model's folder")
def absolute(folder: Path) -> None:
    """A system file."""
    with_weights(folder, outside("/etc/passwd", length=64))


@case("is a link that leads out")
def symbolic_link(folder: Path) -> None:
    """A link in the folder to a file outside."""
    (folder / "weights.bin").symlink_to("/etc/passwd")
    with_weights(folder, outside("weights.bin", length=64))


@case("is a link that leads out")
def symbolic_folder(folder: Path) -> None:
    """The same through a linked folder."""
    (folder / "sub").symlink_to("/etc")
    with_weights(folder, outside("sub/passwd", length=64))


@case("cannot be read")
def symbolic_circle(folder: Path) -> None:
    """Two links to each other."""
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    with_weights(folder, outside("a"))


@case("hard links")
def hard_link(folder: Path) -> None:
    """A hard link to a file elsewhere; only the link count shows it."""
    (folder.parent / "owned.bin").write_bytes(bytes(4096))
    os.link(folder.parent / "owned.bin", folder / "weights.bin")
    with_weights(folder, outside("weights.bin"))


@case("is not a file")
def pipe(folder: Path) -> None:
    """A fifo: to open it would block forever."""
    os.mkfifo(folder / "weights.bin")
    with_weights(folder, outside("weights.bin"))


@case("is not a file")
def pipe_itself(folder: Path) -> None:
    """The model file is a fifo."""
    os.mkfifo(folder / "model.onnx")


@case("is truncated, or belongs to another model")
def weights_cut_off(folder: Path) -> None:
    """A file that is shorter than the tensor."""
    (folder / "weights.bin").write_bytes(bytes(100))
    with_weights(folder, outside("weights.bin"))


@case("is truncated, or belongs to another model")
def offset_beyond(folder: Path) -> None:
    """An offset that overflows."""
    (folder / "weights.bin").write_bytes(bytes(4096))
    with_weights(folder, outside("weights.bin", offset=2**63 - 4096))


@case("loading.model_bytes")
def sparse_weights(folder: Path) -> None:
    """A sparse file of a terabyte."""
    with (folder / "weights.bin").open("wb") as stream:
        stream.truncate(1 << 40)
    with_weights(folder, outside("weights.bin", length=1 << 40))


@case("loading.model_bytes")
def folded_weights(folder: Path) -> None:
    """Ten thousand tensors on the same 16 MB of a file: 160 GB once loaded."""
    with (folder / "weights.bin").open("wb") as stream:
        stream.truncate(1 << 24)
    with_weights(
        folder, *(outside("weights.bin", length=1 << 24, name=f"w{n}") for n in range(10_000))
    )


@case("cannot be read")
def name_of_controls(folder: Path) -> None:
    """A file name with line breaks and terminal escapes."""
    with_weights(folder, outside("a\n\x1b[31mb\u202ec"))


@case("is truncated")
def truncated(folder: Path) -> None:
    """Half of a valid model."""
    weight = helper.make_tensor("w", FLOAT, [4096], np.zeros(4096, np.float32).tobytes(), raw=True)
    with_weights(folder, weight)
    raw = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(raw[: len(raw) // 2])


@case("cannot be loaded")
def empty(folder: Path) -> None:
    """An empty file."""
    (folder / "model.onnx").write_bytes(b"")


@case("is truncated")
def noise(folder: Path) -> None:
    """Random bytes."""
    (folder / "model.onnx").write_bytes(np.random.default_rng(1).bytes(10_000))


@case("cannot be loaded")
def absurd_weights(folder: Path) -> None:
    """A tensor of 2^60 elements with data for four."""
    with_weights(folder, TensorProto(name="w", data_type=FLOAT, dims=[1 << 60], raw_data=bytes(16)))


@case("cannot be loaded")
def negative_weights(folder: Path) -> None:
    """A tensor with a negative size."""
    with_weights(folder, TensorProto(name="w", data_type=FLOAT, dims=[-4], raw_data=bytes(16)))


@case("the size")
def absurd_input(folder: Path) -> None:
    """Rows of 2^40 elements."""
    shape = ("rows", 1 << 40)
    node = helper.make_node("Identity", ["x"], ["y"])
    save(folder, [node], inputs=[value("x", shape=shape)], outputs=[value("y", shape=shape)])


@case("axes beside the rows")
def absurd_rank(folder: Path) -> None:
    """Rows of three hundred axes."""
    shape = ("rows", *[1] * 300)
    node = helper.make_node("Identity", ["x"], ["y"])
    save(folder, [node], inputs=[value("x", shape=shape)], outputs=[value("y", shape=shape)])


@case("nests messages too deeply")
def deep(folder: Path) -> None:
    """Nested graphs in node attributes, five hundred levels: more than libraries write."""
    raw = b""
    for _ in range(500):
        for number in (6, 5, 1):  # An attribute's graph, a node's attribute, a graph's node.
            raw = bytes([number << 3 | 2]) + length_of(len(raw)) + raw
    (folder / "model.onnx").write_bytes(bytes([7 << 3 | 2]) + length_of(len(raw)) + raw)


@case("cannot be loaded")
def unknown_operator(folder: Path) -> None:
    """An unknown operator."""
    save(folder, [helper.make_node("Explode", ["x"], ["y"], domain="org.example")])


@case("memory")
def memory_bomb(folder: Path) -> None:
    """A model of a kilobyte that allocates 64 GB when it runs."""
    save(
        folder,
        [
            helper.make_node("ConstantOfShape", ["s"], ["c"]),
            helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0),
            helper.make_node("Add", ["x", "m"], ["y"]),
        ],
        [helper.make_tensor("s", INT64, [1], [1 << 34])],
    )


@case("memory")
def doubling_bomb(folder: Path) -> None:
    """A tensor that doubles forty times."""
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["d0"])]
    for step in range(40):
        nodes.append(helper.make_node("Concat", [f"d{step}", f"d{step}"], [f"d{step + 1}"], axis=1))
    nodes.append(helper.make_node("ReduceMax", ["d40"], ["y"], axes=[1], keepdims=0))
    save(folder, nodes, [helper.make_tensor("axis", INT64, [1], [1])])


@case("not loaded and warmed in a sandbox within")
def endless_loop(folder: Path) -> None:
    """A loop of 2^62 iterations."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c_in"], ["c_out"]),
            helper.make_node("Add", ["s_in", "s_in"], ["s_out"]),
        ],
        "body",
        [value("i", INT64, ()), value("c_in", TensorProto.BOOL, ()), value("s_in")],
        [value("c_out", TensorProto.BOOL, ()), value("s_out")],
    )
    save(
        folder,
        [helper.make_node("Loop", ["n", "c", "x"], ["y"], body=body)],
        [
            helper.make_tensor("n", INT64, [], [1 << 62]),
            helper.make_tensor("c", TensorProto.BOOL, [], [True]),
        ],
    )


@case("crashed the sandbox process by SIGFPE")
def overflowing_division(folder: Path) -> None:
    """The least integer divided by -1, which raises a signal."""
    save(
        folder,
        [
            helper.make_node("Cast", ["x"], ["whole"], to=INT64),
            helper.make_node("Neg", ["whole"], ["negative"]),
            helper.make_node("Div", ["least", "negative"], ["much"]),
            helper.make_node("Cast", ["much"], ["y"], to=FLOAT),
        ],
        [helper.make_tensor("least", INT64, [1], [-(1 << 63)])],
    )


@case("operator library `/tmp/evil.so` is not allowed")
def own_operators(folder: Path) -> None:
    """A library of custom operators in the model."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    write_manifest(folder, 'custom_ops = ["/tmp/evil.so"]')


@case("is not the file that the manifest pins")
def other_file(folder: Path) -> None:
    """A model that does not match its manifest's digest."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    write_manifest(folder, 'sha256 = {"model.onnx" = "' + "0" * 64 + '"}')


@case("manifest.toml")
def nested_manifest(folder: Path) -> None:
    """A manifest of nested brackets."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    (folder / "manifest.toml").write_text("format = " + "[" * 200_000)


@case("is a link that leads out")
def graph_elsewhere(folder: Path) -> None:
    """The graph of another model, which its own clients may not call."""
    private = folder.parent.resolve() / "private"
    private.mkdir(exist_ok=True)
    save(private, [helper.make_node("Identity", ["x"], ["y"])])
    (folder / "model.onnx").symlink_to(private / "model.onnx")


@case("is a link that leads out")
def manifest_elsewhere(folder: Path) -> None:
    """A system file as the manifest, whose text could be in the error."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    (folder / "manifest.toml").symlink_to("/etc/passwd")


@case("is not a file")
def pipe_of_a_manifest(folder: Path) -> None:
    """A fifo as the manifest."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    os.mkfifo(folder / "manifest.toml")


@case("larger than")
def large_manifest(folder: Path) -> None:
    """A manifest of comments."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    (folder / "manifest.toml").write_text("#" * (2 << 20))


@case("no `.npz` file of plain arrays")
def pickled_sample(folder: Path) -> None:
    """A warm-up sample with a pickled object."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    np.savez(folder / "s.npz", x=np.array([{"a": 1}], np.object_))
    write_manifest(folder, '[warm_up]\nsamples = "s.npz"')


@case("unpacks to")
def packed_sample(folder: Path) -> None:
    """A warm-up sample of 1 GB in 1 MB."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    with (
        zipfile.ZipFile(folder / "s.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as stream,
    ):
        for _ in range(64):
            stream.write(bytes(1 << 24))
    write_manifest(folder, '[warm_up]\nsamples = "s.npz"')


@case("leads out of the model's folder")
def sample_elsewhere(folder: Path) -> None:
    """A warm-up sample in another folder."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    write_manifest(folder, '[warm_up]\nsamples = "../s.npz"')


@case("is no `.npz` file")
def damaged_sample(folder: Path) -> None:
    """A corrupt warm-up sample."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    np.savez_compressed(folder / "s.npz", x=np.arange(4000))
    raw = bytearray((folder / "s.npz").read_bytes())
    raw[60:90] = b"\xff" * 30
    (folder / "s.npz").write_bytes(raw)
    write_manifest(folder, '[warm_up]\nsamples = "s.npz"')


@case("is no `.npz` file")
def absurd_sample(folder: Path) -> None:
    """A warm-up sample that declares 2^50 numbers."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
    with (
        zipfile.ZipFile(folder / "s.npz", "w") as archive,
        archive.open("x.npy", "w") as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(bytes(32))
    write_manifest(folder, '[warm_up]\nsamples = "s.npz"')


@case("is a link that leads out")
def labels_elsewhere(folder: Path) -> None:
    """Labels linked to a system file."""
    save(folder, [helper.make_node("Identity", ["x"], ["y"])])
    (folder / "labels.txt").symlink_to("/etc/passwd")
    write_manifest(folder, "", 'type = "utf8"\nlabels = "labels.txt"\npost = ["argmax"]')


@case("is truncated")
def long_tag(folder: Path) -> None:
    """A graph under a tag of 35 bits, which protobuf truncates to the graph's tag."""
    (folder.parent / "tagged.bin").write_bytes(bytes(4096))
    os.link(folder.parent / "tagged.bin", folder / "weights.bin")
    with_weights(folder, outside("weights.bin"))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    tag = length_of((7 << 3 | 2) | 1 << 32)
    raw = model.SerializeToString() + tag + length_of(len(graph)) + graph
    (folder / "model.onnx").write_bytes(raw)


@case("leads out of the model's folder")
def another_name(folder: Path) -> None:
    """A step whose graph has another file name, with weights in the parent folder."""
    with_weights(folder, outside("../secret.bin"))
    (folder / "model.onnx").rename(folder / "model.pb")
    write_manifest(folder, '[[steps]]\nname = "a"\nmodel = "model.pb"')


@case("own folder")
def step_of_itself(folder: Path) -> None:
    """A pipeline whose only step is the pipeline itself."""
    write_manifest(folder, '[[steps]]\nname = "a"\nmodel = "."\nbackend = "pipeline"')


@case("leads out of the model's folder")
def step_of_zero(folder: Path) -> None:
    """A step name with a zero byte."""
    write_manifest(folder, '[[steps]]\nname = "a"\nmodel = "a\\u0000b"')


@case("cannot be read")
def step_of_a_long_name(folder: Path) -> None:
    """A step name that is too long for a file system."""
    write_manifest(folder, f'[[steps]]\nname = "a"\nmodel = "{"a" * 300}"')


@case("cannot be loaded")
def name_of_slashes(folder: Path) -> None:
    """A node name of slashes, which a path pattern would search for a minute."""
    name = "/" * 200_000
    save(folder, [helper.make_node("Explode", ["x"], ["y"], name=name, domain="org.example")])


@case(None)
def names_of_all_scripts(folder: Path) -> None:
    """Tensor names in right-to-left scripts, and without any letter."""
    name = "\u202e\u05e9\u05dc\u05d5\u05dd \U0001f480 \u540d"
    save(
        folder,
        [helper.make_node("Identity", [name], ["\u0301"])],
        inputs=[value(name)],
        outputs=[value("\u0301")],
    )


def length_of(length: int) -> bytes:
    """A protobuf varint."""
    parts = bytearray()
    while length > 0x7F:
        parts.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*parts, length])


def write_manifest(folder: Path, more: str, output: str = 'type = "float32"') -> None:
    """A manifest from `x` to `y`, with additional keys or tables."""
    keys, _, tables = more.partition("[") if more.startswith("[") else (more, "", "")
    (folder / "manifest.toml").write_text(
        f"format = 1\n{keys}\n"
        '[[inputs]]\ncolumn = "x"\ntype = "float32"\ntensor = "x"\n'
        f'[[outputs]]\ntensor = "y"\ncolumn = "y"\n{output}\n' + (f"[{tables}\n" if tables else "")
    )


if __name__ == "__main__":
    main()
