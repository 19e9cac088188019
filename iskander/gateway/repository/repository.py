"""Reconciles served models with the repository folder: loads, reloads and retires versions.

Also reloads models of the configuration after a change of their files. `wanted_versions` decides
which versions to serve, `generations` replaces them. Each gateway process does this independently.

Runs on: gateway loop; folders are read on threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from iskander.config.models import ModelConfig
from iskander.config.repository import ModelFile
from iskander.config.schema import Config
from iskander.errors import ConfigError, IskanderError, ModelMoved, ModelNotFound, Unsupported
from iskander.foundation.logs import models as log
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.repository.changes import follow
from iskander.gateway.repository.generations import Generation, Generations
from iskander.gateway.repository.load_intents import LoadIntent
from iskander.gateway.repository.model_reader import Found, ModelReader, ModelVersion
from iskander.gateway.repository.models import (
    NAME_CHARACTERS_MAX,
    Failure,
    Models,
    configured_shares,
)
from iskander.gateway.repository.routing import Routing
from iskander.gateway.repository.scan import ABSENT, SETTINGS, ScannedModel, list_models
from iskander.gateway.repository.specs import quorum_of
from iskander.gateway.repository.version_policy import (
    names_at_start,
    plan_transition,
    policy_of,
    targets_error,
    wanted_versions,
)
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.loading.model_loader import ModelLoader

RETRY_S = 5.0
"""Delay before a worker retries a model that it could not load and other workers could."""
UNKNOWN = "?"
"""Version key of a failure that concerns a whole model."""


@dataclass(eq=False, repr=False)
class Repository:
    """The models to serve; parameters as `Generations`."""

    config: Config
    models: Models
    loading: ModelLoader
    reject_queued: Callable[[Lane, IskanderError], None]
    recent: RecentValues
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        config, models, on_change = self.config, self.models, self.on_change
        self._settings = config.repository
        self._is_explicit = config.repository.control == "explicit"
        self._reader = ModelReader(config)
        self._generations = Generations(
            config, models, self.loading, self.reject_queued, self.recent, on_change
        )
        self.startup = StartupBarrier()
        self._tried: dict[str, dict[str, str]] = {}
        self._model_files: dict[str, ModelFile] = {}
        # A lock for each model that is changing; an unused lock is garbage-collected.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading: set[str] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        models.freshness.fingerprint_of = self._fingerprint_of
        models.freshness.on_checked = on_change

    def configure(self, config: Config) -> None:
        """Apply lanes and shadow shares of the configured models, also while they are loading.

        Later loads get the new `limits.rows`, retired versions the new `server.drain_s`.
        """
        self.config = self._generations.config = config
        self._reader.configure(config)
        lanes = {(each.name, str(each.version)): each.lane for each in config.models}
        for lane in self.models.by_key.values():
            key = (lane.model.name, lane.model.version)
            if key in lanes:
                lane.configure(lanes[key])
        self.models.set_shadow_shares(configured_shares(config))

    def settings_of(self, name: str, version: str) -> ModelConfig | None:
        """Return the settings of a model version, of the configuration or its `model.toml`."""
        file = self._model_files.get(name)
        if file is not None:
            return self._reader.model_of(name, version, file)
        return self._reader.configured(name, version)

    def is_controlled_by_calls(self, name: str) -> bool:
        """Whether API calls load and unload this model."""
        return self._is_explicit and not self._reader.is_configured(name)

    async def start(self, intents: Iterable[LoadIntent] = ()) -> None:
        """Start the initial loads, as changed by the intents of earlier calls; watch the folder."""
        if not self._settings.path:
            return self.startup.all_expected()
        settings = self._settings
        listed = await asyncio.to_thread(list_models, Path(settings.path), settings.marker)
        unloaded = {intent.model: intent.excluded for intent in intents if self._is_explicit}
        for name in sorted(names_at_start(settings, listed, intents)):
            scanned = listed.get(name, ABSENT)
            if name in unloaded:
                scanned = scanned._replace(unloaded=unloaded[name])
                if scanned.versions.keys() <= set(scanned.unloaded):
                    continue  # Calls have unloaded all its versions.
            self.startup.expect(name)
            self.models.pending += 1
            # An unreadable folder may not be a model, unless the configuration names it.
            is_required = not scanned.error or (self._is_explicit and name in settings.load)
            self._spawn(self._start(name, scanned, is_required=is_required))
        self.models.is_scanning = False
        self.startup.all_expected()
        if not self._is_explicit:
            spawn, reconcile = self._spawn, self._reconcile
            spawn(follow(settings, listed, lambda name, now: spawn(reconcile(name, now))))

    def close(self) -> None:
        """Cancel changes and stop watching."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._generations.close()
        self.models.freshness.close()

    def update(self) -> None:
        """Update the generations, reload stale models, and schedule retries of failed loads."""
        self._generations.update()
        for lane in self.models:
            if lane.is_stale:
                lane.is_stale = False
                name = lane.model.name
                if name not in self._reloading:
                    self._reloading.add(name)
                    self._spawn(self._reload_stale(name))
        if any(worker.load_errors for worker in self.models.workers) and self._retry_timer is None:
            self._retry_timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    async def load(self, name: str) -> list[str]:
        """Load a model's current files if they differ from those served; return its versions.

        Raises IskanderError for an unknown model or a failed load; served versions are unaffected.
        """
        if self._reader.is_configured(name):
            await self._reload(name, retries_failed=True)
        else:
            scanned = ABSENT
            if self._settings.path:
                scanned = await asyncio.to_thread(self._reader.listed, name)
            if not scanned.versions and not scanned.error:
                self.models.find(name, None)  # Raises an error that lists the models.
                raise ModelNotFound(f"model `{name}` is no longer in the folder", model=name)
            await self._reconcile(name, scanned, retries_failed=True)
        return list(self.models.versions_of(name))

    def unload(self, name: str, version: str | None = None) -> list[str]:
        """Stop serving a model or one version; return the versions. Accepted requests complete.

        Raises ModelNotFound if it is not served, Unsupported if calls do not control it.
        """
        short = name[:NAME_CHARACTERS_MAX]
        if not self._settings.path or self._reader.is_configured(name):
            self.models.find(name, version)
            raise Unsupported(f"model `{short}` cannot be unloaded: it is in the configuration")
        if not self._is_explicit:
            raise Unsupported(
                f"model `{short}` cannot be unloaded by a call: `repository.control` is "
                "`watched`; remove its folder"
            )

        def matches(model_version: ModelVersion) -> bool:
            return model_version[0] == name and version in (None, model_version[1])

        lanes = [lane.model for lane in (*self.models, *self.models.loading_lanes)]
        unloaded = list(dict.fromkeys(m.version for m in lanes if matches((m.name, m.version))))
        failed = [model_version for model_version in self.models.failures if matches(model_version)]
        if not unloaded and not failed:
            raise ModelNotFound(f"model `{short}` is not loaded", model=short)
        for model_version in failed:
            del self.models.failures[model_version]
        self._retire(name, unloaded)
        return unloaded

    def _retire(self, name: str, versions: list[str]) -> None:
        for version in versions:
            self._generations.retire(name, version)
            self._tried.get(name, {}).pop(version, None)

    def _retry(self) -> None:
        self._retry_timer = None
        self.loading.retry_failed()
        self.update()

    def _fingerprint_of(self, lane: Lane) -> str:
        """Runs on: a thread."""
        model_version = lane.model.name, lane.model.version
        return self._reader.fingerprint_of(
            model_version, lane.model.key, self._model_files.get(model_version[0])
        )

    async def _start(self, name: str, scanned: ScannedModel, *, is_required: bool) -> None:
        try:
            await self._reconcile(name, scanned, is_required=is_required)
        finally:
            self.startup.release(name)
            self.models.pending -= 1
            self.on_change()

    async def _reload_stale(self, name: str) -> None:
        try:
            if self._reader.is_configured(name):
                await self._reload(name)
            else:
                scanned = await asyncio.to_thread(self._reader.listed, name)
                await self._reconcile(name, scanned, is_stale=True)
        finally:
            self._reloading.discard(name)

    async def _reload(self, name: str, *, retries_failed: bool = False) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            found = await asyncio.to_thread(self._reader.of_configuration, name)
            begun, error = self._begin_all(name, found, retries_failed=retries_failed)
            await _wait_for_loads(begun)
            if error is not None:
                raise error

    async def _reconcile(
        self,
        name: str,
        scanned: ScannedModel,
        *,
        retries_failed: bool = False,
        is_required: bool = False,
        is_stale: bool = False,
    ) -> None:
        """Load and retire versions of a model to match a scan.

        With `is_stale`, it loads no versions that only a call may load.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._reader.is_configured(name):
                log.model_ignored(model=name)
                return
            if is_stale and self._is_explicit:
                scanned = self._as_loaded(name, scanned)
            if scanned.error:
                error = ConfigError(scanned.error)
                raise self._fail((name, UNKNOWN), error, is_required=is_required)
            try:
                settings, routing = await asyncio.to_thread(self._reader.settings, name)
            except IskanderError as error:
                if scanned.versions:
                    raise self._fail((name, SETTINGS), error, is_required=is_required) from None
                settings, routing = ModelFile(), Routing()
            self._model_files[name] = settings
            policy = policy_of(self._settings, settings)
            wanted = wanted_versions(scanned.versions, policy, routing)
            versions = [version for version in wanted if version not in scanned.unloaded]
            for model_version in list(self.models.failures):
                if model_version[0] == name and model_version[1] not in versions:
                    del self.models.failures[model_version]
            stamps = {version: scanned.versions[version] for version in versions}
            found = await asyncio.to_thread(self._reader.of_folder, name, settings, stamps)
            begun, last_error = self._begin_all(
                name, found, retries_failed=retries_failed, is_required=is_required
            )
            self.startup.release(name)
            if is_required and not wanted:
                last_error = ModelNotFound(f"model `{name}` has no versions to load")
                self._fail((name, UNKNOWN), last_error, is_required=is_required)
            try:
                await _wait_for_loads(begun)
            finally:
                self._retire_and_route(name, versions, routing, scanned.unloaded)
            if last_error is not None:
                raise last_error

    def _as_loaded(self, name: str, scanned: ScannedModel) -> ScannedModel:
        """Reduce a scan to the versions that calls have loaded, or tried to load."""
        lanes = (*self.models, *self.models.loading_lanes)
        loaded = {lane.model.version for lane in lanes if lane.model.name == name}
        loaded |= {version for each, version in self.models.failures if each == name}
        if not loaded:
            return ABSENT
        versions = {each: stamp for each, stamp in scanned.versions.items() if each in loaded}
        unloaded = self.models.routings.get(name, Routing()).targets() - loaded
        return scanned._replace(versions=versions, unloaded=unloaded)

    def _begin_all(
        self, name: str, found: Found, *, retries_failed: bool, is_required: bool = False
    ) -> tuple[list[Generation], IskanderError | None]:
        """Start loads; return them, and the last error of those that did not start."""
        begun: list[Generation] = []
        last_error: IskanderError | None = None
        for version, each in found.items():
            model_version = (name, version)
            try:
                if isinstance(each, IskanderError):
                    raise each
                spec, settings = each.spec, each.settings
                if self._needs_load(model_version, spec.fingerprint, retries_failed=retries_failed):
                    quorum, begin = quorum_of(self.config, settings), self._generations.begin
                    begun.append(begin(spec, settings.lane, quorum, is_required=is_required))
            except IskanderError as error:
                last_error = self._fail(model_version, error, is_required=is_required)
        return begun, last_error

    def _needs_load(
        self, model_version: ModelVersion, fingerprint: str, *, retries_failed: bool
    ) -> bool:
        """Whether these files are not served and, unless retried, have not failed."""
        name, version = model_version
        tried = self._tried.setdefault(name, {})
        lane = self.models.versions_of(name).get(version)
        was_tried = tried.get(version) == fingerprint
        tried[version] = fingerprint
        if lane is not None and lane.model.fingerprint == fingerprint:
            self.models.failures.pop(model_version, None)
            return False
        if was_tried and not retries_failed:
            return False
        if lane is not None:
            log.model_files_changed(model=lane.title)
        return True

    def _retire_and_route(
        self, name: str, versions: list[str], routing: Routing, unloaded: Collection[str]
    ) -> None:
        served = self.models.versions_of(name)
        retired, is_routed = plan_transition(served, versions, routing, unloaded)
        if is_routed:
            self.models.route(name, routing if versions and routing != Routing() else None)
        elif problem := targets_error(routing, {*versions, *unloaded}):
            error = ConfigError(f"{problem}; the previous routing stays in effect")
            self._fail((name, SETTINGS), error, is_required=False)
        self._retire(name, retired)
        if not versions:
            self._tried.pop(name, None)
            self._model_files.pop(name, None)

    def _fail(
        self, model_version: ModelVersion, error: IskanderError, *, is_required: bool
    ) -> IskanderError:
        log.model_not_served(model="/".join(model_version), reason=error.message)
        self.models.counts["failed"] += 1
        self.models.failures[model_version] = Failure(error.message, is_required)
        return error

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, IskanderError):  # Others are in `failures`.
            log.repository_change_failed(error=error)


class StartupBarrier:
    """Delays peers' changes of a model until the startup has chosen the versions of the model.

    The startup would overwrite an earlier change.
    """

    def __init__(self) -> None:
        self._is_listed = asyncio.Event()
        self._expected: dict[str, asyncio.Event] = {}

    def expect(self, name: str) -> None:
        self._expected[name] = asyncio.Event()

    def all_expected(self) -> None:
        """End the registration: other models need not wait."""
        self._is_listed.set()

    def release(self, name: str) -> None:
        """Let changes of a model proceed: the startup has chosen its versions."""
        if name in self._expected:
            self._expected.pop(name).set()

    async def wait_for(self, name: str) -> None:
        """Wait until changes of a model may proceed."""
        await self._is_listed.wait()
        if name in self._expected:
            await self._expected[name].wait()


async def _wait_for_loads(begun: Iterable[Generation]) -> None:
    """Wait for the loads; raise their first error, a `ModelMoved` only if there is no other."""
    outcomes = await asyncio.gather(*(each.outcome for each in begun), return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, ModelMoved))
