"""The models as lanes: found by name and version, described, ready or not.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from iskander.config.schema import Config
from iskander.contract.inputs import entries_of, said
from iskander.contract.tensors import Contract
from iskander.errors import ModelNotFound, NotReady
from iskander.measurement.recent_values import RecentValues
from iskander.repository.routing import Routing
from iskander.repository.specs import loading_spec, model_spec, quorum_of
from iskander.scheduling.lane import Lane
from iskander.supervision.file_freshness import FileFreshness
from iskander.supervision.readiness import reason_of
from iskander.supervision.worker import Worker

STOPPING: Final = "the server is stopping"
RETRY_MS: Final = 500


class Failure(NamedTuple):
    """A model version that was asked for and does not load.

    Attributes:
        reason: Why, in words for the operator.
        is_required: The server is not ready without it.
    """

    reason: str
    is_required: bool


class Models:
    """What is served, and what is on its way to be or to leave.

    Attributes:
        by_key: Every lane by the number that control messages use; a number is never used twice.
        failures: What does not load, by name and version.
        routings: Of models whose versions have names or shares.
        revision: Changes with every change of what `find` says.
        counts: Loads, failures and unloads.
        workers: Every place of the plan; set by the supervisor.
        is_stopping: Nothing is called ready any more.
        is_discreet: Not every caller may know what there is.
        is_looking: What the repository has to be loaded from the start is not known yet.
        pending: Models whose loads of the start have not come to their end.
        freshness: Whether lanes' files are those that they were loaded from.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, Lane] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.routings: dict[str, Routing] = {}
        self.revision = 0
        self.counts: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.is_stopping = False
        self.is_discreet = False
        self.is_looking = False
        self.pending = 0
        self.freshness = FileFreshness()
        self._served: dict[str, dict[str, Lane]] = {}
        self._highest: dict[str, str] = {}

    def __iter__(self) -> Iterator[Lane]:
        """The lanes that are served."""
        return iter([lane for versions in self._served.values() for lane in versions.values()])

    def serve(self, lane: Lane) -> Lane | None:
        """Let a lane be found; the one that was found in its place until now."""
        name, version = lane.model.name, lane.model.version
        older = self._served.get(name, {}).get(version)
        if older is not None:
            older.is_served = False
            lane.follow(older)
        lane.is_served = True
        self._served.setdefault(name, {})[version] = lane
        self._note(name)
        return older

    def withdraw(self, lane: Lane) -> None:
        """Let a lane be found no more, where it still is."""
        name, version = lane.model.name, lane.model.version
        lane.is_served = False
        if self._served.get(name, {}).get(version) is lane:
            del self._served[name][version]
            self._note(name)

    def route(self, name: str, routing: Routing | None) -> None:
        """Give the versions of a model names and shares, or none."""
        if self.routings.get(name) != routing:
            if routing is None:
                del self.routings[name]
            else:
                self.routings[name] = routing
            self.revision += 1

    @property
    def is_ready(self) -> bool:
        """Whether every model has the workers that it needs, and they are to be used."""
        return not self.reasons()

    @property
    def is_settled(self) -> bool:
        """Whether every model is ready, or known not to load."""
        is_pending = self.is_looking or self.pending
        return not is_pending and all(self.is_lane_ready(lane) for lane in self)

    def is_lane_ready(self, lane: Lane) -> bool:
        """Whether one model version has the workers that it needs."""
        return lane.is_ready

    def reasons(self) -> list[str]:
        """Why not everything is ready, a sentence each; empty where it is."""
        if self.is_stopping:
            return [STOPPING]
        # A model in quarantine takes no other down: its callers are told, and not the balancer.
        served = (lane for lane in self if lane.quarantine is None)
        lanes = [*served, *(lane for lane in self.coming if lane.is_required)]
        reasons = [(lane.title, self._reason(lane)) for lane in lanes]
        reasons += [
            ("/".join(which), failure.reason)
            for which, failure in self.failures.items()
            if failure.is_required
        ]
        told = [f"model `{title}`: {reason}" for title, reason in reasons if reason]
        if not told and (self.is_looking or self.pending):
            told.append("the repository's models are being loaded")
        return told

    @property
    def coming(self) -> list[Lane]:
        """Lanes that workers are loading, and that nobody finds yet."""
        return [lane for lane in self.by_key.values() if lane.is_coming]

    def find(self, name: str, version: str | None, key: str = "") -> Lane:
        """The lane of a model.

        Args:
            name: Of the model.
            version: Or an alias of one; None for the model's default, or its highest one.
            key: Where versions have shares: the same key gets the same version.

        Raises:
            ModelNotFound: Says what is there.
            NotReady: It is being loaded, or should be served and does not load.
        """
        served = self._served.get(name)
        if served is None:
            raise self._absent(name, version)
        wanted = version
        if wanted is None or wanted not in served:
            routing = self.routings.get(name)
            if routing is not None:
                wanted = routing.choose(version, key, served)
            if wanted is None:
                wanted = self._highest[name]
        lane = served.get(wanted)
        if lane is None:
            raise self._absent(name, wanted)
        return lane

    def find_loaded(self, name: str, version: str | None, key: str = "") -> Lane:
        """The same, for those who need its contract.

        Raises:
            ModelNotFound: There is no such model.
            NotReady: No worker has loaded it yet.
        """
        lane = self.find(name, version, key)
        if lane.contract is None:
            raise NotReady(f"model `{lane.title}` is not loaded yet", retry_after_ms=RETRY_MS)
        return lane

    def readiness(self) -> dict[str, Any]:
        """Whether all is ready, and each model version, and why not; for `health`."""
        models: dict[str, dict[str, Any]] = {}
        for lane in self:
            reason = self._reason(lane)
            model = models.setdefault(lane.model.name, {"ready": True, "versions": {}})
            model["versions"][lane.model.version] = not reason
            if reason:
                model["ready"] = False
                # The versions of a model wait for the same workers; the first one tells enough.
                model.setdefault("reason", reason)
        for (name, version), failure in self.failures.items():
            model = models.setdefault(name, {"ready": False, "versions": {}})
            model["versions"].setdefault(version, False)
            model["ready"] = model["ready"] and not failure.is_required
            model.setdefault("reason", f"version {version}: {failure.reason}")
        stopping = {"reason": STOPPING} if self.is_stopping else {}
        return {"ready": self.is_ready, **stopping, "models": models}

    def index(self) -> Iterator[ModelStatus]:
        """Every model version that is served, is coming, or should be served and does not load."""
        for lane in self:
            failure = self.failures.get((lane.model.name, lane.model.version))
            reason = self._reason(lane)
            state = "UNAVAILABLE" if reason else "READY"
            if failure is not None:
                reason = reason or f"a change of it is not served: {failure.reason}"
            yield ModelStatus(lane.model.name, lane.model.version, state, reason, lane)
        told = {(lane.model.name, lane.model.version) for lane in self}
        for lane in self.coming:
            which = (lane.model.name, lane.model.version)
            if which not in told:
                told.add(which)
                yield ModelStatus(*which, "LOADING", self._reason(lane), None)
        for lane in self.by_key.values():
            which = (lane.model.name, lane.model.version)
            if not lane.is_served and not lane.is_coming and which not in told:
                told.add(which)
                yield ModelStatus(*which, "UNLOADING", "it finishes what it accepted", None)
        for which, failure in self.failures.items():
            if which not in told:
                yield ModelStatus(*which, "UNAVAILABLE", failure.reason, None)

    def stages(self) -> Iterator[tuple[tuple[str], int]]:
        """How many lanes are in each stage of their life."""
        lanes = self.by_key.values()
        yield ("loading",), sum(lane.is_coming for lane in lanes)
        yield ("serving",), sum(lane.is_served for lane in lanes)
        yield ("draining",), sum(lane.is_over for lane in lanes)

    def describe_all(self) -> list[dict[str, Any]]:
        """What `index` says, with the contracts of what is served."""
        described: list[dict[str, Any]] = []
        for standing in self.index():
            name, version = standing.name, standing.version
            entry: dict[str, Any] = {"name": name, "version": version, "ready": False}
            if standing.lane is not None:
                entry = describe(standing.lane)
                entry["routes"] = self._routes_to(name, version)
            described.append(entry | {"state": standing.state.lower(), "reason": standing.reason})
        return described

    def _routes_to(self, name: str, version: str) -> list[str]:
        """What leads to a version beside its number."""
        routing = self.routings.get(name)
        return [] if routing is None else routing.told_of(version)

    def _reason(self, lane: Lane) -> str:
        reason = reason_of(lane, self.workers)
        if not reason and not lane.is_served:
            return "its workers are loading"
        # Before the plan is made there are no workers to tell about.
        return reason if reason or lane.is_ready else "its workers have not come yet"

    def _note(self, name: str) -> None:
        self.revision += 1
        versions = self._served[name]
        if versions:
            self._highest[name] = max(versions, key=version_order)
        else:
            del self._served[name], self._highest[name]

    def _absent(self, name: str, version: str | None) -> ModelNotFound | NotReady:
        """Why there is no lane: it is none of ours, or not yet, or not any more."""
        for lane in self.coming:
            if lane.model.name == name and version in (None, lane.model.version):
                text = f"model `{lane.title}` is being loaded"
                return NotReady(text, model=name, retry_after_ms=RETRY_MS)
        for (failed, which), failure in self.failures.items():
            if failed == name and version in (None, which):
                text = f"model `{name}/{which}` does not load: {failure.reason}"
                return NotReady(text, model=name, version=which)
        served = self._served.get(name)
        if served is None:
            there = "" if self.is_discreet else ", ".join(sorted(self._served)) or "none"
            return ModelNotFound(
                f"there is no model `{name[:100]}`{there and '; there are '}{there}",
                model=name[:100],
            )
        known = sorted(served, key=version_order)
        routing = self.routings.get(name)
        aliases = f" and the aliases {', '.join(routing.aliases)}" if routing else ""
        return ModelNotFound(
            f"model `{name}` has no version `{(version or '')[:100]}`; it has "
            f"{', '.join(known)}{aliases}",
            model=name,
            version=(version or "")[:100],
        )


class ModelStatus(NamedTuple):
    """How a model version stands.

    Attributes:
        state: READY, LOADING, UNLOADING or UNAVAILABLE, as the Open Inference Protocol says it.
        reason: Why it is not ready, or why a change of it is not served.
        lane: Where it is served.
    """

    name: str
    version: str
    state: str
    reason: str
    lane: Lane | None


def configured(config: Config, recent: RecentValues) -> Models:
    """The models of the configuration, which are found from the start.

    Raises:
        ConfigError: There is no file where the configuration says.
    """
    models, loading = Models(), loading_spec(config)
    models.is_looking = bool(config.repository.path)
    for key, model in enumerate(config.models):
        lane = Lane(model_spec(key, model, loading), model.lane, quorum_of(config, model), recent)
        models.by_key[key] = lane
        models.serve(lane)
    return models


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


def version_order(version: str) -> tuple[int, int, str]:
    """What versions are sorted by: those that are numbers above the others."""
    return (1, int(version), "") if version.isdecimal() else (0, 0, version)
