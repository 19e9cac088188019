"""When a client's next request is expected: regular, irregular, late, gone and back."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from support.lanes import MS

from iskander.scheduling.arrivals import (
    CLIENTS_MAX,
    DEVIATION_MOST,
    SAMPLES_LEAST,
    ArrivalPredictor,
)

PERIOD, BUDGET = 20 * MS, 7 * MS


def regular(
    cadence: ArrivalPredictor,
    client: str = "a",
    *,
    begin_ns: int = 0,
    count: int = 10,
    jitter: float = 0.0,
    budget_ns: int = BUDGET,
) -> int:
    """Requests of a client, each a period after the one before; returns when the last one came."""
    chance, at_ns = random.Random(client), begin_ns
    for index in range(count):
        at_ns = begin_ns + index * PERIOD
        at_ns += int(PERIOD * jitter * chance.uniform(-1, 1))
        cadence.observe(client, at_ns, budget_ns)
    return at_ns


def moments(cadence: ArrivalPredictor, now_ns: int) -> list[int]:
    """When clients are expected, without what is allowed for their deviation."""
    return [due_ns - BUDGET for _, due_ns in cadence.expected(now_ns)]


def test_a_period_is_known_after_so_many_intervals() -> None:
    """Both sides: after one less, nothing is, and nobody is expected."""
    cadence, periods, counts = ArrivalPredictor(), [], []
    for index in range(SAMPLES_LEAST + 2):
        cadence.observe("a", index * PERIOD, BUDGET)
        periods.append(cadence.period_ns("a"))
        counts.append(len(list(cadence.expected(index * PERIOD))))

    assert periods == [0] * SAMPLES_LEAST + [PERIOD] * 2
    assert counts == [0] * SAMPLES_LEAST + [1] * 2
    assert cadence.clients() == [("a", PERIOD, SAMPLES_LEAST + 1)]
    assert cadence.period_ns("b") == 0


def test_the_next_one_is_expected_a_period_after_the_last() -> None:
    """And is due as much later as the last one was."""
    cadence = ArrivalPredictor()
    last_ns = regular(cadence)
    expected = [(last_ns + PERIOD, last_ns + PERIOD + BUDGET)]

    assert list(cadence.expected(last_ns)) == expected
    assert list(cadence.expected(last_ns + PERIOD)) == expected
    # To look changes nothing.
    assert list(cadence.expected(last_ns)) == expected


def test_what_is_due_when_is_what_the_last_request_said() -> None:
    cadence = ArrivalPredictor()
    last_ns = regular(cadence) + PERIOD
    cadence.observe("a", last_ns, 3 * BUDGET)

    assert list(cadence.expected(last_ns)) == [(last_ns + PERIOD, last_ns + PERIOD + 3 * BUDGET)]


def test_one_whose_last_request_had_no_deadline_is_not_expected() -> None:
    """Its rhythm is known all the same, and it is expected again when it says one."""
    cadence = ArrivalPredictor()
    last_ns = regular(cadence, budget_ns=0)
    assert (cadence.period_ns("a"), list(cadence.expected(last_ns))) == (PERIOD, [])

    for budget_ns, count in ((BUDGET, 1), (0, 0), (1, 1)):
        last_ns += PERIOD
        cadence.observe("a", last_ns, budget_ns)
        assert len(list(cadence.expected(last_ns))) == count


def test_a_little_jitter_is_regular_and_much_is_not() -> None:
    steady, wild = ArrivalPredictor(), ArrivalPredictor()
    regular(steady, count=40, jitter=0.05)
    regular(wild, count=40, jitter=0.5)

    ((_, period_ns, _),) = steady.clients()
    assert period_ns == pytest.approx(PERIOD, rel=0.1)
    assert steady.period_ns("a") == period_ns
    assert [period for _, period, _ in wild.clients()] == [0] == [wild.period_ns("a")]
    assert moments(wild, 39 * PERIOD) == []


def test_one_that_becomes_irregular_is_expected_no_more() -> None:
    cadence = ArrivalPredictor()
    last_ns = regular(cadence)
    cadence.observe("a", last_ns + 3 * PERIOD, BUDGET)

    assert cadence.period_ns("a") == 0
    assert moments(cadence, last_ns + 3 * PERIOD) == []


def test_a_new_period_is_learned() -> None:
    cadence = ArrivalPredictor()
    now_ns = regular(cadence)
    for _ in range(40):
        now_ns += 2 * PERIOD
        cadence.observe("a", now_ns, BUDGET)

    assert cadence.period_ns("a") == pytest.approx(2 * PERIOD, rel=0.01)


def test_one_is_worth_waiting_for_until_its_usual_deviation_after_its_moment() -> None:
    """Both sides; one without any that is late by a nanosecond has missed its time."""
    cadence = ArrivalPredictor()
    last_ns = regular(cadence, count=40, jitter=0.1)
    ((until_ns, due_ns),) = expected = list(cadence.expected(last_ns))
    at_ns = due_ns - BUDGET
    assert 0 < until_ns - at_ns <= PERIOD * 0.2
    assert at_ns == last_ns + cadence.period_ns("a")
    assert list(cadence.expected(until_ns)) == expected
    assert list(cadence.expected(until_ns + 1)) == []

    exact = ArrivalPredictor()
    last_ns = regular(exact)
    assert moments(exact, last_ns + PERIOD) == [last_ns + PERIOD]
    assert moments(exact, last_ns + PERIOD + 1) == []


def test_one_that_missed_its_time_is_not_expected_until_it_comes_again() -> None:
    cadence = ArrivalPredictor()
    last_ns = regular(cadence)
    late_ns = last_ns + int((1 + DEVIATION_MOST) * PERIOD) + 1

    assert moments(cadence, late_ns) == []
    assert moments(cadence, last_ns) == []
    assert len(cadence) == 1
    # Twenty more regular ones outweigh the pause.
    again_ns = regular(cadence, begin_ns=late_ns + 50 * PERIOD, count=40)
    assert moments(cadence, again_ns) == [pytest.approx(again_ns + PERIOD, abs=PERIOD // 100)]


def test_all_are_expected_the_soonest_first() -> None:
    """And when the first has missed its time, the others."""
    cadence = ArrivalPredictor()
    for client, begin_ns in (("b", 3 * MS), ("a", 1 * MS), ("c", 2 * MS)):
        regular(cadence, client, begin_ns=begin_ns)
    next_ns = 10 * PERIOD
    order = [next_ns + 1 * MS, next_ns + 2 * MS, next_ns + 3 * MS]

    assert moments(cadence, 9 * PERIOD + 3 * MS) == order
    for index in range(3):
        assert moments(cadence, order[index]) == order[index:]
        assert moments(cadence, order[index] + 1) == order[index + 1 :]


def test_one_that_came_is_expected_a_period_later_and_after_the_others() -> None:
    cadence = ArrivalPredictor()
    for client, begin_ns in (("a", 0), ("b", MS)):
        last_ns = regular(cadence, client, begin_ns=begin_ns)
    came_ns = last_ns - MS + PERIOD
    cadence.observe("a", came_ns, BUDGET)

    assert moments(cadence, came_ns) == [last_ns + PERIOD, came_ns + PERIOD]


def test_every_client_has_a_rhythm_of_its_own() -> None:
    cadence = ArrivalPredictor()
    for index in range(20):
        cadence.observe("fast", index * PERIOD, BUDGET)
        if index % 2:
            cadence.observe("slow", index * PERIOD, BUDGET)

    assert [(name, period) for name, period, _ in cadence.clients()] == [
        ("fast", PERIOD),
        ("slow", 2 * PERIOD),
    ]


def test_only_so_many_clients_are_remembered_and_the_least_recent_goes() -> None:
    cadence = ArrivalPredictor()
    regular(cadence, "old")
    last_ns = regular(cadence, "kept")
    for index in range(CLIENTS_MAX - 2):
        cadence.observe(f"c{index}", last_ns, BUDGET)
    cadence.observe("kept", last_ns + PERIOD, BUDGET)
    assert len(cadence) == CLIENTS_MAX
    assert moments(cadence, last_ns) == [last_ns + PERIOD, last_ns + 2 * PERIOD]

    cadence.observe("one more", last_ns + PERIOD, BUDGET)

    names = [name for name, _, _ in cadence.clients()]
    assert len(cadence) == len(names) == CLIENTS_MAX
    assert "old" not in names and "kept" in names
    # Of the one that was forgotten nothing is expected either.
    assert moments(cadence, last_ns) == [last_ns + 2 * PERIOD]
    cadence.observe("old", last_ns + PERIOD, BUDGET)
    assert cadence.period_ns("old") == 0


def test_all_clients_that_are_expected_are_in_order_whatever_comes() -> None:
    """Many clients with rhythms and pauses, beside a list of what each is expected at."""
    chance, cadence = random.Random(6), ArrivalPredictor()
    live: dict[str, int] = {}
    coming = [(chance.randint(0, PERIOD), f"c{index}") for index in range(12)]
    most = late = 0
    for _ in range(5000):
        now_ns, client = heapq.heappop(coming)
        pause_ns = PERIOD * chance.choice([0] * 30 + [2])
        jitter_ns = int(PERIOD * 0.2 * chance.uniform(-1, 1))
        heapq.heappush(coming, (now_ns + PERIOD + jitter_ns + pause_ns, client))
        budget_ns = chance.choice([0] + [BUDGET] * 9)
        cadence.observe(client, now_ns, budget_ns)
        live.pop(client, None)
        if cadence.period_ns(client) and budget_ns:
            live[client] = now_ns + cadence.period_ns(client)

        found = moments(cadence, now_ns)

        ahead = sorted(at_ns for at_ns in live.values() if at_ns >= now_ns)
        assert found == sorted(found) and {*found} <= {*live.values()}
        assert found[len(found) - len(ahead) :] == ahead
        # Whoever comes before them is late, and the first by no more than its deviation.
        for until_ns, _ in itertools.islice(cadence.expected(now_ns), 1):
            assert until_ns >= now_ns
        most, late = max(most, len(ahead)), late + (len(found) > len(ahead))
    assert most >= 6 and late > 100
