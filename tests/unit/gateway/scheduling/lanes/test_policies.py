"""Scheduling policies: rank formulas, and the bound on overtaking."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lanes import MS, lane_of, request_of

from iskander.config.models import LaneConfig
from iskander.errors import ConfigError
from iskander.gateway.scheduling.lanes import policies
from iskander.gateway.scheduling.lanes.policies import CLIENTS_MAX, POLICIES, Policy, make_policy
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import PRIORITY_MAX, Request

TIMEOUT_MS = 20
TIMEOUT = TIMEOUT_MS * MS
LANE = lane_of(ttl_ms=0)

# Bound on overtaking: how much later a request may arrive and still run first, in units of
# `patience_ms`. With `deadline_aware` it applies to requests without a deadline; a request with one
# is not overtaken by arrivals after its deadline. `round_robin` counts rows and has its own tests.
BOUNDS = {
    "fifo": 0,
    "batch_optimized": 0,
    "deadline_aware": 10,
    "model_deadline": 10,
    "tiered_deadline": 100,
    "priority_tiered": 90,
}
TERMS = st.fixed_dictionaries(
    {
        "priority": st.integers(0, PRIORITY_MAX),
        "urgency": st.floats(0, 1),
        "budget_ms": st.none() | st.floats(0, 3_600_000),
        "steps_remaining": st.none() | st.integers(0, 9),
    }
)


def policy_of(name: str) -> Policy:
    return make_policy(LaneConfig(policy=name, patience_ms=TIMEOUT_MS))


def rank_of(name: str, arrived_ns: int = 0, period_ns: int = 0, **terms: Any) -> int:
    request = request_of(LANE, arrived_ns=arrived_ns, **terms)
    return policy_of(name).rank(request, period_ns)


@pytest.mark.parametrize("name", ["fifo", "batch_optimized"])
@given(terms=TERMS, arrived_ns=st.integers(0, 1 << 50))
def test_rank_is_the_arrival_time(name: str, terms: dict[str, Any], arrived_ns: int) -> None:
    assert rank_of(name, arrived_ns, **terms) == arrived_ns


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100 * TIMEOUT_MS)), min_size=2))
def test_earliest_deadline_first_is_exact(
    requests: list[tuple[int, int]],
) -> None:
    """Priority and urgency do not change the order of requests with deadlines."""
    ranked = sorted(
        (rank_of("deadline_aware", at * MS, budget_ms=budget, priority=at % 10, urgency=1.0), at, b)
        for at, budget in requests
        for b in [budget]
    )

    deadlines = [(at + budget) * MS for _, at, budget in ranked]
    assert deadlines == sorted(deadlines) == [rank for rank, _, _ in ranked]


@pytest.mark.parametrize("name", ["model_deadline", "tiered_deadline"])
def test_far_deadline_counts_as_ten_times_patience(name: str) -> None:
    ranks = {rank_of(name, 7, budget_ms=10 * TIMEOUT_MS + extra) for extra in (0, 1, 10_000)}

    assert len(ranks) == 1 and max(ranks) <= 7 + 20 * TIMEOUT


@pytest.mark.parametrize(
    ("terms", "factor"),
    [
        ({"priority": 0}, 1),
        ({"priority": 9}, 10),
        ({}, 2),
        ({"priority": 1, "urgency": 0.5}, 1),
        ({"priority": 1, "urgency": 1.0}, 0),
        ({"priority": 1, "steps_remaining": 0}, 1),
        ({"priority": 1, "steps_remaining": 2}, 1.3),
        ({"priority": 1, "steps_remaining": 4}, 1.6),
        ({"priority": 1, "steps_remaining": 5}, 2),
        ({"priority": 3, "urgency": 0.25, "steps_remaining": 0}, 1.5),
    ],
)
def test_rank_without_a_deadline_uses_patience(terms: dict[str, Any], factor: float) -> None:
    assert rank_of("deadline_aware", 3, **terms) == 3 + int(factor * TIMEOUT)


@pytest.mark.parametrize(
    ("terms", "period", "score"),
    [
        ({"priority": 9}, 0, 0),
        ({"priority": 0}, 0, 10),
        ({"priority": 9, "urgency": 1.0}, 0, 25),
        ({"priority": 9, "steps_remaining": 0}, 0, 15),
        ({"priority": 9, "steps_remaining": 3}, 0, 6),
        ({"priority": 9}, 0.25, 45 * 0.75),
        ({"priority": 9}, 1, 0),
        ({"priority": 9}, 2, 0),
        ({"priority": 0, "urgency": 1.0, "steps_remaining": 0}, 0.5, 72.5),
    ],
)
@pytest.mark.parametrize("budget_ms", [None, 5, 50])
def test_model_deadline_shrinks_with_the_weights(
    terms: dict[str, Any], period: float, score: float, budget_ms: int | None
) -> None:
    """Weights: cadence 45, urgency 25, steps 15, priority 10; at most 9/10 of the budget."""
    budget_ns = TIMEOUT if budget_ms is None else budget_ms * MS

    rank = rank_of("model_deadline", 3, int(period * budget_ns), budget_ms=budget_ms, **terms)

    assert rank == pytest.approx(3 + budget_ns * (1 - 0.9 * score / 95), abs=2)


@given(terms=TERMS)
def test_tiers_differ_by_ten_times_patience(terms: dict[str, Any]) -> None:
    tier = terms["priority"] * 10 * TIMEOUT

    assert rank_of("priority_tiered", 5, **terms) == 5 + tier
    due_ns = min(rank_of("deadline_aware", 5, **terms), 5 + 10 * TIMEOUT)
    assert rank_of("tiered_deadline", 5, **terms) == due_ns + tier


@pytest.mark.parametrize("name", BOUNDS)
@given(old=TERMS, new=TERMS, extra=st.integers(0, 1 << 50))
def test_request_is_not_overtaken_by_arrivals_after_the_bound(
    name: str, old: dict[str, Any], new: dict[str, Any], extra: int
) -> None:
    """An endless stream of the most urgent requests overtakes a request only until the bound."""
    bound_ns = BOUNDS[name] * TIMEOUT
    if name == "deadline_aware" and old["budget_ms"] is not None:
        bound_ns = int(old["budget_ms"] * MS)

    assert rank_of(name, 0, **old) <= rank_of(name, bound_ns + extra, **new)


@pytest.mark.parametrize("name", [name for name, bound in BOUNDS.items() if bound])
def test_bound_on_overtaking_is_reached(name: str) -> None:
    """The most urgent request overtakes the least urgent one until 1% before the bound."""
    least = {"priority": 9, "budget_ms": None if name == "deadline_aware" else 3_600_000}
    most = {"priority": 0, "urgency": 1.0, "steps_remaining": 0, "budget_ms": 0}
    before = int(0.99 * BOUNDS[name] * TIMEOUT)

    assert rank_of(name, before, **most) < rank_of(name, 0, **least)


def test_endless_stream_of_urgent_requests_does_not_starve_a_request() -> None:
    """Two urgent requests arrive for each one that is served."""
    for name, bound in BOUNDS.items():
        policy, queue = policy_of(name), WaitingQueue()
        victim = request_of(LANE, priority=9)
        enqueue(queue, policy, victim, number=1)
        now_ns, number = 0, 1
        while victim.is_waiting:
            for _ in range(2):
                number += 1
                urgent = request_of(LANE, arrived_ns=now_ns, priority=0, urgency=1.0, budget_ms=0)
                enqueue(queue, policy, urgent, number)
            serve(queue, policy)
            now_ns += TIMEOUT // 10
            assert number < 20_000
        # It waits for the requests that arrived before the bound, at the rate of service.
        assert now_ns <= 2 * bound * TIMEOUT + TIMEOUT, name


def enqueue(queue: WaitingQueue, policy: Policy, request: Request, number: int) -> None:
    request.number = number
    request.rank = policy.rank(request, 0)
    policy.on_put(request)
    queue.put(request)


def serve(queue: WaitingQueue, policy: Policy) -> Request:
    request = next(iter(queue))
    policy.on_taken(request)
    queue.take(request, request.rows)
    return request


def serve_backlogged(rows: dict[str, list[int]], rounds: int) -> list[dict[str, int]]:
    """Rows served to each client after each round; each always has three requests queued."""
    policy, queue, served = policy_of("round_robin"), WaitingQueue(), dict.fromkeys(rows, 0)
    number, history = 0, []
    for turn in range(rounds):
        for client, sizes in rows.items():
            while sum(request.terms.client == client for request in queue) < 3:
                number += 1
                size = sizes[number % len(sizes)]
                enqueue(queue, policy, request_of(LANE, size, client=client), number)
        request = serve(queue, policy)
        served[request.terms.client] += request.rows
        history.append(dict(served))
        assert turn < rounds
    return history


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=2, max_size=5))
def test_served_rows_of_clients_differ_by_at_most_one_request(sizes: list[list[int]]) -> None:
    """Clients with small and with large requests, all of them with a backlog."""
    clients = {f"c{index}": each for index, each in enumerate(sizes)}

    for served in serve_backlogged(clients, 60):
        assert max(served.values()) - min(served.values()) <= max(map(max, sizes))


def test_client_that_sends_more_gets_no_more() -> None:
    """One client has a hundred requests queued, the others three; each is served in each round."""
    policy, queue = policy_of("round_robin"), WaitingQueue()
    clients = ["greedy"] * 100 + ["a"] * 3 + ["b"] * 3
    for number, client in enumerate(clients):
        enqueue(queue, policy, request_of(LANE, 4, client=client), number)

    first = [serve(queue, policy).terms.client for _ in range(9)]

    assert [first.count(client) for client in ("greedy", "a", "b")] == [3, 3, 3]


def test_idle_client_saves_up_no_share() -> None:
    """The other client was served in the meantime; from then on they alternate."""
    policy, queue = policy_of("round_robin"), WaitingQueue()
    for number in range(40):
        enqueue(queue, policy, request_of(LANE, client="busy"), number)
    for _ in range(30):
        serve(queue, policy)
    for number in range(40, 80):
        enqueue(queue, policy, request_of(LANE, client="back"), number)

    order = [serve(queue, policy).terms.client for _ in range(10)]

    assert abs(order.count("back") - order.count("busy")) <= 2


def test_single_request_waits_for_at_most_one_of_each_client() -> None:
    policy, queue = policy_of("round_robin"), WaitingQueue()
    others = [f"c{index}" for index in range(10)]
    for number in range(100):
        enqueue(queue, policy, request_of(LANE, client=others[number % 10]), number)
    for _ in range(35):
        serve(queue, policy)
    last = request_of(LANE, client="new")
    enqueue(queue, policy, last, number=1000)

    before = 0
    while last.is_waiting:
        serve(queue, policy)
        before += 1
    assert before - 1 <= len(others)


def test_number_of_remembered_clients_is_bounded() -> None:
    policy: Any = policy_of("round_robin")
    for number in range(2 * CLIENTS_MAX):
        request = request_of(LANE, client=f"c{number}")
        request.rank = policy.rank(request, 0)
        policy.on_put(request)
        assert len(policy._ends) <= CLIENTS_MAX
        if number < CLIENTS_MAX // 2:
            policy.on_taken(request)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_found_by_name(name: str) -> None:
    policy = policy_of(name)

    assert type(policy) is POLICIES[name]
    assert (policy.linger_ns > 0) == (name == "batch_optimized")


def install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """Makes installed packages provide these policies."""

    def entry_points(*, group: str) -> EntryPoints:
        assert group == "iskander.policies"
        return EntryPoints(EntryPoint(name, target, group) for name, target in targets.items())

    monkeypatch.setattr(policies, "entry_points", entry_points)


def test_policy_of_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="iskander.gateway.scheduling.lanes.policies:BatchOptimized")

    policy = policy_of("mine")

    assert isinstance(policy, policies.GuardedPolicy)
    assert policy.linger_ns == policies.BATCH_LINGER_NS


@pytest.mark.parametrize("rank", [float("nan"), float("inf"), "no"])
def test_request_with_an_invalid_rank_ranks_by_arrival(rank: Any) -> None:
    policy: Any = policy_of("fifo")
    installed = SimpleNamespace(
        linger_ns=0,
        rank=lambda request, period_ns: rank,
        on_put=policy.on_put,
        on_taken=policy.on_taken,
        on_left=policy.on_left,
    )
    guarded = policies.GuardedPolicy("mine", installed)  # type: ignore[arg-type]

    assert guarded.rank(request_of(LANE, arrived_ns=7), 0) == 7 and not guarded.is_fair


def test_unknown_policy_is_rejected_with_the_known_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, mine="iskander.gateway.scheduling.lanes.policies:RoundRobin")

    with pytest.raises(ConfigError, match=r'lanes\.policy = "yours"') as caught:
        policy_of("yours")

    for name in [*POLICIES, "mine"]:
        assert name in caught.value.message
