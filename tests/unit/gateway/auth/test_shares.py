"""Shares of sources: the rule, items by source, and the bounded search for an idle item."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from iskander.gateway.auth.shares import EXAMINED_MAX, IDLE_NS, Shares, SourceTable, may_take


def idle_since(times: dict[str, int]) -> Callable[[str], int]:
    return lambda item: times.get(item, 0)


def table_with(**counts: int) -> SourceTable[str]:
    table: SourceTable[str] = SourceTable()
    for source, count in counts.items():
        for number in range(count):
            table.add(source, f"{source}{number}")
    return table


def test_items_are_counted_by_source() -> None:
    table = table_with(a=2, b=1)
    assert (len(table), table.count("a"), table.count("b"), table.count("c")) == (3, 2, 1, 0)
    assert table.remove("a", "a0") and not table.remove("a", "a0") and not table.remove("c", "c0")
    assert (len(table), table.count("a")) == (2, 1)
    assert table.remove("a", "a1") and table.count("a") == 0


def test_oldest_idle_item_of_the_largest_source_is_returned() -> None:
    table = table_with(few=2, most=4)
    times = {"few0": 1, "few1": 2, "most0": 9, "most1": 0, "most2": 5, "most3": 7}
    assert table.oldest_idle(idle_since(times)) == "most2"
    assert table.oldest_idle(idle_since(times), "few") == "few0"
    table.remove("most", "most2")
    table.remove("most", "most3")
    table.remove("most", "most0")
    # The other source is larger now.
    assert table.oldest_idle(idle_since(times)) == "few0"


def test_next_source_is_searched_if_the_largest_is_busy() -> None:
    table = table_with(a=3, b=2)
    assert table.oldest_idle(idle_since({"b1": 5})) == "b1"
    assert table.oldest_idle(idle_since({})) is None
    assert table.oldest_idle(idle_since({"b1": 5}), "a") is None


def test_oldest_item_is_returned_among_sources_of_equal_size() -> None:
    table = table_with(a=1, b=1, c=1)
    assert table.oldest_idle(idle_since({"a0": 3, "b0": 1, "c0": 2})) == "b0"


@pytest.mark.parametrize("counts", [{"a": 5000}, {f"s{number}": 1 for number in range(5000)}])
def test_each_search_examines_few_items_and_continues_with_the_next(counts: dict[str, int]) -> None:
    table = table_with(**counts)
    examined: list[str] = []

    def busy(item: str) -> int:
        examined.append(item)
        return 0

    assert table.oldest_idle(busy) is None
    assert len(examined) == EXAMINED_MAX
    while len(set(examined)) < 5000:
        before = len(set(examined))
        table.oldest_idle(busy)
        assert len(set(examined)) == min(before + EXAMINED_MAX, 5000)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8, 16, 64, 1024])
@pytest.mark.parametrize("sources", [1, 2, 12, 100])
def test_a_source_without_items_finds_room_beside_greedy_ones(limit: int, sources: int) -> None:
    """Unless each item belongs to another source."""
    held = dict.fromkeys(range(sources), 0)
    for _ in range(limit):
        for source, own in held.items():
            if may_take(limit, sum(held.values()), own, shared_from=0):
                held[source] += 1
    used = sum(held.values())
    assert used <= limit and used >= limit * 8 // 9 - sources
    if max(held.values()) > 1:
        own = max(held.values())
        assert may_take(limit, used, 0) and not may_take(limit, used, own, shared_from=0)


def test_small_limit_has_no_part_for_others() -> None:
    assert may_take(8, 7, 7) and not may_take(9, 8, 8)
    assert not may_take(8, 8, 0)


class Resource:
    """Items with a time of their last progress, 0 while they make it."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self.ended: list[str] = []
        self.shares: Shares[str] = Shares(self.since.__getitem__, self.ended.append)

    def add(self, source: str, item: str, since: int = 1) -> None:
        self.since[item] = since
        self.shares.add(source, item)


LIMIT = 4
LATER = IDLE_NS + 1
"""Time at which an item since 1 may be taken back."""


def full(since: int = 1) -> Resource:
    resource = Resource()
    for item in ("a1", "a2", "a3"):
        resource.add("a", item, since)
    resource.add("b", "b1")
    return resource


def test_idle_item_of_the_source_with_the_most_is_taken_back() -> None:
    resource = full()
    assert not resource.shares.make_room("c", LIMIT, LATER - 1)
    assert resource.shares.make_room("c", LIMIT, LATER)
    assert resource.ended == ["a1"] and resource.shares.count("a") == 2
    resource.shares.remove("a1")
    assert len(resource.shares) == 3


def test_source_takes_nothing_from_one_with_as_few() -> None:
    resource = full(since=0)
    assert not resource.shares.make_room("b", LIMIT, LATER)
    resource.since["b1"] = 0
    assert not resource.shares.make_room("c", LIMIT, LATER)
    assert resource.ended == []


def test_source_does_not_replace_its_own_items() -> None:
    resource = full()
    assert not resource.shares.make_room("a", LIMIT, LATER)
    assert resource.ended == []


def test_nothing_is_taken_back_above_a_lower_limit() -> None:
    resource = full()
    assert not resource.shares.make_room("c", LIMIT - 1, LATER)
    assert resource.ended == []
