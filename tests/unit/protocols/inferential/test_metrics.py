"""Points of what came of observations: which measure, with which labels."""

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
from iskander.measurement.recent_values import RecentValues
from iskander.protocols.inferential.metrics import InferentialMetrics

ROBOT = {"client": "robot-7"}


def points(
    happen: Callable[[InferentialMetrics], None],
) -> tuple[dict[str, list[dict[str, str]]], InferentialMetrics]:
    """The labels of each measure's points, and the metrics."""
    recent = RecentValues()
    metrics = InferentialMetrics(recent)
    happen(metrics)
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
def test_a_refusal_is_a_point_of_one_measure(
    error: IskanderError, measure: str, labels: dict[str, str]
) -> None:
    found, metrics = points(lambda metrics: metrics.on_rejected(ROBOT, "arm", error))
    assert found == {measure: [labels]}
    assert metrics.outcomes == {error.code: 1} and metrics.last_error == "x"


@pytest.mark.parametrize(
    ("happen", "outcome"),
    [(InferentialMetrics.on_late, "late"), (InferentialMetrics.on_unsent, "unsent")],
)
def test_results_that_reach_nobody_are_errors_of_sending(
    happen: Callable[[InferentialMetrics, dict[str, str]], None], outcome: str
) -> None:
    found, metrics = points(lambda metrics: happen(metrics, ROBOT))
    assert found == {"send_errors": [ROBOT]}
    assert metrics.outcomes == {outcome: 1}


def test_a_message_of_nobody_has_no_client() -> None:
    found, _ = points(lambda metrics: metrics.on_malformed(MalformedInput("x")))
    assert found == {"observation_errors": [{}]}


def test_a_model_of_any_length_makes_a_label_of_some() -> None:
    found, _ = points(lambda metrics: metrics.on_rejected(ROBOT, "m" * 10_000, ModelNotFound("x")))
    (labels,) = found["dispatch_errors"]
    assert labels["model"] == "m" * 100
