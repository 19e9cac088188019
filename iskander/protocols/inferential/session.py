"""One client of Inferential: observations in, replies out, for each model in order.

It has no task of its own for an observation. The connection calls `take`, lane and dispatcher call
`deliver` or `fail`, and `_write` sends what is next, as far as the client takes it. A bounded
window of observations is in work; while it is full nothing is taken, and so a client that floods or
does not read costs itself only. One that has failed, or whose client has given it up, has no place
in the window any more: newer ones do not wait behind it.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.clock import NS_PER_MS, NS_PER_S, now_ns, wall_ns
from iskander.errors import Draining, IskanderError, Overloaded
from iskander.protocols.inferential.terms import read_terms
from iskander.protocols.inferential.wire import (
    Address,
    Observation,
    Part,
    Question,
    read_observation,
    read_question,
    render_error,
    render_results,
)
from iskander.protocols.tensors import RequestTensors, take
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import NEVER_NS, Request, Terms
from iskander.transport.zmtp.connection import Connection

if TYPE_CHECKING:
    from iskander.protocols.inferential.service import InferentialService

log: Final = logging.getLogger("iskander.inferential")

NAME_MAX: Final = 128
"""Letters of a client's name that count; it is a label of every point."""
FAILED_MAX: Final = 1024
"""Failures that wait to be told behind results."""
RETRY_MS: Final = 1000


class _Pending(Request):
    """An observation, from admission until its reply is written.

    Attributes:
        taken: The results' body; None until it is there.
        error: Why there will be none.
        held_bytes: What it keeps of private memory at most: its tensors and its results.
    """

    __slots__ = ("address", "error", "held_bytes", "is_single", "taken")

    def __init__(
        self,
        lane: Lane,
        caller: Session,
        offered: RequestTensors,
        terms: Terms,
        *,
        arrived_ns: int,
        address: Address,
        is_single: bool,
    ) -> None:
        super().__init__(
            lane,
            caller,
            offered.rows,
            offered.tensors,
            terms=terms,
            arrived_ns=arrived_ns,
            bucket=offered.bucket,
        )
        self.address = address
        self.is_single = is_single
        self.taken: bytes | memoryview | None = None
        self.error: IskanderError | None = None
        self.held_bytes = self.layout.input_bytes + self.layout.output_bytes


class _Refused:
    """Stands among a model's observations for one that was not taken."""

    __slots__ = ("address", "deadline_ns", "error", "taken")

    def __init__(self, address: Address, error: IskanderError, deadline_ns: int) -> None:
        self.address = address
        self.error: IskanderError | None = error
        self.taken = None
        self.deadline_ns = deadline_ns


class Session:
    """One client.

    Args:
        service: What it is a client of.
        connection: Of the client.
        identity: That its socket says; empty where it says none.

    Attributes:
        unread_bytes: Results that are not sent yet; they are charged to the receive budget.
    """

    def __init__(
        self, service: InferentialService, connection: Connection, identity: bytes
    ) -> None:
        self._service = service
        self._connection = connection
        self._limits = service.limits
        self._windows: dict[str, deque[_Pending | _Refused]] = {}
        self._held = self._held_bytes = self._failed = 0
        self.unread_bytes = 0
        self._admission: asyncio.Task[None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._giving_up_ns = NEVER_NS
        self._is_write_due = self._is_lost = False
        self.name = ""
        self._source = UNKNOWN_SOURCE
        if identity:
            self._be_called(identity.decode("utf-8", "backslashreplace"))

    @property
    def is_full(self) -> bool:
        """Whether observations have to be answered before the next is read."""
        return (
            self._admission is not None
            or self._held >= self._limits.window_batches
            or self._held_bytes >= self._limits.window_bytes
            or self._failed >= FAILED_MAX
        )

    @property
    def has_work(self) -> bool:
        """Whether something that was taken is not answered, or an answer is not sent."""
        return bool(self._windows or self._admission) or self._connection.has_unsent

    def take(self, parts: list[Part], arrived_ns: int) -> None:
        """Take a message, which came at that time."""
        service = self._service
        try:
            observation = read_observation(parts)
        except IskanderError as error:
            # Nobody would know what a reply is for.
            return service.journal.malformed(error)
        envelope = observation.envelope
        if not self.name:
            self._be_called(envelope.client.id)
        address = Address(envelope.client.id, envelope.model_id, service.next_response())
        service.journal.received(self.labels, envelope.timestamp_ns, len(observation.payload))
        try:
            self._ask(observation, address, arrived_ns)
        except IskanderError as error:
            self._refuse(address, error)
        except Exception:
            # The observation ends here and the server goes on; the text stays in the log.
            log.exception("an observation could not be taken")
            self._refuse(address, IskanderError("the server failed; its log says why"))
        return None

    def refuse(self, parts: list[Part]) -> None:
        """Take a message that there is no memory for: it is not processed."""
        try:
            envelope = read_observation(parts).envelope
        except IskanderError as error:
            return self._service.journal.malformed(error)
        if not self.name:
            self._be_called(envelope.client.id)
        address = Address(envelope.client.id, envelope.model_id, self._service.next_response())
        return self._refuse(
            address,
            Overloaded(
                "the server has no memory for what was received (limits.receive_bytes)",
                retry_after_ms=RETRY_MS,
            ),
        )

    def on_room(self) -> None:
        """The client takes replies again."""
        self._write()

    def on_lost(self) -> None:
        """The client is gone: nobody waits for what it asked."""
        self._is_lost = True
        if self._admission is not None:
            self._admission.cancel()
        if self._giving_up is not None:
            self._giving_up.cancel()
        for window in self._windows.values():
            for pending in window:
                if isinstance(pending, _Pending):
                    self._service.dispatcher.withdraw(pending)
                self._service.journal.unsent(self.labels)
        self._windows.clear()
        self._service.budget.release(self.unread_bytes)
        self._held = self._held_bytes = self._failed = self.unread_bytes = 0
        self._service.on_left(self)

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Take the results of one observation, to be sent when its turn comes."""
        assert isinstance(request, _Pending)
        request.taken = results
        self.unread_bytes += len(results)
        self._service.budget.charge(len(results))
        self._write_soon()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Take the failure of one observation, to be told when its turn comes, or not at all."""
        assert isinstance(request, _Pending)
        if self._service.is_silent:
            self._leave(request)
            self._service.journal.refused(self.labels, request.address.model, error)
        else:
            self._let_go(request)
            request.error = error
            self._count_failed()
        self._write_soon()

    def _be_called(self, name: str) -> None:
        self.name = self._service.name_for(self, name[:NAME_MAX])
        self.labels = {"client": self.name}
        self._source = Source(connection=self.name)

    def _ask(self, observation: Observation, address: Address, arrived_ns: int) -> None:
        service = self._service
        if service.is_draining:
            raise Draining("the server is stopping; send it to another", retry_after_ms=0)
        envelope = observation.envelope
        terms = read_terms(
            envelope,
            self.name,
            newest_wins=service.config.newest_wins,
            wall_ns=wall_ns(),
            source=self._source,
        )
        name, _, version = address.model.partition("/")
        service.grant.require_model(name)
        lane = service.models.find_loaded(name, version or None, self.name)
        assert lane.contract is not None
        question: Question = read_question(lane.contract, observation)
        offered = take(lane.contract, question.tensors, self._limits)
        pending = _Pending(
            lane,
            self,
            offered,
            terms,
            arrived_ns=arrived_ns,
            address=address,
            is_single=question.is_single,
        )
        if not pending.rows:
            pending.taken, pending.tensors = b"", []
            self._enter(pending)
            self._write_soon()
        else:
            self._admit(pending)

    def _admit(self, pending: _Pending) -> None:
        try:
            is_there = self._service.intake.admit(pending)
        except IskanderError as error:
            return self._refuse(pending.address, error, pending.deadline_ns)
        if is_there:
            self._enter(pending)
            return self._service.dispatcher.submit(pending)
        self._admission = asyncio.get_running_loop().create_task(self._admit_later(pending))
        return self._give_up_soon()

    async def _admit_later(self, pending: _Pending) -> None:
        try:
            await self._service.intake.admit_later(pending)
            self._enter(pending)
            self._service.dispatcher.submit(pending)
        except IskanderError as error:
            self._refuse(pending.address, error, pending.deadline_ns)
        except Exception:
            log.exception("an observation could not be admitted")
            self._refuse(pending.address, IskanderError("the server failed; its log says why"))
        self._admission = None
        self._connection.resume()

    def _enter(self, pending: _Pending) -> None:
        self._windows.setdefault(pending.address.model, deque()).append(pending)
        self._held += 1
        self._held_bytes += pending.held_bytes
        if self.is_full:
            self._give_up_soon()

    def _let_go(self, pending: _Pending) -> None:
        """Give its place in the window to another."""
        self._held -= 1
        self._held_bytes -= pending.held_bytes
        if pending.taken is not None:
            self.unread_bytes -= len(pending.taken)
            self._service.budget.release(len(pending.taken))

    def _leave(self, pending: _Pending) -> None:
        """Forget one that will not be answered."""
        self._let_go(pending)
        window = self._windows[pending.address.model]
        window.remove(pending)
        if not window:
            del self._windows[pending.address.model]

    def _refuse(self, address: Address, error: IskanderError, deadline_ns: int = NEVER_NS) -> None:
        if self._service.is_silent:
            self._service.journal.refused(self.labels, address.model, error)
        else:
            refused = _Refused(address, error, deadline_ns)
            self._windows.setdefault(address.model, deque()).append(refused)
            self._count_failed()
            self._write_soon()

    def _count_failed(self) -> None:
        """One more waits to be told."""
        self._failed += 1
        if self.is_full:
            self._give_up_soon()

    def _give_up_soon(self) -> None:
        """Let go of what is with a worker when its deadline passes: nothing more is read before."""
        first_ns = min((each.deadline_ns for each in self._unanswered()), default=NEVER_NS)
        if first_ns < self._giving_up_ns:
            if self._giving_up is not None:
                self._giving_up.cancel()
            after_s = max(first_ns - now_ns(), 0) / NS_PER_S
            self._giving_up = asyncio.get_running_loop().call_later(after_s, self._give_up)
            self._giving_up_ns = first_ns

    def _give_up(self) -> None:
        self._giving_up, self._giving_up_ns = None, NEVER_NS
        now = now_ns()
        for pending in [each for each in self._unanswered() if each.deadline_ns <= now]:
            self._service.dispatcher.withdraw(pending)
            pending.lane.count_missed(pending)
            self._service.journal.late(self.labels)
            self._leave(pending)
        if self.is_full:
            self._give_up_soon()
        self._write_soon()

    def _unanswered(self) -> Iterator[_Pending]:
        for window in self._windows.values():
            for pending in window:
                if isinstance(pending, _Pending) and pending.error is None is pending.taken:
                    yield pending

    def _write_soon(self) -> None:
        """Write when this turn of the loop is over: workers get their next batches before that."""
        if not self._is_write_due and not self._is_lost:
            self._is_write_due = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Send what is there, for each model in order, until the client has to take some first."""
        self._is_write_due = False
        for model, window in list(self._windows.items()):
            while window and not self._connection.is_blocked:
                pending = window[0]
                if pending.taken is None and pending.error is None:
                    break
                window.popleft()
                if pending.error is None:
                    assert isinstance(pending, _Pending)
                    self._let_go(pending)
                else:
                    self._failed -= 1
                self._answer(pending)
            if not window:
                del self._windows[model]
        if not self._is_lost:
            self._connection.resume()

    def _answer(self, pending: _Pending | _Refused) -> None:
        """Send one reply, or none: to a client that has given up it would be the next one's."""
        journal = self._service.journal
        error, now = pending.error, now_ns()
        if error is not None:
            journal.refused(self.labels, pending.address.model, error)
        if now > pending.deadline_ns:
            if error is None:
                journal.late(self.labels)
            return
        try:
            reply = (
                render_error(pending.address, error, wall_ns())
                if error is not None
                else self._results(pending)
            )
        except IskanderError as unsaid:
            journal.refused(self.labels, pending.address.model, unsaid)
            if self._service.is_silent:
                return
            reply = render_error(pending.address, unsaid, wall_ns())
        self._connection.send(reply)
        if error is None:
            journal.answered()

    @staticmethod
    def _results(pending: _Pending | _Refused) -> list[bytes | memoryview]:
        assert isinstance(pending, _Pending) and pending.taken is not None
        assert pending.lane.contract is not None
        return render_results(
            pending.address,
            pending.lane.contract,
            pending.rows,
            pending.taken,
            is_single=pending.is_single,
            latency_ms=pending.run_ns / NS_PER_MS,
            wall_ns=wall_ns(),
        )
