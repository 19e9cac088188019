"""Load specification of a model: its settings and files as a message to workers.

Runs on: gateway loop, and the operator's tool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from iskander.config.drift import ModelDriftConfig
from iskander.config.models import LaneConfig, ModelConfig
from iskander.config.observation import ModelLogConfig
from iskander.config.schema import Config
from iskander.contract.manifest import model_file
from iskander.contract.paths import existing_inside, path_inside
from iskander.errors import ConfigError, ManifestError
from iskander.gateway.supervision.gpus.budgets import share_of, with_limit
from iskander.interprocess.control.messages import LoadingSpec, ModelSpec

SANDBOX_SHARE = 0.8
"""Sandboxed load's share of `workers.start_s`: it ends before the worker's own timeout."""


def model_spec(
    key: int,
    model: ModelConfig,
    loading: LoadingSpec = LoadingSpec(),  # noqa: B008
) -> ModelSpec:
    """Return a model's load specification; raise ConfigError if a file of it is missing."""
    if model.python and not os.access(model.python, os.X_OK):
        raise ConfigError(
            f"models[{key}].python: `{model.name}`: `{model.python}` is not executable"
        )
    try:
        file = model_file(Path(model.path), model.backend)
        stat = os.stat(file)
        stamps = _stamps_beside(file, model.backend)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"models[{key}].path: `{model.name}` has no model file: {reason}"
        ) from None
    try:
        path_inside(file.parent, file.name)
        existing_inside(file.parent, "manifest.toml")
    except ManifestError as error:
        raise ConfigError(f"models[{key}].path: `{model.name}`: {error.message}") from None
    pad_to = tuple(sorted({each for each in model.lane.pad_to if each <= model.max_batch_rows}))
    return ModelSpec(
        key=key,
        name=model.name,
        version=str(model.version),
        backend=model.backend,
        path=str(file),
        execution_providers=model.execution_providers,
        threads_intra=model.intra_threads,
        threads_inter=model.inter_threads,
        optimization_level=model.optimization_level,
        is_parallel=model.parallel_execution,
        has_memory_pattern=model.memory_pattern,
        rows_max=model.max_batch_rows,
        string_bytes=model.result_string_bytes,
        fingerprint=f"{file} {stat.st_size} {stat.st_mtime_ns} {stamps} {_options(model, pad_to)}",
        pool=model.pool,
        provider_options=with_limit(
            {
                provider: {key: _option(value) for key, value in options.items()}
                for provider, options in model.provider_options.items()
            },
            model.execution_providers,
            model.gpu_memory_bytes,
        ),
        devices=model.devices,
        gpu_memory_bytes=share_of(model).budget_bytes,
        trust_pickle=model.trust_pickle,
        trusted_types=model.trusted_types,
        loading=loading,
        pad_to=pad_to,
    )


def _options(model: ModelConfig, pad_to: tuple[int, ...]) -> str:
    """Return the settings that a load depends on: those that only the gateway uses are left out."""
    used = msgspec.structs.replace(
        model,
        lane=LaneConfig(pad_to=pad_to),
        shadow_share=None,
        prediction_log=ModelLogConfig(),
        drift=ModelDriftConfig(),
    )
    return msgspec.json.encode(used).decode()


def _stamps_beside(file: Path, backend: str) -> list[tuple[str, int]]:
    """Return names and times of the files next to a model that its load may read."""
    # A manifest may refer to label files; other backends may read any file of the folder.
    if backend == "onnx" and not (file.parent / "manifest.toml").exists():
        return []
    beside = sorted(file.parent.iterdir())
    return [(path.name, path.stat().st_mtime_ns) for path in beside if path.exists()]


def loading_spec(config: Config, environment: Mapping[str, str] = os.environ) -> LoadingSpec:
    """Return the trust settings and limits of loads."""
    settings = config.loading
    return LoadingSpec(
        is_sandboxed=settings.sandbox,
        sandbox_s=min(settings.sandbox_s, SANDBOX_SHARE * config.workers.start_s),
        sandbox_bytes=settings.sandbox_bytes,
        model_bytes=settings.model_bytes,
        is_shared=settings.share_weights,
        cache=settings.cache_folder(environment),
        cache_bytes=settings.cache_bytes,
        custom_ops=settings.custom_ops,
        public_key=settings.public_key,
        engine_s=min(settings.engine_s, SANDBOX_SHARE * config.workers.start_s),
    )


def _option(value: str | int | float | bool) -> str:
    """Format a provider's option for ONNX Runtime; TensorRT rejects 0 and 1 for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def quorum_of(config: Config, model: ModelConfig) -> int:
    """Return a model's quorum, at most its number of own workers."""
    return min(config.workers.quorum, model.own_workers or config.workers.quorum)
