"""Registry of served models: lookup by name and version, readiness, descriptions.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from iskander.config.schema import Config
from iskander.contract.inputs import entries_of, entry_keys
from iskander.contract.tensors import Contract
from iskander.errors import ModelNotFound, NotReady
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.repository.routing import Routing, shadow_route
from iskander.gateway.repository.specs import loading_spec, model_spec, quorum_of
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.readiness import reason_of
from iskander.gateway.supervision.worker import Worker

STOPPING: Final = "the server is stopping"
RETRY_MS: Final = 500
NAME_CHARACTERS_MAX: Final = 100
"""Characters of a requested name or version that an error repeats."""


class Failure(NamedTuple):
    """A failed load of a model version; the server is not ready after a required one."""

    reason: str
    is_required: bool


class Models:
    """All model versions that are served, loading or draining.

    Attributes:
        by_key: Every lane by its number in control messages; a number is never reused.
        revision: Incremented when the result of `find` may change.
        on_revision: Called after each increment.
        workers: One for each slot of the placement plan; set by the supervisor.
        is_stopping: The server shuts down, so nothing is ready.
        hides_models: Errors do not list the models.
        is_scanning: The first scan of the repository is incomplete.
        pending: Models whose load at startup is incomplete.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, Lane] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.routings: dict[str, Routing] = {}
        self.revision = 0
        self.on_revision: Callable[[], None] = _nothing
        self.counts: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.is_stopping = self.hides_models = self.is_scanning = False
        self.pending = 0
        self.freshness = FileFreshness()
        self._served: dict[str, dict[str, Lane]] = {}
        self._highest: dict[str, str] = {}
        self._shadow_shares: dict[tuple[str, str], float] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter([lane for versions in self._served.values() for lane in versions.values()])

    def versions_of(self, name: str) -> Mapping[str, Lane]:
        return self._served.get(name, {})

    def serve(self, lane: Lane) -> Lane | None:
        """Route calls to a lane; return the lane that it replaces."""
        name, version = _model_version(lane)
        versions = self._served.setdefault(name, {})
        older = versions.get(version)
        if older is not None:
            older.is_served = False
            lane.inherit(older)
        lane.is_served = True
        versions[version] = lane
        self._on_version_change(name)
        return older

    def withdraw(self, lane: Lane) -> None:
        """Stop routing calls to a lane."""
        name, version = _model_version(lane)
        lane.is_served = False
        if self._served.get(name, {}).get(version) is lane:
            del self._served[name][version]
            self._on_version_change(name)

    def route(self, name: str, routing: Routing | None) -> None:
        """Set or clear the routing of a model."""
        if self.routings.get(name) != routing:
            if routing is None:
                del self.routings[name]
            else:
                self.routings[name] = routing
            self._revise(name)

    def shadow_shares_of(self, name: str) -> dict[str, float]:
        """Return the share of each shadow version of a model."""
        routing = self.routings.get(name)
        if routing is not None and routing.shadows:
            return routing.shadow_shares()
        shares = self._shadow_shares
        return {version: share for (each, version), share in shares.items() if each == name}

    def set_shadow_shares(self, shares: dict[tuple[str, str], float]) -> None:
        """Set the shares of the shadow versions among the models of the configuration."""
        if shares != self._shadow_shares:
            changed = {name for name, _ in (*shares, *self._shadow_shares)}
            self._shadow_shares = shares
            for name in changed:
                self._revise(name)

    @property
    def is_ready(self) -> bool:
        """Whether every required model has its quorum, and the server is not stopping."""
        return not self.reasons()

    @property
    def is_settled(self) -> bool:
        """Whether the startup is complete: every required model is ready or has failed."""
        is_known = not self.is_scanning and not self.pending
        return is_known and all(lane.is_ready for lane in self._required)

    def has_all_runtimes(self, lane: Lane) -> bool:
        """Whether the runtimes of a lane are those of all workers that can load the model.

        Workers with equal devices and numbers of cores have one runtime.
        """
        pool, key = lane.pool_workers(self.workers), lane.model.key
        known = {(each.device, each.plan.cores) for each in pool if key in each.models}
        return all(
            (each.device, each.plan.cores) in known
            or each.is_looping
            or key in each.load_errors
            or each.state is State.OUT_OF_SERVICE
            for each in pool
        )

    def is_lane_ready(self, lane: Lane) -> bool:
        return lane.is_ready

    def reasons(self) -> list[str]:
        """Return why the server is not ready, one sentence each; empty if it is."""
        if self.is_stopping:
            return [STOPPING]
        # A model in quarantine fails its own calls; the server stays ready for the others.
        served = (lane for lane in self._required if lane.quarantine is None)
        lanes = [*served, *(lane for lane in self.loading_lanes if lane.is_required)]
        found = [(lane.title, self._reason(lane)) for lane in lanes]
        found += [("/".join(each), f.reason) for each, f in self.failures.items() if f.is_required]
        reasons = [f"model `{title}`: {reason}" for title, reason in found if reason]
        if not reasons and (self.is_scanning or self.pending):
            reasons.append("the repository's models are being loaded")
        return reasons

    @property
    def _required(self) -> Iterator[Lane]:
        """The served lanes, except of shadow versions, whose failures concern no caller."""
        return (lane for lane in self if not self._is_shadow(*_model_version(lane)))

    @property
    def loading_lanes(self) -> list[Lane]:
        """Lanes that workers are loading and that are not served yet."""
        return [lane for lane in self.by_key.values() if lane.is_pending]

    def find(self, name: str, version: str | None, key: str = "") -> Lane:
        """Return the lane for a call by version, alias, default, split, or highest version.

        Equal keys get the same version of a split. Raises ModelNotFound, which lists the available
        models or versions, or NotReady if it is loading or its load failed.
        """
        served = self._served.get(name)
        if served is None:
            raise self._not_found(name, version)
        target = version
        if target is None or target not in served:
            if routing := self.routings.get(name):
                target = routing.choose(version, key, served)
            if target is None:
                target = self._highest.get(name)
        lane = None if target is None else served.get(target)
        if lane is None:
            raise self._not_found(name, target)
        return lane

    def find_loaded(self, name: str, version: str | None, key: str = "") -> Lane:
        """Return the lane for a call, as `find`; raise NotReady until a worker has loaded it."""
        lane = self.find(name, version, key)
        if lane.contract is None:
            raise NotReady(f"model `{lane.title}` is not loaded yet", retry_after_ms=RETRY_MS)
        return lane

    def readiness(self) -> dict[str, Any]:
        """Return the readiness of the server and of each model version, for `health`."""
        models: dict[str, dict[str, Any]] = {}
        for lane in self:
            reason = self._reason(lane)
            model = models.setdefault(lane.model.name, {"ready": True, "versions": {}})
            model["versions"][lane.model.version] = not reason
            if reason and not self._is_shadow(*_model_version(lane)):
                model["ready"] = False
                # All versions of a model need the same workers; the first reason is enough.
                model.setdefault("reason", reason)
        for (name, version), failure in self.failures.items():
            model = models.setdefault(name, {"ready": False, "versions": {}})
            model["versions"].setdefault(version, False)
            model["ready"] = model["ready"] and not failure.is_required
            model.setdefault("reason", f"version {version}: {failure.reason}")
        stopping = {"reason": STOPPING} if self.is_stopping else {}
        return {"ready": self.is_ready, **stopping, "models": models}

    def index(self) -> Iterator[ModelStatus]:
        """Every model version that is served, loading or draining, or whose load failed."""
        for lane in self:
            failure = self.failures.get(_model_version(lane))
            reason = self._reason(lane)
            state = "UNAVAILABLE" if reason else "READY"
            if failure is not None:
                reason = reason or f"its changed files are not served: {failure.reason}"
            yield ModelStatus(*_model_version(lane), state, reason, lane)
        others = [
            (_model_version(lane), "LOADING", self._reason(lane)) for lane in self.loading_lanes
        ]
        others += [
            (_model_version(lane), "UNLOADING", "draining: its accepted requests are not finished")
            for lane in self.by_key.values()
            if not lane.is_served and not lane.is_pending
        ]
        others += [(each, "UNAVAILABLE", f.reason) for each, f in self.failures.items()]
        listed = {_model_version(lane) for lane in self}
        for model_version, state, reason in others:
            if model_version not in listed:
                listed.add(model_version)
                yield ModelStatus(*model_version, state, reason, None)

    def describe_versions(self, name: str) -> dict[str, Any]:
        """Return the served versions of a model, lowest first, and its aliases."""
        versions = sorted(self._served.get(name, ()), key=version_order)
        return {"versions": versions, "aliases": self.routings.get(name, Routing()).aliases}

    def stages(self) -> Iterator[tuple[tuple[str], int]]:
        """The number of lanes in each stage."""
        lanes = self.by_key.values()
        yield ("loading",), sum(lane.is_pending for lane in lanes)
        yield ("serving",), sum(lane.is_served for lane in lanes)
        yield ("draining",), sum(lane.is_retired for lane in lanes)

    def describe(self, status: ModelStatus) -> dict[str, Any]:
        """Return an entry of `index`, with the contract of a served model."""
        name, version = status.name, status.version
        entry: dict[str, Any] = {"name": name, "version": version, "ready": False}
        if status.lane is not None:
            entry = describe(status.lane) | {"routes": self._routes_to(name, version)}
        return entry | {"state": status.state.lower(), "reason": status.reason}

    def _reason(self, lane: Lane) -> str:
        reason = reason_of(lane, self.workers)
        if not reason and not lane.is_served:
            return "its workers are loading"
        # Before the placement plan exists there are no workers.
        return reason if reason or lane.is_ready else "its workers have not attached yet"

    def _is_shadow(self, name: str, version: str) -> bool:
        routing = self.routings.get(name)
        if routing is not None and routing.shadows:
            return version in routing.shadow_shares()
        return (name, version) in self._shadow_shares

    def _routes_to(self, name: str, version: str) -> list[str]:
        if name in self.routings:
            return self.routings[name].routes_to(version)
        share = self._shadow_shares.get((name, version))
        return [] if share is None else [shadow_route(share)]

    def _on_version_change(self, name: str) -> None:
        if not self._served[name]:
            del self._served[name]
        self._revise(name)

    def _revise(self, name: str) -> None:
        """Update what `find` returns for a model."""
        self.revision += 1
        shadows = self.shadow_shares_of(name)
        versions = [each for each in self._served.get(name, ()) if each not in shadows]
        if versions:
            self._highest[name] = max(versions, key=version_order)
        else:
            self._highest.pop(name, None)
        self.on_revision()

    def _not_found(self, name: str, version: str | None) -> ModelNotFound | NotReady:
        for lane in self.loading_lanes:
            if lane.model.name == name and version in (None, lane.model.version):
                text = f"model `{lane.title}` is being loaded"
                return NotReady(text, model=name, retry_after_ms=RETRY_MS)
        for (failed, failed_version), failure in self.failures.items():
            if failed == name and version in (None, failed_version):
                text = f"model `{name}/{failed_version}` failed to load: {failure.reason}"
                return NotReady(text, model=name, version=failed_version)
        served = self._served.get(name)
        if served is None:
            name = name[:NAME_CHARACTERS_MAX]
            names = "" if self.hides_models else ", ".join(sorted(self._served)) or "none"
            available = names and f"; available: {names}"
            return ModelNotFound(f"there is no model `{name}`{available}", model=name)
        known = ", ".join(sorted(served, key=version_order))
        if version is None:
            text = f"model `{name}` has only shadow versions, which calls have to name: {known}"
            return ModelNotFound(text, model=name)
        routing = self.routings.get(name)
        aliases = f"; aliases: {', '.join(routing.aliases)}" if routing else ""
        version = (version or "")[:NAME_CHARACTERS_MAX]
        text = f"model `{name}` has no version `{version}`; available: {known}{aliases}"
        return ModelNotFound(text, model=name, version=version)


class ModelStatus(NamedTuple):
    """State of a model version, READY to UNAVAILABLE as in the Open Inference Protocol.

    `reason`: why it is not ready, or why changed files of it are not served.
    """

    name: str
    version: str
    state: str
    reason: str
    lane: Lane | None


def configured(config: Config, recent: RecentValues) -> Models:
    """Return the models of the configuration; raise ConfigError if a model file is missing."""
    models, loading = Models(), loading_spec(config)
    models.is_scanning = bool(config.repository.path)
    for key, model in enumerate(config.models):
        lane = Lane(model_spec(key, model, loading), model.lane, quorum_of(config, model), recent)
        models.by_key[key] = lane
        models.serve(lane)
    models.set_shadow_shares(configured_shares(config))
    return models


def configured_shares(config: Config) -> dict[tuple[str, str], float]:
    """Return the shares of the shadow versions among the models of a configuration."""
    return {
        (model.name, str(model.version)): model.shadow_share
        for model in config.models
        if model.shadow_share is not None
    }


def describe(lane: Lane) -> dict[str, Any]:
    """Return a model version and its contract as JSON values."""
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
            "rows": lane.relation.to_wire(),
            "inputs": [entry_keys(entry) for entry in entries_of(contract)],
            "outputs": _outputs(contract),
            "passthrough": contract.passthrough,
            "columns": contract.column_order,
            "ranked_within": [rank.within for rank in contract.ranks],
            "files_sha256": lane.files_sha256,
            "runtimes": [{**each._asdict(), "name": each.name} for each in lane.runtimes],
        }
    return described


def _outputs(contract: Contract) -> list[dict[str, Any]]:
    """Result columns, each with its source tensor or tensors."""
    outputs = contract.outputs
    if not contract.columns:
        return [{"column": o.column, "type": str(o.type), "tensor": o.tensor} for o in outputs]
    described = []
    for each in contract.columns:
        tensors = [outputs[index].tensor for index in each.outputs]
        source = {"tensors": tensors} if each.is_assembled else {"tensor": tensors[0]}
        described.append({"column": each.column, "type": each.type, **source, "made": each.source})
    return described


def _nothing() -> None:
    pass


def _model_version(lane: Lane) -> tuple[str, str]:
    return lane.model.name, lane.model.version


def version_order(version: str) -> tuple[int, int, str]:
    """Sort key of versions: numbers rank above names."""
    return (1, int(version), "") if version.isdecimal() else (0, 0, version)
