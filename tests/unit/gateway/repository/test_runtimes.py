"""Runtimes of a model: known once each kind of worker has loaded it."""

from __future__ import annotations

from support.lanes import lane_of

from iskander.gateway.repository.models import Models
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import SlotPlan, Worker


def test_runtimes_are_known_when_each_kind_of_worker_has_loaded_the_model() -> None:
    models, lane = Models(), lane_of()
    key = lane.model.key
    cores = (2, 2, 3, 4, 5)
    models.workers = [
        Worker(SlotPlan(index, 0, (0,), None, cores=count)) for index, count in enumerate(cores)
    ]
    first, _, third, fourth, fifth = models.workers
    assert not models.has_all_runtimes(lane)
    for each in (first, third):
        each.models.add(key)
        assert not models.has_all_runtimes(lane)
    fourth.load_errors[key] = "no"
    assert not models.has_all_runtimes(lane)
    fifth.state = State.OUT_OF_SERVICE
    assert models.has_all_runtimes(lane)
    fifth.state, fifth.is_looping = State.ABSENT, True
    assert models.has_all_runtimes(lane)
    models.workers.append(Worker(SlotPlan(5, 0, (0,), None, pool="other/1", cores=9)))
    assert models.has_all_runtimes(lane)
