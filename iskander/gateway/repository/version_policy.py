"""Version policy: the versions to serve, and the scanned states to apply.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from iskander.config.repository import ModelFile, RepositoryConfig, Versions
from iskander.gateway.repository.load_intents import LoadIntent
from iskander.gateway.repository.routing import Routing

ALL_MODELS = "*"

Key = TypeVar("Key")
State = TypeVar("State")


def names_at_start(
    settings: RepositoryConfig, listed: Collection[str], intents: Iterable[LoadIntent] = ()
) -> set[str]:
    """Return the models to load at startup; intents of earlier calls need `explicit` control."""
    if settings.control == "watched":
        return set(listed)
    names = set(settings.load)
    if ALL_MODELS in names:
        names = {*listed, *names} - {ALL_MODELS}
    for intent in intents:
        (names.add if intent.is_loaded else names.discard)(intent.model)
    return names


def policy_of(settings: RepositoryConfig, own: ModelFile) -> Versions:
    """Return a model's version policy: its own, else that of the repository."""
    return settings.versions if own.versions is None else own.versions


def wanted_versions(present: Collection[str], policy: Versions, routing: Routing) -> list[str]:
    """Return the present versions to serve, lowest first: by policy or as routing targets."""
    numbers = sorted(present, key=int)
    if policy == "all":
        chosen = set(numbers)
    elif isinstance(policy, str):
        chosen = set(numbers[-int(policy.partition(":")[2]) :])
    else:
        chosen = {str(version) for version in policy}
    chosen |= routing.targets()
    return [version for version in numbers if version in chosen]


def routing_of(settings: ModelFile) -> Routing:
    """Return the routing of a `model.toml`."""
    aliases = {alias: str(version) for alias, version in settings.aliases.items()}
    return Routing(str(settings.default), aliases, dict(settings.split), dict(settings.shadows))


def routing_error(routing: Routing) -> str:
    """Return an error of the routing that does not depend on the versions; empty if valid."""
    targets = [("default", routing.default), *(("split", each) for each in routing.split)]
    for setting, target in [*targets, *(("shadows", each) for each in routing.shadows)]:
        if target and target not in routing.aliases and not target.isdecimal():
            return f"{setting}: `{target}` is neither a version nor an alias"
    shadows = routing.shadow_shares()
    for setting, target in targets:
        if routing.aliases.get(target, target) in shadows:
            return f"{setting}: `{target}` is in `shadows`: its results are never returned"
    if routing.split and not sum(routing.split.values()):
        return "split: every weight is 0"
    return ""


def targets_error(routing: Routing, versions: Collection[str]) -> str:
    """Return an error if the routing refers to versions that are not to be served, else empty."""
    missing = ", ".join(sorted(routing.targets().difference(versions)))
    return missing and f"the routing refers to missing versions: {missing}"


def plan_transition(
    served: Collection[str],
    wanted: Collection[str],
    routing: Routing,
    unloaded: Collection[str] = (),
) -> tuple[list[str], bool]:
    """Return the served versions to retire, and whether the new routing takes effect.

    No version retires until all wanted versions and all routing targets are served. The routing
    takes effect when all its targets are served. Targets that calls have unloaded do not count.
    Without wanted versions, targets are ignored and all versions retire.
    """
    targets = routing.targets().difference(unloaded) if wanted else set()
    is_complete = all(version in served for version in targets.union(wanted))
    retire = [version for version in served if version not in wanted] if is_complete else []
    return retire, all(target in served for target in targets)


def settled(
    before: Mapping[Key, State], now: Mapping[Key, State], applied: Mapping[Key, State]
) -> dict[Key, State]:
    """Return the states to apply: those that two scans agree on, else those applied before."""
    states = {
        key: (now if before.get(key) == now.get(key) else applied).get(key)
        for key in {*now, *applied}
    }
    return {key: state for key, state in states.items() if state is not None}
