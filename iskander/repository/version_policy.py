"""Which versions of a model are to be served, and which changes of a folder are to be followed.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from iskander.config.repository import ModelFile, RepositoryConfig, Versions
from iskander.repository.load_intents import LoadIntent
from iskander.repository.routing import Routing

EVERYTHING = "*"

Key = TypeVar("Key")
Seen = TypeVar("Seen")


def names_at_start(
    settings: RepositoryConfig, listed: Collection[str], wishes: Iterable[LoadIntent] = ()
) -> set[str]:
    """The models of the folder that a start loads, whether they are there or not.

    Args:
        settings: Of the repository.
        listed: Models that are there.
        wishes: What calls wanted since; with `explicit` control.
    """
    if settings.control == "watched":
        return set(listed)
    asked = set(settings.load)
    if EVERYTHING in asked:
        asked = {*listed, *asked} - {EVERYTHING}
    for wish in wishes:
        (asked.add if wish.is_loaded else asked.discard)(wish.model)
    return asked


def policy_of(settings: RepositoryConfig, own: ModelFile) -> Versions:
    """Which versions of a model are served: as it says itself, else as all."""
    return settings.versions if own.versions is None else own.versions


def wanted_versions(present: Collection[str], policy: Versions, routing: Routing) -> list[str]:
    """The versions to serve, lowest first: those of the policy, and those that something leads to.

    Args:
        present: Versions that are there.
        policy: `latest:N`, `all`, or a list.
        routing: Of the model.
    """
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
    """What leads to which version."""
    return Routing(
        str(settings.default),
        {alias: str(version) for alias, version in settings.aliases.items()},
        dict(settings.split),
    )


def complaint_about(routing: Routing) -> str:
    """What is wrong with names that lead nowhere by themselves; empty where nothing is."""
    for what, target in (
        ("default", routing.default),
        *(("split", each) for each in routing.split),
    ):
        if target and target not in routing.aliases and not target.isdecimal():
            return f"{what}: `{target}` is neither a version nor an alias"
    if routing.split and not sum(routing.split.values()):
        return "split: every weight is 0"
    return ""


def complaint_about_targets(routing: Routing, versions: Collection[str]) -> str:
    """What is wrong with names that lead where nothing is; empty where nothing is wrong.

    Args:
        routing: Of a model.
        versions: Those that are to be served.
    """
    missing = ", ".join(sorted(routing.targets().difference(versions)))
    return missing and f"names lead to versions that are not there: {missing}"


class Move(NamedTuple):
    """What to do once the loads of a model have come to their end.

    Attributes:
        retire: Versions that are served and not to be any more.
        is_routed: The routing that is wanted can take effect.
    """

    retire: list[str]
    is_routed: bool


def move(served: Collection[str], wanted_now: Collection[str], routing: Routing) -> Move:
    """Let the new take the place of the old only where the new is there.

    While one that is wanted, or that something leads to, is not there, everything that is served
    stays, and where something would lead to a version that is not there, everything leads where it
    led. A model that is wanted no more is free of all that.
    """
    targets = routing.targets() if wanted_now else set()
    is_whole = all(version in served for version in targets.union(wanted_now))
    retire = [version for version in served if version not in wanted_now] if is_whole else []
    return Move(retire, all(target in served for target in targets))


def settled(
    before: Mapping[Key, Seen], now: Mapping[Key, Seen], followed: Mapping[Key, Seen]
) -> dict[Key, Seen]:
    """What to go by: of each thing that was the same at two looks, what was seen; else as before.

    Args:
        before: The look before.
        now: This look.
        followed: What was gone by until now.
    """
    result: dict[Key, Seen] = {}
    for key in {*now, *followed}:
        is_same = before.get(key) == now.get(key)
        seen = now.get(key) if is_same else followed.get(key)
        if seen is not None:
            result[key] = seen
    return result
