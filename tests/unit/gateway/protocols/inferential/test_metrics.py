"""Metric points of failed observations: measure and labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from iskander.errors import (
    ArenaFull,
    ClientOverShare,
    DeadlineExceeded,
    DeadlineUnreachable,
    DroppedFromQueue,
    ExecutionFailed,
    IskanderError,
    MalformedInput,
    ModelNotFound,
    QueueFull,
    Superseded,
)
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.protocols.inferential.metrics import InferentialMetrics

ROBOT = {"client": "robot-7"}


def points(
    record: Callable[[InferentialMetrics], None],
) -> tuple[dict[str, list[dict[str, str]]], InferentialMetrics]:
    """Returns the labels of each measure's points, and the metrics."""
    recent = RecentValues()
    metrics = InferentialMetrics(recent)
    record(metrics)
    return {
        name: [dict(labels) for _, _, labels in recent.ring(name)] for name in recent.names()
    }, metrics


@pytest.mark.parametrize(
    ("error", "measure", "labels"),
    [
        (QueueFull("x"), "queue_full_drops", ROBOT),
        (ClientOverShare("x"), "queue_full_drops", ROBOT),
        (DroppedFromQueue("x"), "queue_full_drops", ROBOT),
        (Superseded("x"), "queue_full_drops", ROBOT),
        (ArenaFull("x"), "queue_full_drops", ROBOT),
        (DeadlineExceeded("x"), "requests_expired", {}),
        (DeadlineUnreachable("x"), "requests_expired", {}),
        *(
            (kind("x"), "dispatch_errors", ROBOT | {"model": "arm", "error": kind.code})
            for kind in (ModelNotFound, MalformedInput, ExecutionFailed)
        ),
    ],
)
def test_rejection_is_recorded_in_one_measure(
    error: IskanderError, measure: str, labels: dict[str, str]
) -> None:
    actual, metrics = points(lambda metrics: metrics.on_rejected(ROBOT, "arm", error))
    assert actual == {measure: [labels]}
    assert metrics.outcomes == {error.code: 1} and metrics.last_error == "x"


@pytest.mark.parametrize(
    ("record", "outcome"),
    [(InferentialMetrics.on_late, "late"), (InferentialMetrics.on_unsent, "unsent")],
)
def test_undelivered_results_are_recorded_as_send_errors(
    record: Callable[[InferentialMetrics, dict[str, str]], None], outcome: str
) -> None:
    actual, metrics = points(lambda metrics: record(metrics, ROBOT))
    assert actual == {"send_errors": [ROBOT]}
    assert metrics.outcomes == {outcome: 1}


def test_malformed_message_has_no_client_label() -> None:
    actual, _ = points(lambda metrics: metrics.on_malformed(MalformedInput("x")))
    assert actual == {"observation_errors": [{}]}


def test_long_model_name_is_truncated_in_its_label() -> None:
    actual, _ = points(lambda metrics: metrics.on_rejected(ROBOT, "m" * 10_000, ModelNotFound("x")))
    (labels,) = actual["dispatch_errors"]
    assert labels["model"] == "m" * 100
