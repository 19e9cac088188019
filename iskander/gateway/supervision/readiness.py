"""Readiness of a model, and the reason if it is not ready.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import Worker


def reason_of(lane: Lane, workers: Sequence[Worker]) -> str:
    """Return why a lane is not ready, such as `1 of 2 workers are ready`; empty if it is.

    A worker in a crash loop serves requests, but does not count until it has been steady.
    """
    if lane.quarantine is not None:
        return f"in quarantine: {lane.quarantine.reason}"
    if lane.outage:
        return lane.outage
    ready = sum(not worker.is_looping for worker in lane.workers.values())
    if ready >= lane.quorum:
        return ""
    missing = [w for w in lane.pool_workers(workers) if w.incarnation not in lane.workers]
    failing = [
        w for w in workers if w.is_looping or (w in missing and (w.failures or w.device_error))
    ]
    facts = [f"{ready} of {lane.quorum} workers are ready"] if lane.quorum > 1 else []
    facts += [_failure_of(worker) for worker in failing]
    with_load_error = [w for w in missing if lane.model.key in w.load_errors]
    facts += [f"worker {w.plan.index}: {w.load_errors[lane.model.key]}" for w in with_load_error]
    if not failing and not with_load_error:
        facts.append(_absence_of(missing))
    return "; ".join(fact for fact in facts if fact)


def _failure_of(worker: Worker) -> str:
    """Describe the failures of a worker, with the last cause."""
    name, count = f"worker {worker.index}", worker.failures
    cause = f" {worker.last_exit}" if worker.last_exit is not None else ""
    if worker.load_error:
        last = f"; last error: {worker.load_error}"
    else:
        last = f", the last{cause}" if cause else ""
    if worker.device_error:
        return f"{name}: {worker.device_error}"
    if worker.is_looping:
        return f"{name} is in a crash loop: {count} deaths in a row{last}"
    if worker.was_loaded:
        return f"{name} died{cause} and is restarted"
    times = "once" if count == 1 else f"{count} times in a row"
    return f"{name} ended before it had loaded its models, {times}{last}"


def _absence_of(missing: list[Worker]) -> str:
    """Describe the state of workers that do not serve and have not failed."""
    states = {worker.state for worker in missing}
    if any(worker.is_replacement_pending for worker in missing):
        return "a worker is being replaced; requests are queued"
    if states & {State.STARTING, State.LOADING}:
        return "its workers are loading"
    if State.HUNG in states:
        return "a worker hung and is being replaced"
    if states & {State.LEAVING, State.STOPPING, State.STOPPED}:
        return "its workers are draining or stopped"
    return "its workers have not attached yet" if missing else ""
