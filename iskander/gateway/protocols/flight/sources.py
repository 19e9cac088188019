"""Sources over Flight: queries to endpoints with tickets, and tickets to scored batches.

    GetFlightInfo   query -> plan by a reader process -> signed tickets, with locations
    DoGet           ticket -> checks -> a reader process, whose Arrow IPC messages are passed on

A reader process calls the model on this gateway, with the token of the caller. `call.write` waits
while the client does not read, and the process then waits for the gateway.

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import msgspec

from iskander._generated import flight_pb2
from iskander.config.sources import SourceConfig, SourceReadsConfig
from iskander.errors import IskanderError, LimitExceeded, Overloaded, SourceNotFound, TicketRejected
from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.gateway.auth.grants import HEADER, Grant, bearer_token
from iskander.gateway.protocols.flight.data import data_head, schema_frame
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.sources.messages import Frame, Kind, Planned, PlanRequest, ReadRequest
from iskander.gateway.sources.query import SourceQuery
from iskander.gateway.sources.readers import Readers
from iskander.gateway.sources.tickets import Ticket, read_ticket, sign_ticket
from iskander.gateway.transport.http2.call import Call

READ_HEADER: Final = "iskander-read"
"""Header with which the reader process of an open read calls the model."""
READ_ID_BYTES: Final = 16
ENDPOINTS_PER_TURN: Final = 64
"""Signed in one event loop iteration, in about a millisecond."""
INFO_BYTES_MAX: Final = 4_000_000
"""gRPC clients accept 4 MiB by default."""
FRAME_NS: Final = 3 * NS_PER_S
"""Time for a client to read a frame, before it counts as time without progress."""
RETRY_MS: Final = 1000
ENDED: Final = "ended."
"""Prefix of the counts of ended reads: completed, cancelled, or the code of the error."""

FindLane = Callable[[str, str | None], Lane]
Describe = Callable[[Lane, Grant], list[bytes]]


@dataclass(eq=False)
class Read:
    """An open `DoGet` call.

    Attributes:
        grant: Of the caller.
        ticket: What it reads.
        scope: Ends the call at its deadline, which is none until `stop`.
        error: Error with which `stop` ends it.
        written_ns: Start of the write of a frame; 0 between two.
    """

    grant: Grant
    ticket: Ticket
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    error: IskanderError | None = None
    written_ns: int = 0

    @property
    def stalled_since_ns(self) -> int:
        """The time at which the client is too late to read a frame; 0 between two frames."""
        return self.written_ns and self.written_ns + FRAME_NS

    def give_way(self) -> None:
        """End the call: its client does not read, and others wait for a reader process."""
        self.stop(
            Overloaded(
                "the client did not read for a while, and the reader process was given to another "
                "caller; limit `source_reads.streams`",
                retry_after_ms=RETRY_MS,
            )
        )

    def stop(self, error: IskanderError) -> None:
        """End the call with an error."""
        if self.error is None:
            self.error = error
            self.scope.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Require that the caller may still read the source and use the model."""
        self.grant.require_source(self.ticket.source)
        self.grant.require_model(self.ticket.model)


class FlightSources:
    """Serves the sources of a configuration.

    Args:
        sources: The sources.
        config: Limits of reads, and locations.
        key: Key that signs tickets.
        address: Address at which reader processes call this gateway.
        readers: Reader processes.
        find: Finds a loaded model version, or raises ModelNotFound.
        describe: Returns the results of the action `contract`.

    Attributes:
        address: Address at which reader processes call this gateway.
        reads: Open reads by their identity.
        counts: Rows and bytes that were sent, and ended reads by their result.
    """

    def __init__(
        self,
        sources: Iterable[SourceConfig],
        config: SourceReadsConfig,
        *,
        key: bytes,
        address: str,
        readers: Readers,
        find: FindLane,
        describe: Describe,
    ) -> None:
        self._sources = {source.name: source for source in sources}
        self._config = config
        self._key = key
        self.address = address
        self._readers = readers
        self._find = find
        self._describe = describe
        self.reads: dict[str, Read] = {}
        self.counts: Counter[str] = Counter()

    def configure(self, config: SourceReadsConfig, frame_bytes: int) -> None:
        """Apply the limits to new plans and reads; see `Readers`."""
        self._config = config
        self._readers.configure(config, frame_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def list(self, grant: Grant) -> list[bytes]:
        """Return an entry for each source that the caller may read; schemas need a plan."""
        kind = flight_pb2.FlightDescriptor
        return [
            flight_pb2.FlightInfo(
                flight_descriptor=kind(type=kind.PATH, path=[source.name]),
                total_records=-1,
                total_bytes=-1,
                app_metadata=msgspec.json.encode({"source": source.name, "model": source.model}),
            ).SerializeToString()
            for source in self._sources.values()
            if grant.may_read(source.name) and grant.may_call(source.model)
        ]

    async def schema(self, query: SourceQuery, call: Call) -> bytes:
        """Return the columns of the answer to a query as an IPC message."""
        _, planned = await self._plan(query, call)
        return planned.schema

    async def info(
        self, query: SourceQuery, descriptor: flight_pb2.FlightDescriptor, call: Call
    ) -> bytes:
        """Return the endpoints of a query, in the order of the files, with their tickets."""
        lane, planned = await self._plan(query, call)
        model, grant = lane.model, call.grant.name
        rules = _rules(self._source(query.source))
        expires_s = wall_ns() / NS_PER_S + self._config.ticket_s
        expiration = flight_pb2.Timestamp(seconds=int(expires_s))
        info = flight_pb2.FlightInfo(
            schema=planned.schema,
            flight_descriptor=descriptor,
            total_records=planned.rows,
            total_bytes=-1,
            app_metadata=msgspec.json.encode(
                {"source": query.source, "model": model.name, "version": model.version}
            ),
        )
        for index, part in enumerate(planned.parts):
            if index % ENDPOINTS_PER_TURN == 0:
                await asyncio.sleep(0)
            ticket = Ticket(query.source, model.name, model.version, grant, rules, expires_s, part)
            info.endpoint.add(
                ticket=flight_pb2.Ticket(ticket=sign_ticket(self._key, ticket)),
                location=[flight_pb2.Location(uri=uri) for uri in self._locations(index)],
                expiration_time=expiration,
            )
        encoded: bytes = info.SerializeToString()
        if len(encoded) > INFO_BYTES_MAX:
            raise LimitExceeded(
                f"the {len(planned.parts)} endpoints of source `{query.source}` have "
                f"{len(encoded):,} bytes, limit {INFO_BYTES_MAX:,}; read a part of it (`path`), or "
                "set fewer `source_reads.locations`"
            )
        return encoded

    async def get(self, raw_ticket: bytes, call: Call) -> None:
        """Send the scored rows of a ticket."""
        ticket = read_ticket(self._key, raw_ticket, wall_ns() / NS_PER_S)
        grant = call.grant
        grant.require_name(ticket.grant)
        read = Read(grant, ticket)
        read.check()
        source = self._source(ticket.source)
        if ticket.rules != _rules(source):
            raise TicketRejected(
                f"`keep` or `filter` of source `{source.name}` changed since the ticket; request a "
                "new one with GetFlightInfo"
            )
        lane = self._find(ticket.model, ticket.version)
        name = secrets.token_hex(READ_ID_BYTES)
        request = ReadRequest(
            source=source.name,
            root=source.path,
            contract=self._describe(lane, grant),
            part=ticket.part,
            address=self.address,
            token=_token(call),
            read=name,
        )
        self.reads[name] = read
        result = "cancelled"
        try:
            await self._relay(read, request, call)
            result = "completed"
        except IskanderError as error:
            result = error.code
            raise
        finally:
            self.counts[ENDED + result] += 1
            del self.reads[name]

    def is_reader(self, call: Call) -> bool:
        """Whether a call is of the reader process of an open read."""
        return any(name == READ_HEADER and value in self.reads for name, value in call.metadata)

    def reader_grant(self, call: Call) -> Grant | None:
        """The grant of the open read whose reader process calls; None for any other call."""
        for name, value in call.metadata:
            if name == READ_HEADER:
                read = self.reads.get(str(value))
                return None if read is None else read.grant
        return None

    def check_grants(self) -> None:
        """End reads whose grant was revoked."""
        for read in list(self.reads.values()):
            try:
                read.check()
            except IskanderError as error:
                read.stop(error)

    def stop(self, error: IskanderError) -> None:
        """End all reads with an error."""
        for read in list(self.reads.values()):
            read.stop(error)

    async def close(self) -> None:
        """End all reader processes."""
        await self._readers.stop()

    def stats(self) -> dict[str, Any]:
        """Return the open reads, and counts since the start."""
        return {
            "open": len(self.reads),
            "waiting": self._readers.waiting,
            "processes": [reader.pid for reader in self._readers.processes],
            "rows": self.counts["rows"],
            "bytes": self.counts["bytes"],
            "ended": {
                key.removeprefix(ENDED): count
                for key, count in self.counts.items()
                if key.startswith(ENDED)
            },
        }

    async def _plan(self, query: SourceQuery, call: Call) -> tuple[Lane, Planned]:
        grant = call.grant
        grant.require_source(query.source)
        source = self._source(query.source)
        model = query.model or source.model
        grant.require_model(model)
        lane = self._find(model, source.version_text if model == source.model else None)
        request = PlanRequest(
            source=source.name,
            root=source.path,
            contract=self._describe(lane, grant),
            filters=[each for each in (source.filter, query.filter) if each],
            parts_max=self._config.endpoints,
            path=query.path,
            keep=query.keep,
            columns=query.columns,
            permitted=source.keep,
            unit_rows=query.unit_rows or source.unit_rows,
            plain_files=source.plain_files,
        )
        async with contextlib.aclosing(self._readers.answers(request, call.source)) as frames:
            found = [frame async for frame in frames]
        return lane, msgspec.msgpack.decode(found[0].metadata, type=Planned)

    async def _relay(self, read: Read, request: ReadRequest, call: Call) -> None:
        answers = self._readers.answers(request, call.source, read)
        try:
            async with read.scope, contextlib.aclosing(answers) as frames:
                async for frame in frames:
                    read.written_ns = now_ns()
                    await self._send(frame, call)
                    read.written_ns = 0
        except TimeoutError:
            assert read.error is not None, "the scope has no deadline of its own"
            raise read.error from None

    async def _send(self, frame: Frame, call: Call) -> None:
        if frame.kind is Kind.SCHEMA:
            await call.write(schema_frame(bytes(frame.metadata)))
            return
        head = data_head(bytes(frame.metadata), b"", len(frame.body))
        await call.write(head, frame.body)
        self.counts["rows"] += frame.rows
        self.counts["bytes"] += len(frame.body)

    def _source(self, name: str) -> SourceConfig:
        source = self._sources.get(name)
        if source is None:
            raise SourceNotFound(f"there is no source `{name[:100]}` (`[[sources]]`)")
        return source

    def _locations(self, index: int) -> tuple[str, ...]:
        """All locations, rotated so that the first ones of the endpoints are spread evenly."""
        locations = self._config.locations
        at = index % len(locations) if locations else 0
        return locations[at:] + locations[:at]


def _rules(source: SourceConfig) -> bytes:
    """Digest of what a source permits; its path may differ between gateways."""
    return sha256(msgspec.json.encode((source.keep, source.filter))).digest()


def _token(call: Call) -> str | None:
    """The token of a call, with which its reader process calls the model."""
    value = next((str(value) for name, value in call.metadata if name == HEADER), None)
    return None if value is None else bearer_token(value)
