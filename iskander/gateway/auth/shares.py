"""Shares of sources in countable resources, such as streams, regions and handshakes.

    leaves_enough   a source holds at most eight times what it leaves free
    may_take        the same for one more item; a source without items may take the last one
    SourceTable     items by source, and the search for an idle item
    Shares          both: a source may take an item back that is idle at a source with more items

So sources with several items never fill a resource, and an item without progress is taken back when
another source needs it. Each operation has a bounded cost. A search examines at most `EXAMINED_MAX`
items, sources with the most items first, and moves busy items to the end of their source.

Pure. Source: dynamic queue thresholds (Choudhury and Hahne, 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final, Generic, TypeVar

FREE_SHARE: Final = 8
"""A source may hold at most this multiple of the free capacity that it leaves."""
SHARED_MIN: Final = FREE_SHARE + 1
"""Smallest limit of which a part stays free for sources with few items."""
EXAMINED_MAX: Final = 64
"""Items examined by one search."""
IDLE_NS: Final = 2_000_000_000
"""Time without progress after which an item may be taken back."""

Item = TypeVar("Item", bound=Hashable)


def leaves_enough(own: int, free: int) -> bool:
    """Return whether a source that holds `own` units leaves enough if `free` units are free."""
    return own <= FREE_SHARE * free


def may_take(limit: int, used: int, own: int, *, shared_from: int = SHARED_MIN) -> bool:
    """Return whether a source that holds `own` items may take one more.

    `used` of `limit` items are held by all sources. A limit below `shared_from` keeps nothing free
    for others, because even one item would be too large a part of it.
    """
    free = limit - used - 1
    return free >= 0 and (not own or limit < shared_from or leaves_enough(own + 1, free))


class SourceTable(Generic[Item]):
    """Items grouped by source."""

    def __init__(self) -> None:
        self._items: dict[Hashable, dict[Item, None]] = {}
        self._by_count: dict[int, dict[Hashable, None]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def count(self, source: Hashable) -> int:
        return len(self._items.get(source, ()))

    def add(self, source: Hashable, item: Item) -> None:
        """Add a new item."""
        items = self._items.setdefault(source, {})
        items[item] = None
        self._len += 1
        self._move(source, len(items) - 1, len(items))

    def remove(self, source: Hashable, item: Item) -> bool:
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
        self, idle_since: Callable[[Item], int], source: Hashable | None = None
    ) -> Item | None:
        """Return the longest idle item of the sources with the most items that have an idle one.

        The items that are examined and busy move to the end of their source.

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

    def _levels(self, source: Hashable | None) -> Iterator[list[Hashable]]:
        """Yield the sources of each number of items, the highest number first.

        They move to the end of their level, so that the next search begins with others.
        """
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

    def _move(self, source: Hashable, old_count: int, new_count: int) -> None:
        """Move a source to the level of its new count."""
        if old_count:
            level = self._by_count[old_count]
            del level[source]
            if not level:
                del self._by_count[old_count]
        if new_count:
            self._by_count.setdefault(new_count, {})[source] = None


class Shares(Generic[Item]):
    """Items of a resource with a limit, each held by a source.

    Args:
        idle_since: Start of an item's time without progress, in ns; 0 while it makes progress.
        end: Ends an item that is taken back; it is no longer counted.
    """

    def __init__(self, idle_since: Callable[[Item], int], end: Callable[[Item], None]) -> None:
        self._idle_since = idle_since
        self._end = end
        self._table: SourceTable[Item] = SourceTable()
        self._sources: dict[Item, Hashable] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def count(self, source: Hashable) -> int:
        return self._table.count(source)

    def add(self, source: Hashable, item: Item) -> None:
        """Add a new item."""
        self._sources[item] = source
        self._table.add(source, item)

    def remove(self, item: Item) -> None:
        """Remove an item. Idempotent."""
        source = self._sources.pop(item, None)
        if source is not None:
            self._table.remove(source, item)

    def make_room(self, source: Hashable, limit: int, now_ns: int) -> bool:
        """Return whether a source may add an item, after taking one back if necessary.

        No item is taken back while more than `limit` are held, after the limit was lowered.
        """
        own = self._table.count(source)
        if may_take(limit, len(self), own):
            return True
        if len(self) > limit or not limit:
            return False
        return self.take_back(now_ns, above=own)

    def take_back(self, now_ns: int, *, above: int = 0) -> bool:
        """End an idle item of a source with more than `above` items; return whether one ended."""
        item = self._table.oldest_idle(self._idle_since)
        if item is None or now_ns - self._idle_since(item) < IDLE_NS:
            return False
        if self._table.count(self._sources[item]) <= above:
            return False
        self.remove(item)
        self._end(item)
        return True
