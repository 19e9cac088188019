"""How workers load a model: its settings and files as a message.

Runs on: gateway loop, and the operator's tool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.contract.manifest import model_file
from iskander.control.messages import LoadingSpec, ModelSpec
from iskander.errors import ConfigError

TRIAL_SHARE = 0.8
"""Of the time that a worker has for its models: a trial ends before the worker has to."""


def model_spec(
    key: int,
    model: ModelConfig,
    loading: LoadingSpec = LoadingSpec(),  # noqa: B008
) -> ModelSpec:
    """How a worker loads a configured model.

    Raises:
        ConfigError: There is no file where the configuration says, or it cannot be looked at.
    """
    if model.python and not os.access(model.python, os.X_OK):
        raise ConfigError(f"models[{key}].python: `{model.name}` has no interpreter there")
    try:
        file = model_file(Path(model.path), model.backend)
        stat = os.stat(file)
        stamps = _stamps_beside(file, model.backend)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"models[{key}].path: `{model.name}` has no model file there: {reason}"
        ) from None
    options = msgspec.json.encode(model).decode()
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
        fingerprint=f"{file} {stat.st_size} {stat.st_mtime_ns} {stamps} {options}",
        pool=model.pool,
        provider_options={
            provider: {key: _option(value) for key, value in options.items()}
            for provider, options in model.provider_options.items()
        },
        trust_pickle=model.trust_pickle,
        trusted_types=model.trusted_types,
        loading=loading,
    )


def _stamps_beside(file: Path, backend: str) -> list[tuple[str, int]]:
    """Names and times of what lies beside a model that may need it.

    A manifest names files of labels and the like, and may be all that another backend has.
    """
    if backend == "onnx" and not (file.parent / "manifest.toml").exists():
        return []
    beside = sorted(file.parent.iterdir())
    return [(path.name, path.stat().st_mtime_ns) for path in beside if path.exists()]


def loading_spec(config: Config, environment: Mapping[str, str] = os.environ) -> LoadingSpec:
    """What workers believe of model files, and what opening one may take."""
    settings = config.loading
    home = environment.get("XDG_CACHE_HOME") or (
        f"{environment['HOME']}/.cache" if environment.get("HOME") else ""
    )
    own = environment.get("CACHE_DIRECTORY", "").partition(":")[0]
    default = own or (f"{home}/iskander" if home else "")
    return LoadingSpec(
        is_tried=settings.trial,
        trial_s=min(settings.trial_s, TRIAL_SHARE * config.workers.start_s),
        trial_bytes=settings.trial_bytes,
        model_bytes=settings.model_bytes,
        is_shared=settings.share_weights,
        cache=settings.cache or default,
        cache_bytes=settings.cache_bytes,
        custom_ops=settings.custom_ops,
        public_key=settings.public_key,
    )


def _option(value: str | int | float | bool) -> str:
    """A provider's option as the runtime reads it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def quorum_of(config: Config, model: ModelConfig) -> int:
    """Workers that a model needs; of its own it may have fewer than others need."""
    return min(config.workers.quorum, model.own_workers or config.workers.quorum)
