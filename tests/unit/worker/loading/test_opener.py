"""Opening of models: operator libraries, signatures, packed weights, warm-up, cache."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
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
from iskander.errors import ManifestError
from iskander.interprocess.control.messages import LoadingSpec, ModelSpec


def test_only_allowed_operator_libraries_are_loaded(tmp_path: Path) -> None:
    library = tmp_path / "ops.so"
    library.write_bytes(b"")
    path = str(library)

    assert libraries_of((), (path,)) == ()
    assert libraries_of((path,), (path,)) == (path,)
    for requested, allowed, message in (
        ((path,), (), "allows none"),
        ((path,), ("other",), "allows other"),
        (("json",), ("json",), "no package here with"),
        (("no_such_package",), ("no_such_package",), "no package here"),
        (("/no/such.so",), ("/no/such.so",), "not found on this machine"),
    ):
        with pytest.raises(ManifestError, match=message):
            libraries_of(requested, allowed)


def test_signature_must_match_bytes_and_key(tmp_path: Path) -> None:
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


def test_packed_weights_are_aligned(tmp_path: Path) -> None:
    """Packed bytes, aligned blobs and the rest of the model stay unchanged."""
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

    result = onnx.load(tmp_path / "m", load_external_data=False)
    weights = (tmp_path / "w").read_bytes()
    first, second = (tensor.external_data[1].value for tensor in result.graph.initializer)
    assert first == "Gemm+1|64;100;7" and weights[:1000] == raw
    kernel, *blobs = second.split("|")
    positions = [tuple(map(int, blob.split(";"))) for blob in blobs]
    assert kernel == "MatMul+2" and [position[1:] for position in positions] == [(300, 0), (0, 9)]
    assert all(position[0] % 64 == 0 for position in positions)
    assert weights[positions[0][0] :][:300] == raw[65:365]
    for tensor in (*result.graph.initializer, *model.graph.initializer):
        tensor.external_data[1].value = ""
    assert result == model
    result.graph.initializer[0].external_data[1].value = "something else"
    (tmp_path / "m").write_bytes(result.SerializeToString())
    with pytest.raises(ManifestError, match="have an unknown format"):
        align_weights(tmp_path / "m", tmp_path / "w")


TYPES = ("bool", "int8", "uint64", "float16", "float64", "bfloat16", "utf8", "binary")


def spec(name: str, type_text: str, shape: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name, name, parse_column_type(type_text), shape, string_bytes=256)


@given(rows=st.integers(1, 20), values=st.sampled_from(["ones", "zeros", "random"]))
def test_arrays_round_trip_through_a_body(rows: int, values: str) -> None:
    specs = tuple(spec(f"t{n}", name, (n % 3,) if n % 2 else ()) for n, name in enumerate(TYPES))
    arrays = warm_up.generate_inputs(specs, rows, WarmUp(values=values, low=-3, high=300))  # type: ignore[arg-type]
    body = warm_up.to_body(specs, rows, arrays)
    result = warm_up.from_body(specs, rows, body)

    for each in specs:
        expected, actual = arrays[each.tensor], result[each.tensor]
        if each.is_string:
            assert [text.decode() for text in actual.flat] == list(expected.flat)
        elif each.type.dtype_name == "bfloat16":
            assert (actual.view(np.uint32) >> 16).astype(np.uint16).tobytes() == expected.tobytes()
        else:
            assert actual.dtype == expected.dtype and np.array_equal(actual, expected)


def test_random_values_are_within_their_bounds_and_type() -> None:
    specs = (spec("f", "float32"), spec("i", "int8"), spec("u", "uint8"))
    result = warm_up.generate_inputs(
        specs, 500, WarmUp(values="random", low=-2.5, high=200.5, seed=4)
    )

    assert result["f"].min() >= -2.5 and result["f"].max() <= 200.5 and len(set(result["f"])) > 100
    assert result["i"].min() == -2 and result["i"].max() == 127
    assert result["u"].min() == 0 and result["u"].max() == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('sha256 = {"model.onnx" = "12"}', "sha256"),
        ("[warm_up]\nlow = 2\nhigh = 1", "low = 2 is above warm_up.high"),
        ('[warm_up]\nresults = "r.npz"', "warm_up.results needs warm_up.samples"),
        ('[warm_up]\nvalues = "twos"', "values"),
        ("[warm_up]\nabsolute = -1.0", "absolute"),
    ],
)
def test_invalid_manifest_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.toml").write_text(f"format = 1\ninputs = []\noutputs = []\n{text}\n")
    with pytest.raises(ManifestError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["manifest.toml", "manifest.toml.sig"])
def test_manifest_in_a_fifo_is_rejected_without_blocking(tmp_path: Path, name: str) -> None:
    public = base64.b64encode(bytes(32)).decode()
    (tmp_path / "manifest.toml").write_text("format = 1\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(ManifestError, match="is not a file"):
        require_signature(tmp_path, public)
    if name == "manifest.toml":
        with pytest.raises(ManifestError, match="is not a file"):
            read_manifest(tmp_path)


class Signer:
    """Signs manifests with a generated key."""

    def __init__(self) -> None:
        ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
        self._key = ed25519.Ed25519PrivateKey.generate()
        public = base64.b64encode(self._key.public_key().public_bytes_raw()).decode()
        self.loading = LoadingSpec(public_key=public)

    def sign(self, folder: Path, more: str, *pinned: str) -> None:
        """Writes a signed manifest that pins files."""
        pins = ", ".join(
            f'"{name}" = "{hashlib.sha256((folder / name).read_bytes()).hexdigest()}"'
            for name in pinned
        )
        raw = f"format = 1\nsha256 = {{{pins}}}\n{more}".encode()
        (folder / "manifest.toml").write_bytes(raw)
        (folder / "manifest.toml.sig").write_bytes(self._key.sign(raw))


def open_stub_model(spec: ModelSpec, cores: int, source: ModelSource) -> Any:
    return SimpleNamespace(notices=(), close=lambda: None)


def test_signed_manifest_must_pin_every_file_it_names(tmp_path: Path) -> None:
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
    for unpinned in names:
        signer.sign(folder, more, *(name for name in names if name != unpinned))
        with pytest.raises(ManifestError, match=f"pins no sha256 of `{unpinned}`"):
            open_model(spec, 1, open_stub_model, "1")
    signer.sign(folder, more, *names)
    open_model(spec, 1, open_stub_model, "1")


def test_signed_folder_has_no_unpinned_files_or_linked_folders(tmp_path: Path) -> None:
    """An import could prefer a linked folder to a pinned file of the same name."""
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


@pytest.mark.parametrize("when", ["during the sandboxed load", "during the load"])
def test_result_of_replaced_files_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A file is replaced after the hash; the next load runs in the sandbox again."""
    folder = row_ids(tmp_path / "m")
    spec = model_spec(folder, loading=LoadingSpec(is_sandboxed=True, cache=str(tmp_path / "cache")))
    replacements, sandboxed, closed = [when], [], []

    def replace_file(now: str) -> None:
        if now in replacements:
            replacements.remove(now)
            (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes() + b"\x12\x00")

    def stub_sandbox(*_: Any, **__: Any) -> Verdict:
        sandboxed.append(1)
        replace_file("during the sandboxed load")
        return Verdict()

    def open_stub(spec: ModelSpec, cores: int, source: ModelSource) -> Any:
        replace_file("during the load")
        return SimpleNamespace(notices=(), close=lambda: closed.append(1))

    monkeypatch.setattr(opening, "load_in_sandbox", stub_sandbox)
    with pytest.raises(ManifestError, match=r"its file `model\.onnx` was changed during the load"):
        open_model(spec, 1, open_stub, "1")
    assert len(closed) == (when == "during the load")
    open_model(spec, 1, open_stub, "1")
    open_model(spec, 1, open_stub, "1")
    assert len(sandboxed) == 2


@pytest.mark.parametrize("is_sandboxed", [True, False])
def test_sandboxed_load_gets_the_remaining_time_and_its_timeout_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sandboxed: bool
) -> None:
    """By the clock, other workers held the lock of the entry for most of the time.

    A load that is only to make a shared copy does not fail.
    """
    monkeypatch.setattr(opening, "SHARED_BYTES_MIN", 0)
    spec = model_spec(
        row_ids(tmp_path / "m"),
        loading=LoadingSpec(
            is_sandboxed=is_sandboxed,
            is_shared=True,
            sandbox_s=60.0,
            cache=str(tmp_path / "cache"),
        ),
    )
    timeouts_s: list[float] = []
    verdict = Verdict(refusal="it was late", is_late=True)

    def stub_sandbox(*_: Any, seconds: float, **__: Any) -> Verdict:
        timeouts_s.append(seconds)
        return verdict

    monkeypatch.setattr(opening, "load_in_sandbox", stub_sandbox)
    find, delay_ns = opening.WeightStore.find, 50 * opening.clock.NS_PER_S

    def find_delayed(self: Any, key: str) -> Any:
        now_ns = opening.clock.now_ns() + delay_ns
        monkeypatch.setattr(opening.clock, "now_ns", lambda: now_ns)
        return find(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(opening.WeightStore, "find", find_delayed)
        if is_sandboxed:
            with pytest.raises(ManifestError, match="it was late"):
                open_model(spec, 1, open_stub_model, "1")
        else:
            model = open_model(spec, 1, open_stub_model, "1")
            assert model.notices == ("weights are not shared: it was late",)
    assert timeouts_s[-1] <= 10
    verdict = Verdict()
    open_model(spec, 1, open_stub_model, "1")
    assert len(timeouts_s) == 2


def test_load_after_a_crash_of_the_copy_is_final_by_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash came late, so the load of the model itself had too little time."""
    monkeypatch.setattr(opening, "SHARED_BYTES_MIN", 0)
    loading = LoadingSpec(
        is_sandboxed=True, is_shared=True, sandbox_s=60.0, cache=str(tmp_path / "cache")
    )
    spec = model_spec(row_ids(tmp_path / "m"), loading=loading)
    timeouts_s: list[float] = []

    def stub_sandbox(*_: Any, seconds: float, folder: Path | None = None, **__: Any) -> Verdict:
        timeouts_s.append(seconds)
        if folder is None:
            return Verdict(refusal="it was late", is_late=True)
        now_ns = opening.clock.now_ns() + 40 * opening.clock.NS_PER_S
        monkeypatch.setattr(opening.clock, "now_ns", lambda: now_ns)
        return Verdict(refusal="it crashed")

    monkeypatch.setattr(opening, "load_in_sandbox", stub_sandbox)
    with pytest.raises(ManifestError, match=r"it was late$"):
        open_model(spec, 1, open_stub_model, "1")
    assert len(timeouts_s) == 2 and timeouts_s[1] <= 20
    monkeypatch.setattr(opening, "load_in_sandbox", lambda *_, **__: Verdict())
    open_model(spec, 1, open_stub_model, "1")


def test_model_that_crashed_is_refused_once_the_sandbox_is_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sandbox, the crash was only the reason for a private copy of the weights."""
    monkeypatch.setattr(opening, "SHARED_BYTES_MIN", 0)
    monkeypatch.setattr(opening, "load_in_sandbox", lambda *_, **__: Verdict(refusal="it crashed"))
    loading = LoadingSpec(is_shared=True, cache=str(tmp_path / "cache"))
    spec = model_spec(row_ids(tmp_path / "m"), loading=loading)
    model = open_model(spec, 1, open_stub_model, "1")
    assert model.notices == ("weights are not shared: it crashed, when its copy was made",)
    loading = msgspec.structs.replace(loading, is_sandboxed=True)
    spec = msgspec.structs.replace(spec, loading=loading)
    with pytest.raises(ManifestError, match="it crashed"):
        open_model(spec, 1, open_stub_model, "1")
