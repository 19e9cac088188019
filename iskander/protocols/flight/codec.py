"""A stream's batches: checked and cut into tensors on the way in, put together on the way out.

    schema + contract  ->  Plan      which nodes and buffers of a header are which tensor
    header, body       ->  Arrived   the bytes of every tensor and passed-through column
    Arrived, results   ->  frames    the response, with the passed-through columns as they came

The usual batch is never parsed as a whole: its header's numbers are held against what the plan
expects, and its bytes are copied once. What needs more (compression, dictionaries, lists that are
passed through, older metadata) is read by pyarrow, rewritten as a usual batch, and goes on from
there.

A header's numbers are claims. Each is checked against the rows and the body before it is used, so
the copy that the model reads is complete whatever the claims were.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from iskander.arrow import ipc
from iskander.arrow.types import columns_without_nulls, leaf_of
from iskander.arrow.utf8 import require_string_bytes, require_strings
from iskander.config.schema import LimitsConfig
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.strings import string_lengths, string_ranges
from iskander.contract.tensors import ALIGNMENT, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.memory.chunked_copy import WHOLE_BYTES
from iskander.memory.client_segment import SegmentRange
from iskander.protocols.flight.convert import BatchPortion, Converter, require_bytes
from iskander.protocols.flight.data import Parts, data_head, read_flight_data
from iskander.protocols.flight.plan import (
    Checked,
    Column,
    PassthroughColumn,
    Plan,
    Reply,
    require_header,
)


def require_apart(total: int, length: int) -> None:
    """Refuse buffers that share bytes: many columns of one small body would be a large batch."""
    if total > length:
        raise MalformedInput(
            f"the batch's buffers overlap: they have {total} bytes in a body of {length}"
        )


def require_lengths(column: Column, rows: int, nodes: tuple[int, ...]) -> None:
    """Refuse a column whose arrays have not as many values as the batch's rows make."""
    for index, level in enumerate(column.levels, column.first_node):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length != rows * level or not 0 <= null_count <= length:
            raise MalformedInput(
                f"column `{column.name}` says {length} values with {null_count} nulls where the "
                f"batch's {rows} rows make {rows * level}",
                column=column.name,
            )


def strings_range(column: Column, rows: int, batch: ipc.Batch, body: memoryview) -> tuple[int, int]:
    """Start and end of the bytes of an input's strings, each found to be UTF-8."""
    at = 2 * column.values_buffer
    ends, _, start, length = batch.buffers[at : at + 4]
    if start < 0 or length < 0 or start + length > len(body):
        raise MalformedInput(
            f"column `{column.name}` has a buffer of {length} bytes at {start} of a body of "
            f"{len(body)}",
            column=column.name,
        )
    if not rows:
        return start, start
    count = rows * column.levels[-1]
    offsets = body[ends : ends + (count + 1) * OFFSET_BYTES]
    require_strings(f"column `{column.name}`", count, offsets, body[start : start + length])
    return start, start + int.from_bytes(offsets[-OFFSET_BYTES:], "little")


def forwarded_ranges(
    column: Column, rows: int, batch: ipc.Batch, body: memoryview
) -> list[tuple[int, int]]:
    """The ranges of a passed-through column's buffers, each found long enough."""
    ranges = []
    count = len(column.levels) + (1 if column.bits else 2)
    for place in range(count):
        at = 2 * (column.first_buffer + place)
        start, length = batch.buffers[at], batch.buffers[at + 1]
        wanted = 0
        if place < len(column.levels):
            node = 2 * (column.first_node + place)
            wanted = (batch.nodes[node] + 7) // 8 if batch.nodes[node + 1] else 0
        elif column.bits:
            wanted = (rows * column.levels[-1] * column.bits + 7) // 8
        if start < 0 or length < wanted or length < 0 or start + length > len(body):
            raise MalformedInput(
                f"column `{column.name}` has a buffer of {length} bytes at {start} of a body of "
                f"{len(body)}, and needs {wanted}",
                column=column.name,
            )
        ranges.append((start, start + length))
    if not column.bits and rows:
        buffers = [pa.py_buffer(body[start:stop]) for start, stop in ranges[-3:]]
        null_count = batch.nodes[2 * (column.first_node + len(column.levels)) - 1]
        buffers[0] = buffers[0] if null_count else None
        try:
            storage = leaf_of(column.type)
            count = rows * column.levels[-1]
            pa.Array.from_buffers(storage, count, buffers, null_count).validate(full=True)
        except pa.ArrowInvalid as error:
            text = str(error).split("\n", 1)[0]
            raise MalformedInput(f"column `{column.name}`: {text}", column=column.name) from None
    return ranges


CHECKED_HEADER_BYTES_MAX: Final = 4096
ASSEMBLED_ROWS: Final = 4096
"""Ranks and lists of more rows take milliseconds."""
CHECKED_MAX: Final = 64
"""Headers remembered by a plan; batches of one size have one header, byte for byte."""


class ParsedBatch(msgspec.Struct, frozen=True):
    """A checked batch.

    Attributes:
        tensors: Start and end in `body` of each of the contract's inputs, then of the bytes of each
            that is strings.
        reply: What is known of a plain response: of one with strings, what is passed through.
        kept: The passed-through columns, where the response is not plain.
        portions: The inputs, where they were made of columns and are not in `body`.
    """

    rows: int
    body: memoryview | SegmentRange
    tensors: list[tuple[int, int]]
    reply: Reply | PassthroughColumn | None
    kept: list[pa.Array]
    app_metadata: bytes
    portions: tuple[BatchPortion, ...] = ()

    def without_inputs(self) -> ParsedBatch:
        """Itself, for whoever has taken its inputs: lent memory is not kept for its response."""
        if isinstance(self.body, SegmentRange):
            return replace(self, portions=(), body=memoryview(b""))
        return replace(self, portions=()) if self.portions else self


class Unrendered(NamedTuple):
    """Results whose messages depend on those before them, as dictionaries do.

    Attributes:
        batch: The response; None until it is put together.
    """

    arrived: ParsedBatch
    results: bytes | memoryview
    batch: pa.RecordBatch | None


class LongMessage(Exception):
    """A message that a thread should read: it takes milliseconds, whatever its own length."""


class StreamCodec:
    """One stream's way in and out."""

    def __init__(self, plan: Plan, limits: LimitsConfig) -> None:
        self.plan = plan
        self._limits = limits
        self._converter = Converter(plan, limits)
        self._head = b""
        self._raw_bytes = 0
        self._like: ParsedBatch | None = None

    def is_quick(self, raw: bytes | memoryview) -> bool:
        """Whether a message is small, or will be read without a look into its body.

        Others go through pyarrow as a whole; `read` does that without the interpreter's lock.

        Raises:
            MalformedInput: It is no message of the stream.
        """
        if len(raw) <= WHOLE_BYTES and not self.plan.makes_lists:
            return True
        return self._is_quick(read_flight_data(raw).header, len(raw))

    def _is_quick(self, header: bytes | memoryview, length: int) -> bool:
        """The same of a message with this header and so many bytes."""
        if length <= WHOLE_BYTES:
            return not self.plan.makes_lists or self._is_made_small(bytes(header))
        return bytes(header[:CHECKED_HEADER_BYTES_MAX]) in self.plan.checked

    def _is_made_small(self, header: bytes) -> bool:
        """Whether a small message of lists stays small when its rows are padded."""
        message = ipc.read_message(header)
        if message.kind != ipc.RECORD_BATCH:
            return True
        rows = ipc.read_batch(header, message).rows
        return rows * self.plan.row_bytes <= WHOLE_BYTES

    @property
    def held_bytes(self) -> int:
        """Memory of decoded dictionaries beside the messages that they came in."""
        return self._converter.held_bytes

    def work_bytes(self, raw: bytes | memoryview) -> int:
        """Memory that reading a message takes beside its own, for a time.

        Raises:
            IskanderError: It cannot be read.
        """
        data = read_flight_data(raw)
        return self._work_bytes(bytes(data.header), data.body)

    def _work_bytes(self, header: bytes, body: memoryview | SegmentRange) -> int:
        message = ipc.read_message(header)
        is_dictionary = message.kind == ipc.DICTIONARY_BATCH
        if not is_dictionary and message.kind != ipc.RECORD_BATCH:
            return 0
        batch = ipc.read_dictionary(header, message)[2] if is_dictionary else None
        batch = batch or ipc.read_batch(header, message)
        work = self._converter.work_bytes(batch, body)
        # A batch that is converted is written once more.
        return 2 * work + (0 if is_dictionary or not self.plan.is_converted else len(body))

    def read(self, raw: bytes | memoryview, *, is_at_once: bool = False) -> ParsedBatch | None:
        """Take one message of the stream; None for a dictionary.

        Raises:
            IskanderError: As `decode`.
            LongMessage: As `decode`; nothing was taken.
        """
        like = self._like
        if like is not None and len(raw) == self._raw_bytes:
            head_bytes = len(self._head)
            if raw[:head_bytes] == self._head:
                # As the one before it but for the body, into which no check looks.
                body = memoryview(raw)[head_bytes:]
                return ParsedBatch(like.rows, body, like.tensors, like.reply, [], like.app_metadata)
        data = read_flight_data(raw)
        if not data.header:
            raise MalformedInput("a message of the stream has no record batch")
        self._like = None
        arrived = self.decode(data.header, data.body, data.app_metadata, is_at_once=is_at_once)
        if arrived is not None and 0 < data.head_bytes <= CHECKED_HEADER_BYTES_MAX:
            checked = self.plan.checked.get(bytes(data.header))
            if checked is not None and checked.tensors is arrived.tensors:
                self._head, self._raw_bytes = bytes(raw[: data.head_bytes]), len(raw)
                self._like = replace(arrived, body=memoryview(b""))
        return arrived

    def decode(
        self,
        header: memoryview,
        body: memoryview | SegmentRange,
        app_metadata: bytes,
        *,
        is_at_once: bool = False,
    ) -> ParsedBatch | None:
        """Check one message of the stream; None for a dictionary, which is kept.

        Args:
            header: Of the message.
            body: Of the message.
            app_metadata: Of the message.
            is_at_once: It is not to take long.

        Raises:
            LongMessage: It would take long, and nothing was taken.
            MalformedInput: The message is not what it claims.
            LimitExceeded: Rows or bytes.
            ContractError: Nulls in an input.
        """
        require_header(header)
        raw = bytes(header)
        checked = self.plan.checked.get(raw)
        if checked is not None and checked.body_bytes == len(body):
            body = self._own(body) if self.plan.forwarded else body
            return ParsedBatch(checked.rows, body, checked.tensors, checked.reply, [], app_metadata)
        message = ipc.read_message(raw)
        if not 0 <= message.body_bytes <= len(body):
            raise MalformedInput(
                f"the header announces a body of {message.body_bytes} bytes and {len(body)} came"
            )
        if message.kind == ipc.DICTIONARY_BATCH:
            require_bytes(len(body), self._limits)
            if is_at_once:
                self._require_short(ipc.read_dictionary(raw, message)[2], body)
            self._converter.keep_dictionary(raw, message, self._own(body))
            return None
        if message.kind != ipc.RECORD_BATCH:
            what = "a second schema" if message.kind == ipc.SCHEMA else f"kind {message.kind}"
            raise MalformedInput(f"wanted a record batch, got {what}")
        batch = ipc.read_batch(raw, message)
        self._require_rows(batch.rows)
        require_bytes(len(body), self._limits)
        is_usual = not batch.is_compressed and message.version == ipc.METADATA_V5
        if self.plan.is_converted or not is_usual:
            if is_at_once:
                self._require_short(batch, body)
            plain = self._converter.plain(raw, batch, self._own(body))
            arrived = self._check(plain.batch, plain.body, plain.kept, app_metadata)
            return replace(arrived, portions=plain.portions)
        if not self.plan.is_decided_by_header or self.plan.forwarded:
            body = self._own(body)
        arrived = self._check(batch, body, [], app_metadata)
        if self.plan.is_decided_by_header and len(raw) <= CHECKED_HEADER_BYTES_MAX:
            if len(self.plan.checked) >= CHECKED_MAX:
                self.plan.checked.clear()
            self.plan.checked[raw] = Checked(
                arrived.rows, len(body), arrived.tensors, arrived.reply
            )
        return arrived

    def _require_short(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> None:
        if len(body) + self._converter.work_bytes(batch, body) > WHOLE_BYTES:
            raise LongMessage

    def _own(self, body: memoryview | SegmentRange) -> memoryview:
        """A body that is to be looked into, or kept, as bytes that nobody changes."""
        return body.read() if isinstance(body, SegmentRange) else body

    def take(self, arrived: ParsedBatch, results: bytes | memoryview) -> Parts | Unrendered:
        """What `frames` wants of a batch's results: the finished message, for a plain response."""
        if self.plan.is_response_plain:
            return _plain_frame(self.plan, arrived, results)
        return Unrendered(arrived, results, None)

    def is_slow(self, arrived: ParsedBatch) -> bool:
        """Whether it is better for the others that a thread puts the response together."""
        return self.plan.is_assembled and arrived.rows > ASSEMBLED_ROWS

    def assembled(self, arrived: ParsedBatch, results: bytes | memoryview) -> Unrendered:
        """What `frames` wants, with the response put together; may be called by any thread."""
        batch = self._converter.assembled(arrived.rows, arrived.kept, results)
        return Unrendered(arrived, b"", batch)

    def frames(self, taken: Parts | Unrendered) -> list[Parts]:
        """The messages of one response; to be called in the stream's order."""
        if not isinstance(taken, Unrendered):
            return [taken]
        if taken.batch is None:
            taken = self.assembled(taken.arrived, taken.results)
        return self._converter.frames(taken.batch, taken.arrived.kept, taken.arrived.app_metadata)

    def error_frames(self, error: IskanderError) -> list[Parts]:
        """The messages that take a result's place: no rows, and the error as JSON metadata."""
        kept = self._converter.empty()
        metadata = msgspec.json.encode({"iskander": {"error": error.to_wire()}})
        return self._converter.frames(self._converter.assembled(0, kept, b""), kept, metadata)

    def _check(
        self,
        batch: ipc.Batch,
        body: memoryview | SegmentRange,
        kept: list[pa.Array],
        app_metadata: bytes,
    ) -> ParsedBatch:
        plan, rows, nodes, buffers = self.plan, batch.rows, batch.nodes, batch.buffers
        if len(nodes) != 2 * plan.nodes_count or len(buffers) != 2 * plan.buffers_count:
            raise MalformedInput(
                f"the record batch has {len(nodes) // 2} arrays in {len(buffers) // 2} buffers and "
                f"its schema asks for {plan.nodes_count} in {plan.buffers_count}"
            )
        length = len(body)
        tensors = []
        for column in plan.inputs:
            require_lengths(column, rows, nodes)
            for index in range(column.first_node, column.first_node + len(column.levels)):
                if nodes[2 * index + 1]:
                    raise ContractError(
                        f"column `{column.name}` has {nodes[2 * index + 1]} nulls, and the model's "
                        "input cannot hold a null",
                        column=column.name,
                    )
            assert column.spec is not None
            # Of no strings there need be no offsets.
            wanted = column.spec.buffer_bytes(rows) if rows else 0
            start, got = buffers[2 * column.values_buffer : 2 * column.values_buffer + 2]
            if start < 0 or got < wanted or start + got > length:
                raise MalformedInput(
                    f"column `{column.name}` needs {wanted} bytes for {rows} rows; its buffer says "
                    f"{got} at {start} of a body of {length}",
                    column=column.name,
                )
            tensors.append((start, start + wanted))
        if plan.has_string_inputs:
            texts = [column for column in plan.inputs if not column.bits]
            tensors += [strings_range(column, rows, batch, _ours(body)) for column in texts]
        require_apart(sum(stop - start for start, stop in tensors), length)
        reply: Reply | PassthroughColumn | None = None
        if plan.is_response_plain:
            reply = passed = _passed(plan, batch, body)
            if not plan.has_string_results:
                reply = _reply(plan, rows, passed, b"")
        if plan.strings:
            self._require_strings(plan.strings, batch)
        return ParsedBatch(rows, body, tensors, reply, kept, app_metadata)

    def _require_rows(self, rows: int) -> None:
        if not 0 <= rows <= self._limits.rows:
            raise LimitExceeded(
                f"a batch may have {self._limits.rows} rows, got {rows}", wanted=self._limits.rows
            )

    def _require_strings(self, columns: list[Column], batch: ipc.Batch) -> None:
        total = sum(batch.buffers[2 * (column.values_buffer + 1) + 1] for column in columns)
        require_string_bytes(total, self._limits)


def _plain_frame(plan: Plan, arrived: ParsedBatch, results: bytes | memoryview) -> Parts:
    """The response to a plain batch.

    Layout:
        The results' body as the worker left it, then the passed-through buffers, each on a
        64-byte boundary.
    """
    reply, body = arrived.reply, arrived.body
    if not isinstance(reply, Reply):
        assert reply is not None
        # Of no rows nothing was computed, and a column of strings has an offset all the same.
        results = results or bytes(body_layout(plan.contract.outputs, 0)[1])
        reply = _reply(plan, arrived.rows, reply, results)
    assert len(results) == reply.results_bytes
    head = reply.head
    if arrived.app_metadata:
        head = data_head(reply.header, arrived.app_metadata, reply.body_bytes)
    if not reply.ranges:
        return head, results
    passed: list[bytes | memoryview] = []
    for start, stop, padding in reply.ranges:
        passed += (_ours(body)[start:stop], padding)
    return head, results, *passed


def _passed(plan: Plan, batch: ipc.Batch, body: memoryview | SegmentRange) -> PassthroughColumn:
    """Check the passed-through columns, and lay them out one after the other."""
    rows, nodes, end = batch.rows, batch.nodes, 0
    reply_nodes: list[int] = []
    reply_buffers: list[int] = []
    ranges: list[tuple[int, int, bytes]] = []
    for column in plan.forwarded:
        require_lengths(column, rows, nodes)
        first, last = column.first_node, column.first_node + len(column.levels)
        reply_nodes += nodes[2 * first : 2 * last]
        for start, stop in forwarded_ranges(column, rows, batch, _ours(body)):
            padding = bytes(-(stop - start) % ALIGNMENT)
            ranges.append((start, stop, padding))
            reply_buffers += (end, stop - start)
            end += stop - start + len(padding)
    require_apart(sum(stop - start for start, stop, _ in ranges), len(body))
    return PassthroughColumn(reply_nodes, reply_buffers, ranges, end)


def _reply(plan: Plan, rows: int, passed: PassthroughColumn, results: bytes | memoryview) -> Reply:
    """Render the response's header.

    Args:
        plan: Of the stream.
        rows: Of the batch.
        passed: The passed-through columns, which come behind the results.
        results: Looked at only where there are strings in them.
    """
    outputs = plan.contract.outputs
    offsets, results_bytes = body_layout(outputs, rows)
    strings: list[tuple[int, int]] = []
    if plan.has_string_results:
        lengths = string_lengths(outputs, rows, results, offsets)
        strings, results_bytes = string_ranges(outputs, rows, lengths, offsets)
    nodes, buffers = columns_without_nulls(outputs, rows, offsets, strings)
    behind = list(passed.buffers)
    behind[::2] = [results_bytes + start for start in passed.buffers[::2]]
    end = results_bytes + passed.length_bytes
    assert plan.template is not None
    nodes, buffers = plan.order.numbers(passed.nodes + nodes, behind + buffers)
    header = bytes(plan.template.render(rows, nodes, buffers, end))
    return Reply(header, data_head(header, b"", end), results_bytes, passed.ranges, end)


def _ours(body: memoryview | SegmentRange) -> memoryview:
    """A body of which more than tensors is read: then nobody else can change it."""
    assert isinstance(body, memoryview)
    return body
