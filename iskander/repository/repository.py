"""The models of a folder: what is there against what is served; the difference comes or goes.

Those of the configuration are loaded anew here, too, when their files have changed.

`wanted_versions` decides which versions to serve, `generations` replaces them. Each gateway process
does this by itself; processes that watch the same folder reach the same state independently.

Runs on: gateway loop; folders are read on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from iskander.config.repository import ModelFile
from iskander.config.schema import Config
from iskander.errors import ConfigError, IskanderError, ModelMoved, ModelNotFound, Unsupported
from iskander.measurement.recent_values import RecentValues
from iskander.repository.changes import NOTHING, follow
from iskander.repository.generations import Generation, Generations
from iskander.repository.load_intents import LoadIntent
from iskander.repository.model_reader import FoundModel, ModelReader, Which
from iskander.repository.models import Failure, Models
from iskander.repository.routing import Routing
from iskander.repository.scan import SETTINGS, ScannedModel, list_models
from iskander.repository.specs import quorum_of
from iskander.repository.startup_barrier import StartupBarrier
from iskander.repository.version_policy import (
    complaint_about_targets,
    move,
    names_at_start,
    policy_of,
    wanted_versions,
)
from iskander.scheduling.lane import Lane
from iskander.supervision.model_loader import ModelLoader

log = logging.getLogger("iskander.repository")

RETRY_S = 5.0
"""How long a worker goes on without a model that others could serve, before it is asked again."""
NOT_FOLDERS = "its models come from the server's configuration"
UNKNOWN = "?"
"""Stands for the versions of a model that nobody can name."""


class Repository:
    """What is to be served.

    Args:
        config: Of the server.
        models: What is served.
        loading: Gives workers their models.
        refuse_queued: Answers what waits in a lane with an error.
        recent: Where the last latencies are kept.
        on_change: Called when what is served, or more of what is to be, is known.

    Attributes:
        beginning: Which models the start has yet to begin with.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        loading: ModelLoader,
        refuse_queued: Callable[[Lane, IskanderError], None],
        *,
        recent: RecentValues,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._settings = config.repository
        self._reader = ModelReader(config)
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
        self.beginning = StartupBarrier()
        self._tried: dict[str, dict[str, str]] = {}
        self._model_files: dict[str, ModelFile] = {}
        # Of the models of which something is being changed; one that nobody holds is forgotten.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading: set[str] = set()
        self._retrying: asyncio.TimerHandle | None = None
        models.freshness.fingerprint_of = self._fingerprint_of
        models.freshness.on_known = on_change

    @property
    def is_explicit(self) -> bool:
        """Whether models come and go by calls."""
        return self._settings.control == "explicit"

    def is_for_calls(self, name: str) -> bool:
        """Whether a model comes and goes by calls, and not by the configuration or the folder."""
        return self.is_explicit and not self._reader.is_configured(name)

    async def start(self, wishes: Iterable[LoadIntent] = ()) -> None:
        """Begin to load what is to be served from the start, and to watch the folder.

        Args:
            wishes: What calls wanted of other processes of this gateway.

        Raises:
            ConfigError: The folder cannot be read.
        """
        if not self._settings.path:
            return self.beginning.listed()
        settings = self._settings
        listed = await asyncio.to_thread(list_models, Path(settings.path), settings.marker)
        but = {wish.model: wish.but for wish in wishes if self.is_explicit}
        for name in sorted(names_at_start(settings, listed, wishes)):
            found = listed.get(name, NOTHING)
            if name in but:
                found = found.without(but[name])
                if not found.versions:
                    continue  # Calls have given up all that is there of it.
            self.beginning.expect(name)
            self._models.pending += 1
            # Whether a folder that cannot be read is a model's, only who asks for it knows.
            is_asked = self.is_explicit and name in settings.load
            is_required = is_asked or not found.error
            self._spawn(self._start(name, found, is_required=is_required))
        self._models.is_looking = False
        self.beginning.listed()
        if not self.is_explicit:
            self._spawn(follow(self._settings, listed, self._on_model))

    def close(self) -> None:
        """Follow nothing any more."""
        if self._retrying is not None:
            self._retrying.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._generations.close()
        self._models.freshness.close()

    def look(self) -> None:
        """See how generations stand, and load anew what workers found to be changed."""
        self._generations.look()
        for lane in self._models:
            if lane.is_stale:
                lane.is_stale = False
                name = lane.model.name
                if name not in self._reloading:
                    self._reloading.add(name)
                    self._spawn(self._reload_quietly(name))
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
        if self._reader.is_configured(name):
            await self._reload(name, is_asked=True)
        else:
            listed = NOTHING
            if self._settings.path:
                listed = await asyncio.to_thread(self._reader.listed, name)
            if not listed.versions and not listed.error:
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
        if not self._settings.path or self._reader.is_configured(name):
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
        """On a thread."""
        which = lane.model.name, lane.model.version
        return self._reader.fingerprint_of(which, lane.model.key, self._model_files.get(which[0]))

    def _on_model(self, name: str, listed: ScannedModel) -> None:
        self._spawn(self._quietly(name, listed))

    async def _start(self, name: str, listed: ScannedModel, *, is_required: bool) -> None:
        try:
            await self._quietly(name, listed, is_required=is_required)
        finally:
            self.beginning.begun(name)
            self._models.pending -= 1
            self._on_change()

    async def _quietly(self, name: str, listed: ScannedModel, *, is_required: bool = False) -> None:
        with contextlib.suppress(IskanderError):  # It is kept among the failures.
            await self._change(name, listed, is_required=is_required)

    async def _reload_quietly(self, name: str) -> None:
        try:
            with contextlib.suppress(IskanderError):
                if self._reader.is_configured(name):
                    await self._reload(name)
                else:
                    await self._change(name, await asyncio.to_thread(self._reader.listed, name))
        finally:
            self._reloading.discard(name)

    async def _reload(self, name: str, *, is_asked: bool = False) -> None:
        """Load the versions of the configuration whose files have changed."""
        async with self._lock(name):
            found = await asyncio.to_thread(self._reader.of_configuration, name)
            begun, error_at_once = self._begin_all(name, found, is_asked=is_asked)
            await _outcomes(begun)
            if error_at_once is not None:
                raise error_at_once

    async def _change(
        self, name: str, listed: ScannedModel, *, is_asked: bool = False, is_required: bool = False
    ) -> None:
        """Bring what is served of a model to what is listed.

        Args:
            name: Of the model.
            listed: What is there of it.
            is_asked: Somebody wants to know what comes of it: what failed is tried again.
            is_required: The server is not ready without it.
        """
        async with self._lock(name):
            if self._reader.is_configured(name):
                log.error("model `%s` of the repository is one of the configuration too", name)
                return
            if listed.error:
                raise self._fail(
                    (name, UNKNOWN), ConfigError(listed.error), is_required=is_required
                )
            try:
                settings, routing = await asyncio.to_thread(self._reader.settings, name)
            except IskanderError as error:
                if listed.versions:
                    raise self._fail((name, SETTINGS), error, is_required=is_required) from None
                settings, routing = ModelFile(), Routing()
            self._model_files[name] = settings
            versions = wanted_versions(
                listed.versions, policy_of(self._settings, settings), routing
            )
            for which in [which for which in self._models.failures if which[0] == name]:
                if which[1] not in versions:
                    del self._models.failures[which]
            found = await asyncio.to_thread(
                self._reader.of_folder,
                name,
                settings,
                {version: listed.versions[version] for version in versions},
            )
            begun, error_at_once = self._begin_all(
                name, found, is_asked=is_asked, is_required=is_required
            )
            self.beginning.begun(name)
            if is_required and not versions:
                error_at_once = ModelNotFound(f"there is nothing to load of model `{name}`")
                self._fail((name, UNKNOWN), error_at_once, is_required=is_required)
            try:
                await _outcomes(begun)
            finally:
                self._move(name, versions, routing)
            if error_at_once is not None:
                raise error_at_once

    def _begin_all(
        self,
        name: str,
        found: Mapping[str, FoundModel | IskanderError],
        *,
        is_asked: bool,
        is_required: bool = False,
    ) -> tuple[list[Generation], IskanderError | None]:
        """Begin to load versions; also the last error of those that cannot be begun."""
        begun: list[Generation] = []
        error_at_once: IskanderError | None = None
        for version, each in found.items():
            try:
                if isinstance(each, IskanderError):
                    raise each
                if self._is_to_try((name, version), each.spec.fingerprint, is_asked=is_asked):
                    quorum = quorum_of(self._config, each.settings)
                    begin = self._generations.begin
                    begun.append(
                        begin(each.spec, each.settings.lane, quorum, is_required=is_required)
                    )
            except IskanderError as error:
                error_at_once = self._fail((name, version), error, is_required=is_required)
        return begun, error_at_once

    def _is_to_try(self, which: Which, fingerprint: str, *, is_asked: bool) -> bool:
        """Whether a version is neither served nor was tried as it is now."""
        tried = self._tried.setdefault(which[0], {})
        lane = self._served(*which)
        if lane is not None and lane.model.fingerprint == fingerprint:
            self._models.failures.pop(which, None)
            tried[which[1]] = fingerprint
            return False
        if tried.get(which[1]) == fingerprint and not is_asked:
            return False
        tried[which[1]] = fingerprint
        if lane is not None:
            log.warning("the files of %s are not those that are served", lane.title)
        return True

    def _move(self, name: str, versions: list[str], routing: Routing) -> None:
        served = [lane.model.version for lane in self._models if lane.model.name == name]
        what = move(served, versions, routing)
        if what.is_routed:
            self._models.route(name, routing if versions and routing != Routing() else None)
        elif complaint := complaint_about_targets(routing, versions):
            error = ConfigError(f"{complaint}; all lead on as before")
            self._fail((name, SETTINGS), error, is_required=False)
        for version in what.retire:
            self._generations.retire(name, version)
            self._tried.get(name, {}).pop(version, None)
        if not versions:
            for kept in (self._tried, self._model_files):
                kept.pop(name, None)

    def _fail(self, which: Which, error: IskanderError, *, is_required: bool) -> IskanderError:
        log.error("%s is not served: %s", "/".join(which), error.message)
        self._models.counts["failed"] += 1
        self._models.failures[which] = Failure(error.message, is_required)
        return error

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
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change was not followed to its end", exc_info=task.exception())


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
