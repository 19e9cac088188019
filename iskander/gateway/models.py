"""The configured models as lanes: found by name and version, described, ready or not.

Runs on: gateway loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from iskander.config import Config
from iskander.config_models import ModelConfig
from iskander.contract.inputs import entries_of, said
from iskander.contract.manifest import model_file
from iskander.contract.tensors import Contract
from iskander.errors import ConfigError, ModelNotFound, NotReady
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.supervision.readiness import reason_of
from iskander.gateway.supervision.workers import Worker
from iskander.gateway.telemetry.recent import Recent
from iskander.wire.messages import LoadingSpec, ModelSpec

STOPPING = "the server is stopping"
TRIAL_SHARE = 0.8
"""Of the time that a worker has for its models: a trial ends before the worker has to."""


class Models:
    """All lanes.

    Attributes:
        by_key: By the number that control messages use.
        workers: Every place of the plan; set by the supervisor.
        is_stopping: Nothing is called ready any more.
    """

    def __init__(self, config: Config, recent: Recent) -> None:
        loading = loading_spec(config)
        self.by_key = {
            key: Lane(model_spec(key, model, loading), model.lane, _quorum(config, model), recent)
            for key, model in enumerate(config.models)
        }

        self.workers: list[Worker] = []
        self.is_stopping = False

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.by_key.values())

    @property
    def is_ready(self) -> bool:
        """Whether every model has the workers that it needs, and they are to be used."""
        return not self.is_stopping and all(self.is_lane_ready(lane) for lane in self)

    def is_lane_ready(self, lane: Lane) -> bool:
        """Whether one model version has the workers that it needs."""
        return not reason_of(lane, self.workers)

    def reasons(self) -> list[str]:
        """Why not everything is ready, a sentence each; empty where it is."""
        if self.is_stopping:
            return [STOPPING]
        reasons = [(lane.title, reason_of(lane, self.workers)) for lane in self]
        return [f"model `{title}`: {reason}" for title, reason in reasons if reason]

    def find(self, name: str, version: str | None) -> Lane:
        """The lane of a model; without a version, of its highest one.

        Raises:
            ModelNotFound: Says what is there.
        """
        lanes = [lane for lane in self if lane.model.name == name]
        if not lanes:
            known = sorted({lane.model.name for lane in self})
            raise ModelNotFound(
                f"there is no model `{name[:100]}`; there are {', '.join(known)}", model=name[:100]
            )
        if version is None:
            return max(lanes, key=lambda lane: _version_order(lane.model.version))
        for lane in lanes:
            if lane.model.version == version:
                return lane
        known = sorted((lane.model.version for lane in lanes), key=_version_order)
        raise ModelNotFound(
            f"model `{name}` has no version `{version[:100]}`; it has {', '.join(known)}",
            model=name,
            version=version[:100],
        )

    def find_loaded(self, name: str, version: str | None) -> Lane:
        """The same, for those who need its contract.

        Raises:
            ModelNotFound: There is no such model.
            NotReady: No worker has loaded it yet.
        """
        lane = self.find(name, version)
        if lane.contract is None:
            raise NotReady(f"model `{lane.title}` is not loaded yet", retry_after_ms=500)
        return lane

    def readiness(self) -> dict[str, Any]:
        """Whether all is ready, and each model version, and why not; for `health`."""
        models: dict[str, dict[str, Any]] = {}
        for lane in self:
            reason = reason_of(lane, self.workers)
            model = models.setdefault(lane.model.name, {"ready": True, "versions": {}})
            model["versions"][lane.model.version] = not reason
            if reason:
                model["ready"] = False
                # The versions of a model wait for the same workers; the first one tells enough.
                model.setdefault("reason", reason)
        stopping = {"reason": STOPPING} if self.is_stopping else {}
        return {"ready": self.is_ready, **stopping, "models": models}


def describe(lane: Lane) -> dict[str, Any]:
    """A model and its contract, for people and programs."""
    described: dict[str, Any] = {
        "name": lane.model.name,
        "version": lane.model.version,
        "ready": lane.is_ready,
        "backend": lane.model.backend,
        "max_batch_rows": lane.model.rows_max,
    }
    contract = lane.contract
    if contract is not None:
        described |= {
            "rows_fixed": contract.rows_fixed,
            "inputs": [said(entry) for entry in entries_of(contract)],
            "outputs": _outputs(contract),
            "passthrough": contract.passthrough,
            "columns": contract.column_order,
        }
    return described


def _outputs(contract: Contract) -> list[dict[str, Any]]:
    """The columns of results; each with the one tensor that it is, or those that it is made of."""
    outputs = contract.outputs
    if not contract.columns:
        return [
            {"column": spec.column, "type": str(spec.type), "tensor": spec.tensor}
            for spec in outputs
        ]
    described = []
    for column in contract.columns:
        tensors = [outputs[index].tensor for index in column.outputs]
        source = {"tensors": tensors} if column.is_assembled else {"tensor": tensors[0]}
        described.append(
            {"column": column.column, "type": column.type, **source, "made": column.made}
        )
    return described


def model_spec(
    key: int,
    model: ModelConfig,
    loading: LoadingSpec = LoadingSpec(),  # noqa: B008
) -> ModelSpec:
    """How a worker loads a configured model.

    Raises:
        ConfigError: There is no file where the configuration says.
    """
    if model.python and not os.access(model.python, os.X_OK):
        raise ConfigError(f"models[{key}].python: `{model.name}` has no interpreter there")
    file = model_file(Path(model.path), model.backend)
    try:
        stat = os.stat(file)
    except OSError as error:
        raise ConfigError(
            f"models[{key}].path: `{model.name}` has no model file there: {error.strerror}"
        ) from None
    manifest = file.parent / "manifest.toml"
    # A manifest names files of labels and the like, and may be all that another backend has.
    has_files = manifest.exists() or model.backend != "onnx"
    beside = sorted(file.parent.iterdir()) if has_files else []
    stamps = [(path.name, path.stat().st_mtime_ns) for path in beside if path.exists()]
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


def _quorum(config: Config, model: ModelConfig) -> int:
    """Workers that a model needs; of its own it may have fewer than others need."""
    return min(config.workers.quorum, model.own_workers or config.workers.quorum)


def _version_order(version: str) -> tuple[int, int, str]:
    return (1, int(version), "") if version.isdecimal() else (0, 0, version)
