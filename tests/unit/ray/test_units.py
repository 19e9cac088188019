"""Units of a job as tasks, without Ray: results, errors, cancellation, and waits for servers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from iskander.engines.addresses import Addresses
from iskander.errors import Cancelled, ContractError, NotReady
from iskander.lake.journal import Finished
from iskander.lake.plan import make_unit
from iskander.lake.rows import ErrorBudget, TooManyErrors
from iskander.lake.run.report import Counters
from iskander.lake.sinks.writing import Staged
from iskander.ray import units
from iskander.ray.units import RayUnits, RemoteUnit

UNIT = make_unit(0, {"n": 0}, rows=4, bytes=32)
NONE, OWN = Addresses(None, ()), Addresses("unix:/s", ("h:1",))
STAGED = Staged(0, "part", 3, 24)


def result(rejected: int = 0) -> Any:
    finished = Finished(
        index=0, name=UNIT.name, rows_in=4, rows_out=3, quarantined=0, rejected=rejected, bytes=24
    )
    return units._TaskResult(staged=STAGED, finished=finished, times={"read_s": 2.0})


class FakeCluster:
    """Tasks end at once with `answer`, unless `is_endless`."""

    def __init__(self) -> None:
        self.answer: Any = result()
        self.is_endless = False
        self.cancelled: list[str] = []
        self.puts = 0

    def put(self, value: object) -> str:
        self.puts += 1
        return "work"

    def start_task(self, function: Any, *arguments: object, retries: int) -> str:
        assert arguments == ("work", UNIT) and retries > 0
        return "task"

    def is_done(self, task: str, *, within_s: float) -> bool:
        if self.is_endless:
            threading.Event().wait(0.01)
        return not self.is_endless

    def result_of(self, task: str) -> Any:
        return self.answer

    def cancel_task(self, task: str) -> None:
        self.cancelled.append(task)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(units, "cluster", fake)
    return fake


def shared(rows: list[int], errors_max: int = 10) -> Any:
    parts = dict.fromkeys(("job", "planned", "source", "stager", "quarantine"))
    budget = ErrorBudget(errors_max)
    return SimpleNamespace(**parts, counters=Counters(), budget=budget, on_rows=rows.append)


def opened(given: Any) -> RemoteUnit:
    return RayUnits(SimpleNamespace(), {})(given, UNIT)  # type: ignore[arg-type]


def test_result_of_a_task_is_counted(cluster: FakeCluster) -> None:
    rows: list[int] = []
    given = shared(rows)
    staged, finished = opened(given).run()
    assert (staged, finished.rows_in, rows) == (STAGED, 4, [4])
    assert given.counters.read_s == 2.0


def test_work_is_kept_once_for_all_units(cluster: FakeCluster) -> None:
    open_unit = RayUnits(SimpleNamespace(), {})  # type: ignore[arg-type]
    for _ in range(3):
        open_unit(shared([]), UNIT)
    assert cluster.puts == 1


def test_error_of_a_task_keeps_its_type(cluster: FakeCluster) -> None:
    cluster.answer = ContractError("bad row")
    with pytest.raises(ContractError, match="bad row"):
        opened(shared([])).run()


def test_rejected_rows_of_all_tasks_are_limited(cluster: FakeCluster) -> None:
    cluster.answer = result(rejected=2)
    given = shared([], errors_max=3)
    opened(given).run()
    with pytest.raises(TooManyErrors):
        opened(given).run()


def test_cancelled_unit_ends_its_task(cluster: FakeCluster) -> None:
    cluster.is_endless = True
    running = opened(shared([]))
    threading.Timer(0.05, running.cancel).start()
    with pytest.raises(Cancelled):
        running.run()
    assert cluster.cancelled == ["task"]


def test_wait_for_servers_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SERVERS_S", 0.1)
    found = [NONE] * 100
    with pytest.raises(NotReady, match="no server of the cluster"):
        units._wait_for_addresses(SimpleNamespace(look_up=found.pop))  # type: ignore[arg-type]
    found = [OWN, NONE]
    assert units._wait_for_addresses(SimpleNamespace(look_up=found.pop)) == OWN  # type: ignore[arg-type]


def test_process_keeps_the_client_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_client(*_: Any, **options: Any) -> Any:
        opened.append(SimpleNamespace(is_closed=False))
        opened[-1].close = lambda each=opened[-1]: setattr(each, "is_closed", True)
        return opened[-1]

    monkeypatch.setattr("iskander.engines.addresses.Client", open_client)
    monkeypatch.setattr(units, "_clients", {})
    servers = SimpleNamespace(look_up=lambda: OWN)
    first, other = (SimpleNamespace(key=key, servers=servers, options={}) for key in ("a", "b"))
    assert units._client_of_job(first) is units._client_of_job(first) is opened[0]  # type: ignore[arg-type]
    assert units._client_of_job(other) is opened[1]  # type: ignore[arg-type]
    assert [each.is_closed for each in opened] == [True, False]
