"""Scheduling policies: the order of a lane's queue.

A policy ranks each request at its admission, and the lowest rank runs first. Ranks are times in
nanoseconds and never change, so queued requests age. Every policy bounds by how much a later
request may overtake, and so the wait under sustained traffic. No policy reads a clock.

Installed packages add policies by an entry point of the group `iskander.policies`: a callable that
takes the settings of the lane and returns a `Policy`. `register` adds a scoring function.

Source: earliest deadline first (Liu and Layland, 1973); start-time fair queueing (Goyal, 1996).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol

from iskander.config.models import LaneConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.foundation.logs import requests as log
from iskander.gateway.scheduling.request import NEVER_NS, PRIORITY_MAX, Request

ENTRY_POINTS: Final = "iskander.policies"
BATCH_LINGER_NS: Final = 10 * NS_PER_MS
CLIENTS_MAX: Final = 4096
STEPS: Final = ((0, 1.0), (2, 0.7), (4, 0.4))
"""Maximum steps remaining, and the weight up to it."""
CADENCE_WEIGHT: Final = 45
URGENCY_WEIGHT: Final = 25
STEPS_WEIGHT: Final = 15
PRIORITY_WEIGHT: Final = 10
_WEIGHTS: Final = CADENCE_WEIGHT + URGENCY_WEIGHT + STEPS_WEIGHT + PRIORITY_WEIGHT
POINTS: Final = 10
"""Points of a score that are worth `patience_ms`."""
SCORE_MAX: Final = 1000.0


class Policy(Protocol):
    """Order of a lane's queue.

    Attributes:
        linger_ns: Wait for a fuller batch, if the settings have none.
        is_fair: Ranks apply within the fair share of each source (`fair_share`). If False or
            missing, ranks alone order all requests.
    """

    linger_ns: int
    is_fair: bool

    def rank(self, request: Request, period_ns: int) -> float:
        """Return the rank of a request; lower runs first. Changes nothing.

        `period_ns` is the mean interval between the client's requests; 0 if unknown.
        """

    def on_put(self, request: Request) -> None:
        """Handle a queued request; a request that it replaces leaves the queue afterwards."""

    def on_taken(self, request: Request) -> None:
        """Handle rows of a request that go to a worker."""

    def on_left(self, request: Request) -> None:
        """Handle a request that left the queue without any row at a worker."""


class Fifo:
    """By arrival. A later request never overtakes."""

    linger_ns = 0
    is_fair = False

    def __init__(self, config: LaneConfig) -> None:
        self._patience_ns = int(config.patience_ms * NS_PER_MS)
        self._aging_ns = (PRIORITY_MAX + 1) * self._patience_ns

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by arrival."""
        return request.arrived_ns

    def on_put(self, request: Request) -> None:
        """Do nothing."""

    def on_taken(self, request: Request) -> None:
        """Do nothing."""

    def on_left(self, request: Request) -> None:
        """Do nothing."""


class BatchOptimized(Fifo):
    """By arrival; waits for full batches: up to `linger_us`, or 10 ms."""

    linger_ns = BATCH_LINGER_NS


class DeadlineAware(Fifo):
    """Fair between connections and tokens, and by earliest deadline within their shares.

    A request without a deadline gets a virtual one: `patience_ms` after its arrival for each level
    of priority, less if it is urgent or its client has few steps left. So only requests that are
    due within ten times `patience_ms` after its arrival overtake it.
    """

    is_fair = True

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by deadline."""
        if request.deadline_ns < NEVER_NS:
            return request.deadline_ns
        return request.arrived_ns + int(
            self._patience_ns
            * (1 + request.terms.priority)
            * (1.0 - request.terms.urgency)
            * (1.0 - steps_share(request.terms.steps_remaining) / 2)
        )


class ModelDeadline(Fifo):
    """By a virtual deadline: the client's budget scaled by fixed weights.

    The budget (or `patience_ms`) shrinks by up to nine tenths with cadence (a late result is of
    little use to a client that sends its next request soon), urgency, steps and priority.
    """

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by arrival plus the scaled budget."""
        arrived_ns, terms = request.arrived_ns, request.terms
        budget_ns = self._patience_ns
        if request.deadline_ns < NEVER_NS:
            budget_ns = min(request.deadline_ns - arrived_ns, self._aging_ns)
        cadence = 1.0 - min(period_ns / budget_ns, 1.0) if period_ns and budget_ns > 0 else 0.0
        score = (
            CADENCE_WEIGHT * cadence
            + URGENCY_WEIGHT * terms.urgency
            + STEPS_WEIGHT * steps_share(terms.steps_remaining)
            + PRIORITY_WEIGHT * (PRIORITY_MAX - terms.priority) / PRIORITY_MAX
        ) / _WEIGHTS
        return arrived_ns + int(budget_ns * (1.0 - 0.9 * score))


class TieredDeadline(DeadlineAware):
    """By priority, then by deadline; a level of priority is worth ten times `patience_ms`."""

    is_fair = False

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by deadline, at most ten times `patience_ms` away, plus the priority."""
        due_ns = min(super().rank(request, period_ns), request.arrived_ns + self._aging_ns)
        return due_ns + request.terms.priority * self._aging_ns


class PriorityTiered(Fifo):
    """By priority, then by arrival; a level of priority is worth ten times `patience_ms`."""

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by arrival plus the priority."""
        return request.arrived_ns + request.terms.priority * self._aging_ns


class RoundRobin(Fifo):
    """Fair by client: every client with queued requests gets the same share of rows.

    Ranks are virtual times, in rows. The next request of a client starts at the end of its last one
    or at the current virtual time, whichever is later; service advances the virtual time. A client
    with one request waits for at most one request of every other client.
    """

    def __init__(self, config: LaneConfig) -> None:
        super().__init__(config)
        self._virtual_now = 0.0
        self._ends: dict[str, float] = {}

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by the virtual end of the client's last request."""
        return max(self._ends.get(request.terms.client, 0.0), self._virtual_now)

    def on_put(self, request: Request) -> None:
        """Charge the client for the rows, also if the request replaced another."""
        if len(self._ends) >= CLIENTS_MAX:
            self._ends = {name: end for name, end in self._ends.items() if end > self._virtual_now}
            if len(self._ends) >= CLIENTS_MAX:
                self._ends.clear()  # All clients start again together.
        client = request.terms.client
        self._ends[client] = max(self._ends.get(client, 0.0), request.rank) + request.rows

    def on_taken(self, request: Request) -> None:
        """Advance the virtual time."""
        self._virtual_now = max(self._virtual_now, request.rank)

    def on_left(self, request: Request) -> None:
        """Refund the rows of a request that was not served."""
        end = self._ends.get(request.terms.client)
        if end is not None:
            self._ends[request.terms.client] = end - request.rows


class Scorable(NamedTuple):
    """Argument of a scoring function.

    Attributes:
        client_id: Name of the client.
        model_id: Name of the model.
        received_at: Arrival, in seconds of a monotonic clock.
        urgency: 0 to 1.
        steps_remaining: Actions that the client has left; None if not sent.
        time_until_next: Predicted seconds until the client's next request; 0 if unknown.
        latency_budget_ms: From arrival to deadline; None without a deadline.
        priority: 0 is the highest.
    """

    client_id: str
    model_id: str
    received_at: float
    urgency: float
    steps_remaining: int | None
    time_until_next: float
    latency_budget_ms: float | None
    priority: int


Score = Callable[[Scorable], float]


class ScoredPolicy(Fifo):
    """By arrival and the score of a registered function; a higher score overtakes.

    A point is worth a tenth of `patience_ms`, so no request starves. A score that is not a finite
    number counts as 0.
    """

    def __init__(self, config: LaneConfig, score: Score) -> None:
        super().__init__(config)
        self._score: Callable[[Scorable], Any] = score
        self._point_ns = config.patience_ms * NS_PER_MS / POINTS
        self._has_failed = False

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by arrival, earlier by the score."""
        terms, budget_ns = request.terms, request.deadline_ns - request.arrived_ns
        scorable = Scorable(
            client_id=terms.client,
            model_id=request.lane.model.name,
            received_at=request.arrived_ns / NS_PER_S,
            urgency=terms.urgency,
            steps_remaining=terms.steps_remaining,
            time_until_next=period_ns / NS_PER_S,
            latency_budget_ms=budget_ns / NS_PER_MS if request.deadline_ns < NEVER_NS else None,
            priority=terms.priority,
        )
        try:
            score = float(self._score(scorable))
        except Exception as error:
            # User code must not lose a request; it is logged once.
            if not self._has_failed:
                log.scoring_function_failed(error=error)
            self._has_failed = True
            score = 0.0
        score = min(max(score, -SCORE_MAX), SCORE_MAX) if isfinite(score) else 0.0
        return request.arrived_ns - int(score * self._point_ns)


class GuardedPolicy:
    """An installed policy, whose exceptions lose no request.

    A request ranks by arrival if the policy fails to rank it, or not with a finite number.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self.linger_ns = policy.linger_ns
        self.is_fair = bool(getattr(policy, "is_fair", False))
        self._name = name
        self._rank: Callable[[Request, int], Any] = policy.rank
        self._on_put: Callable[[Request], None] = policy.on_put
        self._on_taken: Callable[[Request], None] = policy.on_taken
        self._on_left: Callable[[Request], None] = policy.on_left
        self._has_failed = False

    def rank(self, request: Request, period_ns: int) -> float:
        """Rank by the policy."""
        try:
            rank = float(self._rank(request, period_ns))
        except Exception as error:
            self._note(error)
            return request.arrived_ns
        return rank if isfinite(rank) else request.arrived_ns

    def on_put(self, request: Request) -> None:
        """Call the policy."""
        self._call(self._on_put, request)

    def on_taken(self, request: Request) -> None:
        """Call the policy."""
        self._call(self._on_taken, request)

    def on_left(self, request: Request) -> None:
        """Call the policy."""
        self._call(self._on_left, request)

    def _call(self, handle: Callable[[Request], None], request: Request) -> None:
        try:
            handle(request)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Log the first exception."""
        if not self._has_failed:
            log.policy_failed(policy=self._name, error=error)
        self._has_failed = True


POLICIES: dict[str, Callable[[LaneConfig], Policy]] = {
    "deadline_aware": DeadlineAware,
    "model_deadline": ModelDeadline,
    "tiered_deadline": TieredDeadline,
    "batch_optimized": BatchOptimized,
    "priority_tiered": PriorityTiered,
    "round_robin": RoundRobin,
    "fifo": Fifo,
}


def register(name: str, score: Score) -> None:
    """Register a scoring function as a policy that lanes can name.

    Raises:
        ConfigError: The name is taken.
    """
    if name in POLICIES:
        raise ConfigError(f"policy `{name}` already exists; choose another name")
    POLICIES[name] = lambda config: ScoredPolicy(config, score)


def make_policy(config: LaneConfig) -> Policy:
    """Create the policy of a lane.

    Raises:
        ConfigError: No policy of that name is built in or installed.
    """
    make = POLICIES.get(config.policy)
    if make is not None:
        return make(config)
    installed = entry_points(group=ENTRY_POINTS)
    if config.policy not in installed.names:
        known = ", ".join([*POLICIES, *sorted(installed.names)])
        raise ConfigError(f'unknown policy: lanes.policy = "{config.policy}"; available: {known}')
    policy: Policy = installed[config.policy].load()(config)
    return GuardedPolicy(config.policy, policy)


def steps_share(steps_remaining: int | None) -> float:
    """Weight of the steps that a client has left, 0 to 1."""
    if steps_remaining is not None:
        for most, share in STEPS:
            if steps_remaining <= most:
                return share
    return 0.0
