"""Options of providers with a budget, load specifications by kind of worker, and late loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.gpus import ONE

from iskander.config.loader import load_config, require_model
from iskander.config.models import LaneConfig, ModelConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError, IskanderError
from iskander.gateway.repository.specs import model_spec
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.budgets import spec_for
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.control.messages import LoadFailed, LoadStep, ModelSpec

GIB = 1 << 30
CUDA: dict[str, Any] = {"execution_providers": ["cuda", "cpu"]}


def model(folder: Path, **fields: Any) -> ModelConfig:
    path = folder / "m.onnx"
    path.touch()
    raw = {"name": "m", "path": str(path), "version": "1"} | CUDA | fields
    return msgspec.convert(raw, ModelConfig)


def spec(folder: Path, **fields: Any) -> ModelSpec:
    return model_spec(0, model(folder, **fields))


def test_budget_is_the_limit_of_the_provider_beside_its_other_options(tmp_path: Path) -> None:
    options = {"cuda": {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": False}}
    made = spec(tmp_path, gpu_memory_bytes=5 * GIB, provider_options=options)
    assert made.provider_options == {
        "cuda": {
            "cudnn_conv_algo_search": "HEURISTIC",
            "use_tf32": "false",
            "gpu_mem_limit": str(5 * GIB),
        }
    }
    assert (made.devices, made.gpu_memory_bytes) == (("gpu",), 5 * GIB)


def test_lower_limit_of_the_configuration_is_kept(tmp_path: Path) -> None:
    options = {"cuda": {"gpu_mem_limit": GIB}}
    made = spec(tmp_path, gpu_memory_bytes=5 * GIB, provider_options=options)
    assert made.provider_options == {"cuda": {"gpu_mem_limit": str(GIB)}}


def test_budget_limits_the_workspace_of_engines_too(tmp_path: Path) -> None:
    """A build tries kernels with as much memory as it may use, beside served models."""
    both = {"execution_providers": ["tensorrt", "cuda"], "gpu_memory_bytes": 5 * GIB}
    made = spec(tmp_path, **both, provider_options={"tensorrt": {"trt_fp16_enable": True}})
    assert made.provider_options == {
        "tensorrt": {"trt_fp16_enable": "true", "trt_max_workspace_size": str(5 * GIB)},
        "cuda": {"gpu_mem_limit": str(5 * GIB)},
    }
    lower = {"tensorrt": {"trt_max_workspace_size": GIB}}
    made = spec(tmp_path, **both, provider_options=lower)
    assert made.provider_options["tensorrt"] == {"trt_max_workspace_size": str(GIB)}


def test_model_without_a_budget_has_only_the_options_of_the_configuration(tmp_path: Path) -> None:
    assert spec(tmp_path).provider_options == {}


def test_worker_without_a_gpu_gets_no_provider_of_one(tmp_path: Path) -> None:
    made = spec(tmp_path, placement="any", gpu_memory_bytes=GIB)
    assert made.devices == ("cpu", "gpu")
    assert spec_for(made, "gpu") is made
    without = spec_for(made, "cpu")
    assert without.execution_providers == ("cpu",) and without.provider_options == {}
    plain = spec(tmp_path, execution_providers=["cpu"])
    assert spec_for(plain, "cpu") is plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": "gpu", "execution_providers": ["cpu"]}, "none of them uses a GPU"),
        ({"placement": "cpu"}, "cuda needs a GPU"),
        ({"placement": "any", "execution_providers": ["cuda"]}, "without a GPU need `cpu`"),
        ({"execution_providers": ["cpu"], "gpu_memory_bytes": 1}, "no GPU loads the model"),
        ({"provider_options": {"cuda": {"device_id": 1}}}, "device_id = 1: a worker of a GPU"),
        (
            {"gpu_memory_bytes": 5, "provider_options": {"cuda": {"gpu_mem_limit": 6}}},
            "gpu_mem_limit = 6 is more than models[0].gpu_memory_bytes = 5",
        ),
        ({"provider_options": {"cuda": {"gpu_mem_limit": "1G"}}}, "expected a number of bytes"),
        (
            {
                "execution_providers": ["tensorrt", "cuda"],
                "gpu_memory_bytes": 5,
                "provider_options": {"tensorrt": {"trt_max_workspace_size": 6}},
            },
            "trt_max_workspace_size = 6 is more than models[0].gpu_memory_bytes = 5",
        ),
        ({"backend": "remote", "placement": "gpu"}, "a remote model needs no GPU"),
    ],
)
def test_contradictions_are_rejected(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"models\[0\]") as caught:
        require_model(model(tmp_path, **fields), "models[0]", Config())
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"execution_providers": ["cpu"]}, ("cpu",)),
        ({}, ("gpu",)),
        ({"execution_providers": ["tensorrt", "cuda"]}, ("gpu",)),
        ({"placement": "any"}, ("cpu", "gpu")),
        ({"placement": "any", "execution_providers": ["cpu"]}, ("cpu", "gpu")),
        ({"backend": "python", "placement": "gpu", "execution_providers": ["cpu"]}, ("gpu",)),
    ],
)
def test_placement_is_that_of_the_providers_unless_set(
    tmp_path: Path, fields: dict[str, Any], devices: tuple[str, ...]
) -> None:
    made = model(tmp_path, **fields)
    require_model(made, "models[0]", Config())
    assert made.devices == devices


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    file = tmp_path / "iskander.toml"
    file.write_text(
        '[workers]\ngroups = ["auto", "gpu:auto"]\ngpu_reserve_bytes = 7\n'
        '[[models]]\nname = "m"\npath = "m.onnx"\nplacement = "any"\ngpu_memory_bytes = 5\n'
        'execution_providers = ["cuda", "cpu"]\n'
    )
    config = load_config(file).config
    assert config.workers.groups == ("auto", "gpu:auto")
    assert config.models[0].devices == ("cpu", "gpu")


class Loads:
    """A loader with one worker on a GPU, and the models that it was sent."""

    def __init__(self, gpu: Gpu, budget_bytes: int, models: dict[str, int]) -> None:
        self.sent: list[str] = []
        self.lanes: dict[int, Lane] = {}
        self.worker = Worker(SlotPlan(0, 0, (0,), None, gpu=gpu, gpu_budget_bytes=budget_bytes))
        self.worker.state = State.READY
        for key, (title, memory_bytes) in enumerate(models.items()):
            self.add(key, title, memory_bytes)
        self.loader = ModelLoader(
            self.lanes,
            [self.worker],
            1 << 20,
            FileFreshness(),
            self._on_event,
            self._on_error,
            lambda worker, messages: self.sent.append("load"),
        )

    def add(self, key: int, name: str, memory_bytes: int) -> Lane:
        raw = ModelSpec(
            key, name, "1", "onnx", "", ("cuda",), 0, 0, "level3", False, True, 64, 256, ""
        )
        made = msgspec.structs.replace(raw, devices=("gpu",), gpu_memory_bytes=memory_bytes)
        lane = self.lanes[key] = Lane(made, LaneConfig())
        lane.is_served = lane.is_required = False
        return lane

    def load(self) -> list[str]:
        """Load what is due, as if the worker succeeded; returns the loaded models."""
        loaded = []
        while True:
            before = len(self.sent)
            self.loader.load_next(self.worker)
            if len(self.sent) == before:
                return loaded
            key = self.worker.loading_key
            assert key is not None
            self.worker.loading_key = None
            self.worker.models.add(key)
            loaded.append(self.lanes[key].model.name)

    def _on_event(self, worker: Worker, event: Event) -> None:
        raise AssertionError(event)

    def _on_error(self, worker: Worker, error: IskanderError) -> None:
        raise AssertionError(error)


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return ONE.gpus(tmp_path)[0]


def test_model_that_exceeds_the_rest_of_the_budget_is_refused(gpu: Gpu) -> None:
    loads = Loads(gpu, 10 * GIB, {"a": 4 * GIB, "b": 5 * GIB, "c": 2 * GIB, "d": GIB})
    assert loads.load() == ["a", "b", "d"]
    refusal = loads.lanes[2].refusal
    assert refusal is not None
    assert "11 GiB needed (`a/1` 4 GiB, `b/1` 5 GiB, `c/1` 2 GiB), 10 GiB available" in str(refusal)


def test_models_that_may_build_engines_are_loaded_last(gpu: Gpu) -> None:
    loads = Loads(gpu, 10 * GIB, {"built": GIB, "a": GIB, "b": GIB})
    built = msgspec.structs.replace(loads.lanes[0].model, execution_providers=("tensorrt", "cuda"))
    loads.lanes[0].model = built
    assert loads.load() == ["a", "b", "built"]


def test_step_of_a_load_is_that_of_its_model_until_the_answer(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads(gpu, 10 * GIB, {"a": GIB})
    loads.loader.load_next(loads.worker)
    with caplog.at_level("INFO"):
        loads.loader.on_step(loads.worker, LoadStep(7, "building", 9.0))
        assert loads.worker.load_step == ""
        loads.loader.on_step(loads.worker, LoadStep(0, "building TensorRT engines", 20.4))
    assert loads.worker.load_step == "a/1: building TensorRT engines, 20 s"
    assert [each.getMessage() for each in caplog.records] == [
        "worker 0: a/1: building TensorRT engines, 20 s"
    ]
    loads.loader.on_answer(loads.worker, LoadFailed(0, "manifest", "no"))
    assert loads.worker.load_step == ""


def test_model_without_a_budget_is_refused_beside_others(gpu: Gpu) -> None:
    loads = Loads(gpu, 10 * GIB, {"a": GIB, "b": 0})
    assert loads.load() == ["a"]
    assert "`b/1` has no gpu_memory_bytes" in str(loads.lanes[1].refusal)


def test_next_generation_needs_space_beside_the_old_one(gpu: Gpu) -> None:
    loads = Loads(gpu, 10 * GIB, {"a": 6 * GIB})
    assert loads.load() == ["a"]
    loads.add(1, "a", 6 * GIB)
    assert loads.load() == [] and "12 GiB needed" in str(loads.lanes[1].refusal)
    alone = Loads(gpu, 10 * GIB, {"a": 0})
    assert alone.load() == ["a"]
    alone.add(1, "a", 0)
    assert alone.load() == ["a"]
