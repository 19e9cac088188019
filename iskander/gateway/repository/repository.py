"""The models of a folder: what is there against what is served; the difference comes or goes.

Those of the configuration are loaded anew here, too, when their files have changed.

Which versions are wanted is decided in `wanted`, how they come and go in `generations`. In each
gateway process by itself: processes that watch the same folder come to the same end, each in its
own time.

Runs on: gateway loop; folders are read on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from iskander.config import Config
from iskander.config_models import ModelConfig
from iskander.config_repository import ModelFile
from iskander.errors import ConfigError, IskanderError, ModelMoved, ModelNotFound, Unsupported
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.models import Failure, Models
from iskander.gateway.repository.following import NOTHING, follow
from iskander.gateway.repository.generations import Generation, Generations
from iskander.gateway.repository.listing import (
    SETTINGS,
    Listed,
    list_model,
    list_models,
    read_settings,
    stamp_of,
)
from iskander.gateway.repository.routing import Routing
from iskander.gateway.repository.wanted import (
    complaint_about,
    move,
    routing_of,
    wanted,
)
from iskander.gateway.specs import loading_spec, model_spec, quorum_of
from iskander.gateway.supervision.loading import Loading
from iskander.gateway.telemetry.recent import Recent
from iskander.wire.messages import ModelSpec

log = logging.getLogger("iskander.repository")

EVERYTHING = "*"
RETRY_S = 5.0
"""How long a worker goes on without a model that others could serve, before it is asked again."""
NOT_FOLDERS = "its models come from the server's configuration"


class Repository:
    """What is to be served.

    Args:
        config: Of the server.
        models: What is served.
        loading: Gives workers their models.
        refuse_queued: Answers what waits in a lane with an error.
        recent: Where the last latencies are kept.
        on_change: Called when what is served, or more of what is to be, is known.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        loading: Loading,
        refuse_queued: Callable[[Lane, IskanderError], None],
        *,
        recent: Recent,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._settings = config.repository
        self._root = Path(config.repository.path)
        self._spec_of_loading = loading_spec(config)
        self._models = models
        self._loading = loading
        self._generations = Generations(
            models,
            loading,
            refuse_queued,
            load_s=config.workers.start_s,
            drain_s=config.server.drain_s,
            recent=recent,
            on_change=on_change,
        )
        self._on_change = on_change
        self._configured = {(m.name, str(m.version)): m for m in config.models}
        self._tried: dict[str, dict[str, str]] = {}
        self._model_files: dict[str, ModelFile] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retrying: asyncio.TimerHandle | None = None
        models.fingerprint_of = self._fingerprint_of

    @property
    def is_explicit(self) -> bool:
        """Whether models come and go by calls."""
        return self._settings.control == "explicit"

    async def start(self) -> None:
        """Begin to load what is to be served from the start, and to watch the folder.

        Raises:
            ConfigError: The folder cannot be read.
        """
        if not self._settings.path:
            return
        listed = await asyncio.to_thread(list_models, self._root, self._settings.marker)
        asked = self._settings.load if self.is_explicit else (EVERYTHING,)
        names = set(asked) if EVERYTHING not in asked else {*listed, *asked} - {EVERYTHING}
        for name in sorted(names):
            self._models.pending += 1
            self._spawn(self._start(name, listed.get(name, NOTHING)))
        if not self.is_explicit:
            self._spawn(follow(self._settings, listed, self._on_model))

    def close(self) -> None:
        """Follow nothing any more."""
        if self._retrying is not None:
            self._retrying.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._generations.close()

    def look(self) -> None:
        """See how generations stand, and load anew what workers found to be changed."""
        self._generations.look()
        for lane in self._models:
            if lane.is_stale:
                lane.is_stale = False
                log.warning("the files of %s are not those that are served", lane.title)
                self._spawn(self._reload_quietly(lane.model.name))
        is_refused = any(worker.refused for worker in self._models.workers)
        if is_refused and self._retrying is None:
            self._retrying = asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    async def load(self, name: str) -> list[str]:
        """Load what is there of a model, where it is not served as it is there.

        Returns:
            The versions that are served now.

        Raises:
            ModelNotFound: There is no such model, neither in the folder nor in the configuration.
            IskanderError: A version does not load; says why. What was served still is.
        """
        if any(each == name for each, _ in self._configured):
            await self._reload(name)
        else:
            listed = NOTHING
            if self._settings.path:
                listed = await asyncio.to_thread(
                    list_model, self._root, name, self._settings.marker
                )
            if not listed.versions:
                self._models.find(name, None)  # Says what is there, where it is not.
                raise ModelNotFound(
                    f"there is no model `{name}` in the folder any more", model=name
                )
            await self._change(name, listed, is_asked=True)
        return [lane.model.version for lane in self._models if lane.model.name == name]

    def unload(self, name: str, version: str | None = None) -> list[str]:
        """Serve a model, or one version of it, no longer; what was accepted is still answered.

        Returns:
            The versions that are let go.

        Raises:
            ModelNotFound: It is not served.
            Unsupported: It is not for calls to say what is served.
        """
        if not self._settings.path or any(each == name for each, _ in self._configured):
            self._models.find(name, version)
            raise Unsupported(f"model `{name[:100]}` stays loaded; {NOT_FOLDERS}")
        if not self.is_explicit:
            raise Unsupported(
                f"model `{name[:100]}` is served while it is in the folder: repository.control is "
                "`watched`"
            )
        there = [
            lane.model.version
            for lane in (*self._models, *self._models.coming)
            if lane.model.name == name and version in (None, lane.model.version)
        ]
        there = list(dict.fromkeys(there))
        failed = [
            which
            for which in self._models.failures
            if which[0] == name and version in (None, which[1])
        ]
        if not there and not failed:
            raise ModelNotFound(f"model `{name[:100]}` is not loaded", model=name[:100])
        for which in failed:
            del self._models.failures[which]
        for each in there:
            self._generations.retire(name, each)
            self._tried.get(name, {}).pop(each, None)
        return there

    def _retry(self) -> None:
        self._retrying = None
        self._loading.ask_again()
        self.look()

    def _fingerprint_of(self, lane: Lane) -> str:
        name, version = lane.model.name, lane.model.version
        try:
            configured = self._configured.get((name, version))
            if configured is not None:
                return model_spec(lane.model.key, configured, self._spec_of_loading).fingerprint
            settings = self._model_files.get(name) or read_settings(self._root, name, self._config)
            stamp = stamp_of(self._root / name / version, self._settings.marker)
            return self._spec(settings, name, version, stamp).fingerprint
        except IskanderError:
            return ""

    def _on_model(self, name: str, listed: Listed) -> None:
        self._spawn(self._quietly(name, listed))

    async def _start(self, name: str, listed: Listed) -> None:
        try:
            await self._quietly(name, listed, is_required=True)
        finally:
            self._models.pending -= 1
            self._on_change()

    async def _quietly(self, name: str, listed: Listed, *, is_required: bool = False) -> None:
        with contextlib.suppress(IskanderError):  # It is kept among the failures.
            await self._change(name, listed, is_required=is_required)

    async def _reload_quietly(self, name: str) -> None:
        with contextlib.suppress(IskanderError):
            if any(each == name for each, _ in self._configured):
                await self._reload(name)
            else:
                marker = self._settings.marker
                listed = await asyncio.to_thread(list_model, self._root, name, marker)
                await self._change(name, listed)

    async def _reload(self, name: str) -> None:
        """Load the versions of the configuration whose files have changed."""
        begun = []
        async with self._lock(name):
            for which, model in self._configured.items():
                if which[0] == name:
                    try:
                        spec = model_spec(0, model, self._spec_of_loading)
                    except IskanderError as error:
                        self._fail(which, error, is_required=False)
                        raise
                    lane = self._served(*which)
                    if lane is None or lane.model.fingerprint != spec.fingerprint:
                        quorum = quorum_of(self._config, model)
                        begun.append(
                            self._generations.begin(spec, model.lane, quorum, is_required=False)
                        )
                    else:
                        self._models.failures.pop(which, None)
            await _outcomes(begun)

    async def _change(
        self, name: str, listed: Listed, *, is_asked: bool = False, is_required: bool = False
    ) -> None:
        """Bring what is served of a model to what is listed.

        Args:
            name: Of the model.
            listed: What is there of it.
            is_asked: Somebody wants to know what comes of it: what failed is tried again.
            is_required: The server is not ready without it.
        """
        async with self._lock(name):
            if any(each == name for each, _ in self._configured):
                log.error("model `%s` of the repository is one of the configuration too", name)
                return
            try:
                settings = await asyncio.to_thread(read_settings, self._root, name, self._config)
                routing = routing_of(settings)
                complaint = complaint_about(routing)
                if complaint:
                    raise ConfigError(f"{SETTINGS}: {complaint}")
            except IskanderError as error:
                if listed.versions:
                    self._fail((name, SETTINGS), error, is_required=is_required)
                    raise
                settings, routing = ModelFile(), Routing()
            self._models.failures.pop((name, SETTINGS), None)
            self._model_files[name] = settings
            policy = self._settings.versions if settings.versions is None else settings.versions
            versions = wanted(listed.versions, policy, routing)
            for which in [which for which in self._models.failures if which[0] == name]:
                if which[1] not in versions:
                    del self._models.failures[which]
            begun: list[Generation] = []
            error_at_once: IskanderError | None = None
            for version in versions:
                try:
                    begun += self._begin(
                        settings,
                        (name, version),
                        listed.versions[version],
                        is_asked=is_asked,
                        is_required=is_required,
                    )
                except IskanderError as error:
                    self._fail((name, version), error, is_required=is_required)
                    error_at_once = error
            if is_required and not versions:
                error_at_once = ModelNotFound(f"there is nothing to load of model `{name}`")
                self._fail((name, "?"), error_at_once, is_required=True)
            try:
                await _outcomes(begun)
            finally:
                self._move(name, versions, routing)
            if error_at_once is not None:
                raise error_at_once

    def _begin(
        self,
        settings: ModelFile,
        which: tuple[str, str],
        stamp: str,
        *,
        is_asked: bool,
        is_required: bool,
    ) -> list[Generation]:
        """Begin to load a version, where it is not served or was not tried as it is now."""
        spec = self._spec(settings, *which, stamp)
        tried = self._tried.setdefault(which[0], {})
        lane = self._served(*which)
        if lane is not None and lane.model.fingerprint == spec.fingerprint:
            self._models.failures.pop(which, None)
            tried[which[1]] = spec.fingerprint
            return []
        if tried.get(which[1]) == spec.fingerprint and not is_asked:
            return []
        tried[which[1]] = spec.fingerprint
        quorum = quorum_of(self._config, settings)
        begin = self._generations.begin
        return [begin(spec, settings.lane, quorum, is_required=is_required)]

    def _move(self, name: str, versions: list[str], routing: Routing) -> None:
        served = [lane.model.version for lane in self._models if lane.model.name == name]
        what = move(served, versions, routing)
        if what.is_routed:
            self._models.route(name, routing if versions and routing != Routing() else None)
        for version in what.retire:
            self._generations.retire(name, version)
            self._tried.get(name, {}).pop(version, None)
        if not versions:
            for kept in (self._tried, self._model_files):
                kept.pop(name, None)

    def _spec(self, settings: ModelFile, name: str, version: str, stamp: str) -> ModelSpec:
        folder = self._root / name / version
        model = ModelConfig(
            **{
                key: getattr(settings, key)
                for key in ModelConfig.__struct_fields__
                if key not in ("name", "path", "version")
            },
            name=name,
            path=str(folder),
            version=version,
        )
        spec = model_spec(0, model, self._spec_of_loading)
        options = msgspec.json.encode(model).decode()
        return msgspec.structs.replace(spec, fingerprint=f"{stamp} {options}")

    def _fail(self, which: tuple[str, str], error: IskanderError, *, is_required: bool) -> None:
        log.error("%s is not served: %s", "/".join(which), error.message)
        self._models.counts["failed"] += 1
        self._models.failures[which] = Failure(error.message, is_required)

    def _served(self, name: str, version: str) -> Lane | None:
        return next(
            (
                lane
                for lane in self._models
                if (lane.model.name, lane.model.version) == (name, version)
            ),
            None,
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _outcomes(begun: Iterable[Generation]) -> None:
    """Wait until each is served or is known not to be.

    Raises:
        IskanderError: Of the first that is not.
    """
    outcomes = await asyncio.gather(*(each.outcome for each in begun), return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    errors.sort(key=lambda error: isinstance(error, ModelMoved))
    if errors:
        raise errors[0]
