"""Whose turn it is: the order of a lane's queue.

A policy gives each request a rank when it is admitted, and the lowest rank runs first. Ranks are
moments, in nanoseconds, and do not change: what was admitted long ago is overtaken by nothing that
comes now, which is how waiting requests age without being looked at again. Every policy says by
how much a later request may go first, so the wait under sustained traffic is bounded.

Each is a function of the request and of what was put and taken before; none looks at a clock.

Another one comes from an installed package, by an entry point of the group `iskander.policies`: a
callable that takes the lane's settings and returns a `Policy`.

Source: earliest deadline first (Liu and Layland, 1973); start-time fair queueing (Goyal, 1996).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final, Protocol

from iskander.clock import NS_PER_MS
from iskander.config.models import LaneConfig
from iskander.errors import ConfigError
from iskander.scheduling.request import NEVER_NS, PRIORITY_MAX, Request

ENTRY_POINTS: Final = "iskander.policies"
BATCH_LINGER_NS: Final = 10 * NS_PER_MS
CLIENTS_MAX: Final = 4096
STEPS: Final = ((0, 1.0), (2, 0.7), (4, 0.4))
"""How near a client is to having nothing left to do: up to so many steps, so much of 1."""
CADENCE_WEIGHT: Final = 45
URGENCY_WEIGHT: Final = 25
STEPS_WEIGHT: Final = 15
PRIORITY_WEIGHT: Final = 10
_WEIGHTS: Final = CADENCE_WEIGHT + URGENCY_WEIGHT + STEPS_WEIGHT + PRIORITY_WEIGHT


class Policy(Protocol):
    """Order of a lane's queue.

    Attributes:
        linger_ns: How long to wait for a fuller batch, where the settings say nothing.
        is_fair: Ranks order the requests of sources that have not had more than their share of the
            queue (`fair_share`). False, or where it is missing: ranks alone order all requests.
    """

    linger_ns: int
    is_fair: bool

    def rank(self, request: Request, period_ns: int) -> float:
        """Where a request comes in the queue; lower runs first. Changes nothing.

        Args:
            request: With its terms, arrival and deadline.
            period_ns: How long after another its client's requests come; 0 where not known.
        """

    def on_put(self, request: Request) -> None:
        """A request with this rank waits now; one whose place it took leaves after that."""

    def on_taken(self, request: Request) -> None:
        """Rows of a request go to a worker."""

    def on_left(self, request: Request) -> None:
        """A request left the queue and no worker had any of it."""


class Fifo:
    """By arrival. A later request never goes first."""

    linger_ns = 0
    is_fair = False

    def __init__(self, config: LaneConfig) -> None:
        self._patience_ns = int(config.patience_ms * NS_PER_MS)
        self._aging_ns = (PRIORITY_MAX + 1) * self._patience_ns

    def rank(self, request: Request, period_ns: int) -> float:
        """Its arrival."""
        return request.arrived_ns

    def on_put(self, request: Request) -> None:
        """Nothing to remember."""

    def on_taken(self, request: Request) -> None:
        """Nothing to remember."""

    def on_left(self, request: Request) -> None:
        """Nothing to remember."""


class BatchOptimized(Fifo):
    """By arrival, and waits for full batches: up to `linger_us`, or 10 ms."""

    linger_ns = BATCH_LINGER_NS


class DeadlineAware(Fifo):
    """Fair between connections and tokens, and within that by earliest deadline.

    A request without a deadline is ranked as if it had one: `patience_ms` from its arrival for
    each level of priority, less where it is urgent or its client has few steps left; so nothing
    that is due later than ten times `patience_ms` after its arrival goes first. The backlog of one
    source delays its own later requests only.
    """

    is_fair = True

    def rank(self, request: Request, period_ns: int) -> float:
        """Its deadline."""
        if request.deadline_ns < NEVER_NS:
            return request.deadline_ns
        return request.arrived_ns + int(
            self._patience_ns
            * (1 + request.terms.priority)
            * (1.0 - request.terms.urgency)
            * (1.0 - steps_share(request.terms.steps_remaining) / 2)
        )


class ModelDeadline(Fifo):
    """By a deadline that the model's own weights make of the client's budget.

    The budget (or `patience_ms`) shrinks by up to nine tenths with cadence (a client that soon
    sends its next request has little use of a late result), urgency, steps and priority.
    """

    def rank(self, request: Request, period_ns: int) -> float:
        """Arrival and what is left of the budget."""
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
    """By priority, and within one priority by deadline; ten times `patience_ms` make up a level."""

    is_fair = False

    def rank(self, request: Request, period_ns: int) -> float:
        """Its deadline, or ten times `patience_ms` if that is sooner, later by its priority."""
        due_ns = min(super().rank(request, period_ns), request.arrived_ns + self._aging_ns)
        return due_ns + request.terms.priority * self._aging_ns


class PriorityTiered(Fifo):
    """By priority, and within one by arrival; ten times `patience_ms` make up a level."""

    def rank(self, request: Request, period_ns: int) -> float:
        """Its arrival, later by its priority."""
        return request.arrived_ns + request.terms.priority * self._aging_ns


class RoundRobin(Fifo):
    """Fair by client: each gets the same share of rows while it has requests waiting.

    Ranks are rows of virtual time: a client's next request begins where its last one ended, or
    now, whichever is later, and virtual time goes on to what is served. A client with one request
    waits at most for one of each other client that is there, or comes meanwhile.
    """

    def __init__(self, config: LaneConfig) -> None:
        super().__init__(config)
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def rank(self, request: Request, period_ns: int) -> float:
        """Where its client's share has come to."""
        return max(self._ends.get(request.terms.client, 0.0), self._now)

    def on_put(self, request: Request) -> None:
        """The client's share goes on by this one's rows, also where it took another's place."""
        if len(self._ends) >= CLIENTS_MAX:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            if len(self._ends) >= CLIENTS_MAX:
                self._ends.clear()  # All start again together.
        client = request.terms.client
        self._ends[client] = max(self._ends.get(client, 0.0), request.rank) + request.rows

    def on_taken(self, request: Request) -> None:
        """Virtual time goes on to what is served."""
        self._now = max(self._now, request.rank)

    def on_left(self, request: Request) -> None:
        """The client does not pay for what was not served."""
        end = self._ends.get(request.terms.client)
        if end is not None:
            self._ends[request.terms.client] = end - request.rows


POLICIES: dict[str, Callable[[LaneConfig], Policy]] = {
    "deadline_aware": DeadlineAware,
    "model_deadline": ModelDeadline,
    "tiered_deadline": TieredDeadline,
    "batch_optimized": BatchOptimized,
    "priority_tiered": PriorityTiered,
    "round_robin": RoundRobin,
    "fifo": Fifo,
}


def make_policy(config: LaneConfig) -> Policy:
    """The policy that a lane's settings name.

    Raises:
        ConfigError: There is none of that name, built in or installed.
    """
    make = POLICIES.get(config.policy)
    if make is None:
        installed = entry_points(group=ENTRY_POINTS)
        if config.policy not in installed.names:
            known = ", ".join([*POLICIES, *sorted(installed.names)])
            raise ConfigError(f'lane.policy = "{config.policy}": there are {known}')
        make = installed[config.policy].load()
    policy: Policy = make(config)
    return policy


def steps_share(steps_remaining: int | None) -> float:
    """How near a client is to having nothing left to do, 0 to 1."""
    if steps_remaining is not None:
        for most, share in STEPS:
            if steps_remaining <= most:
                return share
    return 0.0
