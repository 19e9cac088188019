"""Scoring in a process of an engine: waits for servers, changed addresses, rejected rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from iskander.engines import scorer as module
from iskander.engines.addresses import Addresses
from iskander.engines.columns import Columns
from iskander.engines.scorer import Scorer, ScoreSpec
from iskander.errors import (
    Cancelled,
    ConnectionFailed,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    NotReady,
    RuntimeDiffers,
)
from iskander.lake.rows import ErrorBudget, TooManyErrors

FIRST, SECOND = Addresses("own:1", ("b:1",)), Addresses("own:2", ("b:1",))
GONE = ConnectionFailed("gone")


class Network:
    """Servers with one answer for all, and the clients that were opened."""

    def __init__(self) -> None:
        self.addresses = FIRST
        self.terms: list[Any] = []
        self.errors: list[IskanderError] = []
        self.opened: list[FakeClient] = []

    def client(self, others: Sequence[str], *, preferred: str | None, **_: Any) -> FakeClient:
        self.opened.append(FakeClient(self, preferred, tuple(others)))
        return self.opened[-1]

    def scorer(self, wait_s: float = 60.0, on_error: str = "fail") -> Scorer:
        spec = ScoreSpec(
            version="1",
            columns=Columns(
                model="m", inputs=("x",), results=pa.schema({"y": pa.int64()}), keep=None
            ),
            renamed={},
            servers=SimpleNamespace(look_up=lambda: self.addresses),  # type: ignore[arg-type]
            client={"token": "t"},
            runtimes={"runtimes": "R"},
            on_error=on_error,
            timeout_s=1.0,
            wait_s=wait_s,
        )
        return Scorer(spec)


class FakeClient:
    def __init__(self, network: Network, preferred: str | None, others: tuple[str, ...]) -> None:
        self._network = network
        self.addresses = Addresses(preferred, others)
        self.is_closed = False

    def score(self, model: str, data: pa.Table, **options: Any) -> pa.Table:
        if self.is_closed:
            raise Cancelled("the client is closed")
        self._network.terms.append(options["terms"])
        if self._network.errors:
            raise self._network.errors.pop(0)
        return pa.table({"y": data["x"]})

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr("iskander.engines.addresses.Client", network.client)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    return network


TABLE = pa.table({"x": [1, 2]})


def scored(scorer: Scorer) -> list[int]:
    found: list[int] = scorer(TABLE)["y"].to_pylist()
    return found


def test_one_client_has_all_addresses(network: Network) -> None:
    scorer = network.scorer()
    assert [scored(scorer), scored(scorer)] == [[1, 2]] * 2
    assert [each.addresses for each in network.opened] == [FIRST]


def test_calls_name_the_runtimes_of_the_driver(network: Network) -> None:
    """A server of a node that differs rejects them, and its error is final."""
    network.errors = [RuntimeDiffers("threads 2, expected 1")]
    with pytest.raises(RuntimeDiffers):
        scored(network.scorer())
    assert [each["runtimes"] for each in network.terms] == ["R"]


def test_batch_waits_for_a_server_with_the_same_client(network: Network) -> None:
    late = DeadlineExceeded("the call's deadline has passed")
    late.is_unanswered = True
    network.errors = [GONE, NotReady("starting"), late]
    assert scored(network.scorer()) == [1, 2]
    assert len(network.opened) == 1


def test_changed_addresses_have_another_client(network: Network) -> None:
    scorer = network.scorer()
    network.errors, network.addresses = [GONE], SECOND
    assert scored(scorer) == [1, 2]
    assert [each.addresses for each in network.opened] == [FIRST, SECOND]
    assert [each.is_closed for each in network.opened] == [True, False]


def test_call_that_the_replacement_ends_is_made_again(network: Network) -> None:
    """Another thread replaces the client during the call."""
    scorer = network.scorer()
    is_called, go_on = threading.Event(), threading.Event()

    def score(model: str, data: pa.Table, **options: Any) -> pa.Table:
        is_called.set()
        assert go_on.wait(10)
        raise Cancelled("the client is closed")

    first = scorer._client
    first.score = score  # type: ignore[assignment]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(scored(scorer)))
    thread.start()
    assert is_called.wait(10)
    network.addresses = SECOND
    scorer._look_up_after(first)
    scorer._look_up_after(first)
    go_on.set()
    thread.join(10)
    assert found == [[1, 2]]
    assert len(network.opened) == 2


def test_last_addresses_are_kept_while_none_is_known(network: Network) -> None:
    scorer = network.scorer()
    network.errors, network.addresses = [GONE], Addresses(None, ())
    assert scored(scorer) == [1, 2]
    assert len(network.opened) == 1


@pytest.mark.parametrize("error", [ContractError("wrong"), DeadlineExceeded("late")], ids=repr)
def test_errors_that_cannot_be_retried_are_raised_at_once(
    network: Network, error: IskanderError
) -> None:
    network.errors = [error, GONE]
    with pytest.raises(type(error)):
        scored(network.scorer())
    assert network.errors == [GONE]


def test_last_error_is_raised_after_the_wait(network: Network) -> None:
    network.errors = [GONE, NotReady("loading")]
    with pytest.raises(ConnectionFailed, match="gone") as caught:
        scored(network.scorer(wait_s=0.0))
    assert caught.value.__notes__ == ["no server scored the batch within 0 s"]


def test_no_server_at_all(network: Network) -> None:
    network.addresses = Addresses(None, ())
    with pytest.raises(NotReady, match="no server is known"):
        network.scorer()


@pytest.fixture
def rejecting(network: Network, monkeypatch: pytest.MonkeyPatch) -> Scorer:
    """Servers that reject all rows, and a limit of three of them."""

    def reject(*_: Any, **__: Any) -> pa.Table:
        raise ContractError("wrong")

    monkeypatch.setattr(FakeClient, "score", reject)
    monkeypatch.setattr(module, "ErrorBudget", partial(ErrorBudget, 3))
    return network.scorer(on_error="null")


def test_each_call_has_a_limit_of_rejected_rows(rejecting: Scorer) -> None:
    """The process of an engine lives as long as its query."""
    for _ in range(3):
        assert scored(rejecting) == [None, None]
    with pytest.raises(TooManyErrors, match="the server rejected 4 rows; limit 3"):
        rejecting(pa.table({"x": range(4)}))
    assert scored(rejecting) == [None, None]


def test_calls_of_a_task_have_one_limit_of_rejected_rows(rejecting: Scorer) -> None:
    for _ in range(2):
        task = rejecting.task()
        assert task(TABLE)["y"].to_pylist() == [None, None]
        with pytest.raises(TooManyErrors, match="the server rejected 4 rows; limit 3"):
            task(TABLE)
