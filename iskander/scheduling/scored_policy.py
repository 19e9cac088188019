"""Order by a number that somebody else's function gives each request.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from iskander.clock import NS_PER_MS, NS_PER_S
from iskander.config.models import LaneConfig
from iskander.errors import ConfigError
from iskander.scheduling.policies import POLICIES
from iskander.scheduling.request import NEVER_NS, Request

POINTS = 10
"""How many of them count for as much as `patience_ms`."""
SCORE_MAX = 1000.0

log = logging.getLogger("iskander.policies")


class Scorable(NamedTuple):
    """What a scoring function is told of a request.

    Attributes:
        client_id: Whose it is.
        model_id: The model's name.
        received_at: When it came, in seconds of a clock that only goes on.
        urgency: 0 to 1.
        steps_remaining: Actions that the client has left; None where it has not said.
        time_until_next: Seconds until the client's next request, as far as its rhythm is known.
        latency_budget_ms: From its arrival to its deadline; None where it has none.
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


class ScoredPolicy:
    """The higher score goes first.

    A later request overtakes by at most a tenth of `patience_ms` for each point that it has more,
    so that what waits comes to its turn. One that cannot be scored has 0.
    """

    linger_ns = 0
    is_fair = False

    def __init__(self, config: LaneConfig, score: Score) -> None:
        self._score = score
        self._point_ns = config.patience_ms * NS_PER_MS / POINTS
        self._has_failed = False

    def rank(self, request: Request, period_ns: int) -> float:
        """Its arrival, sooner by its score."""
        return request.arrived_ns - int(self._scored(request, period_ns) * self._point_ns)

    def on_put(self, request: Request) -> None:
        """Nothing to remember."""

    def on_taken(self, request: Request) -> None:
        """Nothing to remember."""

    def on_left(self, request: Request) -> None:
        """Nothing to remember."""

    def _scored(self, request: Request, period_ns: int) -> float:
        try:
            score = float(self._score(_scorable(request, period_ns)))
        except Exception:
            # A request must not be lost by a function that is not ours; it tells once.
            if not self._has_failed:
                log.exception("a scoring function failed; what it fails with has the score 0")
            self._has_failed = True
            return 0.0
        return min(max(score, -SCORE_MAX), SCORE_MAX) if isfinite(score) else 0.0


def register(name: str, score: Score) -> None:
    """Let lanes name a scoring function as their policy.

    Raises:
        ConfigError: There is a policy of that name.
    """
    if name in POLICIES:
        raise ConfigError(f"there is a policy `{name}` already")
    POLICIES[name] = lambda config: ScoredPolicy(config, score)


def _scorable(request: Request, period_ns: int) -> Scorable:
    terms = request.terms
    budget_ns = request.deadline_ns - request.arrived_ns
    return Scorable(
        client_id=terms.client,
        model_id=request.lane.model.name,
        received_at=request.arrived_ns / NS_PER_S,
        urgency=terms.urgency,
        steps_remaining=terms.steps_remaining,
        time_until_next=period_ns / NS_PER_S,
        latency_budget_ms=budget_ns / NS_PER_MS if request.deadline_ns < NEVER_NS else None,
        priority=terms.priority,
    )
