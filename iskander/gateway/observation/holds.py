"""Leases of sampled requests that are held until the observer process has copied them.

    results of some rows    add_part      pending, until the last rows of the request
    results of the last     complete      held under a ticket; the observer process is notified
    copied, or not wanted   release       both arenas get their memory back

Bounded by number and bytes. Pure: moves leases and does no I/O.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.gateway.observation.messages import OutputPart
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import InFlightBatch, WorkerSlot
from iskander.interprocess.memory.arena import Arena, Lease


class HeldOutput:
    """Output lease of a batch with sampled results.

    Attributes:
        uses: Sampled requests with results in it.
        is_ours: The dispatcher has finished with it, so that the last use gives it back.
    """

    __slots__ = ("arena", "incarnation", "is_ours", "lease", "uses")

    def __init__(self, incarnation: int, arena: Arena, lease: Lease) -> None:
        self.incarnation = incarnation
        self.arena = arena
        self.lease = lease
        self.uses = 0
        self.is_ours = False


class Held:
    """Leases of one sampled request.

    Attributes:
        is_whole: The results of all rows so far are held.
        since_ns: Time of its first results.
    """

    __slots__ = ("input", "is_whole", "outputs", "parts", "since_ns")

    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns
        self.input: Lease | None = None
        self.outputs: list[HeldOutput] = []
        self.parts: list[OutputPart] = []
        self.is_whole = True


class Holds:
    """All held leases of a gateway process.

    Attributes:
        bytes: Bytes of all held leases.

    Args:
        input_arena: Arena of the inputs.
        requests_max: Limit of held requests, pending ones included.
        bytes_max: Limit of `bytes`.
    """

    def __init__(self, input_arena: Arena, requests_max: int, bytes_max: int) -> None:
        self.bytes = 0
        self._input_arena = input_arena
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._next_ticket = 1
        self._held: dict[int, Held] = {}  # Oldest first.
        self._pending: dict[Request, Held] = {}
        self._outputs: dict[Lease, HeldOutput] = {}

    def configure(self, requests_max: int, bytes_max: int) -> None:
        """Apply the limits to requests that are not held yet."""
        self._requests_max = requests_max
        self._bytes_max = bytes_max

    def __len__(self) -> int:
        return len(self._held) + len(self._pending)

    def add_part(
        self, request: Request, worker: WorkerSlot, batch: InFlightBatch, part: OutputPart, now: int
    ) -> bool:
        """Hold the results of some rows; False if a limit is reached, then or before.

        A request without some of its rows stays pending without leases, so that its later rows
        are not held.
        """
        held = self._pending.get(request)
        if held is None:
            if len(self) >= self._requests_max:
                return False
            held = self._pending[request] = Held(now)
        if not held.is_whole:
            return False
        output = self._outputs.get(batch.output)
        size = 0 if output is not None else batch.output.length_bytes
        if self.bytes + size > self._bytes_max:
            self._empty(held)
            return False
        if output is None:
            output = HeldOutput(worker.incarnation, worker.output_arena, batch.output)
            self._outputs[batch.output] = output
        self.bytes += size
        output.uses += 1
        held.outputs.append(output)
        held.parts.append(part)
        return True

    def can_complete(self, request: Request) -> bool:
        """Whether the results of all rows are held, and the input lease is within the limit."""
        held = self._pending.get(request)
        assert request.lease is not None
        return (
            held is not None
            and held.is_whole
            and sum(part.rows for part in held.parts) == request.rows
            and self.bytes + request.lease.length_bytes <= self._bytes_max
        )

    def complete(self, request: Request, lease: Lease) -> tuple[int, tuple[OutputPart, ...]]:
        """Hold the input lease too; return the ticket, and the results in the order of the rows."""
        held = self._pending.pop(request)
        held.input = lease
        self.bytes += lease.length_bytes
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._held[ticket] = held
        return ticket, tuple(sorted(held.parts, key=lambda part: part.first))

    def discard(self, request: Request) -> None:
        """Release what is held of a request that has ended."""
        held = self._pending.pop(request, None)
        if held is not None:
            self._empty(held)

    def abandon(self, request: Request) -> None:
        """Release what is held of a pending request; its later rows are not held."""
        self._empty(self._pending[request])

    def has(self, ticket: int) -> bool:
        """Whether the leases of a ticket are held."""
        return ticket in self._held

    def release(self, ticket: int) -> bool:
        """Give the leases of a ticket back; False if they were given back before."""
        held = self._held.pop(ticket, None)
        if held is None:
            return False
        self._empty(held)
        return True

    def release_all(self) -> list[int]:
        """Release everything; return the tickets."""
        tickets = list(self._held)
        for ticket in tickets:
            self.release(ticket)
        for request in list(self._pending):
            self.discard(request)
        return tickets

    def oldest_input(self) -> int:
        """Oldest ticket with an input lease; 0 if there is none."""
        return next(iter(self._held), 0)

    def oldest_output(self, incarnation: int) -> int | Request | None:
        """Ticket or pending request with a lease in the output arena of a worker."""
        for ticket, held in self._held.items():
            if _is_in(held, incarnation):
                return ticket
        return next(
            (each for each, held in self._pending.items() if _is_in(held, incarnation)), None
        )

    def expired(self, before_ns: int) -> list[int]:
        """Tickets that are held since before a time."""
        return [ticket for ticket, held in self._held.items() if held.since_ns < before_ns]

    def ended(self) -> list[Request]:
        """Pending requests that were answered without their last results."""
        return [request for request in self._pending if request.is_over]

    def tickets_in(self, incarnation: int) -> list[int]:
        """Tickets with results in the output arena of a worker."""
        return [ticket for ticket, held in self._held.items() if _is_in(held, incarnation)]

    def pending_in(self, incarnation: int) -> list[Request]:
        """Pending requests with results in the output arena of a worker."""
        return [each for each, held in self._pending.items() if _is_in(held, incarnation)]

    def keep_output(self, lease: Lease) -> bool:
        """Take over the output lease of a finished batch; False if it has no sampled results."""
        output = self._outputs.get(lease)
        if output is None:
            return False
        output.is_ours = True
        return True

    def _empty(self, held: Held) -> None:
        """Give back the leases of a request; it stays pending if it is."""
        held.is_whole = False
        for output in held.outputs:
            output.uses -= 1
            if not output.uses:
                del self._outputs[output.lease]
                self.bytes -= output.lease.length_bytes
                if output.is_ours:
                    output.arena.give_back(output.lease)
        held.outputs.clear()
        held.parts.clear()
        if held.input is not None:
            self._input_arena.give_back(held.input)
            self.bytes -= held.input.length_bytes
            held.input = None


def _is_in(held: Held, incarnation: int) -> bool:
    return any(output.incarnation == incarnation and output.is_ours for output in held.outputs)
