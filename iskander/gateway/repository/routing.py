"""Routing of a call to a version: by number, alias, default, or weighted split.

A split is sticky by weighted rendezvous hashing: each version gets a score from its weight and a
hash with the key, and the highest score wins. A key keeps its version while that version exists and
no other weight grows; a version that is added or removed moves only its own keys.

Pure. Source: D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates" (1998);
the weighted form is by J. Resch (2015).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from hashlib import blake2b
from math import log
from typing import NamedTuple

_HASH_BYTES = 8


class Routing(NamedTuple):
    """Routing of one model; the split and the default are for calls without a version.

    Attributes:
        default: Version or alias; empty: the highest version.
        split: Weights by version or alias. Versions that are not served are ignored.
        shadows: Shares of the shadow versions, by version or alias.
    """

    default: str = ""
    aliases: Mapping[str, str] = {}
    split: Mapping[str, float] = {}
    shadows: Mapping[str, float] = {}

    def choose(self, version: str | None, key: str, served: Container[str]) -> str | None:
        """Return the version for a call with a version, an alias or neither; None: the highest."""
        if version is None:
            version = self._choose_by_split(key, served) or self.default or None
        return version if version is None else self.aliases.get(version, version)

    def targets(self) -> set[str]:
        """Return every version that the routing refers to."""
        named = {self.default, *self.split, *self.shadows, *self.aliases.values()} - {""}
        return {self.aliases.get(each, each) for each in named}

    def shadow_shares(self) -> dict[str, float]:
        return {self.aliases.get(each, each): share for each, share in self.shadows.items()}

    def routes_to(self, version: str) -> list[str]:
        """Describe the routes to a version: `stable`, `default`, `90 of 100`."""
        routes = [alias for alias, target in self.aliases.items() if target == version]
        if self.default and self.aliases.get(self.default, self.default) == version:
            routes.append("default")
        total = sum(self.split.values())
        share = self._weights().get(version)
        if share:
            routes.append(f"{share:g} of {total:g}")
        shadow_share = self.shadow_shares().get(version)
        return routes if shadow_share is None else [*routes, shadow_route(shadow_share)]

    def _weights(self) -> dict[str, float]:
        """Return the weight of each version of the split, which may have several aliases."""
        weights: dict[str, float] = {}
        for target, weight in self.split.items():
            version = self.aliases.get(target, target)
            weights[version] = weights.get(version, 0) + weight
        return weights

    def _choose_by_split(self, key: str, served: Container[str]) -> str | None:
        best, best_score = None, 0.0
        for version, weight in self._weights().items():
            if weight and version in served:
                score = -weight / log(_hash(key, version))
                if best is None or score > best_score:
                    best, best_score = version, score
        return best


def shadow_route(share: float) -> str:
    return f"shadow of {share:g}"


def _hash(key: str, version: str) -> float:
    """Hash a key and a version to a number between 0 and 1."""
    text = f"{version}\0{key}".encode("utf-8", "replace")
    value = int.from_bytes(blake2b(text, digest_size=_HASH_BYTES).digest(), "big")
    return ((value >> 12) + 0.5) / 2**52
