"""Operator libraries, signatures, packed weights and warm-up samples: what is taken for what."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from iskander_worker import warm_up
from iskander_worker.loading import opener as opening
from iskander_worker.loading.model_files import require_signature
from iskander_worker.loading.opener import ModelSource, libraries_of, open_model, require_trusted
from iskander_worker.loading.prepacked import align_weights
from iskander_worker.sandbox.client import Verdict
from onnx import TensorProto, helper
from support.models import row_ids
from support.scripted import model_spec

from iskander.contract.column_types import parse_column_type
from iskander.contract.manifest import WarmUp, read_manifest
from iskander.contract.tensors import TensorSpec
from iskander.control.messages import LoadingSpec, ModelSpec
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
        (("json",), ("json",), "no package here with"),
        (("no_such_package",), ("no_such_package",), "no package here"),
        (("/no/such.so",), ("/no/such.so",), "not found on this machine"),
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
    with pytest.raises(ManifestError, match="have an unknown format"):
        align_weights(tmp_path / "m", tmp_path / "w")


TYPES = ("bool", "int8", "uint64", "float16", "float64", "bfloat16", "utf8", "binary")


def spec(name: str, type_text: str, shape: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name, name, parse_column_type(type_text), shape, string_bytes=256)


@given(rows=st.integers(1, 20), values=st.sampled_from(["ones", "zeros", "random"]))
def test_a_body_gives_back_the_arrays_that_it_was_made_of(rows: int, values: str) -> None:
    specs = tuple(spec(f"t{n}", name, (n % 3,) if n % 2 else ()) for n, name in enumerate(TYPES))
    arrays = warm_up.generate_inputs(specs, rows, WarmUp(values=values, low=-3, high=300))  # type: ignore[arg-type]
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
    found = warm_up.generate_inputs(
        specs, 500, WarmUp(values="random", low=-2.5, high=200.5, seed=4)
    )

    assert found["f"].min() >= -2.5 and found["f"].max() <= 200.5 and len(set(found["f"])) > 100
    assert found["i"].min() == -2 and found["i"].max() == 127
    assert found["u"].min() == 0 and found["u"].max() == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('sha256 = {"model.onnx" = "12"}', "sha256"),
        ("[warm_up]\nlow = 2\nhigh = 1", "low = 2 is above warm_up.high"),
        ('[warm_up]\nresults = "r.npz"', "warm_up.results needs warm_up.samples"),
        ('[warm_up]\nvalues = "twos"', "values"),
        ("[warm_up]\nabsolute = -1.0", "absolute"),
    ],
)
def test_a_manifest_that_says_nonsense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "manifest.toml").write_text(f"format = 1\ninputs = []\noutputs = []\n{text}\n")
    with pytest.raises(ManifestError, match=words):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["manifest.toml", "manifest.toml.sig"])
def test_a_manifest_that_never_ends_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """A pipe that nobody writes to, in the place of a file."""
    public = base64.b64encode(bytes(32)).decode()
    (tmp_path / "manifest.toml").write_text("format = 1\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(ManifestError, match="it is not a file"):
        require_signature(tmp_path, public)
    if name == "manifest.toml":
        with pytest.raises(ManifestError, match="it is not a file"):
            read_manifest(tmp_path)


class Signer:
    """A key, and what it signs."""

    def __init__(self) -> None:
        ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
        self._key = ed25519.Ed25519PrivateKey.generate()
        public = base64.b64encode(self._key.public_key().public_bytes_raw()).decode()
        self.loading = LoadingSpec(public_key=public)

    def sign(self, folder: Path, more: str, *pinned: str) -> None:
        """Write a manifest that pins these files."""
        pins = ", ".join(
            f'"{name}" = "{hashlib.sha256((folder / name).read_bytes()).hexdigest()}"'
            for name in pinned
        )
        raw = f"format = 1\nsha256 = {{{pins}}}\n{more}".encode()
        (folder / "manifest.toml").write_bytes(raw)
        (folder / "manifest.toml.sig").write_bytes(self._key.sign(raw))


def model(spec: ModelSpec, cores: int, source: ModelSource) -> Any:
    return SimpleNamespace(notices=(), close=lambda: None)


def test_a_signed_graph_pins_every_file_that_its_manifest_names(tmp_path: Path) -> None:
    signer, folder = Signer(), row_ids(tmp_path / "m")
    for name in ("labels.txt", "words.txt", "s.npz", "r.npz"):
        (folder / name).write_text("one\n")
    more = (
        '[[inputs]]\ntensor = "x"\nvocabulary = "words.txt"\n'
        '[[outputs]]\ncolumn = "y"\ntype = "utf8"\ntensor = "y"\nlabels = "labels.txt"\n'
        '[warm_up]\nsamples = "s.npz"\nresults = "r.npz"\n'
    )
    spec = model_spec(folder, loading=signer.loading)
    names = ["model.onnx", "labels.txt", "words.txt", "s.npz", "r.npz"]
    for left_out in names:
        signer.sign(folder, more, *(name for name in names if name != left_out))
        with pytest.raises(ManifestError, match=f"pins no sha256 of `{left_out}`"):
            open_model(spec, 1, model, "1")
    signer.sign(folder, more, *names)
    open_model(spec, 1, model, "1")


def test_a_signed_folder_has_nothing_that_its_signature_does_not_cover(tmp_path: Path) -> None:
    """Not a manifest below, not a folder behind a link that an import could prefer to a file."""
    signer, folder = Signer(), tmp_path / "m"
    (folder / "step").mkdir(parents=True)
    (folder / "step" / "manifest.toml").write_text("format = 1\n")
    (folder / "helper.py").write_text("")
    spec = model_spec(folder, loading=signer.loading)
    more = "inputs = []\noutputs = []\n"

    signer.sign(folder, more, "helper.py")
    with pytest.raises(ManifestError, match=r"pins no sha256 of `step/manifest\.toml`"):
        require_trusted(spec)
    signer.sign(folder, more, "helper.py", "step/manifest.toml")
    require_trusted(spec)
    (tmp_path / "evil").mkdir()
    (folder / "helper").symlink_to("../evil")
    with pytest.raises(ManifestError, match="`helper` is a link to a folder"):
        require_trusted(spec)


@pytest.mark.parametrize("when", ["in the trial", "in the opening"])
def test_what_was_found_of_other_files_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A file is exchanged after it was hashed: the next load tries the new one out by itself."""
    folder = row_ids(tmp_path / "m")
    spec = model_spec(folder, loading=LoadingSpec(is_sandboxed=True, cache=str(tmp_path / "cache")))
    happens, tried, closed = [when], [], []

    def exchange(now: str) -> None:
        if now in happens:
            happens.remove(now)
            (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes() + b"\x12\x00")

    def try_out(*_: Any, **__: Any) -> Verdict:
        tried.append(1)
        exchange("in the trial")
        return Verdict()

    def make(spec: ModelSpec, cores: int, source: ModelSource) -> Any:
        exchange("in the opening")
        return SimpleNamespace(notices=(), close=lambda: closed.append(1))

    monkeypatch.setattr(opening, "load_in_sandbox", try_out)
    with pytest.raises(ManifestError, match=r"its file `model\.onnx` was changed during the load"):
        open_model(spec, 1, make, "1")
    assert len(closed) == (when == "in the opening")
    open_model(spec, 1, make, "1")
    open_model(spec, 1, make, "1")
    assert len(tried) == 2


def test_a_trial_has_what_is_left_of_the_time_and_is_not_blamed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock says that others had the entry for nearly all of it."""
    spec = model_spec(
        row_ids(tmp_path / "m"),
        loading=LoadingSpec(is_sandboxed=True, sandbox_s=60.0, cache=str(tmp_path / "cache")),
    )
    given: list[float] = []
    late = Verdict(refusal="it was late", is_late=True)

    def try_out(*_: Any, seconds: float, **__: Any) -> Verdict:
        given.append(seconds)
        return late

    monkeypatch.setattr(opening, "load_in_sandbox", try_out)
    find, passed_ns = opening.WeightStore.find, 50 * opening.clock.NS_PER_S

    def find_late(self: Any, key: str) -> Any:
        now_ns = opening.clock.now_ns() + passed_ns
        monkeypatch.setattr(opening.clock, "now_ns", lambda: now_ns)
        return find(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(opening.WeightStore, "find", find_late)
        with pytest.raises(ManifestError, match="it was late"):
            open_model(spec, 1, model, "1")
    assert given[-1] <= 10
    late = Verdict()
    open_model(spec, 1, model, "1")
    assert len(given) == 2
