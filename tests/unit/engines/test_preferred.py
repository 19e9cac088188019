"""Preference of one server: failures, the others, the return, and a new address."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.processes import eventually

from iskander.engines.addresses import Addresses
from iskander.engines.preferred import PreferredClient
from iskander.errors import ConnectionFailed, ContractError, IskanderError, NotReady, QueueFull
from iskander.ray.addresses import FixedServers, fixed_servers

OWN, OTHERS = ("own",), ("b", "c")


class Network:
    """Servers by their addresses, with the error that each one raises."""

    def __init__(self, *, preferred: str = "own", is_expected: bool = False) -> None:
        self.errors: dict[str, IskanderError | None] = {}
        self.addresses = Addresses(preferred, OTHERS, is_expected)
        self.calls: list[tuple[str, ...]] = []
        self.opened: list[tuple[str, ...]] = []
        self.lookups = 0

    def look_up(self) -> Addresses:
        self.lookups += 1
        return self.addresses

    def open(self, addresses: Sequence[str]) -> Any:
        self.opened.append(tuple(addresses))
        return FakeClient(self, tuple(addresses))

    def client(self, wait_s: float = 0.0) -> PreferredClient:
        return PreferredClient(self.look_up, self.open, wait_s=wait_s, probe_s=0.01)


class FakeClient:
    def __init__(self, network: Network, addresses: tuple[str, ...]) -> None:
        self._network, self._addresses = network, addresses

    def score(self, model: str, data: Any, **options: Any) -> Any:
        self._network.calls.append(self._addresses)
        self._check()
        return data

    def health(self) -> dict[str, Any]:
        self._check()
        return {"ready": True}

    def _check(self) -> None:
        error = self._network.errors.get(self._addresses[0])
        if error is not None:
            raise error


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "iskander-preferred"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    yield
    eventually(lambda: not threads(), what="the end of the thread")


def test_preferred_server_alone_is_used() -> None:
    network = Network()
    client = network.client()
    assert [client.score("m", index) for index in range(3)] == [0, 1, 2]
    assert network.opened == [OWN]


def test_others_are_used_until_the_preferred_one_is_back() -> None:
    network = Network()
    client = network.client()
    network.errors["own"] = ConnectionFailed("gone")
    client.score("m", 1)
    client.score("m", 2)
    assert network.calls == [OWN, OTHERS, OTHERS]
    network.errors["own"] = None
    eventually(lambda: not threads(), what="the return")
    client.score("m", 3)
    assert network.calls[-1] == OWN


def test_preferred_server_returns_at_another_address() -> None:
    network = Network()
    client = network.client()
    network.errors["own"] = ConnectionFailed("gone")
    client.score("m", 1)
    network.addresses = Addresses("new", OTHERS)
    eventually(lambda: not threads(), what="the return")
    client.score("m", 2)
    assert network.calls[-1] == ("new",)


def test_full_queue_is_no_reason_to_leave() -> None:
    network = Network()
    client = network.client()
    network.errors["own"] = QueueFull("full")
    client.score("m", 1)
    network.errors["own"] = None
    client.score("m", 2)
    assert network.calls == [OWN, OTHERS, OWN]


def test_errors_that_cannot_be_retried_are_raised_at_once() -> None:
    network = Network()
    network.errors["own"] = ContractError("wrong")
    with pytest.raises(ContractError):
        network.client().score("m", 1)
    assert network.calls == [OWN]


def test_last_error_is_raised_after_the_wait() -> None:
    network = Network()
    client = network.client()
    network.errors = {"own": ConnectionFailed("gone"), "b": NotReady("loading")}
    with pytest.raises(NotReady, match="loading") as caught:
        client.score("m", 1)
    assert caught.value.__notes__ == ["no server scored the batch within 0 s"]
    network.errors = {}


def test_batch_waits_for_any_server() -> None:
    network = Network()
    client = network.client(wait_s=60.0)
    network.errors = {"own": ConnectionFailed("gone"), "b": ConnectionFailed("gone")}
    threading.Timer(0.1, network.errors.clear).start()
    assert client.score("m", 1) == 1


def test_expected_server_is_used_when_it_is_ready() -> None:
    network = Network(preferred="", is_expected=True)
    client = network.client()
    client.score("m", 1)
    assert network.calls == [OTHERS]
    network.addresses = Addresses("own", OTHERS, True)
    eventually(lambda: not threads(), what="the return")
    client.score("m", 2)
    assert network.calls[-1] == OWN


def test_no_server_at_all() -> None:
    network = Network(preferred="")
    network.addresses = Addresses("", ())
    with pytest.raises(NotReady, match="no server is known"):
        network.client().score("m", 1)


def test_fixed_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iskander.ray.cluster.own_node_id", lambda: "n1")
    monkeypatch.setattr("iskander.ray.cluster.own_host", lambda: "10.0.0.2")
    table = fixed_servers({"n0": "a:1", "n1": "b:1"})
    assert table.look_up() == Addresses("b:1", ("a:1",))
    listed = fixed_servers(["10.0.0.1:1", "10.0.0.2:1"])
    assert listed.look_up() == Addresses("10.0.0.2:1", ("10.0.0.1:1",))
    assert fixed_servers("a:1") == FixedServers(unplaced=("a:1",))
    with pytest.raises(IskanderError, match="`target` has no address"):
        fixed_servers([])
