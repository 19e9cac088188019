"""Lane: eviction, replacement, counters, batching rules, deadlines and arrival rhythms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.lanes import CONTRACT, MS, RecordingCaller, cost_of, lane_of, put, queue, request_of

from iskander.config.models import LaneConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import Cancelled, ContractError, IskanderError, QueueFull
from iskander.gateway.scheduling.lanes.admission import PASSED_MAX
from iskander.gateway.scheduling.lanes.lane import PROBE_NS, Lane
from iskander.gateway.scheduling.lanes.policies import BATCH_LINGER_NS
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.gateway.supervision.worker import SlotPlan, Worker

NOW = 1_000 * MS


def open_lane(**settings: Any) -> Lane:
    lane = lane_of(rows_max=8, **settings)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    return lane


def admit(lane: Lane, rows: int = 1, **terms: Any) -> tuple[Request, list[tuple[Request, str]]]:
    """Admits a request; returns it and the evicted requests, which are retired."""
    request = request_of(lane, rows, arrived_ns=NOW, **terms)
    evicted = lane.put(request, NOW, lane.check(request, NOW))
    lane.queue.validate()
    for victim, _ in evicted:
        assert not victim.is_waiting and victim is not request
        lane.retire(victim)
    return request, [(victim, error.code) for victim, error in evicted]


def admit_portion(lane: Lane, **terms: Any) -> Request:
    """Admits a further portion of a batch; requires that it evicts no request."""
    portion = request_of(lane, arrived_ns=NOW, is_part=True, **terms)
    assert lane.put(portion, NOW, lane.check(portion, NOW)) == []
    lane.queue.validate()
    return portion


def test_drop_oldest_evicts_the_oldest_request() -> None:
    """Rank does not matter; as many as necessary, and none of a higher priority."""
    lane = open_lane(overflow="drop_oldest", queue_rows=10)
    urgent, first, second, third = (put(lane, 2, now_ns=NOW, priority=p) for p in (0, 5, 9, 5))

    _, evicted = admit(lane, 2)
    assert evicted == []
    _, evicted = admit(lane, 3, priority=5)
    assert evicted == [(first, "dropped"), (second, "dropped")]
    assert urgent.is_waiting and third.is_waiting and lane.queue.rows == 9


def test_drop_oldest_does_not_evict_a_more_urgent_request() -> None:
    """Age does not matter; without a less urgent request the new one is rejected."""
    lane = open_lane(overflow="drop_oldest", queue_requests=2)
    urgent, idle = (put(lane, now_ns=NOW, urgency=urgency) for urgency in (0.9, 0.1))

    assert admit(lane, urgency=0.5)[1] == [(idle, "dropped")]
    with pytest.raises(IskanderError) as caught:
        admit(lane, urgency=0.4)
    assert caught.value.code == "queue_full" and urgent.is_waiting
    assert admit(lane, urgency=0.9)[1] == [(urgent, "dropped")]


def test_eviction_compares_priority_before_urgency() -> None:
    lane = open_lane(overflow="drop_oldest", queue_requests=1)
    low = put(lane, now_ns=NOW, priority=9, urgency=1.0)
    assert admit(lane, priority=0, urgency=0.0)[1] == [(low, "dropped")]


def test_search_for_a_victim_is_bounded() -> None:
    lane = open_lane(overflow="drop_oldest", queue_requests=PASSED_MAX + 1)
    for _ in range(PASSED_MAX):
        put(lane, now_ns=NOW, urgency=1.0)
    behind = put(lane, now_ns=NOW)
    with pytest.raises(IskanderError):
        admit(lane)
    assert behind.is_waiting


def test_drop_lowest_priority_evicts_the_newest_request_of_it() -> None:
    lane = open_lane(overflow="drop_lowest_priority", queue_requests=4)
    old, new, high, middle = (put(lane, now_ns=NOW, priority=p) for p in (7, 7, 0, 5))

    for new_priority, victim in ((6, new), (1, old)):
        _, evicted = admit(lane, priority=new_priority)
        assert evicted == [(victim, "dropped")]
    assert high.is_waiting and middle.is_waiting


@pytest.mark.parametrize(
    ("overflow", "priority"),
    [
        *(("drop_lowest_priority", priority) for priority in (5, 6, 9)),
        *(("drop_oldest", priority) for priority in (6, 9)),
    ],
)
def test_no_eviction_for_a_request_of_too_low_priority(overflow: str, priority: int) -> None:
    """With `drop_oldest`, a request of equal priority does evict the oldest."""
    lane = open_lane(overflow=overflow, queue_requests=2)
    queued = [put(lane, now_ns=NOW, priority=p) for p in (5, 0)]

    with pytest.raises(IskanderError) as caught:
        admit(lane, priority=priority)

    assert caught.value.code == "queue_full"
    assert list(lane.queue) == [queued[1], queued[0]] and lane.queue.requests == 2


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
def test_queue_limits_hold_for_every_overflow_setting(
    overflow: str, settings: dict[str, int]
) -> None:
    lane = open_lane(overflow=overflow, **settings)
    for index in range(60):
        try:
            admit(lane, 1 + index % 3, priority=index % 10)
        except IskanderError as error:
            assert error.code == "queue_full"
        assert len(lane.queue) <= settings.get("queue_requests", 99)
        assert lane.queue.rows <= settings.get("queue_rows", 99)


def test_no_eviction_if_it_frees_too_little() -> None:
    """One low-priority row is queued with 99 of high priority; a request of 50 rows arrives."""
    lane = open_lane(overflow="drop_lowest_priority", queue_rows=100)
    for _ in range(99):
        put(lane, now_ns=NOW, priority=0)
    low = put(lane, now_ns=NOW, priority=9)

    with pytest.raises(IskanderError):
        admit(lane, 50, priority=0)

    assert low.is_waiting and lane.queue.rows == 100


@pytest.mark.parametrize("limit", ["queue_rows", "queue_bytes"])
def test_no_eviction_for_a_request_larger_than_the_queue(limit: str) -> None:
    lane = open_lane(overflow="drop_oldest", **{limit: 80 if limit == "queue_bytes" else 10})
    queued = [put(lane, now_ns=NOW) for _ in range(10)]

    with pytest.raises(IskanderError) as caught:
        admit(lane, 11)

    assert caught.value.code == "queue_full" and list(lane.queue) == queued


def test_newest_request_of_a_client_replaces_its_queued_one() -> None:
    """It replaces no running request, and none of another client."""
    lane = open_lane()
    older, _ = admit(lane, client="a", is_newest_wins=True)
    other, _ = admit(lane, client="b", is_newest_wins=True)

    newest, evicted = admit(lane, client="a", is_newest_wins=True)
    assert evicted == [(older, "superseded")]
    lane.take(newest, 1)
    _, evicted = admit(lane, client="a", is_newest_wins=True)
    assert evicted == [] and other.is_waiting


@pytest.mark.parametrize("settings", [{}, {"newest_wins": True}])
def test_newest_wins_applies_if_the_lane_sets_it(settings: dict[str, bool]) -> None:
    lane = open_lane(**settings)
    admit(lane, client="a")

    _, evicted = admit(lane, client="a")

    assert [code for _, code in evicted] == ["superseded"] * len(settings)


@pytest.mark.parametrize("policy", ["fifo", "deadline_aware", "round_robin"])
def test_replacing_request_keeps_the_rank_of_the_replaced_one(policy: str) -> None:
    """A client that sends all the time is served as often as each of six others.

    With a new rank for each request it would starve; without a charge the others would.
    """
    lane = open_lane(policy=policy)
    order: list[str] = []
    for turn in range(350):
        names = {"robot", *(f"other {index}" for index in range(6))}
        names -= {request.terms.client for request in lane.queue}
        for name in sorted(names | {"robot"}):
            is_robot = name == "robot"
            now_ns = NOW + turn * MS
            request = request_of(lane, client=name, is_newest_wins=is_robot, arrived_ns=now_ns)
            for older, _ in queue(lane, request, now_ns):
                lane.retire(older)
        first = next(iter(lane.queue))
        lane.take(first, 1)
        order.append(first.terms.client)

    assert order.count("robot") == pytest.approx(50, abs=2)


@pytest.mark.parametrize("policy", ["fifo", "deadline_aware", "round_robin"])
def test_request_that_replaces_a_running_one_gets_a_new_rank(policy: str) -> None:
    """A client that replaces each batch before it completes is not always next."""
    lane = open_lane(policy=policy)
    admit(lane, 12, client="robot", is_newest_wins=True)
    others = [put(lane, now_ns=NOW + MS, client="other") for _ in range(2)]
    for turn in range(2, 6):
        lane.take(next(iter(lane.queue)), 8)
        later = {"client": "robot", "is_newest_wins": True, "now_ns": NOW + turn * MS}
        put(lane, 12, **later)

    assert not any(other.is_waiting for other in others)


def test_newest_request_replaces_its_older_one_in_a_full_queue() -> None:
    lane = open_lane(queue_requests=2)
    older, _ = admit(lane, client="a", is_newest_wins=True)
    put(lane, now_ns=NOW)

    _, evicted = admit(lane, client="a", is_newest_wins=True)

    assert evicted == [(older, "superseded")]


def test_portions_of_a_batch_do_not_replace_each_other() -> None:
    """A newer batch replaces the last portion of an older one while that is queued."""
    lane = open_lane(newest_wins=True)
    first, evicted = admit(lane, client="a")
    portions = [admit_portion(lane, client="a") for _ in range(2)]
    assert evicted == [] and first.is_waiting and all(portion.is_waiting for portion in portions)
    lane.take(first, 1)

    newer, evicted = admit(lane, client="a")
    assert evicted == [(portions[-1], "superseded")]
    lane.queue.remove(portions[0])
    lane.retire(portions[0])
    portion = admit_portion(lane, client="a")

    assert newer.is_waiting and portion.is_waiting


def test_portions_of_a_batch_do_not_evict_each_other() -> None:
    """The second portion evicts another request; the third is rejected."""
    lane, caller = open_lane(overflow="drop_oldest", queue_requests=2), RecordingCaller()
    first, *portions = (request_of(lane, caller=caller, is_part=bool(index)) for index in range(3))
    queue(lane, first, NOW)
    other = put(lane, now_ns=NOW)

    assert [victim for victim, _ in queue(lane, portions[0], NOW)] == [other]
    with pytest.raises(QueueFull):
        lane.check(portions[1], NOW)
    assert first.is_waiting and portions[0].is_waiting


def test_portions_of_a_batch_count_as_one_request_and_one_arrival() -> None:
    lane = open_lane(client_requests=1)
    first, _ = admit(lane, client="a", is_named=True)
    portion = admit_portion(lane, client="a", is_named=True)
    observed: Any = []
    lane.arrivals.observe = lambda *args: observed.append(args)  # type: ignore[method-assign]
    for request in (first, portion):
        lane.observe_arrival(request)

    assert len(observed) == 1
    with pytest.raises(IskanderError) as caught:
        admit(lane, client="a")
    assert caught.value.code == "client_over_share"
    assert admit(lane, client="b")[1] == []


def test_arrived_and_outstanding_requests_are_counted() -> None:
    lane = open_lane()
    requests = [admit(lane, 3, client=client)[0] for client in ("a", "a", "b")]
    assert (lane.counts["requests"], lane.counts["rows"]) == (3, 9)
    assert lane.outstanding == {"a": 2, "b": 1}

    for request in requests:
        lane.retire(request)
    assert lane.outstanding == {}
    assert [request.number for request in requests] == [1, 2, 3]


def test_no_state_is_kept_of_clients_without_outstanding_requests() -> None:
    lane: Any = open_lane(newest_wins=True)
    for index in range(50):
        request, _ = admit(lane, client=f"c{index}")
        lane.take(request, 1)
        lane.retire(request)

    assert lane.outstanding == lane._newest == {}


def test_worker_without_runs_uses_the_cost_model_of_another() -> None:
    lane = open_lane()
    first, second = (Worker(SlotPlan(index, 0, (0,), None)) for index in range(2))
    assert lane.cost_of(first).samples == 0
    lane.costs[0].observe(1, 7)

    assert lane.cost_of(second) is lane.costs[0]
    lane.costs[1].observe(1, 9)
    assert lane.cost_of(second) is lane.costs[1]


def test_backlog_begins_when_the_first_worker_is_free() -> None:
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


def test_pad_to_does_not_raise_rows_max() -> None:
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
def test_linger_comes_from_the_setting_or_the_policy(
    settings: dict[str, Any], linger_ns: int
) -> None:
    assert lane_of(**settings).rules.linger_ns == linger_ns


def test_preferred_sizes_above_rows_max_are_ignored() -> None:
    assert lane_of(rows_max=8, preferred_batch_rows=(16, 8, 4)).rules.preferred == (4, 8)


@pytest.mark.parametrize("refuse_late", [True, False])
@pytest.mark.parametrize(("idle_ns", "is_doomed"), [(PROBE_NS - 1, True), (PROBE_NS, False)])
def test_outdated_cost_dooms_no_request(refuse_late: bool, idle_ns: int, is_doomed: bool) -> None:
    """Without runs no cost is learned, so one request is admitted from time to time."""
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
def test_earliest_limit_sets_deadline_and_expiry(
    settings: dict[str, Any],
    terms: dict[str, Any],
    call_ms: int | None,
    deadline_ms: int | None,
    expires_ms: int | None,
) -> None:
    """Limits of the lane, the client and the call; a request also expires at its deadline."""
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


def observe_regular(
    lane: Lane, client: str = "robot", *, is_named: bool = True, **terms: Any
) -> int:
    """Records requests of a client, one per 20 ms; returns the expected time of the next."""
    for index in range(10):
        arrived_ns = NOW + index * 20 * MS
        lane.observe_arrival(
            request_of(lane, client=client, is_named=is_named, arrived_ns=arrived_ns, **terms)
        )
    return NOW + 200 * MS


@pytest.mark.parametrize("budget_ms", [4.0, None])
def test_named_clients_have_rhythms_and_predictions_need_deadlines(
    budget_ms: float | None,
) -> None:
    lane = open_lane()
    for is_named in (True, False):
        expected_ns = observe_regular(lane, f"c{is_named}", is_named=is_named, budget_ms=budget_ms)

    assert lane.arrivals.clients() == [("cTrue", 20 * MS, 9)]
    expected = [] if budget_ms is None else [(expected_ns, expected_ns + 4 * MS)]
    assert list(lane.arrivals.expected(expected_ns - MS)) == expected


def test_deadline_of_the_lane_suffices_for_a_prediction() -> None:
    lane = open_lane(deadline_ms=6.0)
    expected_ns = observe_regular(lane)

    assert list(lane.arrivals.expected(expected_ns)) == [(expected_ns, expected_ns + 6 * MS)]


@pytest.mark.parametrize(("budget_ms", "is_held"), [(2.5, True), (4.0, False)])
def test_batch_is_held_for_a_client_that_would_be_late_otherwise(
    budget_ms: float, is_held: bool
) -> None:
    """A run takes 2 ms; without a hold the robot waits 1.2 ms and then for a second run."""
    lane = open_lane()
    lane.costs[0] = cost_of(1_000, 2 * MS)
    worker = lane.workers[1]
    expected_ns = observe_regular(lane, budget_ms=budget_ms)

    now_ns = expected_ns - MS
    put(lane, now_ns=now_ns, client="other", budget_ms=30.0)

    assert lane.form(worker, now_ns).hold_ns == expected_ns * is_held
    # A worker that is busy until then is not held for the robot.
    worker.in_flight[1] = None  # type: ignore[assignment]
    worker.busy_until_ns = expected_ns
    kept = lane.form(worker, now_ns)
    assert kept.reserves_worker and kept.hold_ns < expected_ns


def test_rhythm_is_learned_from_rejected_requests() -> None:
    """A hold helps the clients that are rejected as late without it."""
    lane = open_lane(queue_requests=1)
    put(lane, now_ns=NOW)
    for index in range(10):
        arrived_ns = NOW + index * 20 * MS
        request = request_of(
            lane, client="robot", is_named=True, arrived_ns=arrived_ns, budget_ms=3.0
        )
        lane.observe_arrival(request)
        with pytest.raises(IskanderError):
            lane.check(request, arrived_ns)

    assert lane.arrivals.clients() == [("robot", 20 * MS, 9)]
    assert len(list(lane.arrivals.expected(NOW + 199 * MS))) == 1


def test_rhythm_of_a_client_changes_its_rank() -> None:
    """`put` is not an arrival: it does not change the rhythm."""
    lane = open_lane(policy="model_deadline")
    at_ns = observe_regular(lane, budget_ms=100.0)

    ranks = [
        put(lane, now_ns=at_ns, client="robot", is_named=is_named, budget_ms=100.0).rank
        for is_named in (True, False)
    ]

    assert ranks[0] < ranks[1]
    assert lane.arrivals.clients() == [("robot", 20 * MS, 9)]


def test_lane_is_ready_with_a_quorum_and_open_with_one_worker() -> None:
    lane = Lane(open_lane().model, LaneConfig(), quorum=2)
    assert (lane.is_open, lane.is_ready) == (False, False)
    for index, expected in ((0, (True, False)), (1, (True, True))):
        lane.workers[index] = Worker(SlotPlan(index, 0, (0,), None))
        assert (lane.is_open, lane.is_ready) == expected
    assert list(lane.ready) == [0, 1]


def test_contract_that_cannot_be_applied_is_not_set() -> None:
    """A faulty worker sent it; another worker may have a valid one."""
    lane = Lane(open_lane().model, LaneConfig())
    column = TensorSpec("x", "x", ColumnType("int64\0"), ())
    with pytest.raises(KeyError):
        lane.set_contract(Contract((column,), (column,)))
    assert lane.contract is None


DEPENDENT = RowRelation("dependent", "row 3 differs among other rows")


def whole_lane(rows_fixed: int | None = None) -> Lane:
    lane = open_lane()
    lane.set_contract(msgspec.structs.replace(CONTRACT, rows_fixed=rows_fixed), DEPENDENT)
    return lane


@pytest.mark.parametrize(
    ("rows_fixed", "rows", "code", "parts"),
    [
        (None, 9, "limit", ("9 rows, limit 8", "max_batch_rows", "row 3 differs", "combine")),
        (3, 2, "contract", ("exactly 3 rows", "got 2", "row 3 differs")),
        (3, 6, "contract", ("exactly 3 rows", "got 6")),
    ],
)
def test_request_that_cannot_run_as_a_whole(
    rows_fixed: int | None, rows: int, code: str, parts: tuple[str, ...]
) -> None:
    lane = whole_lane(rows_fixed)
    admit(lane, rows_fixed or 8)
    with pytest.raises(IskanderError) as caught:
        admit(lane, rows)
    assert caught.value.code == code and caught.value.fields["got"] == rows
    assert not caught.value.retryable
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_part_of_a_batch_does_not_run_as_a_whole() -> None:
    with pytest.raises(IskanderError) as caught:
        admit_portion(whole_lane())
    assert caught.value.code == "model_moved" and caught.value.retryable


def test_request_without_rows_is_answered_unless_the_rows_are_fixed() -> None:
    whole_lane().require_rows_optional()
    open_lane().require_rows_optional()
    with pytest.raises(IskanderError, match="exactly 3 rows"):
        whole_lane(3).require_rows_optional()


def test_weakest_measurement_of_the_workers_applies() -> None:
    lane = open_lane(pad_to=(4, 8))
    assert lane.rules.sizes == (4, 8) and not lane.rules.is_apart
    lane.weaken_relation(RowRelation("approximate", "2 % apart"))
    assert lane.rules.is_apart and not lane.rules.is_whole and lane.rules.sizes == (4, 8)
    lane.weaken_relation(DEPENDENT)
    assert lane.rules.is_whole and lane.rules.sizes == ()
    lane.weaken_relation(RowRelation("independent", ""))
    assert lane.rules.is_whole


def test_backlog_of_a_lane_that_combines_nothing_counts_its_requests() -> None:
    """Eight requests of a row are eight runs: late, where one batch would be in time."""
    for relation, is_late in ((None, False), (DEPENDENT, True)):
        lane = open_lane(refuse_late=True, policy="fifo")
        if relation is not None:
            lane.set_contract(CONTRACT, relation)
        lane.costs[0] = cost_of(0, 10 * MS)
        lane.ran_ns = NOW
        for _ in range(8):
            admit(lane)
        if is_late:
            with pytest.raises(IskanderError) as caught:
                admit(lane, budget_ms=50.0)
            assert caught.value.code == "deadline_unreachable"
        else:
            admit(lane, budget_ms=50.0)


def test_refusal_of_a_protocol_is_counted_once_and_a_withdrawal_is_none() -> None:
    lane = open_lane()
    error = ContractError("a wrong column")
    lane.count_refused(error)
    lane.count_refused(error)
    lane.count_refused(Cancelled("the client disconnected"))
    checked = request_of(lane, arrived_ns=NOW - 1, ttl_ms=0.000001)
    with pytest.raises(IskanderError) as caught:
        lane.check(checked, NOW)
    lane.count_refused(caught.value)
    refused = {name: count for name, count in lane.counts.items() if name.startswith("refused.")}
    assert refused == {"refused.contract": 1, f"refused.{caught.value.code}": 1}
