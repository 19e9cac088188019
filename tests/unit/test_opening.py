"""Operator libraries, signatures, packed weights and warm-up samples: what is taken for what."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from iskander_worker import warm_up
from iskander_worker.opening import libraries_of
from iskander_worker.prepacked import align_weights
from iskander_worker.signature import require_signature
from onnx import TensorProto, helper

from iskander.contract.columns import parse_column_type
from iskander.contract.manifest import WarmUp, read_manifest
from iskander.contract.tensors import TensorSpec
from iskander.errors import ManifestError


def test_operator_libraries_come_from_the_servers_list_only(tmp_path: Path) -> None:
    library = tmp_path / "ops.so"
    library.write_bytes(b"")
    path = str(library)

    assert libraries_of((), (path,)) == ()
    assert libraries_of((path,), (path,)) == (path,)
    for wanted, allowed, words in (
        ((path,), (), "allows none"),
        ((path,), ("other",), "allows other"),
        (("json",), ("json",), "no package here that says"),
        (("no_such_package",), ("no_such_package",), "no package here"),
        (("/no/such.so",), ("/no/such.so",), "there is no operator library"),
    ):
        with pytest.raises(ManifestError, match=words):
            libraries_of(wanted, allowed)


def test_a_signature_is_of_these_bytes_by_this_key(tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key, other = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    manifest, signature = tmp_path / "manifest.toml", tmp_path / "manifest.toml.sig"

    assert require_signature(tmp_path, "") is False
    with pytest.raises(ManifestError, match="cannot be read"):
        require_signature(tmp_path, public)
    manifest.write_bytes(b"format = 1\n")
    signature.write_bytes(key.sign(manifest.read_bytes()))
    assert require_signature(tmp_path, public)
    signature.write_bytes(base64.b64encode(key.sign(manifest.read_bytes())) + b"\n")
    assert require_signature(tmp_path, public)
    for raw in (other.sign(manifest.read_bytes()), key.sign(b"format = 2\n"), b"", b"\xff" * 90):
        signature.write_bytes(raw)
        with pytest.raises(ManifestError, match="is not the signature"):
            require_signature(tmp_path, public)


def test_packed_weights_are_moved_to_where_kernels_read_them(tmp_path: Path) -> None:
    """Bytes stay the same, what lay right stays where it is, all else of the model too."""
    raw = np.random.default_rng(1).bytes(1000)
    (tmp_path / "w").write_bytes(raw)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [])
    for name, value in (("a", "Gemm+1|64;100;7"), ("b", "MatMul+2|65;300;0|200;0;9")):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1])
        tensor.external_data.add(key="location", value="w")
        tensor.external_data.add(key="prepacked_0", value=value)
        graph.initializer.append(tensor)
    model = helper.make_model(graph)
    (tmp_path / "m").write_bytes(model.SerializeToString())

    align_weights(tmp_path / "m", tmp_path / "w")

    found = onnx.load(tmp_path / "m", load_external_data=False)
    weights = (tmp_path / "w").read_bytes()
    first, second = (tensor.external_data[1].value for tensor in found.graph.initializer)
    assert first == "Gemm+1|64;100;7" and weights[:1000] == raw
    kernel, *blobs = second.split("|")
    places = [tuple(map(int, blob.split(";"))) for blob in blobs]
    assert kernel == "MatMul+2" and [place[1:] for place in places] == [(300, 0), (0, 9)]
    assert all(place[0] % 64 == 0 for place in places)
    assert weights[places[0][0] :][:300] == raw[65:365]
    for tensor in (*found.graph.initializer, *model.graph.initializer):
        tensor.external_data[1].value = ""
    assert found == model
    found.graph.initializer[0].external_data[1].value = "something else"
    (tmp_path / "m").write_bytes(found.SerializeToString())
    with pytest.raises(ManifestError, match="which is not known"):
        align_weights(tmp_path / "m", tmp_path / "w")


TYPES = ("bool", "int8", "uint64", "float16", "float64", "bfloat16", "utf8", "binary")


def spec(name: str, type_text: str, shape: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name, name, parse_column_type(type_text), shape, string_bytes=256)


@given(rows=st.integers(1, 20), values=st.sampled_from(["ones", "zeros", "random"]))
def test_a_body_gives_back_the_arrays_that_it_was_made_of(rows: int, values: str) -> None:
    specs = tuple(spec(f"t{n}", name, (n % 3,) if n % 2 else ()) for n, name in enumerate(TYPES))
    arrays = warm_up.made_up(specs, rows, WarmUp(values=values, low=-3, high=300))  # type: ignore[arg-type]
    body = warm_up.to_body(specs, rows, arrays)
    found = warm_up.from_body(specs, rows, body)

    for each in specs:
        wanted, got = arrays[each.tensor], found[each.tensor]
        if each.is_string:
            assert [text.decode() for text in got.flat] == list(wanted.flat)
        elif each.type.dtype_name == "bfloat16":
            assert (got.view(np.uint32) >> 16).astype(np.uint16).tobytes() == wanted.tobytes()
        else:
            assert got.dtype == wanted.dtype and np.array_equal(got, wanted)


def test_random_values_lie_between_their_bounds_and_within_their_type() -> None:
    specs = (spec("f", "float32"), spec("i", "int8"), spec("u", "uint8"))
    found = warm_up.made_up(specs, 500, WarmUp(values="random", low=-2.5, high=200.5, seed=4))

    assert found["f"].min() >= -2.5 and found["f"].max() <= 200.5 and len(set(found["f"])) > 100
    assert found["i"].min() == -2 and found["i"].max() == 127
    assert found["u"].min() == 0 and found["u"].max() == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('sha256 = {"model.onnx" = "12"}', "sha256"),
        ("[warm_up]\nlow = 2\nhigh = 1", "low = 2 is above high"),
        ('[warm_up]\nresults = "r.npz"', "results are of no warm_up.samples"),
        ('[warm_up]\nvalues = "twos"', "values"),
        ("[warm_up]\nabsolute = -1.0", "absolute"),
    ],
)
def test_a_manifest_that_says_nonsense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "manifest.toml").write_text(f"format = 1\ninputs = []\noutputs = []\n{text}\n")
    with pytest.raises(ManifestError, match=words):
        read_manifest(tmp_path)
