"""Embedding API: registered policies and metric callbacks, and their failures."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.lanes import MS, lane_of, request_of

from iskander.config.models import LaneConfig
from iskander.embed import on_metric, register_policy
from iskander.errors import ConfigError
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.foundation.measurement.subscribers import SUBSCRIBERS
from iskander.gateway.scheduling.lanes.policies import POLICIES, Scorable, make_policy

LANE = lane_of(ttl_ms=0)


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    policies = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(policies)
    SUBSCRIBERS.clear()


def rank(score: Any, arrived_ns: int = 0, period_ns: int = 0, **terms: Any) -> float:
    """Return the rank of a request by a registered score function."""
    POLICIES.pop("mine", None)
    register_policy("mine")(score)
    policy = make_policy(LaneConfig(policy="mine", patience_ms=100.0))
    return policy.rank(request_of(LANE, 1, arrived_ns=arrived_ns, **terms), period_ns)


def test_higher_score_ranks_first_and_waiting_raises_it() -> None:
    """A score of 10 equals a wait of `patience_ms`."""
    assert rank(lambda _: 3) < rank(lambda _: 2) < rank(lambda _: -1)
    assert rank(lambda _: 10, arrived_ns=100 * MS) == rank(lambda _: 0)


def test_score_function_receives_the_request_fields() -> None:
    requests: list[Scorable] = []

    def score(request: Scorable) -> float:
        requests.append(request)
        return 0.0

    terms = {"client": "r", "urgency": 0.5, "steps_remaining": 2, "priority": 3, "budget_ms": 20.0}
    rank(score, arrived_ns=2_000 * MS, period_ns=50 * MS, **terms)
    rank(score)
    assert requests[0] == Scorable("r", LANE.model.name, 2.0, 0.5, 2, 0.05, 20.0, 3)
    assert (requests[1].latency_budget_ms, requests[1].steps_remaining) == (None, None)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "much", None])
def test_invalid_score_counts_as_0(score: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert rank(lambda _: score, arrived_ns=7) == 7


def test_failing_score_function_is_logged_once_and_counts_as_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(_: Scorable) -> float:
        raise ValueError("no score")

    register_policy("mine")(fails)
    policy = make_policy(LaneConfig(policy="mine"))
    with caplog.at_level(logging.ERROR):
        assert [policy.rank(request_of(LANE, 1, arrived_ns=7), 0) for _ in range(3)] == [7] * 3
    assert len(caplog.records) == 1


def test_policy_name_in_use_is_rejected() -> None:
    with pytest.raises(ConfigError, match="`fifo` already"):
        register_policy("fifo")(lambda _: 0.0)


def test_every_callback_receives_every_point(caplog: pytest.LogCaptureFixture) -> None:
    """A failing callback is logged once and affects neither other callbacks nor the rings."""
    points: list[Any] = []

    @on_metric
    def fails(name: str, value: float, labels: Any) -> None:
        raise ValueError

    @on_metric
    def collects(name: str, value: float, labels: Any) -> None:
        points.append((name, value, dict(labels)))

    recent = RecentValues(points_max=2)
    with caplog.at_level(logging.ERROR):
        for value in (1, 2, 3):
            recent.record("queue_depth", value, {"model": "m"})
    recent.ring("batch_size").append((0, 4.0, {}))
    assert points[:3] == [("queue_depth", value, {"model": "m"}) for value in (1, 2, 3)]
    assert points[3] == ("batch_size", 4.0, {})
    assert len([record for record in caplog.records if "queue_depth" in record.message]) == 1
    assert recent.query("queue_depth").count == 2
