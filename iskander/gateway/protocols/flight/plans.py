"""Plans of open streams, and a cache of idle ones, charged to the receive budget.

A plan says how the columns of a schema become the inputs of a model, and its outputs columns.

A plan has many times the bytes of its schema. Its bytes are charged once for all streams that use
it, and released when no stream uses it and it has left the cache.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

from iskander.config.schema import LimitsConfig
from iskander.contract.tensors import Contract
from iskander.errors import Overloaded
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, thread_cpu_ns
from iskander.gateway.protocols.flight.fair_threads import FairThreads
from iskander.gateway.protocols.flight.plan import HEADER_FACTOR, Plan
from iskander.gateway.scheduling.lanes.lane import Lane

IDLE_BYTES_MAX: Final = 16 << 20
"""Limit of the bytes of plans that no stream uses."""
IDLE_SHARE: Final = 16
"""Idle plans have at most one part in 16 of the receive budget."""
RETRY_MS: Final = 1000
REST_FACTOR: Final = 4
"""After a build, a caller waits four times as long: it builds plans for a fifth of the time."""
REST_FROM_NS: Final = 5 * NS_PER_MS
"""Shorter builds are free: those of a few hundred columns."""
Key = tuple[int, bytes]
"""Key of the model, and header of the schema message."""


class Budget(Protocol):
    """The part of `ReceiveBudget` that plans need."""

    limit_bytes: int

    def try_charge(self, size: int) -> bool:
        """Charge bytes if that stays within the limit; return whether it did."""

    def release(self, size: int) -> None:
        """Release charged bytes."""


class _Entry:
    """A plan, its number of users, and the bytes charged for it; `is_kept`: `find` returns it."""

    __slots__ = ("charged_bytes", "is_kept", "key", "plan", "users")

    def __init__(self, key: Key, plan: Plan, charged_bytes: int) -> None:
        self.key = key
        self.plan = plan
        self.charged_bytes = charged_bytes
        self.users = 0
        self.is_kept = True


class Plans:
    """Plans by model version and schema.

    Attributes:
        charged_bytes: Bytes charged for all plans.
        limits: Limits of new plans.
        threads: Threads that build them.
    """

    def __init__(self, limits: LimitsConfig, budget: Budget) -> None:
        self.limits = limits
        self.threads = FairThreads()
        self._budget = budget
        self._entries: dict[Key, _Entry] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()  # The one used last is the last.
        self._users: dict[int, _Entry] = {}  # By the identity of the plan.
        self._idle_bytes = 0
        self.charged_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, limits: LimitsConfig) -> None:
        """Apply limits to new plans and drop the cache; open streams keep their plans."""
        self.limits = limits
        while self._idle:
            self._drop(next(iter(self._idle)))
        for entry in self._entries.values():
            entry.is_kept = False
        self._entries.clear()

    def find(self, lane: Lane, header: bytes) -> Plan | None:
        """Return the known plan for a lane and a schema, or None.

        The caller is a user of the plan until it calls `leave`.
        """
        entry = self._entries.get((lane.model.key, header))
        return None if entry is None else self._enter(entry)

    async def build(self, lane: Lane, header: bytes, caller: object) -> Plan:
        """Build a plan on a thread; the caller is a user of it until it calls `leave`.

        Raises:
            IskanderError: As `Plan` does, or Overloaded.
        """
        contract, limits = lane.contract, self.limits
        assert contract is not None
        key = (lane.model.key, header)
        async with self.threads.turn(caller):
            known = self.find(lane, header)  # Another stream may have built it meanwhile.
            if known is not None:
                return known
            size = HEADER_FACTOR * len(header)
            self._charge(size)
            try:
                plan, used_ns = await self.threads.run(_timed_plan, header, contract, limits)
                if used_ns > REST_FROM_NS:
                    self.threads.rest(caller, REST_FACTOR * used_ns / NS_PER_S)
                more_bytes = plan.memory_bytes - size
                self._charge(more_bytes)
                size += more_bytes
            except BaseException:
                self._release(size)
                raise
        other = self.find(lane, header)
        if other is not None:
            self._release(size)
            return other
        entry = _Entry(key, plan, size)
        if limits is self.limits:
            self._entries[key] = entry
        else:
            entry.is_kept = False
        return self._enter(entry)

    def leave(self, plan: Plan) -> None:
        """End the use of a plan by a stream."""
        entry = self._users[id(plan)]
        entry.users -= 1
        if entry.users:
            return
        del self._users[id(plan)]
        if not entry.is_kept:
            self._release(entry.charged_bytes)
            return
        self._idle[entry.key] = None
        self._idle_bytes += entry.charged_bytes
        most = min(IDLE_BYTES_MAX, self._budget.limit_bytes // IDLE_SHARE)
        while self._idle_bytes > most:
            self._drop(next(iter(self._idle)))

    def _enter(self, entry: _Entry) -> Plan:
        """Count a user of a plan."""
        if not entry.users and entry.key in self._idle:
            del self._idle[entry.key]
            self._idle_bytes -= entry.charged_bytes
        entry.users += 1
        self._users[id(entry.plan)] = entry
        return entry.plan

    def _drop(self, key: Key) -> None:
        """Remove an idle plan."""
        del self._idle[key]
        entry = self._entries.pop(key)
        self._idle_bytes -= entry.charged_bytes
        self._release(entry.charged_bytes)

    def _charge(self, size: int) -> None:
        """Charge bytes; drop idle plans if the budget is exhausted."""
        while not self._budget.try_charge(size):
            if not self._idle:
                limit = f"limit {self._budget.limit_bytes:,} for all connections"
                text = f"receive memory exhausted: {size:,} bytes needed for a schema, {limit} "
                raise Overloaded(f"{text}(`limits.receive_bytes`)", retry_after_ms=RETRY_MS)
            self._drop(next(iter(self._idle)))
        self.charged_bytes += size

    def _release(self, size: int) -> None:
        self.charged_bytes -= size
        self._budget.release(size)


def _timed_plan(header: bytes, contract: Contract, limits: LimitsConfig) -> tuple[Plan, int]:
    """Build a plan on a thread; return it and the processor time used."""
    begun_ns = thread_cpu_ns()
    plan = Plan(header, contract, limits)
    return plan, thread_cpu_ns() - begun_ns
