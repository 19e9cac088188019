"""Units of a scoring job as tasks of a Ray cluster.

A task reads a unit, scores it on the server of its own node, and writes the results to the staging
folder of the output, so that all nodes need the storage of the input and the output. The journal
and the commit stay with the command. Ray runs the task of a lost node again on another node.

Ray uses a process for one task after another, and so for the units of a job: the process keeps its
client, with its connection and its shared memory.

Runs in: the operator's tool; `_run_unit` in processes of Ray.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from iskander.client import Client
from iskander.engines.addresses import Addresses, Servers
from iskander.errors import Cancelled, IskanderError, NotReady
from iskander.foundation import clock
from iskander.lake.execution import runtime_terms
from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import Unit
from iskander.lake.planning import PlannedJob
from iskander.lake.rows import ErrorBudget, Quarantine
from iskander.lake.run.report import Counters
from iskander.lake.run.unit_run import UnitContext, UnitRun
from iskander.lake.sinks import Stager
from iskander.lake.sinks.writing import Staged
from iskander.lake.sources import JobSource
from iskander.ray import cluster

RETRIES: Final = 5
"""Further attempts of a unit whose node or process was lost."""
STALL_S: Final = 4 * 3600.0
"""Time without a finished unit after which a job fails: a task reports its rows at its end only."""
SERVERS_S: Final = 60.0
"""Time in which the address of at least one server must be known."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class _JobOfTasks:
    """Arguments that all tasks of a job have in common; Ray keeps one copy on each node."""

    key: str
    job: Job
    planned: PlannedJob
    source: JobSource
    stager: Stager
    quarantine: Quarantine | None
    budget: ErrorBudget
    servers: Servers
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _TaskResult:
    staged: Staged
    finished: Finished
    times: dict[str, float]


class RayUnits:
    """Opens units of one job as tasks of Ray; an object is a runner's `JobSetup.open_unit`.

    Args:
        servers: Servers of the cluster.
        options: Arguments of the clients in the tasks, such as the token.
    """

    def __init__(self, servers: Servers, options: Mapping[str, Any]) -> None:
        self._servers, self._options = servers, dict(options)
        self._mutex = threading.Lock()
        self._work: Any = None

    def __call__(self, shared: UnitContext, unit: Unit) -> RemoteUnit:
        """Open a unit; nothing runs before `run`."""
        with self._mutex:
            if self._work is None:
                self._work = cluster.put(
                    _JobOfTasks(
                        key=uuid.uuid4().hex,
                        job=shared.job,
                        planned=shared.planned,
                        source=shared.source,
                        stager=shared.stager,
                        quarantine=shared.quarantine,
                        budget=shared.budget,
                        servers=self._servers,
                        options=self._options,
                    )
                )
        return RemoteUnit(self._work, shared, unit)


class RemoteUnit:
    """A unit of a job that runs in a task of Ray."""

    def __init__(self, work: Any, shared: UnitContext, unit: Unit) -> None:  # noqa: ANN401
        self._work, self._shared, self._unit = work, shared, unit
        self._is_cancelled = threading.Event()

    def run(self) -> tuple[Staged, Finished]:
        """Run the task; see `RunningUnit.run`.

        Raises:
            Cancelled: `cancel` was called.
            NotReady: Ray lost the task more often than `RETRIES`.
        """
        task = cluster.start_task(_run_unit, self._work, self._unit, retries=RETRIES)
        while not cluster.is_done(task, within_s=_POLL_S):
            if self._is_cancelled.is_set():
                cluster.cancel_task(task)
                raise Cancelled("the unit was dropped")
        result: _TaskResult | IskanderError = cluster.result_of(task)
        if isinstance(result, IskanderError):
            raise result
        shared, finished = self._shared, result.finished
        shared.counters.add(**result.times)
        shared.budget.add(finished.rejected)
        shared.on_rows(finished.rows_in)
        return result.staged, finished

    def cancel(self) -> None:
        """End `run`; see `RunningUnit.cancel`."""
        self._is_cancelled.set()


_clients: Final[dict[str, Client]] = {}
"""The client of this process, if there is one, by the key of its job."""


def _run_unit(work: _JobOfTasks, unit: Unit) -> _TaskResult | IskanderError:
    """Run a unit in a process of Ray; return errors as values, because Ray changes their types."""
    counters = Counters()
    try:
        shared = UnitContext(
            job=work.job,
            planned=work.planned,
            source=work.source,
            stager=work.stager,
            client=_client_of_job(work),
            counters=counters,
            budget=work.budget,
            quarantine=work.quarantine,
            on_rows=lambda rows: None,
            terms=runtime_terms(work.planned.description),
        )
        staged, finished = UnitRun(shared, unit).run()
    except IskanderError as error:
        return error
    return _TaskResult(staged=staged, finished=finished, times=counters.times())


def _client_of_job(work: _JobOfTasks) -> Client:
    """Return the client of this process, which runs one task at a time."""
    if work.key not in _clients:
        while _clients:
            _clients.popitem()[1].close()
        _clients[work.key] = _wait_for_addresses(work.servers).open(work.options)
    return _clients[work.key]


def _wait_for_addresses(servers: Servers) -> Addresses:
    """Return the addresses of servers; wait until there is at least one address.

    Raises:
        NotReady: No address is known in time.
    """
    deadline_ns = clock.now_ns() + int(SERVERS_S * clock.NS_PER_S)
    while not any(addresses := servers.look_up()):
        if clock.now_ns() > deadline_ns:
            raise NotReady(f"no server of the cluster is known after {SERVERS_S:g} s")
        clock.pause_s(_POLL_S)
    return addresses
