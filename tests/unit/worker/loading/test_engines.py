"""TensorRT engines without TensorRT: what decides about their builds, entries and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from iskander_worker.backends import onnx
from iskander_worker.loading import opener
from iskander_worker.loading.engines import (
    LIBRARY,
    PACKAGE,
    cache_options,
    key_parts,
    needs_engines,
    profile_options,
)
from iskander_worker.loading.opener import ModelSource, open_model
from iskander_worker.loading.progress import Progress
from iskander_worker.sandbox.client import Verdict, load_in_sandbox, sandbox_server, timeout_verdict
from support import models
from support.fake_device import FakeDevice
from support.models import ROOT
from support.scripted import model_spec

from iskander.contract.graph import Graph, GraphTensor
from iskander.errors import ManifestError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.interprocess.control.messages import LoadingSpec, ModelSpec

TENSORRT: dict[str, Any] = {"execution_providers": ("tensorrt", "cuda")}
IMAGES = GraphTensor("images", "tensor(float)", ("rows", 3, 224, 224))
FIXED = GraphTensor("scale", "tensor(float)", (4,))


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    loading = LoadingSpec(cache=str(folder / "cache"), engine_s=700.0, sandbox_s=7.0)
    values = {"loading": loading, "rows_max": 64, **TENSORRT}
    return model_spec(models.row_ids(folder / "m"), **(values | changes))


class Builder:
    """Stands for the sandbox and the runtime.

    Attributes:
        built: Timeouts of the builds, in seconds.
        opened: Sources with which workers opened the model.
        verdict: Of the next builds.
    """

    def __init__(self) -> None:
        self.built: list[float] = []
        self.opened: list[ModelSource] = []
        self.verdict = Verdict()

    def load_in_sandbox(self, *_: Any, seconds: float, folder: Path, **__: Any) -> Verdict:
        self.built.append(seconds)
        for name in ("TensorrtExecutionProvider_0_sm90.engine", "timing.cache"):
            (folder / name).write_bytes(b"kernels")
            (folder / name).chmod(0o600)
        return self.verdict

    def make(self, spec: ModelSpec, cores: int, source: ModelSource) -> Any:
        self.opened.append(source)
        return OpenModel()


class OpenModel:
    notices: tuple[str, ...] = ()
    files_sha256 = ""

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(opener, "load_in_sandbox", builder.load_in_sandbox)
    monkeypatch.setattr(opener, "open_device", lambda number: FakeDevice(number=number))
    monkeypatch.setattr(opener, "tensorrt_version", lambda: "101303")
    return builder


def test_engines_are_built_once_and_opened_by_every_worker(
    builder: Builder, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    for _ in range(3):
        open_model(spec, 1, builder.make, "1.31")
    assert len(builder.built) == 1
    assert 690 < builder.built[0] <= 700
    folders = {source.engines for source in builder.opened}
    (folder,) = folders
    assert folder is not None and folder.parent == tmp_path / "cache"
    assert {each.name for each in folder.iterdir()} == {
        "TensorrtExecutionProvider_0_sm90.engine",
        "timing.cache",
        "entry.json",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"rows_max": 65},
        {"pad_to": (8,)},
        {"provider_options": {"tensorrt": {"trt_fp16_enable": "true"}}},
        {"provider_options": {"cuda": {"cudnn_conv_algo_search": "HEURISTIC"}}},
        {"optimization_level": "disable"},
    ],
)
def test_other_settings_have_other_engines(
    builder: Builder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    open_model(spec_of(tmp_path), 1, builder.make, "1.31")
    open_model(spec_of(tmp_path, **changes), 1, builder.make, "1.31")
    assert len(builder.built) == 2


def test_other_card_library_or_runtime_has_other_engines(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path)
    open_model(spec, 1, builder.make, "1.31")
    open_model(spec, 1, builder.make, "1.32")
    monkeypatch.setattr(opener, "tensorrt_version", lambda: "101400")
    open_model(spec, 1, builder.make, "1.31")
    assert len(builder.built) == 3
    names = {repr(key_parts(spec, name, "1")) for name in ("H100 (9.0)", "L4 (8.9)")}
    assert len(names) == 2


def test_damaged_engine_is_built_again(builder: Builder, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    open_model(spec, 1, builder.make, "1.31")
    folder = builder.opened[0].engines
    assert folder is not None
    (folder / "timing.cache").write_bytes(b"other")
    open_model(spec, 1, builder.make, "1.31")
    assert len(builder.built) == 2


@pytest.mark.parametrize(
    ("verdict", "message", "builds"),
    [
        (Verdict(refusal="it crashed the sandbox process by SIGSEGV"), "SIGSEGV", 1),
        (Verdict(error="no kernel for this operator"), "no kernel", 2),
    ],
)
def test_failed_build_rejects_the_model(
    builder: Builder, tmp_path: Path, verdict: Verdict, message: str, builds: int
) -> None:
    """A crash is not repeated for ten minutes; this holds without `loading.sandbox` too."""
    builder.verdict = verdict
    for _ in range(2):
        with pytest.raises(ManifestError, match=message):
            open_model(spec_of(tmp_path), 1, builder.make, "1.31")
    assert not builder.opened
    assert len(builder.built) == builds


def test_missing_cache_is_a_notice(builder: Builder, tmp_path: Path) -> None:
    model = open_model(spec_of(tmp_path, loading=LoadingSpec()), 1, builder.make, "1.31")
    assert "every worker builds them: loading.cache has no folder" in model.notices[0]
    assert builder.opened == [ModelSource()] and not builder.built


def test_engines_beyond_the_cache_are_a_notice(builder: Builder, tmp_path: Path) -> None:
    loading = LoadingSpec(cache=str(tmp_path / "cache"), cache_bytes=10, engine_s=700.0)
    for _ in range(2):
        model = open_model(spec_of(tmp_path, loading=loading), 1, builder.make, "1.31")
        (notice,) = model.notices
        assert "every worker builds them: its entry has 14 bytes, limit 10" in notice
    assert builder.opened == [ModelSource()] * 2 and len(builder.built) == 1


@pytest.mark.parametrize(
    "own",
    [
        {"trt_engine_cache_enable": "true", "trt_engine_cache_path": "/engines"},
        {"trt_engine_cache_path": "/engines"},
        {"trt_engine_cache_enable": "false"},
    ],
)
def test_cache_of_the_configuration_is_left_to_the_runtime(
    builder: Builder, tmp_path: Path, own: dict[str, str]
) -> None:
    spec = spec_of(tmp_path, provider_options={"tensorrt": own})
    assert not needs_engines(spec)
    open_model(spec, 1, builder.make, "1.31")
    assert builder.opened == [ModelSource()] and not builder.built


def test_engines_serve_all_sizes_of_batches(tmp_path: Path) -> None:
    graph = Graph((IMAGES, FIXED), ())
    assert profile_options(spec_of(tmp_path, pad_to=(8, 32)), graph) == {
        "trt_profile_min_shapes": "images:1x3x224x224",
        "trt_profile_opt_shapes": "images:32x3x224x224",
        "trt_profile_max_shapes": "images:64x3x224x224",
    }
    assert "images:64x" in profile_options(spec_of(tmp_path), graph)["trt_profile_opt_shapes"]


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (Graph((FIXED,), ()), {}),
        (Graph((GraphTensor("t", "tensor(int64)", ("rows", "length")),), ()), {}),
        (Graph((IMAGES,), ()), {"tensorrt": {"trt_profile_min_shapes": "images:2x3x224x224"}}),
    ],
)
def test_no_profile_is_made(tmp_path: Path, graph: Graph, options: dict[str, Any]) -> None:
    assert profile_options(spec_of(tmp_path, provider_options=options), graph) == {}


def test_worker_does_not_rewrite_the_entry(tmp_path: Path) -> None:
    """The provider knows `true` and `false` only."""
    read = {"trt_engine_cache_enable": "true", "trt_engine_cache_path": str(tmp_path)}
    built = {"trt_timing_cache_enable": "true", "trt_timing_cache_path": str(tmp_path)}
    assert cache_options(tmp_path, is_building=False) == read
    assert cache_options(tmp_path, is_building=True) == read | built


@pytest.mark.parametrize("has_cache", [True, False])
def test_engines_have_a_profile_with_and_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cache: bool
) -> None:
    """Without one, each new number of rows is a build during a batch."""
    device = FakeDevice()
    opened: list[dict[str, str]] = []
    open_session = onnx._open

    def open_or_note(file: Path, options: Any, providers: Any, *more: Any) -> Any:
        if providers == ("cpu",):
            return open_session(file, options, providers)
        opened.append(more[0]["tensorrt"])
        raise ManifestError("no device")

    monkeypatch.setattr(onnx, "open_device", lambda number: device)
    monkeypatch.setattr(onnx, "_open", open_or_note)
    source = ModelSource(engines=tmp_path if has_cache else None)
    with pytest.raises(ManifestError, match="no device"):
        onnx.OnnxModel(spec_of(tmp_path), 1, source)
    (options,) = opened
    assert options["trt_profile_max_shapes"] == "x:64"
    assert ("trt_engine_cache_path" in options) is has_cache


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_libraries_of_the_python_package_are_found_by_their_names(tmp_path: Path) -> None:
    source = tmp_path / "version.c"
    source.write_text("int getInferLibVersion(void) { return 101601; }")
    package = tmp_path / PACKAGE
    package.mkdir()
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o"]
    subprocess.run([*command, package / LIBRARY, source], check=True)
    script = "from iskander_worker.loading.engines import tensorrt_version as v; print(v())"
    paths = [str(tmp_path), str(ROOT / "workers"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "101601"


def test_timeout_names_the_setting_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_server, "run", timeout_verdict)
    built = load_in_sandbox(spec_of(tmp_path), 1, (), seconds=700.0)
    assert "within 700 s (loading.engine_s)" in built.refusal and built.is_late
    plain = load_in_sandbox(model_spec(tmp_path), 1, (), seconds=7.0)
    assert "within 7 s (loading.sandbox_s)" in plain.refusal


def test_progress_is_reported_at_doubling_intervals() -> None:
    progress = Progress()
    assert not progress.due(now_ns())
    with progress.step("building"):
        begun = now_ns()
        reports = [progress.due(begun + s * NS_PER_S) for s in range(1, 100)]
    found = [report for report in reports if report is not None]
    assert {step for step, _ in found} == {"building"}
    assert [round(seconds) for _, seconds in found] == [10, 20, 40, 80]
    assert not progress.due(begun + 1000 * NS_PER_S)
