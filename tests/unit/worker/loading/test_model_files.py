"""Files of an ONNX model: external tensors, confinement of paths, and sha256 pins."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from iskander_worker.loading import onnx_external as external
from iskander_worker.loading.model_files import (
    folder_sha256,
    inspect_files,
    joined_sha256,
    require_pins,
    require_signature,
)
from iskander_worker.loading.onnx_external import external_tensors
from onnx import TensorProto, helper

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.contract.manifest import read_manifest
from iskander.contract.paths import path_inside
from iskander.errors import ConfigError, ManifestError
from iskander.foundation.varint import encode_varint
from iskander.gateway.repository.scan import read_settings
from iskander.gateway.repository.specs import model_spec

LARGE = 1 << 40


def external_weight(name: str, location: str, offset: int, length: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[max(length // 4, 1)])
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": str(offset)} | (
        {"length": str(length)} if length else {}
    )
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def model(*weights: TensorProto) -> onnx.ModelProto:
    """A model with weights in graph, subgraph, constant, sparse initializer and function."""
    first, second, third, fourth, fifth = weights
    body = helper.make_graph([], "body", [], [], [second])
    sparse = onnx.SparseTensorProto(values=fourth)
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=body),
        helper.make_node("Constant", [], ["k"], value=third),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [first], sparse_initializer=[sparse])
    inner = helper.make_node("Constant", [], ["f"], value=fifth)
    function = helper.make_function("d", "f", [], ["f"], [inner], [helper.make_opsetid("", 17)])
    return helper.make_model(graph, functions=[function])


def test_external_tensors_are_found_everywhere_in_a_model() -> None:
    expected = [(f"w{n}.bin", 64 * n, 4 * n) for n in range(5)]
    raw = model(
        *(external_weight(f"w{n}", *each) for n, each in enumerate(expected))
    ).SerializeToString()

    assert sorted(external_tensors(memoryview(raw), "m")) == expected


def test_files_are_listed_hashed_and_limited_in_size(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(bytes(range(200)))
    weights = [external_weight(f"w{n}", "sub/w.bin", 8 * n, 8) for n in range(4)]
    file = tmp_path / "model.onnx"
    file.write_bytes(
        model(*weights, external_weight("w4", "sub/w.bin", 100, 0)).SerializeToString()
    )

    files = inspect_files(file, LARGE)

    assert list(files.paths) == ["model.onnx", "sub/w.bin"]
    assert files.digests["sub/w.bin"] == hashlib.sha256(bytes(range(200))).hexdigest()
    assert files.weight_bytes == file.stat().st_size + 200
    assert joined_sha256(files.digests) == joined_sha256(dict(reversed(files.digests.items())))
    with pytest.raises(ManifestError, match=r"limit 250 \(loading\.model_bytes\)"):
        inspect_files(file, 250)


def test_hash_of_a_folder_depends_on_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"1")
    hashes = [folder_sha256(tmp_path)]
    (tmp_path / "sub" / "a.bin").write_bytes(b"2")
    hashes.append(folder_sha256(tmp_path))
    (tmp_path / "sub" / "a.bin").rename(tmp_path / "sub" / "b.bin")
    hashes.append(folder_sha256(tmp_path))
    assert len(set(hashes)) == 3
    (tmp_path / "sub" / "model.pyc").touch()
    assert folder_sha256(tmp_path) == hashes[-1]


@given(st.data())
def test_damaged_model_is_parsed_or_rejected(data: st.DataObject) -> None:
    raw = bytearray(
        model(*(external_weight(f"w{n}", "w", n, 4) for n in range(5))).SerializeToString()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(1, len(raw))) :]
    try:
        external_tensors(memoryview(raw), "m")
    except ManifestError as error:
        assert "`m`" in error.message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../a", "leads out"),
        ("/etc/passwd", "leads out"),
        ("", "leads out"),
        ("a\0b", "leads out"),
        ("sub/../../a", "leads out"),
        ("missing", "No such file"),
        ("sub", "is not a file"),
        ("link", "is a link that leads out"),
        ("sub/link", "is a link that leads out"),
        ("circle", "cannot be read"),
        ("twice", "2 names"),
    ],
)
def test_paths_outside_the_folder_are_rejected(tmp_path: Path, name: str, reason: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"secret")
    (folder / "link").symlink_to("../a")
    (folder / "sub" / "link").symlink_to("../../a")
    (folder / "circle").symlink_to("circle")
    os.link(tmp_path / "a", folder / "twice")

    with pytest.raises(ManifestError, match=reason):
        path_inside(folder, name)


def test_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"1")
    (tmp_path / "link").symlink_to("w")

    assert path_inside(tmp_path, "link").read_bytes() == b"1"


def test_pins_cover_every_file_or_name_the_missing_one(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64))
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    weights = [external_weight(f"w{n}", "w.bin", 0, 4) for n in range(5)]
    (tmp_path / "model.onnx").write_bytes(model(*weights).SerializeToString())
    files = inspect_files(tmp_path / "model.onnx", LARGE)
    labels = hashlib.sha256(b"cat\ndog\n").hexdigest()
    pins = {**files.digests, "labels.txt": labels.upper()}

    require_pins(tmp_path, pins, files.digests, files.paths)
    require_pins(tmp_path, {}, {})
    with pytest.raises(ManifestError, match=r"`labels\.txt` is not the file that the manifest pin"):
        require_pins(tmp_path, pins | {"labels.txt": "0" * 64}, files.digests)
    with pytest.raises(ManifestError, match=r"pins no sha256 of `w\.bin`"):
        require_pins(
            tmp_path, {"model.onnx": files.digests["model.onnx"]}, files.digests, files.paths
        )


def test_model_without_external_weights_is_one_file(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4], np.ones(4))
    graph = helper.make_graph([], "g", [], [], [weight])
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())

    assert list(inspect_files(tmp_path / "model.onnx", LARGE).paths) == ["model.onnx"]


def field(number: int, body: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(body)) + body


def test_tag_above_32_bits_is_rejected() -> None:
    """Cut to 32 bits, as protobuf does, it is the tag of the graph."""
    graph = field(5, external_weight("w", "../x", 0, 4).SerializeToString())
    raw = encode_varint((7 << 3 | 2) | 1 << 32) + encode_varint(len(graph)) + graph

    with pytest.raises(ManifestError, match="invalid data at byte"):
        external_tensors(memoryview(raw), "m")


def test_model_is_parsed_for_any_file_name(tmp_path: Path) -> None:
    weights = [external_weight(f"w{n}", "../x", 0, 4) for n in range(5)]
    (tmp_path / "model.pb").write_bytes(model(*weights).SerializeToString())

    with pytest.raises(ManifestError, match="leads out"):
        inspect_files(tmp_path / "model.pb", LARGE)


def test_duplicate_location_is_rejected() -> None:
    tensor = external_weight("w", "a", 0, 4)
    tensor.external_data.add(key="location", value="b")
    raw = field(7, field(5, tensor.SerializeToString()))

    with pytest.raises(ManifestError, match="two entries `location`"):
        external_tensors(memoryview(raw), "m")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("FIELDS_MAX", "too many fields, limit 8"),
        ("TENSORS_MAX", "too many external tensors, limit 8"),
    ],
)
def test_parser_limits(monkeypatch: pytest.MonkeyPatch, limit: str, reason: str) -> None:
    monkeypatch.setattr(external, limit, 8)
    raw = field(7, 9 * field(5, external_weight("w", "a", 0, 4).SerializeToString()))

    with pytest.raises(ManifestError, match=reason):
        external_tensors(memoryview(raw), "m")


def test_parser_memory_does_not_grow_with_the_model() -> None:
    raw = memoryview(field(7, 100_000 * field(1, b"")))
    tracemalloc.start()
    try:
        assert external_tensors(raw, "m") == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 100_000


def test_folder_paths_are_confined_and_not_the_model_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "self").symlink_to(".")
    (tmp_path / "away").symlink_to("/etc")

    assert path_inside(tmp_path, "sub", is_folder_allowed=True) == tmp_path / "sub"
    for name, reason in (
        (".", "own folder"),
        ("self", "own folder"),
        ("away", "leads out"),
        ("a\0b", "leads out"),
        ("a" * 300, "File name too long"),
    ):
        with pytest.raises(ManifestError, match=reason):
            path_inside(tmp_path, name, is_folder_allowed=True)


FILES = ("model.onnx", "manifest.toml", "manifest.toml.sig", "model.toml")


def link_out(file: Path, kind: str) -> None:
    """Replaces a file by a link to its content outside of its folder."""
    outside = file.parent.parent / f"outside-{file.name}"
    file.rename(outside)
    if kind == "hard link":
        os.link(outside, file)
    elif kind == "link":
        file.symlink_to(outside)
    elif kind == "relative link":
        file.symlink_to(f"../{outside.name}")
    elif kind == "link through a folder":
        (file.parent / "sub").symlink_to("..")
        file.symlink_to(f"sub/{outside.name}")
    elif kind == "link by way of /proc":
        file.symlink_to(f"/proc/self/root{outside}")
    elif kind == "chain of links":
        (file.parent / "first").symlink_to(outside)
        file.symlink_to("first")
    else:
        assert kind == "dangling link"
        file.symlink_to("missing")


KINDS = (
    "link", "relative link", "link through a folder", "link by way of /proc", "chain of links",
    "dangling link", "hard link",
)  # fmt: skip
REASON = r"is a link that leads out|\(hard links\)|No such file|not found"


def version_folder(root: Path) -> Path:
    """A folder with every file of a version, `model.toml` for its model, too."""
    folder = root / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(
        model(*(TensorProto() for _ in range(5))).SerializeToString()
    )
    (folder / "manifest.toml").write_text(MINIMAL)
    (folder / "manifest.toml.sig").write_bytes(bytes(64))
    (folder / "model.toml").write_text("max_batch_rows = 8\n")
    return folder


MINIMAL = """
format = 1
[[inputs]]
tensor = "x"
columns = ["x"]
[[outputs]]
column = "y"
type = "float32"
tensor = "y"
"""


def read_all(folder: Path, name: str) -> None:
    """Reads one file as the gateway and a worker do."""
    file = folder / "model.onnx"
    if name == "model.onnx":
        with pytest.raises(ManifestError, match=REASON):
            inspect_files(file, LARGE)
    if name == "manifest.toml":
        with pytest.raises(ManifestError, match=f"`manifest.toml`.*({REASON})"):
            read_manifest(folder)
    if name.startswith("manifest.toml"):
        with pytest.raises(ManifestError, match=REASON):
            require_signature(folder, "x")
    if name == "model.toml":
        with pytest.raises(ConfigError, match=REASON):
            read_settings(folder.parent, "m", Config())
    else:
        spec = ModelConfig(name="m", path=str(folder))
        if name != "manifest.toml.sig":
            with pytest.raises(ConfigError, match=rf"`m`.*({REASON})|no model file: No such file"):
                model_spec(0, spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_version_is_a_link_out_of_its_folder(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = version_folder(tmp_path)
    link_out(folder / name, kind)
    read_all(folder, name)


def test_folder_of_a_version_may_be_a_link(tmp_path: Path) -> None:
    """Also a link to a link, and below one; links to files within it are followed."""
    folder = version_folder(tmp_path)
    (folder / "model.onnx").rename(folder / "weights")
    (folder / "model.onnx").symlink_to("weights")
    (tmp_path / "current").symlink_to("latest/m")
    (tmp_path / "latest").symlink_to("models")
    linked = tmp_path / "current"
    assert read_manifest(linked) is not None
    assert inspect_files(linked / "model.onnx", LARGE).paths
    assert model_spec(0, ModelConfig(name="m", path=str(linked))).path == str(linked / "model.onnx")
    assert read_settings(tmp_path / "latest", "m", Config()).max_batch_rows == 8
