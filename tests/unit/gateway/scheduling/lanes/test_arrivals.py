"""Predictions of the next requests: regular, irregular, overdue and resumed clients."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from support.lanes import MS

from iskander.gateway.scheduling.lanes.arrivals import (
    CLIENTS_MAX,
    DEVIATION_MOST,
    SAMPLES_LEAST,
    ArrivalPredictor,
)

PERIOD, BUDGET = 20 * MS, 7 * MS


def observe_regular(
    predictor: ArrivalPredictor,
    client: str = "a",
    *,
    begin_ns: int = 0,
    count: int = 10,
    jitter: float = 0.0,
    budget_ns: int = BUDGET,
) -> int:
    """Records requests of a client, one per period; returns the time of the last one."""
    rng, at_ns = random.Random(client), begin_ns
    for index in range(count):
        at_ns = begin_ns + index * PERIOD
        at_ns += int(PERIOD * jitter * rng.uniform(-1, 1))
        predictor.observe(client, at_ns, budget_ns)
    return at_ns


def expected_times(predictor: ArrivalPredictor, now_ns: int) -> list[int]:
    """Expected times of the next requests, without the allowed deviation."""
    return [due_ns - BUDGET for _, due_ns in predictor.expected(now_ns)]


def test_period_is_known_after_enough_intervals() -> None:
    """Both sides: with one interval less there is no period and no prediction."""
    predictor, periods, counts = ArrivalPredictor(), [], []
    for index in range(SAMPLES_LEAST + 2):
        predictor.observe("a", index * PERIOD, BUDGET)
        periods.append(predictor.period_ns("a"))
        counts.append(len(list(predictor.expected(index * PERIOD))))

    assert periods == [0] * SAMPLES_LEAST + [PERIOD] * 2
    assert counts == [0] * SAMPLES_LEAST + [1] * 2
    assert predictor.clients() == [("a", PERIOD, SAMPLES_LEAST + 1)]
    assert predictor.period_ns("b") == 0


def test_next_request_is_expected_one_period_after_the_last() -> None:
    """Its time until the deadline is that of the last one."""
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor)
    expected = [(last_ns + PERIOD, last_ns + PERIOD + BUDGET)]

    assert list(predictor.expected(last_ns)) == expected
    assert list(predictor.expected(last_ns + PERIOD)) == expected
    # A read changes nothing.
    assert list(predictor.expected(last_ns)) == expected


def test_expected_deadline_comes_from_the_last_request() -> None:
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor) + PERIOD
    predictor.observe("a", last_ns, 3 * BUDGET)

    assert list(predictor.expected(last_ns)) == [(last_ns + PERIOD, last_ns + PERIOD + 3 * BUDGET)]


def test_no_prediction_if_the_last_request_had_no_deadline() -> None:
    """The period stays known; the next request with a deadline restores the prediction."""
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor, budget_ns=0)
    assert (predictor.period_ns("a"), list(predictor.expected(last_ns))) == (PERIOD, [])

    for budget_ns, count in ((BUDGET, 1), (0, 0), (1, 1)):
        last_ns += PERIOD
        predictor.observe("a", last_ns, budget_ns)
        assert len(list(predictor.expected(last_ns))) == count


def test_little_jitter_is_regular_and_much_is_not() -> None:
    steady, wild = ArrivalPredictor(), ArrivalPredictor()
    observe_regular(steady, count=40, jitter=0.05)
    observe_regular(wild, count=40, jitter=0.5)

    ((_, period_ns, _),) = steady.clients()
    assert period_ns == pytest.approx(PERIOD, rel=0.1)
    assert steady.period_ns("a") == period_ns
    assert [period for _, period, _ in wild.clients()] == [0] == [wild.period_ns("a")]
    assert expected_times(wild, 39 * PERIOD) == []


def test_no_prediction_for_a_client_that_becomes_irregular() -> None:
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor)
    predictor.observe("a", last_ns + 3 * PERIOD, BUDGET)

    assert predictor.period_ns("a") == 0
    assert expected_times(predictor, last_ns + 3 * PERIOD) == []


def test_new_period_is_learned() -> None:
    predictor = ArrivalPredictor()
    now_ns = observe_regular(predictor)
    for _ in range(40):
        now_ns += 2 * PERIOD
        predictor.observe("a", now_ns, BUDGET)

    assert predictor.period_ns("a") == pytest.approx(2 * PERIOD, rel=0.01)


def test_prediction_ends_after_the_usual_deviation() -> None:
    """Both sides; without any deviation the prediction ends 1 ns after the expected time."""
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor, count=40, jitter=0.1)
    ((until_ns, due_ns),) = expected = list(predictor.expected(last_ns))
    at_ns = due_ns - BUDGET
    assert 0 < until_ns - at_ns <= PERIOD * 0.2
    assert at_ns == last_ns + predictor.period_ns("a")
    assert list(predictor.expected(until_ns)) == expected
    assert list(predictor.expected(until_ns + 1)) == []

    exact = ArrivalPredictor()
    last_ns = observe_regular(exact)
    assert expected_times(exact, last_ns + PERIOD) == [last_ns + PERIOD]
    assert expected_times(exact, last_ns + PERIOD + 1) == []


def test_overdue_client_has_no_prediction_until_its_next_request() -> None:
    predictor = ArrivalPredictor()
    last_ns = observe_regular(predictor)
    overdue_ns = last_ns + int((1 + DEVIATION_MOST) * PERIOD) + 1

    assert expected_times(predictor, overdue_ns) == []
    assert expected_times(predictor, last_ns) == []
    assert len(predictor) == 1
    # Forty regular requests outweigh the pause.
    resumed_ns = observe_regular(predictor, begin_ns=overdue_ns + 50 * PERIOD, count=40)
    assert expected_times(predictor, resumed_ns) == [
        pytest.approx(resumed_ns + PERIOD, abs=PERIOD // 100)
    ]


def test_predictions_are_in_order_of_time() -> None:
    """When the first is overdue, the others remain."""
    predictor = ArrivalPredictor()
    for client, begin_ns in (("b", 3 * MS), ("a", 1 * MS), ("c", 2 * MS)):
        observe_regular(predictor, client, begin_ns=begin_ns)
    next_ns = 10 * PERIOD
    order = [next_ns + 1 * MS, next_ns + 2 * MS, next_ns + 3 * MS]

    assert expected_times(predictor, 9 * PERIOD + 3 * MS) == order
    for index in range(3):
        assert expected_times(predictor, order[index]) == order[index:]
        assert expected_times(predictor, order[index] + 1) == order[index + 1 :]


def test_prediction_moves_by_one_period_after_an_arrival() -> None:
    predictor = ArrivalPredictor()
    for client, begin_ns in (("a", 0), ("b", MS)):
        last_ns = observe_regular(predictor, client, begin_ns=begin_ns)
    arrived_ns = last_ns - MS + PERIOD
    predictor.observe("a", arrived_ns, BUDGET)

    assert expected_times(predictor, arrived_ns) == [last_ns + PERIOD, arrived_ns + PERIOD]


def test_each_client_has_its_own_period() -> None:
    predictor = ArrivalPredictor()
    for index in range(20):
        predictor.observe("fast", index * PERIOD, BUDGET)
        if index % 2:
            predictor.observe("slow", index * PERIOD, BUDGET)

    assert [(name, period) for name, period, _ in predictor.clients()] == [
        ("fast", PERIOD),
        ("slow", 2 * PERIOD),
    ]


def test_least_recent_client_is_forgotten_at_the_limit() -> None:
    predictor = ArrivalPredictor()
    observe_regular(predictor, "old")
    last_ns = observe_regular(predictor, "kept")
    for index in range(CLIENTS_MAX - 2):
        predictor.observe(f"c{index}", last_ns, BUDGET)
    predictor.observe("kept", last_ns + PERIOD, BUDGET)
    assert len(predictor) == CLIENTS_MAX
    assert expected_times(predictor, last_ns) == [last_ns + PERIOD, last_ns + 2 * PERIOD]

    predictor.observe("one more", last_ns + PERIOD, BUDGET)

    names = [name for name, _, _ in predictor.clients()]
    assert len(predictor) == len(names) == CLIENTS_MAX
    assert "old" not in names and "kept" in names
    # The forgotten client has no prediction either.
    assert expected_times(predictor, last_ns) == [last_ns + 2 * PERIOD]
    predictor.observe("old", last_ns + PERIOD, BUDGET)
    assert predictor.period_ns("old") == 0


def test_predictions_match_a_list_under_random_traffic() -> None:
    """Many clients with periods and pauses, compared with a list of their expected times."""
    rng, predictor = random.Random(6), ArrivalPredictor()
    reference: dict[str, int] = {}
    arrivals = [(rng.randint(0, PERIOD), f"c{index}") for index in range(12)]
    ahead_max = overdue = 0
    for _ in range(5000):
        now_ns, client = heapq.heappop(arrivals)
        pause_ns = PERIOD * rng.choice([0] * 30 + [2])
        jitter_ns = int(PERIOD * 0.2 * rng.uniform(-1, 1))
        heapq.heappush(arrivals, (now_ns + PERIOD + jitter_ns + pause_ns, client))
        budget_ns = rng.choice([0] + [BUDGET] * 9)
        predictor.observe(client, now_ns, budget_ns)
        reference.pop(client, None)
        if predictor.period_ns(client) and budget_ns:
            reference[client] = now_ns + predictor.period_ns(client)

        actual = expected_times(predictor, now_ns)

        ahead = sorted(at_ns for at_ns in reference.values() if at_ns >= now_ns)
        assert actual == sorted(actual) and {*actual} <= {*reference.values()}
        assert actual[len(actual) - len(ahead) :] == ahead
        # Predictions before these are overdue, the first by at most its deviation.
        for until_ns, _ in itertools.islice(predictor.expected(now_ns), 1):
            assert until_ns >= now_ns
        ahead_max, overdue = max(ahead_max, len(ahead)), overdue + (len(actual) > len(ahead))
    assert ahead_max >= 6 and overdue > 100
