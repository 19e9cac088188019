"""Which version a call means: by its number, an alias, the model's default, or its share.

Shares are sticky by rendezvous hashing: each version draws a lot with the key, weighted, and the
best one wins. So a key keeps its version for as long as its version is there and no other's share
grows, and a version that comes or goes moves its own keys only.

Pure. Source: D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates" (1998);
the weighted form is by J. Resch (2015).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from hashlib import blake2b
from math import log
from typing import NamedTuple

_LOT_BYTES = 8


class Routing(NamedTuple):
    """Of one model.

    Attributes:
        default: Version or alias of a call that names none; empty for the highest version.
        aliases: Versions by alias.
        split: Weights by version or alias; a call that names no version goes to one of them.
    """

    default: str = ""
    aliases: Mapping[str, str] = {}
    split: Mapping[str, float] = {}

    def choose(self, version: str | None, key: str, served: Container[str]) -> str | None:
        """The version that a call means; None for the highest one.

        Args:
            version: That it names, or an alias; None where it names none.
            key: By which it is sticky.
            served: Versions that are there; the share of one that is not goes to the others.
        """
        if version is None:
            version = self._drawn(key, served) or self.default or None
        return version if version is None else self.aliases.get(version, version)

    def targets(self) -> set[str]:
        """Every version that something leads to."""
        named = {self.default, *self.split, *self.aliases.values()} - {""}
        return {self.aliases.get(each, each) for each in named}

    def told_of(self, version: str) -> list[str]:
        """What leads to a version, for people: `stable`, `default`, `90 of 100`."""
        told = [alias for alias, target in self.aliases.items() if target == version]
        if self.default and self.aliases.get(self.default, self.default) == version:
            told.append("default")
        total = sum(self.split.values())
        share = sum(w for t, w in self.split.items() if self.aliases.get(t, t) == version)
        return [*told, f"{share:g} of {total:g}"] if share else told

    def _drawn(self, key: str, served: Container[str]) -> str | None:
        best, best_lot = None, 0.0
        for target, weight in self.split.items():
            version = self.aliases.get(target, target)
            if weight and version in served:
                lot = -weight / log(_lot(key, version))
                if best is None or lot > best_lot:
                    best, best_lot = version, lot
        return best


def _lot(key: str, version: str) -> float:
    """A number between 0 and 1, the same for the same two."""
    text = f"{version}\0{key}".encode("utf-8", "replace")
    drawn = int.from_bytes(blake2b(text, digest_size=_LOT_BYTES).digest(), "big")
    return ((drawn >> 12) + 0.5) / 2**52
