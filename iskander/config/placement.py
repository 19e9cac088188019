"""Checks of a model's placement and memory budget against its providers and their options."""

from __future__ import annotations

from iskander.config.models import GPU_PROVIDERS, REMOTE, ModelConfig
from iskander.config.section import require

MEMORY_LIMITS = {"cuda": "gpu_mem_limit", "tensorrt": "trt_max_workspace_size"}
"""Options of the providers: bytes of the arena of CUDA, and of the workspace of an engine."""


def require_placement(model: ModelConfig, where: str) -> None:
    """Check the settings of a model that concern GPUs against one another.

    Raises:
        ConfigError: Names `where` and the settings that contradict each other.
    """
    providers = model.execution_providers
    named = [each for each in providers if each in GPU_PROVIDERS]
    subject = f'{where}.placement = "{model.placement}"'
    if model.backend == REMOTE:
        require(model.devices == ("cpu",), f"{where}: a remote model needs no GPU of this server")
    elif model.backend == "onnx" and model.placement:
        rule = f"{subject} contradicts execution_providers = {', '.join(providers)}"
        is_possible = model.placement != "gpu" or bool(named)
        require(is_possible, f"{rule}: none of them uses a GPU")
        is_possible = model.placement != "cpu" or not named
        require(is_possible, f"{rule}: {', '.join(named)} needs a GPU")
        is_possible = model.placement != "any" or len(named) < len(providers)
        require(is_possible, f"{rule}: workers without a GPU need `cpu`")
    has_effect = "gpu" in model.devices or not model.gpu_memory_bytes
    require(has_effect, f"{where}.gpu_memory_bytes has no effect: no GPU loads the model")
    for provider, options in model.provider_options.items():
        key = f"{where}.provider_options.{provider}"
        device = str(options.get("device_id", 0))
        text = "a worker of a GPU sees it alone, as device 0: choose GPUs in workers.groups"
        require(device == "0", f"{key}.device_id = {device}: {text}")
        limit = str(options.get(MEMORY_LIMITS[provider], 0))
        key = f"{key}.{MEMORY_LIMITS[provider]} = {limit}"
        require(limit.isdecimal(), f"{key}: expected a number of bytes")
        budget = model.gpu_memory_bytes
        text = f"is more than {where}.gpu_memory_bytes = {budget}"
        require(not budget or int(limit) <= budget, f"{key} {text}")
