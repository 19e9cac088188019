"""Connections by source, and the bounded search for a connection to evict."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from iskander.transport.sources import EXAMINED_MAX, SourceTable, source_of


@pytest.mark.parametrize(
    ("family", "address", "source"),
    [
        (socket.AF_UNIX, "", "unix"),
        (socket.AF_INET, ("10.1.2.3", 5), "10.1.2.3"),
        (socket.AF_INET6, ("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::"),
        (socket.AF_INET6, ("2001:db8:1:2::9", 5, 0, 0), "2001:db8:1:2::"),
        (socket.AF_INET6, ("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (socket.AF_INET6, ("fe80::1%eth0", 5, 0, 2), "fe80::"),
    ],
)
def test_source_of_an_address(family: int, address: object, source: str) -> None:
    assert source_of(family, address) == source


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
