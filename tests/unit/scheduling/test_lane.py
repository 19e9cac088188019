"""A lane: who gives way to whom, what it counts, and what its requests and batches are bound by."""

from __future__ import annotations

from typing import Any

import pytest
from support.lanes import CONTRACT, MS, RecordingCaller, cost_of, lane_of, put, request_of

from iskander.config.models import LaneConfig
from iskander.contract.tensors import Contract
from iskander.errors import IskanderError, QueueFull
from iskander.scheduling.admission import PASSED_MAX
from iskander.scheduling.lane import PROBE_NS, Lane
from iskander.scheduling.policies import BATCH_LINGER_NS
from iskander.scheduling.request import NEVER_NS, Request
from iskander.supervision.worker import SlotPlan, Worker

NOW = 1_000 * MS


def open_lane(**settings: Any) -> Lane:
    lane = lane_of(rows_max=8, **settings)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    return lane


def come(lane: Lane, rows: int = 1, **terms: Any) -> tuple[Request, list[tuple[Request, str]]]:
    """A request that is admitted, and who had to leave for it; they are retired as is due."""
    request = request_of(lane, rows, arrived_ns=NOW, **terms)
    lane.require_open(request, NOW)
    gone = lane.put(request, NOW)
    lane.queue.validate()
    for victim, _ in gone:
        assert not victim.is_waiting and victim is not request
        lane.retire(victim)
    return request, [(victim, error.code) for victim, error in gone]


def come_as_part(lane: Lane, **terms: Any) -> Request:
    """A further part of a batch, that is admitted and for which nobody has to leave."""
    part = request_of(lane, arrived_ns=NOW, is_part=True, **terms)
    lane.require_open(part, NOW)
    assert lane.put(part, NOW) == []
    lane.queue.validate()
    return part


def test_the_oldest_gives_way_where_that_is_wanted() -> None:
    """Whatever its rank; as many as the newcomer needs, and no more; none that is worth more."""
    lane = open_lane(overflow="drop_oldest", queue_rows=10)
    urgent, first, second, third = (put(lane, 2, now_ns=NOW, priority=p) for p in (0, 5, 9, 5))

    _, gone = come(lane, 2)
    assert gone == []
    _, gone = come(lane, 3, priority=5)
    assert gone == [(first, "dropped"), (second, "dropped")]
    assert urgent.is_waiting and third.is_waiting and lane.queue.rows == 9


def test_what_is_urgent_does_not_give_way_to_what_is_less() -> None:
    """However old it is; the oldest of the others does, and nobody where there is none."""
    lane = open_lane(overflow="drop_oldest", queue_requests=2)
    urgent, idle = (put(lane, now_ns=NOW, urgency=urgency) for urgency in (0.9, 0.1))

    assert come(lane, urgency=0.5)[1] == [(idle, "dropped")]
    with pytest.raises(IskanderError) as caught:
        come(lane, urgency=0.4)
    assert caught.value.code == "queue_full" and urgent.is_waiting
    assert come(lane, urgency=0.9)[1] == [(urgent, "dropped")]


def test_a_higher_priority_goes_before_any_urgency() -> None:
    lane = open_lane(overflow="drop_oldest", queue_requests=1)
    low = put(lane, now_ns=NOW, priority=9, urgency=1.0)
    assert come(lane, priority=0, urgency=0.0)[1] == [(low, "dropped")]


def test_a_search_for_one_that_gives_way_has_an_end() -> None:
    lane = open_lane(overflow="drop_oldest", queue_requests=PASSED_MAX + 1)
    for _ in range(PASSED_MAX):
        put(lane, now_ns=NOW, urgency=1.0)
    behind = put(lane, now_ns=NOW)
    with pytest.raises(IskanderError):
        come(lane)
    assert behind.is_waiting


def test_the_newest_of_the_lowest_priority_gives_way_where_that_is_wanted() -> None:
    lane = open_lane(overflow="drop_lowest_priority", queue_requests=4)
    old, new, high, middle = (put(lane, now_ns=NOW, priority=p) for p in (7, 7, 0, 5))

    for newcomer, victim in ((6, new), (1, old)):
        _, gone = come(lane, priority=newcomer)
        assert gone == [(victim, "dropped")]
    assert high.is_waiting and middle.is_waiting


@pytest.mark.parametrize(
    ("overflow", "priority"),
    [
        *(("drop_lowest_priority", priority) for priority in (5, 6, 9)),
        *(("drop_oldest", priority) for priority in (6, 9)),
    ],
)
def test_nobody_gives_way_to_one_that_is_not_worth_it(overflow: str, priority: int) -> None:
    """To one of its own priority does the oldest only."""
    lane = open_lane(overflow=overflow, queue_requests=2)
    waits = [put(lane, now_ns=NOW, priority=p) for p in (5, 0)]

    with pytest.raises(IskanderError) as caught:
        come(lane, priority=priority)

    assert caught.value.code == "queue_full"
    assert list(lane.queue) == [waits[1], waits[0]] and lane.queue.requests == 2


@pytest.mark.parametrize(
    ("overflow", "settings"),
    [
        ("reject", {"queue_rows": 10}),
        ("reject", {"queue_requests": 3}),
        ("drop_oldest", {"queue_rows": 10}),
        ("drop_oldest", {"queue_requests": 3}),
        ("drop_lowest_priority", {"queue_rows": 10}),
        ("drop_lowest_priority", {"queue_requests": 3}),
    ],
)
def test_a_limit_holds_whoever_gives_way(overflow: str, settings: dict[str, int]) -> None:
    lane = open_lane(overflow=overflow, **settings)
    for index in range(60):
        try:
            come(lane, 1 + index % 3, priority=index % 10)
        except IskanderError as error:
            assert error.code == "queue_full"
        assert len(lane.queue) <= settings.get("queue_requests", 99)
        assert lane.queue.rows <= settings.get("queue_rows", 99)


def test_nobody_gives_way_where_that_does_not_suffice() -> None:
    """One row of low priority waits among many of a high one, and fifty come."""
    lane = open_lane(overflow="drop_lowest_priority", queue_rows=100)
    for _ in range(99):
        put(lane, now_ns=NOW, priority=0)
    low = put(lane, now_ns=NOW, priority=9)

    with pytest.raises(IskanderError):
        come(lane, 50, priority=0)

    assert low.is_waiting and lane.queue.rows == 100


@pytest.mark.parametrize("limit", ["queue_rows", "queue_bytes"])
def test_nobody_gives_way_to_what_would_not_fit_an_empty_queue(limit: str) -> None:
    lane = open_lane(overflow="drop_oldest", **{limit: 80 if limit == "queue_bytes" else 10})
    waits = [put(lane, now_ns=NOW) for _ in range(10)]

    with pytest.raises(IskanderError) as caught:
        come(lane, 11)

    assert caught.value.code == "queue_full" and list(lane.queue) == waits


def test_the_newest_of_a_client_takes_the_place_of_its_older_one_that_waits() -> None:
    """Of no other client's, and of none that runs."""
    lane = open_lane()
    older, _ = come(lane, client="a", is_newest_wins=True)
    other, _ = come(lane, client="b", is_newest_wins=True)

    newest, gone = come(lane, client="a", is_newest_wins=True)
    assert gone == [(older, "superseded")]
    lane.take(newest, 1)
    _, gone = come(lane, client="a", is_newest_wins=True)
    assert gone == [] and other.is_waiting


@pytest.mark.parametrize("settings", [{}, {"newest_wins": True}])
def test_the_newest_wins_where_the_lane_or_the_client_says_so(settings: dict[str, bool]) -> None:
    lane = open_lane(**settings)
    come(lane, client="a")

    _, gone = come(lane, client="a")

    assert [code for _, code in gone] == ["superseded"] * len(settings)


@pytest.mark.parametrize("policy", ["fifo", "deadline_aware", "round_robin"])
def test_who_takes_the_place_of_an_older_one_takes_its_turn(policy: str) -> None:
    """Six others wait for each that is served. A client that sends one all the time is served as
    often as any of them; it would never be if each of its requests began to wait anew, and nobody
    else if it paid for none of them."""
    lane = open_lane(policy=policy)
    order: list[str] = []
    for turn in range(350):
        names = {"robot", *(f"other {index}" for index in range(6))}
        names -= {request.terms.client for request in lane.queue}
        for name in sorted(names | {"robot"}):
            is_robot = name == "robot"
            now_ns = NOW + turn * MS
            request = request_of(lane, client=name, is_newest_wins=is_robot, arrived_ns=now_ns)
            for older, _ in lane.put(request, now_ns):
                lane.retire(older)
        first = next(iter(lane.queue))
        lane.take(first, 1)
        order.append(first.terms.client)

    assert order.count("robot") == pytest.approx(50, abs=2)


@pytest.mark.parametrize("policy", ["fifo", "deadline_aware", "round_robin"])
def test_who_takes_the_place_of_one_that_has_begun_to_run_waits_anew(policy: str) -> None:
    """A client whose batches are never done, as a newer one comes first, is not always next."""
    lane = open_lane(policy=policy)
    come(lane, 12, client="robot", is_newest_wins=True)
    others = [put(lane, now_ns=NOW + MS, client="other") for _ in range(2)]
    for turn in range(2, 6):
        lane.take(next(iter(lane.queue)), 8)
        later = {"client": "robot", "is_newest_wins": True, "now_ns": NOW + turn * MS}
        put(lane, 12, **later)

    assert not any(other.is_waiting for other in others)


def test_in_a_full_queue_the_newest_has_the_place_of_its_older_one() -> None:
    lane = open_lane(queue_requests=2)
    older, _ = come(lane, client="a", is_newest_wins=True)
    put(lane, now_ns=NOW)

    _, gone = come(lane, client="a", is_newest_wins=True)

    assert gone == [(older, "superseded")]


def test_the_parts_of_a_batch_take_nobody_s_place_and_are_its_own() -> None:
    """A newer batch has that of an older one as long as the last part of it waits."""
    lane = open_lane(newest_wins=True)
    first, gone = come(lane, client="a")
    parts = [come_as_part(lane, client="a") for _ in range(2)]
    assert gone == [] and first.is_waiting and all(part.is_waiting for part in parts)
    lane.take(first, 1)

    newer, gone = come(lane, client="a")
    assert gone == [(parts[-1], "superseded")]
    lane.queue.remove(parts[0])
    lane.retire(parts[0])
    part = come_as_part(lane, client="a")

    assert newer.is_waiting and part.is_waiting


def test_the_parts_of_a_batch_do_not_give_way_to_each_other() -> None:
    """To the second one another does; for the third there is no place."""
    lane, caller = open_lane(overflow="drop_oldest", queue_requests=2), RecordingCaller()
    first, *parts = (request_of(lane, caller=caller, is_part=bool(index)) for index in range(3))
    lane.put(first, NOW)
    other = put(lane, now_ns=NOW)

    assert [victim for victim, _ in lane.put(parts[0], NOW)] == [other]
    with pytest.raises(QueueFull):
        lane.require_open(parts[1], NOW)
    assert first.is_waiting and parts[0].is_waiting


def test_a_batch_in_parts_is_let_in_as_one_and_has_one_beat() -> None:
    lane = open_lane(client_requests=1)
    first, _ = come(lane, client="a", is_named=True)
    part = come_as_part(lane, client="a", is_named=True)
    heard: Any = []
    lane.arrivals.observe = lambda *said: heard.append(said)  # type: ignore[method-assign]
    for request in (first, part):
        lane.observe_arrival(request)

    assert len(heard) == 1
    with pytest.raises(IskanderError) as caught:
        come(lane, client="a")
    assert caught.value.code == "client_over_share"
    assert come(lane, client="b")[1] == []


def test_what_came_and_what_is_outstanding_is_counted() -> None:
    lane = open_lane()
    requests = [come(lane, 3, client=client)[0] for client in ("a", "a", "b")]
    assert (lane.counts["requests"], lane.counts["rows"]) == (3, 9)
    assert lane.outstanding == {"a": 2, "b": 1}

    for request in requests:
        lane.retire(request)
    assert lane.outstanding == {}
    assert [request.number for request in requests] == [1, 2, 3]


def test_of_a_client_whose_requests_are_answered_nothing_is_kept() -> None:
    lane: Any = open_lane(newest_wins=True)
    for index in range(50):
        request, _ = come(lane, client=f"c{index}")
        lane.take(request, 1)
        lane.retire(request)

    assert lane.outstanding == lane._newest == {}


def test_a_worker_that_has_run_nothing_costs_what_another_does() -> None:
    lane = open_lane()
    first, second = (Worker(SlotPlan(index, 0, (0,), None)) for index in range(2))
    assert lane.cost_of(first).samples == 0
    lane.costs[0].observe(1, 7)

    assert lane.cost_of(second) is lane.costs[0]
    lane.costs[1].observe(1, 9)
    assert lane.cost_of(second) is lane.costs[1]


def test_a_backlog_is_that_of_the_worker_that_is_free_first() -> None:
    lane = open_lane()
    lane.workers[2] = Worker(SlotPlan(1, 0, (0,), None))
    lane.workers[1].busy_until_ns, lane.workers[2].busy_until_ns = 50, 40

    assert lane.backlog(NOW)[1:] == (2, 40)
    lane.workers.clear()
    assert lane.backlog(NOW)[1:] == (0, NOW)


@pytest.mark.parametrize(
    ("settings", "rows_fixed", "rows_max", "sizes"),
    [
        ({}, None, 8, ()),
        ({"pad_to": (4, 2, 4)}, None, 4, (2, 4)),
        ({"pad_to": (2, 4)}, 6, 6, (6,)),
        ({}, 16, 16, (16,)),
    ],
)
def test_rules_come_from_settings_and_contract(
    settings: dict[str, Any], rows_fixed: int | None, rows_max: int, sizes: tuple[int, ...]
) -> None:
    contract = Contract(CONTRACT.inputs, CONTRACT.outputs, rows_fixed=rows_fixed)

    rules = lane_of(rows_max=8, contract=contract, **settings).rules

    assert (rules.rows_max, rules.sizes) == (rows_max, sizes)


def test_sizes_to_fill_up_to_do_not_raise_what_a_batch_may_have() -> None:
    assert lane_of(rows_max=8, pad_to=(4, 4096)).rules.rows_max <= 8


@pytest.mark.parametrize(
    ("settings", "linger_ns"),
    [
        ({}, 0),
        ({"linger_us": 7}, 7_000),
        ({"policy": "batch_optimized"}, BATCH_LINGER_NS),
        ({"policy": "batch_optimized", "linger_us": 7}, 7_000),
    ],
)
def test_how_long_batches_linger(settings: dict[str, Any], linger_ns: int) -> None:
    assert lane_of(**settings).rules.linger_ns == linger_ns


def test_preferred_sizes_are_those_that_a_batch_may_have() -> None:
    assert lane_of(rows_max=8, preferred_batch_rows=(16, 8, 4)).rules.preferred == (4, 8)


@pytest.mark.parametrize("refuse_late", [True, False])
@pytest.mark.parametrize(("idle_ns", "is_doomed"), [(PROBE_NS - 1, True), (PROBE_NS, False)])
def test_by_a_cost_that_is_old_nothing_is_doomed(
    refuse_late: bool, idle_ns: int, is_doomed: bool
) -> None:
    """Where everything is refused nothing is learned; so now and then one is let in."""
    lane = open_lane(refuse_late=refuse_late)
    worker = lane.workers[1]
    lane.cost_of(worker)
    lane.on_ran(worker, 1, 50 * MS, NOW)
    request = put(lane, now_ns=NOW + idle_ns, budget_ms=20.0)

    doomed = lane.form(worker, NOW + idle_ns).doomed

    assert doomed == [request] * (is_doomed and refuse_late)


@pytest.mark.parametrize(
    ("settings", "terms", "call_ms", "deadline_ms", "expires_ms"),
    [
        ({}, {}, None, None, 30_000),
        ({"ttl_ms": 0.0}, {}, None, None, None),
        ({}, {"budget_ms": 20.0}, None, 20, 20),
        ({}, {"budget_ms": 20.0}, 5, 5, 5),
        ({"deadline_ms": 40.0}, {}, None, 40, 40),
        ({"deadline_ms": 40.0}, {"budget_ms": 50.0}, None, 50, 50),
        ({}, {"ttl_ms": 7.0}, None, None, 7),
        ({"ttl_ms": 3.0}, {"ttl_ms": 7.0, "budget_ms": 20.0}, None, 20, 3),
        ({"staleness_ms": 10.0}, {"age_ms": 4.0}, None, None, 6),
        ({"staleness_ms": 10.0}, {"age_ms": 14.0}, None, None, -4),
        ({"staleness_ms": 10.0}, {}, 8, 8, 8),
    ],
)
def test_the_soonest_of_all_limits_is_a_requests_own(
    settings: dict[str, Any],
    terms: dict[str, Any],
    call_ms: int | None,
    deadline_ms: int | None,
    expires_ms: int | None,
) -> None:
    """What the lane, the client and the call say; a deadline is also when it expires."""
    request = Request(
        lane_of(**settings),
        request_of(lane_of()).caller,
        1,
        [],
        terms=request_of(lane_of(), **terms).terms,
        arrived_ns=NOW,
        call_deadline_ns=NEVER_NS if call_ms is None else NOW + call_ms * MS,
    )

    assert request.deadline_ns == (NEVER_NS if deadline_ms is None else NOW + deadline_ms * MS)
    assert request.expires_ns == (NEVER_NS if expires_ms is None else NOW + expires_ms * MS)


def hear(lane: Lane, client: str = "robot", *, is_named: bool = True, **terms: Any) -> int:
    """Requests of a client, one each 20 ms; returns when the next one is expected."""
    for index in range(10):
        arrived_ns = NOW + index * 20 * MS
        lane.observe_arrival(
            request_of(lane, client=client, is_named=is_named, arrived_ns=arrived_ns, **terms)
        )
    return NOW + 200 * MS


@pytest.mark.parametrize("budget_ms", [4.0, None])
def test_clients_with_names_have_rhythms_and_those_with_deadlines_are_expected(
    budget_ms: float | None,
) -> None:
    lane = open_lane()
    for is_named in (True, False):
        expected_ns = hear(lane, f"c{is_named}", is_named=is_named, budget_ms=budget_ms)

    assert lane.arrivals.clients() == [("cTrue", 20 * MS, 9)]
    expected = [] if budget_ms is None else [(expected_ns, expected_ns + 4 * MS)]
    assert list(lane.arrivals.expected(expected_ns - MS)) == expected


def test_the_deadline_of_the_lane_is_one_that_is_expected_too() -> None:
    lane = open_lane(deadline_ms=6.0)
    expected_ns = hear(lane)

    assert list(lane.arrivals.expected(expected_ns)) == [(expected_ns, expected_ns + 6 * MS)]


@pytest.mark.parametrize(("budget_ms", "is_held"), [(2.5, True), (4.0, False)])
def test_an_idle_worker_waits_for_a_robot_that_would_be_late_otherwise(
    budget_ms: float, is_held: bool
) -> None:
    """A run takes 2 ms; the robot would have to wait for 1.2 ms and then for another."""
    lane = open_lane()
    lane.costs[0] = cost_of(1_000, 2 * MS)
    worker = lane.workers[1]
    expected_ns = hear(lane, budget_ms=budget_ms)

    now_ns = expected_ns - MS
    put(lane, now_ns=now_ns, client="other", budget_ms=30.0)

    assert lane.form(worker, now_ns).hold_ns == expected_ns * is_held
    # One that is busy until the robot comes, and after, does not wait for it.
    worker.in_flight[1] = None  # type: ignore[assignment]
    worker.busy_until_ns = expected_ns
    kept = lane.form(worker, now_ns)
    assert kept.is_kept and kept.hold_ns < expected_ns


def test_a_client_whose_requests_are_refused_has_a_rhythm() -> None:
    """Who is too late by itself is whom a batch is held for."""
    lane = open_lane(queue_requests=1)
    put(lane, now_ns=NOW)
    for index in range(10):
        arrived_ns = NOW + index * 20 * MS
        request = request_of(
            lane, client="robot", is_named=True, arrived_ns=arrived_ns, budget_ms=3.0
        )
        lane.observe_arrival(request)
        with pytest.raises(IskanderError):
            lane.require_open(request, arrived_ns)

    assert lane.arrivals.clients() == [("robot", 20 * MS, 9)]
    assert len(list(lane.arrivals.expected(NOW + 199 * MS))) == 1


def test_the_rhythm_of_a_client_is_part_of_its_rank() -> None:
    """And to put a request is not to hear another: its rhythm stays as it is."""
    lane = open_lane(policy="model_deadline")
    at_ns = hear(lane, budget_ms=100.0)

    ranks = [
        put(lane, now_ns=at_ns, client="robot", is_named=is_named, budget_ms=100.0).rank
        for is_named in (True, False)
    ]

    assert ranks[0] < ranks[1]
    assert lane.arrivals.clients() == [("robot", 20 * MS, 9)]


def test_a_lane_is_ready_with_its_quorum_and_open_with_any() -> None:
    lane = Lane(open_lane().model, LaneConfig(), quorum=2)
    assert (lane.is_open, lane.is_ready) == (False, False)
    for index, wanted in ((0, (True, False)), (1, (True, True))):
        lane.workers[index] = Worker(SlotPlan(index, 0, (0,), None))
        assert (lane.is_open, lane.is_ready) == wanted
    assert list(lane.ready) == [0, 1]
