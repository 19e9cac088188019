"""Open connections by source address: which source has most, and which connection gives way.

Every operation takes a bounded number of steps, however many connections there are: an idle
connection is looked for among a few, those of the sources with most first, and the ones that were
found busy go behind the others of their source.

Runs on: gateway loop.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar

LOOKED_AT: Final = 64
"""Connections of which the oldest idle one is chosen."""
PREFIX_BITS: Final = 64
"""Of an IPv6 address: what one client is given as a whole."""

Source: TypeAlias = str
Item = TypeVar("Item")


def source_of(family: int, address: Any) -> Source:  # noqa: ANN401
    """The source of a connection: an IPv4 address, the first half of an IPv6 one, or `unix`."""
    if family == socket.AF_UNIX:
        return "unix"
    host: str = address[0]
    if family == socket.AF_INET:
        return host
    parsed = ipaddress.IPv6Address(host.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, PREFIX_BITS), strict=False).network_address)


class SourceTable(Generic[Item]):
    """Items, each of one source."""

    def __init__(self) -> None:
        self._items: dict[Source, dict[Item, None]] = {}
        self._by_count: dict[int, dict[Source, None]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def count(self, source: Source) -> int:
        """Items of one source."""
        return len(self._items.get(source, ()))

    def add(self, source: Source, item: Item) -> None:
        """Count a new item."""
        items = self._items.setdefault(source, {})
        items[item] = None
        self._len += 1
        self._move(source, len(items) - 1, len(items))

    def remove(self, source: Source, item: Item) -> bool:
        """Count an item no longer; return whether it was counted."""
        items = self._items.get(source, {})
        if item not in items:
            return False
        del items[item]
        self._len -= 1
        self._move(source, len(items) + 1, len(items))
        if not items:
            del self._items[source]
        return True

    def oldest_idle(
        self, idle_since: Callable[[Item], int], source: Source | None = None
    ) -> Item | None:
        """The item that is idle since longest, of the source with most items that has an idle one.

        Args:
            idle_since: Since when an item is idle; 0 where it is busy.
            source: Look at this source alone.
        """
        left = LOOKED_AT
        for level in self._levels(source):
            found: list[tuple[int, Item]] = []
            for each in level:
                items = self._items.get(each, {})
                looked_at = _first(items, left)
                left -= len(looked_at)
                for item in looked_at:
                    since = idle_since(item)
                    if since:
                        found.append((since, item))
                    else:
                        del items[item]
                        items[item] = None
                if left <= 0:
                    break
            if found:
                return min(found, key=_since)[1]
            if left <= 0:
                return None
        return None

    def _levels(self, source: Source | None) -> Iterator[list[Source]]:
        """The sources, those with most first; the ones of a level that were looked at go behind."""
        if source is not None:
            yield [source]
            return
        for count in sorted(self._by_count, reverse=True):
            level = self._by_count[count]
            sources = _first(level, LOOKED_AT)
            for each in sources:
                del level[each]
                level[each] = None
            yield sources

    def _move(self, source: Source, before: int, now: int) -> None:
        if before:
            level = self._by_count[before]
            del level[source]
            if not level:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[source] = None


def _first(items: dict[Item, None], most: int) -> list[Item]:
    return [item for item, _ in zip(items, range(most), strict=False)]


def _since(found: tuple[int, Any]) -> int:
    return found[0]
