"""Models as their files and settings are now: each version as workers would load it.

Decides nothing; what cannot be read is an error of its own version, and costs the others nothing.

Runs on: any thread, but for the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.repository import ModelFile
from iskander.config.schema import Config
from iskander.control.messages import ModelSpec
from iskander.errors import ConfigError, IskanderError
from iskander.repository.routing import Routing
from iskander.repository.scan import SETTINGS, ScannedModel, list_model, read_settings, stamp_of
from iskander.repository.specs import loading_spec, model_spec
from iskander.repository.version_policy import complaint_about, routing_of

Which = tuple[str, str]
"""A name and a version."""


class FoundModel(NamedTuple):
    """A version that can be loaded.

    Attributes:
        settings: Of its model.
        spec: How a worker loads it; its key is nobody's.
    """

    settings: ModelConfig
    spec: ModelSpec


class ModelReader:
    """Reads them.

    Args:
        config: With the models of the configuration, and the repository.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._root = Path(config.repository.path)
        self._marker = config.repository.marker
        self._loading = loading_spec(config)
        self._configured = {(m.name, str(m.version)): m for m in config.models}
        self._names = {name for name, _ in self._configured}

    def is_configured(self, name: str) -> bool:
        """Whether a model is of the configuration, and not of the folder."""
        return name in self._names

    def listed(self, name: str) -> ScannedModel:
        """What is there of a model of the folder."""
        return list_model(self._root, name, self._marker)

    def settings(self, name: str) -> tuple[ModelFile, Routing]:
        """What a model's `model.toml` says.

        Raises:
            ConfigError: It cannot be read, or says what it may not.
        """
        settings = read_settings(self._root, name, self._config)
        routing = routing_of(settings)
        complaint = complaint_about(routing)
        if complaint:
            raise ConfigError(f"{SETTINGS}: {complaint}")
        return settings, routing

    def of_folder(
        self, name: str, settings: ModelFile, stamps: Mapping[str, str]
    ) -> dict[str, FoundModel | IskanderError]:
        """Versions of the folder, or why they cannot be loaded.

        Args:
            name: Of the model.
            settings: Of all of them.
            stamps: What tells the state of each version's folder from another.
        """
        found: dict[str, FoundModel | IskanderError] = {}
        for version, stamp in stamps.items():
            try:
                found[version] = FoundModel(settings, self._spec((name, version), settings, stamp))
            except IskanderError as error:
                found[version] = error
        return found

    def of_configuration(self, name: str) -> dict[str, FoundModel | IskanderError]:
        """Versions of the configuration, or why they cannot be loaded."""
        found: dict[str, FoundModel | IskanderError] = {}
        for (each, version), model in self._configured.items():
            if each == name:
                try:
                    found[version] = FoundModel(model, model_spec(0, model, self._loading))
                except IskanderError as error:
                    found[version] = error
        return found

    def fingerprint_of(self, which: Which, key: int, settings: ModelFile | None) -> str:
        """What tells a version as it is now from another state of it; empty where nobody can say.

        Args:
            which: The version.
            key: Of the lane that serves it.
            settings: By which a version of the folder was loaded; else those of now.
        """
        try:
            configured = self._configured.get(which)
            if configured is not None:
                return model_spec(key, configured, self._loading).fingerprint
            if settings is None:
                settings = read_settings(self._root, which[0], self._config)
            stamp = stamp_of(self._root / which[0] / which[1], self._marker)
            return self._spec(which, settings, stamp).fingerprint
        except IskanderError:
            return ""

    def _spec(self, which: Which, settings: ModelFile, stamp: str) -> ModelSpec:
        name, version = which
        model = ModelConfig(
            **{
                key: getattr(settings, key)
                for key in ModelConfig.__struct_fields__
                if key not in ("name", "path", "version")
            },
            name=name,
            path=str(self._root / name / version),
            version=version,
        )
        spec = model_spec(0, model, self._loading)
        options = msgspec.json.encode(model).decode()
        return msgspec.structs.replace(spec, fingerprint=f"{stamp} {options}")
