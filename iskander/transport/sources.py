"""Open connections by source address, and the search for an idle connection to evict.

Each operation has a bounded cost. A search examines at most `EXAMINED_MAX` connections, sources
with the most connections first, and moves busy connections to the end of their source.

Runs on: gateway loop.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Generic, TypeAlias, TypeVar

EXAMINED_MAX: Final = 64
"""Connections examined by one search."""
PREFIX_BITS: Final = 64
"""Prefix of an IPv6 address that identifies one client."""

Source: TypeAlias = str
Item = TypeVar("Item")


def source_of(family: int, address: Any) -> Source:  # noqa: ANN401
    """Return the source of a connection: IPv4 address, IPv6 /64 prefix, or `unix`."""
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
    """Items grouped by source."""

    def __init__(self) -> None:
        self._items: dict[Source, dict[Item, None]] = {}
        self._by_count: dict[int, dict[Source, None]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def count(self, source: Source) -> int:
        """Return the number of items of a source."""
        return len(self._items.get(source, ()))

    def add(self, source: Source, item: Item) -> None:
        """Add a new item."""
        items = self._items.setdefault(source, {})
        items[item] = None
        self._len += 1
        self._move(source, len(items) - 1, len(items))

    def remove(self, source: Source, item: Item) -> bool:
        """Remove an item; return whether it was present."""
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
        """Return the longest idle item; sources with the most items are searched first.

        Args:
            idle_since: Start of an item's idle time; 0 if busy.
            source: Search this source only.
        """
        left = EXAMINED_MAX
        for level in self._levels(source):
            idle: list[tuple[int, Item]] = []
            for each in level:
                items = self._items.get(each, {})
                examined = list(islice(items, left))
                left -= len(examined)
                for item in examined:
                    since = idle_since(item)
                    if since:
                        idle.append((since, item))
                    else:
                        del items[item]
                        items[item] = None
                if left <= 0:
                    break
            if idle:
                return min(idle, key=itemgetter(0))[1]
            if left <= 0:
                return None
        return None

    def _levels(self, source: Source | None) -> Iterator[list[Source]]:
        """Yield the sources of each count, highest first; move them to the end of their level."""
        if source is not None:
            yield [source]
            return
        for count in sorted(self._by_count, reverse=True):
            level = self._by_count[count]
            sources = list(islice(level, EXAMINED_MAX))
            for each in sources:
                del level[each]
                level[each] = None
            yield sources

    def _move(self, source: Source, old_count: int, new_count: int) -> None:
        """Move a source to the level of its new count."""
        if old_count:
            level = self._by_count[old_count]
            del level[source]
            if not level:
                del self._by_count[old_count]
        if new_count:
            self._by_count.setdefault(new_count, {})[source] = None
