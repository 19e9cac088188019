"""Reader of model files and settings: the current load specification of each version.

Makes no decisions. A version that cannot be read yields an error and does not affect the others.

Runs on: any thread; the constructor runs on the gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.repository import ModelFile
from iskander.config.schema import Config
from iskander.errors import ConfigError, IskanderError
from iskander.gateway.repository.routing import Routing
from iskander.gateway.repository.scan import (
    SETTINGS,
    ScannedModel,
    list_model,
    read_settings,
    stamp_of,
)
from iskander.gateway.repository.specs import loading_spec, model_spec
from iskander.gateway.repository.version_policy import routing_error, routing_of
from iskander.interprocess.control.messages import ModelSpec

ModelVersion = tuple[str, str]
"""Name and version."""


class FoundModel(NamedTuple):
    """A version that can be loaded: its model's settings, and a load specification without key."""

    settings: ModelConfig
    spec: ModelSpec


Found = dict[str, FoundModel | IskanderError]
"""For each version number: the loadable version, or the error of its files or settings."""


class ModelReader:
    """Reads models of the configuration and of the repository folder."""

    def __init__(self, config: Config) -> None:
        self._root = Path(config.repository.path)
        self._marker = config.repository.marker
        self._loading = loading_spec(config)
        self.configure(config)
        self._names = {name for name, _ in self._configured}

    def configure(self, config: Config) -> None:
        """Use live settings for later loads; the fingerprints of the configured models stay."""
        self._config = config
        self._configured = {(m.name, str(m.version)): m for m in config.models}

    def is_configured(self, name: str) -> bool:
        return name in self._names

    def configured(self, name: str, version: str) -> ModelConfig | None:
        return self._configured.get((name, version))

    def model_of(self, name: str, version: str, settings: ModelFile) -> ModelConfig:
        """Return the settings of a version of the folder."""
        fields = {key: getattr(settings, key) for key in ModelConfig.__struct_fields__}
        path = str(self._root / name / version)
        return ModelConfig(**{**fields, "name": name, "path": path, "version": version})

    def listed(self, name: str) -> ScannedModel:
        return list_model(self._root, name, self._marker)

    def settings(self, name: str) -> tuple[ModelFile, Routing]:
        """Read a model's `model.toml`; raise ConfigError if it is invalid."""
        settings = read_settings(self._root, name, self._config)
        routing = routing_of(settings)
        if problem := routing_error(routing):
            raise ConfigError(f"{SETTINGS}: {problem}")
        return settings, routing

    def of_folder(self, name: str, settings: ModelFile, stamps: Mapping[str, str]) -> Found:
        """Read versions of the folder; `stamps` has the stamp of each."""
        return {
            version: _read_or_error(settings, partial(self._spec, (name, version), settings, stamp))
            for version, stamp in stamps.items()
        }

    def of_configuration(self, name: str) -> Found:
        return {
            version: _read_or_error(model, partial(model_spec, 0, model, self._loading))
            for (each, version), model in self._configured.items()
            if each == name
        }

    def fingerprint_of(
        self, model_version: ModelVersion, key: int, settings: ModelFile | None
    ) -> str:
        """Return the fingerprint of a version's current files; empty if they cannot be read.

        `key` is the lane's. A version of the folder is read with `settings`, or with its
        current `model.toml` if None.
        """
        try:
            configured = self._configured.get(model_version)
            if configured is not None:
                return model_spec(key, configured, self._loading).fingerprint
            if settings is None:
                settings = read_settings(self._root, model_version[0], self._config)
            stamp = stamp_of(self._root / model_version[0] / model_version[1], self._marker)
            return self._spec(model_version, settings, stamp).fingerprint
        except IskanderError:
            return ""

    def _spec(self, model_version: ModelVersion, settings: ModelFile, stamp: str) -> ModelSpec:
        model = self.model_of(*model_version, settings)
        spec = model_spec(0, model, self._loading)
        options = msgspec.json.encode(model).decode()
        return msgspec.structs.replace(spec, fingerprint=f"{stamp} {options}")


def _read_or_error(
    settings: ModelConfig, read: Callable[[], ModelSpec]
) -> FoundModel | IskanderError:
    try:
        return FoundModel(settings, read())
    except IskanderError as error:
        return error
