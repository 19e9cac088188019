"""Session of one Inferential client: observations in, replies out, in order for each model.

A session has no task for each observation. The connection calls `on_message`, lane and dispatcher
call `deliver` or `fail`, and `_write` sends the next replies while the client reads them. The
window limits the observations in progress; while it is full the session reads nothing, so that a
client that floods or does not read slows down only itself. Failed and expired observations leave
the window and do not delay newer ones.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from iskander.errors import INTERNAL, DeadlineExceeded, Draining, Fault, IskanderError, Overloaded
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns, wall_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.protocols.inferential.terms import read_terms
from iskander.gateway.protocols.inferential.wire import (
    InputTensors,
    Observation,
    Part,
    ReplyAddress,
    read_observation,
    read_tensors,
    render_error,
    render_results,
)
from iskander.gateway.protocols.tensors import RequestTensors, read_inputs
from iskander.gateway.protocols.traced_call import GONE, OBSERVATION
from iskander.gateway.protocols.window import Window
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, Request, Terms
from iskander.gateway.transport.zmtp.connection import Connection

if TYPE_CHECKING:
    from iskander.gateway.protocols.inferential.service import InferentialService

NAME_MAX: Final = 128
"""Maximum characters of a client's name, a label of its metrics; the rest is cut off."""
FAILED_MAX: Final = 1024
"""Limit of error replies that wait behind results."""
RETRY_MS: Final = 1000
LATE: Final = DeadlineExceeded("not answered before its deadline")


class _Pending(Request):
    """An observation from admission until its reply is written."""

    __slots__ = ("address", "body", "error", "is_single", "memory_bytes")

    def __init__(
        self,
        lane: Lane,
        caller: Session,
        inputs: RequestTensors,
        terms: Terms,
        *,
        arrived_ns: int,
        address: ReplyAddress,
        is_single: bool,
    ) -> None:
        super().__init__(
            lane,
            caller,
            inputs.rows,
            inputs.tensors,
            terms=terms,
            arrived_ns=arrived_ns,
            bucket=inputs.bucket,
        )
        self.address = address
        self.is_single = is_single
        self.body: bytes | memoryview | None = None  # Of the results, once they arrive.
        self.error: IskanderError | None = None
        # Upper bound of its private memory: tensors and results.
        self.memory_bytes = self.layout.input_bytes + self.layout.output_bytes


class _Rejected:
    """A rejected observation, in the reply order of its model."""

    __slots__ = ("address", "body", "deadline_ns", "error")

    def __init__(self, address: ReplyAddress, error: IskanderError, deadline_ns: int) -> None:
        self.address = address
        self.error: IskanderError | None = error
        self.body = None
        self.deadline_ns = deadline_ns


class Session:
    """One client; `identity` is its socket's identity, empty for none."""

    def __init__(
        self, service: InferentialService, connection: Connection, identity: bytes
    ) -> None:
        self._service = service
        self._connection = connection
        self._limits = service.limits
        self._tracer = service.dispatcher.tracer
        self._replies: dict[str, deque[_Pending | _Rejected]] = {}
        self._window = Window(service.limits)
        self._failed = 0
        self.unread_bytes = 0  # Unsent results; they are charged to the receive budget.
        self._admission: asyncio.Task[None] | None = None
        # The observation that waits for the arena, and those rejected after it.
        self._waiting: list[_Pending | _Rejected] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_ns = NEVER_NS
        self._is_write_due = self._is_lost = False
        self.name = ""
        self._source = UNKNOWN_SOURCE
        if identity:
            self._register(identity.decode("utf-8", "backslashreplace"))

    @property
    def is_full(self) -> bool:
        """Whether replies have to be sent before the next observation is read."""
        return self._admission is not None or self._window.is_full or self._failed >= FAILED_MAX

    @property
    def has_work(self) -> bool:
        """Whether an accepted observation has no reply, or a reply is unsent."""
        return bool(self._replies or self._admission) or self._connection.has_unsent

    def on_message(self, parts: list[Part], arrived_ns: int) -> bool:
        """Process a message; return whether it is an observation that the client may send."""
        received = self._read(parts)
        if received is None:
            return False
        observation, address = received
        stamp_ns, length = observation.envelope.timestamp_ns, len(observation.payload)
        self._service.metrics.on_received(self.labels, stamp_ns, length)
        try:
            self._submit(observation, address, arrived_ns)
        except IskanderError as error:
            self._reject(address, error)
            return error.fault != Fault.CLIENT
        except Exception as failure:
            log.observation_failed(error=failure)
            self._reject(address, IskanderError(INTERNAL))
        return True

    def reject(self, parts: list[Part]) -> None:
        """Reject a message for lack of memory."""
        received = self._read(parts)
        if received is not None:
            text = "no memory for received messages (`limits.receive_bytes`)"
            self._reject(received[1], Overloaded(text, retry_after_ms=RETRY_MS))

    def on_writable(self) -> None:
        """Continue sending: the client reads again."""
        self._write()

    def on_lost(self) -> None:
        """Withdraw all observations: the client disconnected."""
        self._is_lost = True
        if self._admission is not None:
            self._admission.cancel()
            # Its error will reference its traceback, which references this object.
            self._admission = None
        if self._expiry is not None:
            self._expiry.cancel()
        for pending in chain(self._waiting, *self._replies.values()):
            if isinstance(pending, _Pending):
                self._service.dispatcher.withdraw(pending)
                self._trace(pending, GONE)
            self._service.metrics.on_unsent(self.labels)
        self._waiting.clear()
        self._replies.clear()
        self._service.budget.release(self.unread_bytes)
        self._window = Window(self._limits)
        self._failed = self.unread_bytes = 0
        self._service.unregister(self)

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Keep the results of an observation until its reply is due."""
        assert isinstance(request, _Pending)
        request.body = results
        self.unread_bytes += len(results)
        self._service.budget.charge(len(results))
        self._write_soon()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Keep the error of an observation until its reply is due; drop both if silent."""
        assert isinstance(request, _Pending)
        if self._service.is_silent:
            self._drop(request)
            self._trace(request, error)
            self._service.metrics.on_rejected(self.labels, request.address.model, error)
        else:
            self._leave_window(request)
            request.error = error
            self._count_failed()
        self._write_soon()

    def _read(self, parts: list[Part]) -> tuple[Observation, ReplyAddress] | None:
        """Parse a message; None if it has no address for a reply."""
        try:
            observation = read_observation(parts)
        except IskanderError as error:
            self._service.metrics.on_malformed(error)
            return None
        client, model = observation.envelope.client.id, observation.envelope.model_id
        if not self.name:
            self._register(client)
        return observation, ReplyAddress(client, model, self._service.next_response())

    def _register(self, name: str) -> None:
        self.name = self._service.register(self, name[:NAME_MAX])
        self.labels = {"client": self.name}
        self._source = Source(self._service.grant.name, self.name)

    def _submit(self, observation: Observation, address: ReplyAddress, arrived_ns: int) -> None:
        service = self._service
        if service.is_draining:
            raise Draining("the server is stopping; retry on another server", retry_after_ms=0)
        terms = read_terms(
            observation.envelope,
            self.name,
            newest_wins=service.config.newest_wins,
            wall_ns=wall_ns(),
            source=self._source,
            is_traced=service.dispatcher.uses_contexts,
        )
        name, _, version = address.model.partition("/")
        service.grant.require_model(name)
        lane = service.models.find_loaded(name, version or None, self.name)
        assert lane.contract is not None
        try:
            received: InputTensors = read_tensors(lane.contract, observation)
            inputs = read_inputs(lane.contract, received.tensors, self._limits)
        except IskanderError as error:
            lane.count_refused(error)
            raise
        pending = _Pending(
            lane,
            self,
            inputs,
            terms,
            arrived_ns=arrived_ns,
            address=address,
            is_single=received.is_single,
        )
        if not pending.rows:
            lane.require_rows_optional()
            pending.body, pending.tensors = b"", []
            self._enter_window(pending)
            self._write_soon()
        else:
            self._admit(pending)

    def _admit(self, pending: _Pending) -> None:
        try:
            if self._service.entry.enter(pending, self._enter_window):
                return None
        except IskanderError as error:
            self._trace(pending, error)
            return self._reject(pending.address, error, pending.deadline_ns)
        self._waiting.append(pending)
        self._admission = asyncio.get_running_loop().create_task(self._admit_later(pending))
        return self._arm_expiry()

    async def _admit_later(self, pending: _Pending) -> None:
        rejection: IskanderError | None = None
        try:
            await self._service.entry.enter_later(pending, self._enter_window)
        except IskanderError as error:
            self._trace(pending, error)
            rejection = error
        except Exception as failure:
            log.observation_admission_failed(error=failure)
            rejection = IskanderError(INTERNAL)
        later, self._waiting, self._admission = self._waiting[1:], [], None
        if rejection is not None:
            self._reject(pending.address, rejection, pending.deadline_ns)
        for rejected in later:
            self._queue_failed(rejected)
        self._connection.resume()

    def _enter_window(self, pending: _Pending) -> None:
        self._queue(pending)
        self._window.enter(pending.memory_bytes)
        self._arm_expiry()

    def _leave_window(self, pending: _Pending) -> None:
        self._window.leave(pending.memory_bytes)
        if pending.body is not None:
            self.unread_bytes -= len(pending.body)
            self._service.budget.release(len(pending.body))

    def _drop(self, pending: _Pending) -> None:
        """Remove an observation that gets no reply."""
        self._leave_window(pending)
        replies = self._replies[pending.address.model]
        replies.remove(pending)
        if not replies:
            del self._replies[pending.address.model]

    def _reject(
        self, address: ReplyAddress, error: IskanderError, deadline_ns: int = NEVER_NS
    ) -> None:
        if self._service.is_silent:
            self._service.metrics.on_rejected(self.labels, address.model, error)
        else:
            rejected = _Rejected(address, error, deadline_ns)
            if self._waiting:
                self._waiting.append(rejected)
            else:
                self._queue_failed(rejected)

    def _queue_failed(self, rejected: _Pending | _Rejected) -> None:
        self._queue(rejected)
        self._count_failed()
        self._write_soon()

    def _queue(self, reply: _Pending | _Rejected) -> None:
        """Append to the replies of its model, which are in the order of the observations."""
        self._replies.setdefault(reply.address.model, deque()).append(reply)

    def _count_failed(self) -> None:
        self._failed += 1
        self._arm_expiry()

    def _arm_expiry(self) -> None:
        """If the window is full, schedule `_expire` at the earliest deadline."""
        if not self.is_full:
            return
        first_ns = min((each.deadline_ns for each in self._unanswered()), default=NEVER_NS)
        if first_ns < self._expiry_ns:
            if self._expiry is not None:
                self._expiry.cancel()
            after_s = max(first_ns - now_ns(), 0) / NS_PER_S
            self._expiry = asyncio.get_running_loop().call_later(after_s, self._expire)
            self._expiry_ns = first_ns

    def _expire(self) -> None:
        """Withdraw the observations past their deadline, to make space in the window."""
        self._expiry, self._expiry_ns = None, NEVER_NS
        now = now_ns()
        for pending in [each for each in self._unanswered() if each.deadline_ns <= now]:
            self._service.dispatcher.withdraw(pending)
            pending.lane.count_missed(pending)
            self._service.metrics.on_late(self.labels)
            self._drop(pending)
            self._trace(pending, LATE)
        self._arm_expiry()
        self._write_soon()

    def _trace(self, pending: _Pending, error: IskanderError | None) -> None:
        if self._tracer is not None:
            self._tracer.on_end(pending, OBSERVATION, error)

    def _unanswered(self) -> Iterator[_Pending]:
        for replies in self._replies.values():
            for pending in replies:
                if isinstance(pending, _Pending) and pending.error is None is pending.body:
                    yield pending

    def _write_soon(self) -> None:
        """Write after this event loop iteration; workers get their next batches first."""
        if not self._is_write_due and not self._is_lost:
            self._is_write_due = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Send due replies, for each model in order, until the client has to read."""
        self._is_write_due = False
        for model, replies in list(self._replies.items()):
            while replies and not self._connection.is_blocked:
                pending = replies[0]
                if pending.body is None and pending.error is None:
                    break
                replies.popleft()
                if pending.error is None:
                    assert isinstance(pending, _Pending)
                    self._leave_window(pending)
                else:
                    self._failed -= 1
                self._reply(pending)
                if isinstance(pending, _Pending):
                    self._trace(pending, pending.error)
            if not replies:
                del self._replies[model]
        if not self._is_lost:
            self._connection.resume()

    def _reply(self, pending: _Pending | _Rejected) -> None:
        """Send one reply; none after its deadline: the client would take it for the next one."""
        metrics = self._service.metrics
        error = pending.error
        if error is not None:
            metrics.on_rejected(self.labels, pending.address.model, error)
        if now_ns() > pending.deadline_ns:
            if error is None:
                metrics.on_late(self.labels)
            return
        try:
            if error is None:
                assert isinstance(pending, _Pending) and pending.body is not None
                assert pending.lane.contract is not None
                reply = render_results(
                    pending.address,
                    pending.lane.contract,
                    pending.rows,
                    pending.body,
                    is_single=pending.is_single,
                    latency_ms=pending.run_ns / NS_PER_MS,
                    wall_ns=wall_ns(),
                )
            else:
                reply = render_error(pending.address, error, wall_ns())
        except IskanderError as failed:
            metrics.on_rejected(self.labels, pending.address.model, failed)
            if self._service.is_silent:
                return
            reply = render_error(pending.address, failed, wall_ns())
        self._connection.send(reply)
        if error is None:
            metrics.on_answered()
