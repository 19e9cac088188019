"""Memory of GPUs: declared budgets of models against the memory of each device.

Pure. Each worker of a GPU loads each of its models once, and needs `workers.gpu_reserve_bytes` for
the context of CUDA. A model without a declared budget may use all of a device, so it does not share
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from iskander.config.models import GPU_PROVIDERS, ModelConfig
from iskander.config.placement import MEMORY_LIMITS
from iskander.errors import ConfigError
from iskander.gateway.supervision.gpus.device import Gpu, format_gib
from iskander.interprocess.control.messages import ModelSpec


class Share(NamedTuple):
    """A model on a device, and the memory that its settings declare; 0 if they declare none."""

    title: str
    budget_bytes: int


def share_of(model: ModelConfig) -> Share:
    """Return a model's share of a device."""
    limit = int(model.provider_options.get("cuda", {}).get(MEMORY_LIMITS["cuda"], 0))
    return Share(f"{model.name}/{model.version}", model.gpu_memory_bytes or limit)


def budget_of(gpu: Gpu, workers: int, reserve_bytes: int) -> int:
    """Return the memory of a device for models; 0 if its size is unknown."""
    return max(gpu.memory_bytes - workers * reserve_bytes, 0)


def shortage(shares: Sequence[Share], budget_bytes: int) -> str:
    """Return why models do not fit in the budget of a device; empty if they do."""
    needed = sum(share.budget_bytes for share in shares)
    undeclared = [share.title for share in shares if not share.budget_bytes]
    if undeclared and len(shares) > 1:
        others = ", ".join(f"`{each.title}`" for each in shares if each.title != undeclared[0])
        text = f"`{undeclared[0]}` has no gpu_memory_bytes, and shares the device with {others}"
        return f"{text}: declare the memory of each"
    if needed <= budget_bytes:
        return ""
    sizes = ", ".join(f"`{each.title}` {format_gib(each.budget_bytes)}" for each in shares)
    return f"{format_gib(needed)} needed ({sizes}), {format_gib(budget_bytes)} available"


def require_budget(gpu: Gpu, shares: Sequence[Share], workers: int, reserve_bytes: int) -> None:
    """Check the models of a device against its memory, as far as it is known.

    Raises:
        ConfigError: They do not fit.
    """
    budget_bytes = budget_of(gpu, workers, reserve_bytes)
    if not gpu.memory_bytes:
        budget_bytes = sum(share.budget_bytes for share in shares)
    if why := shortage(shares, budget_bytes):
        reserve = f"workers.gpu_reserve_bytes = {reserve_bytes} for each of {workers} workers"
        raise ConfigError(
            f"{gpu.description}: {why}; models may use the device's memory minus {reserve}"
        )


def spec_for(model: ModelSpec, device: str) -> ModelSpec:
    """Return the load specification for a worker; one without a GPU gets no providers of GPUs."""
    if device == "gpu" or not GPU_PROVIDERS.intersection(model.execution_providers):
        return model
    return msgspec.structs.replace(
        model,
        execution_providers=tuple(p for p in model.execution_providers if p not in GPU_PROVIDERS),
        provider_options={
            name: options
            for name, options in model.provider_options.items()
            if name not in GPU_PROVIDERS
        },
    )


def with_limit(
    options: Mapping[str, dict[str, str]], providers: Sequence[str], budget_bytes: int
) -> dict[str, dict[str, str]]:
    """Return the options of providers with the budget as the limit of each one's memory.

    An option of the configuration is kept: `require_budget` has checked it.
    """
    merged = {provider: dict(values) for provider, values in options.items()}
    for provider in providers:
        if budget_bytes and provider in MEMORY_LIMITS:
            merged.setdefault(provider, {}).setdefault(MEMORY_LIMITS[provider], str(budget_bytes))
    return merged
