"""Targets: selection, preference, failures, probes, replacement by age, and host names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from iskander.client.calls import targets as module
from iskander.client.calls.targets import (
    Address,
    OpenConnection,
    Route,
    Target,
    TargetLease,
    Targets,
    choose_target,
    due_target,
)
from iskander.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    NotReady,
    QueueFull,
)
from iskander.foundation.clock import NS_PER_S

BROKEN = ConnectionFailed("connection refused")
UNANSWERED = DeadlineExceeded("the call's deadline has passed")
UNANSWERED.is_unanswered = True


class FakeConnection:
    """A connection that answers probes as scripted; ready after the script."""

    def __init__(self, address: Address, script: dict[str, list[Any]]) -> None:
        self.address = address
        self.is_closed = False
        self._answers = script.setdefault(address.text, [])
        self.probes = 0

    def close(self) -> None:
        self.is_closed = True

    def health(self, timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        self.probes += 1
        answer = self._answers.pop(0) if self._answers else True
        if isinstance(answer, Exception):
            raise answer
        return {"ready": answer}


class World:
    """Clock, connections and name service of the tests."""

    def __init__(self) -> None:
        self.ns = 0
        self.opened: list[FakeConnection] = []
        self.script: dict[str, list[Any]] = {}
        self.names: dict[str, list[str]] = {}
        self.connect_error: Exception | None = None

    def targets(self, *addresses: str, **options: Any) -> Targets:
        return Targets(
            list(addresses),
            self.connect,
            now_ns=lambda: self.ns,
            look_up=self.look_up,
            **options,
        )

    def connect(self, address: Address) -> FakeConnection:
        if self.connect_error is not None:
            raise self.connect_error
        self.opened.append(FakeConnection(address, self.script))
        return self.opened[-1]

    def look_up(self, host: str, port: str, **_: Any) -> list[Any]:
        if host not in self.names:
            raise OSError("name not known")
        return [(0, 0, 0, "", (ip, int(port))) for ip in self.names[host]]

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * NS_PER_S)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """The thread does not start: tests call `run_due_tasks`."""
    monkeypatch.setattr(Targets, "_ensure_thread", lambda _: None)
    return World()


def address_of(lease: TargetLease) -> str:
    return lease.target.address.text


def counts(targets: Targets, rows: int, times: int) -> dict[str, int]:
    """Pick and keep leases; returns how many each address got."""
    found: dict[str, int] = {}
    for _ in range(times):
        text = address_of(targets.pick(rows))
        found[text] = found.get(text, 0) + 1
    return found


def test_target_with_the_fewest_outstanding_rows_is_picked(world: World) -> None:
    targets = world.targets("a:1", "b:1", "c:1")
    large = targets.pick(1000)
    small = counts(targets, 10, 100)
    assert address_of(large) not in small
    assert sorted(small.values()) == [50, 50]
    targets.release(large)
    assert address_of(targets.pick(1)) == address_of(large)


def test_stream_changes_its_outstanding_rows(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    first, second = targets.pick(), targets.pick(5)
    if first.target is second.target:  # A tie of idle targets.
        second = targets.pick(5)
    first.rows = 100
    assert targets.pick(1).target is not first.target
    first.rows = 0
    assert targets.pick(1).target is first.target


@pytest.mark.parametrize(
    "error", [BROKEN, Draining("x"), UNANSWERED], ids=["broken", "draining", "unanswered"]
)
def test_target_is_left_after_a_failure_until_a_probe_finds_it_ready(
    world: World, error: Exception
) -> None:
    targets = world.targets("a:1", "b:1")
    lease = targets.pick(1)
    failed = address_of(lease)
    other = ({"a:1", "b:1"} - {failed}).pop()
    world.script[failed] += [False, NotReady("x"), True]
    targets.release(lease, error)
    assert counts(targets, 1, 20) == {other: 20}
    waits = []
    while (wait_s := targets.run_due_tasks()) is not None:
        waits.append(wait_s)
        assert counts(targets, 1, 1) == {other: 1}
        world.advance(wait_s)
    # The first probe, and one after each answer that is not ready.
    assert len(waits) == 3
    assert waits[0] == pytest.approx(0.1)
    assert 0.16 <= waits[1] <= 0.24
    assert 0.32 <= waits[2] <= 0.48
    assert failed in counts(targets, 1, 40)


def test_probes_go_on_after_an_error_of_the_callers_token_function(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    lease = targets.pick(1)
    world.script[address_of(lease)] += [OSError("no token"), True]
    targets.release(lease, BROKEN)
    count = 0
    while (wait_s := targets.run_due_tasks()) is not None:
        count += 1
        world.advance(wait_s)
    assert count == 2
    assert address_of(lease) in counts(targets, 1, 40)


def test_waits_between_probes_are_bounded(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    lease = targets.pick()
    world.script[address_of(lease)] += [False] * 2000
    targets.release(lease, BROKEN)
    for _ in range(1200):
        wait_s = targets.run_due_tasks()
        assert wait_s is not None
        assert wait_s <= 6.0
        world.advance(wait_s)


def test_errors_of_a_model_or_a_batch_leave_no_target(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    for error in (QueueFull("x"), NotReady("x"), ValueError("x"), DeadlineExceeded("x")):
        targets.release(targets.pick(), error)
    assert set(counts(targets, 1, 20)) == {"a:1", "b:1"}
    assert targets.run_due_tasks() is None


def test_left_targets_are_used_if_no_target_is_ready(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    for text in ("a:1", "b:1"):
        lease = next(each for _ in range(50) if address_of(each := targets.pick()) == text)
        targets.release(lease, BROKEN)
    assert set(counts(targets, 1, 20)) == {"a:1", "b:1"}


def test_only_target_is_never_left(world: World) -> None:
    targets = world.targets("a:1")
    targets.release(targets.pick(), BROKEN)
    assert targets.run_due_tasks() is None
    assert address_of(targets.pick()) == "a:1"


def target_of(text: str, *, rows: int, next_probe_ns: int | None = None) -> Target:
    opened = OpenConnection(None, 0)
    target = Target(Address(text), opened, is_preferred=text == "own:1")
    target.next_probe_ns = next_probe_ns
    opened.leases.add(TargetLease(target, rows, lambda *_: None))
    return target


@pytest.mark.parametrize(
    ("own", "b", "c", "avoid", "expected"),
    [
        ((900, None), (0, None), (0, None), None, "own:1"),
        ((900, None), (2, None), (1, None), "own:1", "c:1"),
        ((0, 5), (2, None), (1, None), None, "c:1"),
        ((0, 5), (2, None), (1, None), "c:1", "b:1"),
        ((0, 5), (2, None), (1, 5), "b:1", "b:1"),
        ((900, None), (0, 5), (0, 5), "own:1", "own:1"),
        ((900, 5), (0, 5), (0, 5), None, "own:1"),
        ((900, 5), (1, 5), (0, 5), "own:1", "c:1"),
    ],
)
def test_choice_of_a_target(
    own: tuple[int, int | None],
    b: tuple[int, int | None],
    c: tuple[int, int | None],
    avoid: str | None,
    expected: str,
) -> None:
    """Each target has outstanding rows, and a time if it was left."""
    given = {"own:1": own, "b:1": b, "c:1": c}
    targets = [target_of(text, rows=rows, next_probe_ns=ns) for text, (rows, ns) in given.items()]
    avoided = next((each for each in targets if each.address.text == avoid), None)
    assert choose_target(targets, avoided).address.text == expected


def test_preferred_target_is_probed_before_others() -> None:
    targets = [target_of(text, rows=0, next_probe_ns=ns) for text, ns in (("b:1", 0), ("own:1", 9))]
    targets.append(target_of("c:1", rows=0))
    assert due_target(targets, 8) is targets[0]
    assert due_target(targets, 9) is targets[1]
    assert due_target(targets[2:], 9) is None


def test_preferred_target_gets_all_calls_until_it_is_left_and_again_when_it_is_ready(
    world: World,
) -> None:
    targets = world.targets("b:1", "c:1", preferred="own:1")
    assert counts(targets, 1000, 20) == {"own:1": 20}
    lease = targets.pick()
    world.script["own:1"] += [False] * 20 + [True]
    targets.release(lease, BROKEN)
    assert counts(targets, 1, 20) == {"b:1": 10, "c:1": 10}
    other = targets.pick(1)
    waits = []
    while (wait_s := targets.run_due_tasks()) is not None:
        waits.append(wait_s)
        assert not other.is_outdated
        world.advance(wait_s)
    assert lease.connection.probes == 21
    assert max(waits) <= 1.2 and sum(waits) >= 17 * 0.8
    assert counts(targets, 1, 20) == {"own:1": 20}
    # A stream that was opened meanwhile has a better target now, and no other lease has.
    assert other.is_outdated
    assert not lease.is_outdated
    assert not targets.pick().is_outdated
    assert not targets.pick(avoid=lease.target).is_outdated


def test_preferred_target_without_the_model_is_left(world: World) -> None:
    targets = world.targets("b:1", preferred="own:1")
    targets.release(targets.pick(), NotReady("x"))
    assert counts(targets, 1, 5) == {"b:1": 5}


def test_overload_of_the_preferred_target_moves_one_attempt_only(world: World) -> None:
    targets = world.targets("b:1", preferred="own:1")
    route = Route(targets)
    assert address_of(fail(route, QueueFull("x"))) == "own:1"
    with route.attempt(1) as second:
        assert address_of(second) == "b:1"
    assert counts(targets, 1, 5) == {"own:1": 5}
    assert targets.run_due_tasks() is None


def test_preferred_target_may_be_one_of_the_addresses_or_the_only_one(world: World) -> None:
    world.names["node.test"] = ["10.0.0.1"]
    for given in (["10.0.0.9:1", "node.test:1"], ["10.0.0.9:1"]):
        targets = world.targets(*given, preferred="node.test:1", is_resolved=True)
        assert len(targets) == 2
        assert counts(targets, 1, 5) == {"node.test:1": 5}
    assert len(world.opened) == 4
    alone = world.targets(preferred="own:1")
    alone.release(alone.pick(), BROKEN)
    assert counts(alone, 1, 5) == {"own:1": 5}


def test_preferred_target_stays_when_names_are_looked_up_again(world: World) -> None:
    world.names["node.test"] = ["10.0.0.1"]
    targets = world.targets("node.test:5", preferred="own:1", is_resolved=True, age_s=1000.0)
    world.names["node.test"] = ["10.0.0.2"]
    world.advance(1000.0)
    targets.run_due_tasks()
    assert len(targets) == 2
    lease = targets.pick()
    assert address_of(lease) == "own:1"
    assert not lease.connection.is_closed


def fail(route: Route, error: BaseException) -> TargetLease:
    """An attempt that fails; returns its lease."""
    with pytest.raises(type(error)), route.attempt(1) as lease:
        raise error
    assert lease.target.rows == 0
    return lease


def test_second_attempt_avoids_the_target_of_the_first(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    for _ in range(20):
        route = Route(targets)
        first = fail(route, QueueFull("x"))
        with route.attempt(1) as second:
            assert second.target is not first.target


def test_second_attempt_uses_the_only_ready_target_again(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    lease = targets.pick()
    targets.release(lease, BROKEN)
    for _ in range(10):
        route = Route(targets)
        first = fail(route, QueueFull("x"))
        with route.attempt(1) as second:
            assert second.target is first.target is not lease.target


def test_attempt_after_one_that_did_not_fail_avoids_none(world: World) -> None:
    """A stream that left the preferred target returns to it."""
    targets = world.targets("b:1", preferred="own:1")
    route = Route(targets)
    fail(route, QueueFull("x"))
    with route.attempt(1) as second:
        assert address_of(second) == "b:1"
    with route.attempt(1) as third:
        assert address_of(third) == "own:1"


def test_context_of_a_lease_leaves_its_target_after_a_failure_of_the_gateway(world: World) -> None:
    targets = world.targets("a:1", "b:1")
    with pytest.raises(ConnectionFailed), targets.pick() as lease:
        raise BROKEN
    assert lease.target.next_probe_ns is not None


@pytest.mark.parametrize("error", [KeyError("x"), GeneratorExit(), BROKEN], ids=repr)
def test_errors_of_the_caller_do_not_change_the_route(world: World, error: BaseException) -> None:
    targets = world.targets("a:1", "b:1")
    for _ in range(20):
        route = Route(targets, lambda each: each is BROKEN)
        lease = fail(route, error)
        assert route._avoid is None
        assert lease.target.next_probe_ns is None


def test_old_connection_is_replaced_and_closed_after_its_last_lease(world: World) -> None:
    targets = world.targets("a:1", age_s=100.0)
    lease = targets.pick()
    world.advance(79)
    assert targets.pick().connection is lease.connection
    world.advance(22)
    late = targets.pick()
    assert late.connection is not lease.connection
    assert late.target is lease.target
    old, new = world.opened
    assert not old.is_closed
    targets.release(lease)
    assert not old.is_closed  # One lease is left, of the second pick.
    targets.release(next(iter(lease.opened.leases)))
    assert (old.is_closed, new.is_closed) == (True, False)


def test_old_connection_without_leases_is_closed_at_once(world: World) -> None:
    targets = world.targets("a:1", age_s=100.0)
    targets.release(targets.pick())
    world.advance(101)
    targets.release(targets.pick())
    assert [each.is_closed for each in world.opened] == [True, False]


def test_old_connection_is_kept_while_it_cannot_be_replaced(world: World) -> None:
    targets = world.targets("a:1", age_s=100.0)
    world.advance(101)
    world.connect_error = ConfigError("a TLS file cannot be read")
    assert targets.pick().connection is world.opened[0]
    world.connect_error = None
    world.advance(31)
    assert targets.pick().connection is world.opened[1]


def test_ages_of_connections_differ(world: World) -> None:
    targets = world.targets(*(f"a:{port}" for port in range(1, 51)), age_s=100.0)
    assert len({target.opened.expires_ns for target in targets._targets}) > 10


def test_host_name_becomes_one_target_for_each_address(world: World) -> None:
    world.names["node.test"] = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]
    targets = world.targets("node.test:5", "10.0.0.9:5", "unix:/run/x", is_resolved=True)
    assert {each.address for each in world.opened} == {
        Address("10.0.0.9:5"),
        Address("unix:/run/x"),
        Address("10.0.0.1:5", "node.test"),
        Address("10.0.0.2:5", "node.test"),
        Address("[fd00::1]:5", "node.test"),
    }
    assert len(targets) == 5


def test_host_name_is_one_target_without_resolution(world: World) -> None:
    assert len(world.targets("node.test:5")) == 1
    assert world.opened[0].address == Address("node.test:5")


def test_later_lookup_adds_and_removes_targets(world: World) -> None:
    world.names["node.test"] = ["10.0.0.1", "10.0.0.2"]
    targets = world.targets("node.test:5", is_resolved=True, age_s=1000.0)
    leases = [targets.pick(1), targets.pick(1)]
    assert targets.run_due_tasks() == pytest.approx(1000.0)
    world.advance(1000.0)
    del world.names["node.test"]
    assert targets.run_due_tasks() == pytest.approx(30.0)  # The name service fails: all stays.
    assert len(targets) == 2
    world.names["node.test"] = ["10.0.0.2", "10.0.0.3"]
    world.advance(30.0)
    targets.run_due_tasks()
    assert set(counts(targets, 1, 20)) == {"10.0.0.2:5", "10.0.0.3:5"}
    removed = next(each for each in world.opened if each.address.text == "10.0.0.1:5")
    assert not removed.is_closed
    for lease in leases:
        targets.release(lease)
    assert removed.is_closed


def test_lookup_that_ends_after_close_leaves_no_open_connection(world: World) -> None:
    world.names["node.test"] = ["10.0.0.1"]
    targets = world.targets("node.test:5", is_resolved=True)
    addresses = [Address("10.0.0.1:5", "node.test"), Address("10.0.0.2:5", "node.test")]
    targets.close()
    targets._update(addresses)
    assert len(world.opened) == 2
    assert all(each.is_closed for each in world.opened)
    assert len(targets) == 1


def test_lookup_with_a_tls_file_that_cannot_be_read_keeps_the_targets(world: World) -> None:
    world.names["node.test"] = ["10.0.0.1"]
    targets = world.targets("node.test:5", is_resolved=True, age_s=1000.0)
    world.names["node.test"] = ["10.0.0.1", "10.0.0.2"]
    world.connect_error = ConfigError("a TLS file cannot be read")
    world.advance(1000.0)
    assert targets.run_due_tasks() == pytest.approx(30.0)
    assert len(targets) == 1
    world.connect_error = None
    world.advance(30.0)
    targets.run_due_tasks()
    assert len(targets) == 2


@pytest.mark.parametrize(
    "address",
    [
        "localhost", "localhost:", ":1", "", "unix:", "http://h:1", "grpc://h:1", "h:0", "h:65536",
        "h:port", "h :1", "::1:50051", "h/x:1", "h:1\n", "h:-1", b"h:1", 5, None,
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("is_resolved", [False, True])
def test_invalid_address_is_a_config_error(world: World, address: Any, is_resolved: bool) -> None:
    for given in (address, [address], ["a:1", address]):
        with pytest.raises(ConfigError, match="expected HOST:PORT or unix:PATH"):
            Targets(given, world.connect, is_resolved=is_resolved, look_up=world.look_up)
    if address is not None:
        with pytest.raises(ConfigError, match="expected HOST:PORT or unix:PATH"):
            Targets("a:1", world.connect, preferred=address)
    assert not world.opened


@pytest.mark.parametrize(
    "address", ["h:1", "my_host-1.example:65535", "[::1]:5", "[fe80::1%eth0]:5", "unix:/a b"]
)
def test_valid_address_is_used_as_given(world: World, address: str) -> None:
    for given in (address, (address,), iter([address])):
        Targets(given, world.connect)  # type: ignore[arg-type]
    assert [each.address.text for each in world.opened] == [address] * 3


def test_no_address_and_an_unknown_name_are_errors(world: World) -> None:
    with pytest.raises(ConfigError, match="no address"):
        world.targets()
    with pytest.raises(NotReady, match="name not known"):
        world.targets("node.test:5", is_resolved=True)


def test_name_that_cannot_be_encoded_is_an_error() -> None:
    with pytest.raises(NotReady, match="cannot be resolved"):
        module.resolve(f"{'a' * 64}.test:5", socket.getaddrinfo)


def probing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "iskander-targets"]


def join_threads() -> None:
    """Wait until no thread probes; it may have ended."""
    for thread in probing_threads():
        thread.join(10)
    assert not probing_threads()


@pytest.fixture
def threaded() -> Iterator[World]:
    world = World()
    yield world
    assert not probing_threads()


def test_one_address_has_no_thread(threaded: World) -> None:
    targets = threaded.targets("a:1")
    targets.release(targets.pick(), BROKEN)
    assert not probing_threads()
    targets.close()


def test_thread_probes_and_ends_when_all_targets_are_ready(
    threaded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROBE_FIRST_S", 0.0)
    targets = threaded.targets("a:1", "b:1")
    lease = targets.pick()
    targets.release(lease, BROKEN)
    join_threads()
    assert lease.target.next_probe_ns is None
    assert lease.connection.probes == 1
    targets.close()


def test_thread_is_started_again_after_an_error_of_a_probe(
    threaded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROBE_FIRST_S", 0.0)
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    bug = AssertionError("a bug")
    threads: list[threading.Thread] = []
    with monkeypatch.context() as patched:

        def run_due_tasks(_: Targets) -> float | None:
            threads.append(threading.current_thread())
            raise bug

        patched.setattr(Targets, "run_due_tasks", run_due_tasks)
        targets = threaded.targets("a:1", "b:1")
        lease = targets.pick()
        targets.release(lease, BROKEN)
        while not threads:
            pass
        threads[0].join(10)
    assert died == [bug]
    assert not probing_threads()
    other = targets.pick()
    targets.release(other, BROKEN)
    join_threads()
    assert lease.target.next_probe_ns is other.target.next_probe_ns is None
    targets.close()


def test_one_probe_is_in_flight_at_a_time(threaded: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_FIRST_S", 0.0)
    running, most, guard = [], [0], threading.Lock()

    def health(connection: FakeConnection, timeout_s: float) -> dict[str, Any]:
        with guard:
            running.append(connection)
            most[0] = max(most[0], len(running))
        threading.Event().wait(0.005)
        with guard:
            running.remove(connection)
        connection.probes += 1
        return {"ready": connection.probes > 3}

    monkeypatch.setattr(FakeConnection, "health", health)
    targets = threaded.targets("b:1", "c:1", preferred="own:1")
    for avoid in (None, targets._preferred):
        targets.release(targets.pick(avoid=avoid), BROKEN)
    for _ in range(3):
        for thread in probing_threads():
            thread.join(10)
    assert [each.next_probe_ns for each in targets._targets] == [None] * 3
    assert most == [1]
    targets.close()


def test_close_ends_the_thread_and_closes_all_connections(threaded: World) -> None:
    threaded.names["node.test"] = ["10.0.0.1", "10.0.0.2"]
    targets = threaded.targets("node.test:5", is_resolved=True)
    assert probing_threads()
    targets.close()
    assert not probing_threads()
    assert all(each.is_closed for each in threaded.opened)


def test_default_lookup_resolves_a_local_name() -> None:
    assert module.resolve("localhost:7", socket.getaddrinfo)
