"""Gateways of a client: selection by outstanding rows and health; age of connections.

    pick     ->  the preferred target, or the ready target with the fewest outstanding rows
    release  ->  ends the use of a target; after a failure of its gateway the target is left

A target that was left gets no calls until a probe finds it ready, unless all targets are left. One
probe runs at a time.

Runs on: the caller's threads. With several targets, a daemon thread probes those that were left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from iskander.client.calls.retry import is_gateway_failure
from iskander.errors import ConfigError, IskanderError, NotReady
from iskander.foundation import clock
from iskander.foundation.backoff import backoff

AGE_S = 1800.0
"""Age at which a connection is replaced, so that new nodes behind a host name get calls."""
_AGE_JITTER = 0.2
PROBE_TIMEOUT_S = 2.0
_PROBE_FIRST_S = 0.1
_PROBE_MAX_S = 5.0
PREFERRED_PROBE_MAX_S = 1.0
"""Maximum wait between two probes of the preferred target."""
_RETRY_S = 30.0
"""Wait after a failed lookup of a name, or a failed replacement of a connection."""
_JOIN_S = 1.0
_ADDRESS = re.compile(r"unix:.+|(?:\[[^\[\]/\s]+\]|[^\[\]:/@\s]+):(?P<port>[0-9]{1,5})", re.ASCII)
_PORT_MAX = 65_535


class Address(NamedTuple):
    """Address of a gateway.

    Attributes:
        text: `HOST:PORT` or `unix:PATH`.
        name: Host name in the server's certificate, if the host is a resolved IP address.
    """

    text: str
    name: str | None = None


class TargetConnection(Protocol):
    """The part of a connection that a target uses."""

    def close(self) -> None:
        """Close the connection."""

    def health(self, timeout_s: float) -> dict[str, Any]:
        """Return the readiness of the gateway."""


class OpenConnection:
    """A connection of a target, and the leases that use it."""

    __slots__ = ("connection", "expires_ns", "is_retired", "leases")

    def __init__(self, connection: Any, expires_ns: int) -> None:  # noqa: ANN401
        self.connection = connection
        self.expires_ns = expires_ns
        self.leases: set[TargetLease] = set()
        self.is_retired = False


class Target:
    """A gateway of a client.

    Attributes:
        is_preferred: Whether the target gets all calls while it is ready.
        next_probe_ns: Time of the next probe; None while the target is ready.
        probes: Number of probes since the target was left.
        returns: Number of times that the target became ready again.
    """

    __slots__ = ("address", "is_preferred", "next_probe_ns", "opened", "probes", "returns")

    def __init__(
        self, address: Address, opened: OpenConnection, *, is_preferred: bool = False
    ) -> None:
        self.address = address
        self.opened = opened
        self.is_preferred = is_preferred
        self.next_probe_ns: int | None = None
        self.probes = self.returns = 0

    @property
    def rows(self) -> int:
        """Number of rows that were sent to the target and have no result."""
        return sum(lease.rows for lease in self.opened.leases.copy())


class TargetLease:
    """Use of a target by one attempt of a call; a stream updates its outstanding `rows`.

    Used as a context, the lease ends with the block. An `IskanderError` in the block is the failure
    of the attempt.
    """

    __slots__ = ("_end", "_preferred", "_returns", "opened", "rows", "target")

    def __init__(
        self,
        target: Target,
        rows: int,
        end: Callable[[TargetLease, IskanderError | None], None],
        preferred: Target | None = None,
    ) -> None:
        self._end = end
        self._preferred = preferred
        self._returns = 0 if preferred is None else preferred.returns
        self.target = target
        self.opened = target.opened
        self.rows = rows

    def __enter__(self) -> TargetLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(self, error if isinstance(error, IskanderError) else None)

    @property
    def connection(self) -> Any:  # noqa: ANN401
        """The connection to use."""
        return self.opened.connection

    @property
    def is_outdated(self) -> bool:
        """Whether the preferred target became ready while this lease uses another target."""
        preferred = self._preferred
        return (
            preferred is not None
            and preferred is not self.target
            and preferred.returns != self._returns
        )


class Targets:
    """Gateways of a client.

    Args:
        addresses: `HOST:PORT` or `unix:PATH`, or several of them.
        connect: Opens a connection to an address.
        preferred: Address of the target that gets all calls while it is ready; it need not be
            listed.
        is_resolved: Whether every IP address of a host name is a target; names are then looked up
            again after `age_s`. The preferred address is not resolved.
        age_s: Age at which connections are replaced, reduced by a random part of up to a fifth.
        now_ns: Clock.
        look_up: Function like `socket.getaddrinfo`.

    Raises:
        ConfigError: There is no address, or an address is invalid.
        NotReady: A host name cannot be resolved.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        connect: Callable[[Address], TargetConnection],
        *,
        preferred: str | None = None,
        is_resolved: bool = False,
        age_s: float = AGE_S,
        now_ns: Callable[[], int] = clock.now_ns,
        look_up: Callable[..., Iterable[Any]] = socket.getaddrinfo,
    ) -> None:
        texts = _require_addresses(addresses, preferred)
        self._connect = connect
        self._age_s = age_s
        self._now_ns = now_ns
        self._look_up = look_up
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._names = [
            text for text in texts if is_resolved and text != preferred and _is_name(text)
        ]
        fixed = [Address(text) for text in texts if text not in self._names]
        self._fixed = tuple(dict.fromkeys(fixed))
        self._lookup_ns: int | None = None
        self._preferred: Target | None = None
        if preferred is not None:
            address = Address(preferred)
            self._preferred = Target(address, self._open_connection(address), is_preferred=True)
        self._targets = [self._new_or_preferred(address) for address in self._addresses()]
        if self._names:
            self._lookup_ns = now_ns() + _ns(age_s)
            with self._changed:
                self._ensure_thread()

    def __len__(self) -> int:
        return len(self._targets)

    def pick(
        self,
        rows: int = 0,
        *,
        avoid: Target | None = None,
        end: Callable[[TargetLease, IskanderError | None], None] | None = None,
    ) -> TargetLease:
        """Lease the preferred target, or the ready target with the fewest outstanding rows.

        Args:
            rows: Rows of the call.
            avoid: Target of the failed attempt before this one, used only if no other target is
                ready.
            end: Called at the end of the lease's context, instead of `release`.
        """
        targets = self._targets
        target = targets[0] if len(targets) == 1 else choose_target(targets, avoid)
        retired = None
        with self._changed:
            if self._now_ns() >= target.opened.expires_ns and not self._is_closed:
                retired = self._replace(target)
            lease = TargetLease(target, rows, end or self.release, self._preferred)
            lease.opened.leases.add(lease)
        if retired is not None:
            self._retire(retired)
        return lease

    def release(self, lease: TargetLease, error: BaseException | None = None) -> None:
        """End a lease; `error` is the failure of its attempt."""
        opened, target = lease.opened, lease.target
        is_failure = error is not None and (
            is_gateway_failure(error) or (target.is_preferred and isinstance(error, NotReady))
        )
        with self._changed:
            opened.leases.discard(lease)
            is_unused = opened.is_retired and not opened.leases
            if is_failure and len(self._targets) > 1 and target.next_probe_ns is None:
                target.probes = 0
                target.next_probe_ns = self._now_ns() + _ns(_PROBE_FIRST_S)
                self._ensure_thread()
                self._changed.notify_all()
        if is_unused:
            opened.connection.close()

    def close(self) -> None:
        """Close all connections and end the thread."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        for target in self._targets:
            target.opened.connection.close()
        if thread is not None:
            thread.join(_JOIN_S)

    def run_due_tasks(self) -> float | None:
        """Look names up if that is due, and probe one target whose probe is due.

        Returns:
            Seconds until the next task is due; None if there is no task.
        """
        if self._lookup_ns is not None and self._now_ns() >= self._lookup_ns:
            self._lookup_ns = self._now_ns() + _ns(min(self._age_s, _RETRY_S))
            # If a name is not found or a TLS file cannot be read, the targets stay unchanged.
            with contextlib.suppress(NotReady, ConfigError):
                self._update(self._addresses())
                self._lookup_ns = self._now_ns() + _ns(self._age_s)
        target = due_target(self._targets, self._now_ns())
        if target is not None:
            self._probe(target)
        return self._wait_s()

    def _probe(self, target: Target) -> None:
        with self._changed:
            lease = TargetLease(target, 0, self.release)
            lease.opened.leases.add(lease)
        is_ready = False
        # The caller's token function may raise anything; the next call raises it to the caller.
        with contextlib.suppress(Exception):
            is_ready = bool(lease.connection.health(PROBE_TIMEOUT_S)["ready"])
        target.probes += 1
        wait_max_s = PREFERRED_PROBE_MAX_S if target.is_preferred else _PROBE_MAX_S
        wait_s = backoff(target.probes + 1, _PROBE_FIRST_S, wait_max_s)
        due_ns = self._now_ns() + _ns(wait_s * random.uniform(0.8, 1.2))
        target.next_probe_ns = None if is_ready else due_ns
        target.returns += is_ready
        self.release(lease)

    def _replace(self, target: Target) -> OpenConnection | None:
        """Replace the connection of a target; return the old connection, or None on failure."""
        old = target.opened
        try:
            target.opened = self._open_connection(target.address)
        except ConfigError:  # A TLS file cannot be read now.
            old.expires_ns = self._now_ns() + _ns(_RETRY_S)
            return None
        return old

    def _update(self, addresses: Sequence[Address]) -> None:
        """Add targets of new addresses, and retire targets whose addresses are gone."""
        known = {target.address: target for target in self._targets}
        added = {each: self._new_or_preferred(each) for each in addresses if each not in known}
        with self._changed:
            is_closed = self._is_closed  # The lookup may have ended after `close`.
            if not is_closed:
                self._targets = [known.get(address) or added[address] for address in addresses]
        removed = [known[each] for each in known.keys() - set(addresses)]
        for target in added.values() if is_closed else removed:
            self._retire(target.opened)

    def _retire(self, opened: OpenConnection) -> None:
        """Close a connection now, or at the end of its last lease."""
        with self._changed:
            opened.is_retired = True
            is_unused = not opened.leases
        if is_unused:
            opened.connection.close()

    def _new_or_preferred(self, address: Address) -> Target:
        """Return a new target, or the preferred target if it has this address."""
        if self._preferred is not None and self._preferred.address == address:
            return self._preferred
        return Target(address, self._open_connection(address))

    def _open_connection(self, address: Address) -> OpenConnection:
        age_s = self._age_s * random.uniform(1 - _AGE_JITTER, 1)
        return OpenConnection(self._connect(address), self._now_ns() + _ns(age_s))

    def _addresses(self) -> list[Address]:
        """Return the fixed addresses, followed by the addresses of the names."""
        found = dict.fromkeys(self._fixed)
        for text in self._names:
            found.update(dict.fromkeys(resolve(text, self._look_up)))
        return list(found)

    def _wait_s(self) -> float | None:
        times_ns = [
            target.next_probe_ns for target in self._targets if target.next_probe_ns is not None
        ]
        if self._lookup_ns is not None:
            times_ns.append(self._lookup_ns)
        return max(min(times_ns) - self._now_ns(), 0) / clock.NS_PER_S if times_ns else None

    def _ensure_thread(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="iskander-targets", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self.run_due_tasks()
                with self._changed:
                    wait_s = self._wait_s()
                    if wait_s is None or self._is_closed:
                        self._thread = None  # Under the lock: a later failure starts a new thread.
                        return
                    self._changed.wait(wait_s)
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None


class Route:
    """Selects the targets of one call's attempts; avoids the target of the last failed attempt.

    Args:
        targets: Targets of the client.
        is_callers: Returns whether an error comes from the caller, and is no failure of the target.
    """

    __slots__ = ("_avoid", "_is_callers", "_targets")

    def __init__(
        self, targets: Targets, is_callers: Callable[[BaseException], bool] | None = None
    ) -> None:
        self._targets = targets
        self._is_callers = is_callers
        self._avoid: Target | None = None

    def attempt(self, rows: int) -> TargetLease:
        """Lease a target for an attempt; use the lease as a context."""
        return self._targets.pick(rows, avoid=self._avoid, end=self._end)

    def _end(self, lease: TargetLease, error: IskanderError | None) -> None:
        if error is not None and self._is_callers is not None and self._is_callers(error):
            error = None
        self._avoid = None if error is None else lease.target
        self._targets.release(lease, error)


def choose_target(targets: Sequence[Target], avoid: Target | None = None) -> Target:
    """Return the target for a call.

    Ready targets come first, then targets other than `avoid`. Among them the preferred target is
    returned, or else the target with the fewest outstanding rows.
    """
    wanted = [target for target in targets if target.next_probe_ns is None] or targets
    others = [target for target in wanted if target is not avoid]
    return min(
        others or wanted,
        key=lambda target: (not target.is_preferred, target.rows, random.random()),
    )


def due_target(targets: Sequence[Target], now_ns: int) -> Target | None:
    """Return the target to probe now, first the preferred target; None if no probe is due."""
    waiting = [
        target
        for target in targets
        if target.next_probe_ns is not None and target.next_probe_ns <= now_ns
    ]
    return min(
        waiting, key=lambda each: (not each.is_preferred, each.next_probe_ns or 0), default=None
    )


def resolve(text: str, look_up: Callable[..., Iterable[Any]]) -> list[Address]:
    """Return an address for each IP address of a host.

    Raises:
        NotReady: The name cannot be resolved.
    """
    host, _, port = text.rpartition(":")
    try:
        found = look_up(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label is too long.
        raise NotReady(f"the host name of {text} cannot be resolved: {error}") from error
    hosts = sorted({entry[4][0] for entry in found})
    return [Address(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in hosts]


def _require_addresses(addresses: object, preferred: object) -> list[str]:
    """Return the addresses of a client, including the preferred address.

    Raises:
        ConfigError: There is no address, or an address is invalid.
    """
    if isinstance(addresses, bytes) or not isinstance(addresses, str | Iterable):
        raise ConfigError(f"invalid address {addresses!r}: expected HOST:PORT or unix:PATH")
    texts = [addresses] if isinstance(addresses, str) else list(addresses)
    if preferred is not None:
        texts.append(preferred)
    if not texts:
        raise ConfigError("a client has no address; the minimum is one")
    for text in texts:
        match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        port = None if match is None else match["port"]
        if match is None or (port is not None and not 0 < int(port) <= _PORT_MAX):
            raise ConfigError(f"invalid address {text!r}: expected HOST:PORT or unix:PATH")
    return texts


def _is_name(text: str) -> bool:
    """Whether the host of a valid address is a name, not an IP address or a path."""
    if text.startswith("unix:"):
        return False
    try:
        ipaddress.ip_address(text.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


def _ns(seconds: float) -> int:
    return int(seconds * clock.NS_PER_S)
