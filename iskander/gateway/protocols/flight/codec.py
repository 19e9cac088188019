"""Codec of one stream: splits batches into tensors, and builds responses.

    schema + contract     ->  Plan         the tensor of each node and buffer in a header
    header, body          ->  ParsedBatch  the bytes of each tensor and passed-through column
    ParsedBatch, results  ->  frames       the response, with the passed-through columns unchanged

A plain batch is not parsed as a whole: the numbers in its header are compared with the plan, and
its bytes are copied once. pyarrow reads any other batch (compression, dictionaries, passed-through
lists, older metadata) and rewrites it as a plain one.

Each number in a header is checked against the rows and the body before use, so the copy that the
model reads is complete.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from iskander.arrow import ipc
from iskander.arrow.types import columns_without_nulls, innermost_type
from iskander.arrow.utf8 import require_string_bytes, require_strings
from iskander.config.schema import LimitsConfig
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.strings import string_lengths, string_ranges
from iskander.contract.tensors import ALIGNMENT, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.columns.convert import BatchPortion, Converter, LongMessage
from iskander.gateway.protocols.flight.data import Parts, data_head, read_flight_data
from iskander.gateway.protocols.flight.plan import (
    CachedHeader,
    Column,
    PassthroughLayout,
    Plan,
    ResponseLayout,
    require_header,
    require_limit,
)
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES
from iskander.interprocess.memory.client_segment import SegmentRange

__all__ = ["LongMessage", "ParsedBatch", "StreamCodec"]
CACHED_HEADER_BYTES_MAX: Final = 4096
ASSEMBLED_ROWS: Final = 4096
"""Ranks and lists of more rows are assembled on a thread: they cost milliseconds."""
ASSEMBLED_BYTES: Final = 1 << 20
"""The same for batches of more bytes."""
LOOP_BYTES: Final = 256 * 1024
LOOP_FACTOR: Final = 16
"""A message is converted on the event loop if it becomes at most 256 KiB, or 16 times its own
bytes; a message of 500 bytes may become 64 MiB."""
NO_LIMIT: Final = 1 << 62
NODE_BYTES: Final = 512
"""Memory of an array in a batch that pyarrow reads."""


class ParsedBatch(msgspec.Struct, frozen=True):
    """A checked batch.

    `tensors` has start and end in `body` of each input, then of the bytes of each string input.
    """

    rows: int
    body: memoryview | SegmentRange
    tensors: list[tuple[int, int]]
    response: ResponseLayout | PassthroughLayout | None  # With string results, only the latter.
    passthrough: list[pa.Array]  # If the response is not plain.
    app_metadata: bytes
    portions: tuple[BatchPortion, ...] = ()  # The inputs, if built from columns.
    source_bytes: int = 0  # Of a converted batch, decompressed.

    def without_inputs(self) -> ParsedBatch:
        """A copy without inputs, so that a pending response holds no client memory."""
        if isinstance(self.body, SegmentRange):
            return replace(self, portions=(), body=memoryview(b""))
        return replace(self, portions=()) if self.portions else self


class Unrendered(NamedTuple):
    """A response that depends on the dictionaries sent before; `batch` is None until assembled."""

    parsed: ParsedBatch
    results: bytes | memoryview
    batch: pa.RecordBatch | None
    parts: Parts  # Its message, once assembled.


def require_app_metadata(size: int, limits: LimitsConfig) -> None:
    """Raise LimitExceeded for long `app_metadata`, which is kept until the response."""
    if size > limits.app_metadata_bytes:
        limit = f"limit {limits.app_metadata_bytes} (`limits.app_metadata_bytes`)"
        text = f"the batch's app_metadata has {size} bytes, {limit}"
        raise LimitExceeded(text, wanted=limits.app_metadata_bytes)


class Rendered(NamedTuple):
    """The messages of a response."""

    frames: list[Parts]


Response: TypeAlias = Parts | Unrendered | Rendered


class StreamCodec:
    """Reads the batches and writes the responses of one stream."""

    def __init__(self, plan: Plan, limits: LimitsConfig) -> None:
        self.plan = plan
        self._limits = limits
        self._converter = Converter(plan, limits)
        self._last_head = b""
        self._last_bytes = 0
        self._last: ParsedBatch | None = None

    def set_whole(self, *, is_whole: bool) -> None:
        """Set whether each later batch is one request (`Converter.is_whole`)."""
        self._converter.is_whole = is_whole

    def locate(self, raw: bytes | memoryview) -> BatchMessage:
        """Find the parts of a message; raises `MalformedInput`."""
        data = read_flight_data(raw)
        return BatchMessage(raw, data.header, data.body, data.app_metadata, data.head_bytes)

    def is_quick(self, message: BatchMessage) -> bool:
        """Whether to decode a message on the event loop: it is small, or its header is cached.

        `decode` may still raise LongMessage.
        """
        if message.size <= WHOLE_BYTES:
            return not self.plan.is_wide
        if isinstance(message.body, SegmentRange) and self.plan.forwarded:
            return False  # The body is copied.
        return bytes(message.header[:CACHED_HEADER_BYTES_MAX]) in self.plan.header_cache

    @property
    def dictionary_bytes(self) -> int:
        """Memory of decoded dictionaries, without the messages that contain them."""
        return self._converter.reader.decoded_bytes

    def work_bytes(self, message: BatchMessage) -> int:
        """Upper bound of the temporary memory to decode a message.

        It includes the private copy of a body in the client's region, but not the message itself.
        """
        body, copied_bytes = message.body, 0
        if isinstance(body, SegmentRange):
            require_limit("bytes", len(body), self._limits.bytes)
            copied_bytes = len(body)
        kind = message.head.kind
        if kind == ipc.DICTIONARY_BATCH:
            return copied_bytes + 2 * self._converter.dictionary_work_bytes(message)
        if kind != ipc.RECORD_BATCH:
            return copied_bytes
        plan, batch = self.plan, message.batch
        if not (
            plan.is_converted or batch.is_compressed or message.head.version != ipc.METADATA_V5
        ):
            return copied_bytes
        require_limit("rows", batch.rows, self._limits.rows)
        cost = self._converter.cost(batch, body)
        # Conversion writes the batch once more.
        work = copied_bytes + 2 * cost.work_bytes
        if plan.is_converted:
            work += len(body) + NODE_BYTES * plan.layout.nodes
            if plan.has_texts:
                texts = self._limits.string_bytes
                work += 3 * (texts if plan.expands_texts else min(texts, sum(cost.lengths)))
        return work

    def repeated(self, raw: bytes | memoryview) -> ParsedBatch | None:
        """Return the batch of a message that differs from the last one only in its body.

        None for any other message. No check of the last one read its body.
        """
        last = self._last
        if last is None or len(raw) != self._last_bytes:
            return None
        head_bytes = len(self._last_head)
        if raw[:head_bytes] != self._last_head:
            return None
        body = memoryview(raw)[head_bytes:]
        return ParsedBatch(last.rows, body, last.tensors, last.response, [], last.app_metadata)

    def decode(self, message: BatchMessage, *, is_on_loop: bool = False) -> ParsedBatch | None:
        """Check one message of the stream; None for a dictionary, which is stored.

        With `is_on_loop`, raises LongMessage, and changes nothing, if a thread should decode it.
        """
        if message.error is not None:
            raise message.error
        header, body = message.header, message.body
        if not header:
            raise MalformedInput("a message of the stream has no record batch")
        if message.app_metadata:
            require_app_metadata(len(message.app_metadata), self._limits)
        require_header(header)
        self._last = None
        key, app_metadata = bytes(header), bytes(message.app_metadata)
        cached = self.plan.header_cache.get(key)
        if cached is not None and cached.body_bytes == len(body):
            body = _private(body) if self.plan.forwarded else body
            parsed = ParsedBatch(
                cached.rows, body, cached.tensors, cached.response, [], app_metadata
            )
            self._remember(message, parsed)
            return parsed
        declared_bytes = message.head.body_bytes
        if not 0 <= declared_bytes <= len(body):
            declared = f"the header declares a body of {declared_bytes} bytes"
            raise MalformedInput(f"{declared}, got {len(body)}")
        kind = message.head.kind
        if kind == ipc.DICTIONARY_BATCH:
            self._store_dictionary(message, is_on_loop=is_on_loop)
            return None
        if kind != ipc.RECORD_BATCH:
            what = "a second schema" if kind == ipc.SCHEMA else f"kind {kind}"
            raise MalformedInput(f"wanted a record batch, got {what}")
        batch = message.batch
        require_limit("rows", batch.rows, self._limits.rows)
        require_limit("bytes", len(body), self._limits.bytes)
        is_current = not batch.is_compressed and message.head.version == ipc.METADATA_V5
        if self.plan.is_converted or not is_current:
            return self._convert(message, app_metadata, is_on_loop=is_on_loop)
        is_cacheable = self.plan.is_header_sufficient
        if not is_cacheable or self.plan.forwarded:
            body = _private(body)
        parsed = self._check(batch, body, [], app_metadata)
        if is_cacheable and len(key) <= CACHED_HEADER_BYTES_MAX:
            checked = CachedHeader(parsed.rows, len(body), parsed.tensors, parsed.response)
            self.plan.remember(key, checked)
            self._remember(message, parsed)
        return parsed

    def _remember(self, message: BatchMessage, parsed: ParsedBatch) -> None:
        """Keep a batch that only its header determines, for `repeated`."""
        if 0 < message.head_bytes <= CACHED_HEADER_BYTES_MAX:
            raw = message.raw
            self._last_head, self._last_bytes = bytes(raw[: message.head_bytes]), len(raw)
            self._last = replace(parsed, body=memoryview(b""))

    def _store_dictionary(self, message: BatchMessage, *, is_on_loop: bool) -> None:
        require_limit("bytes", len(message.body), self._limits.bytes)
        if is_on_loop:
            _require_short(self._converter.dictionary_work_bytes(message), message.size)
        self._converter.add_dictionary(message, _private(message.body))

    def _convert(
        self, message: BatchMessage, app_metadata: bytes, *, is_on_loop: bool
    ) -> ParsedBatch:
        """Rewrite a batch as a plain one, and check that."""
        cost = self._converter.cost(message.batch, message.body)
        text_bytes_max = NO_LIMIT
        if is_on_loop:
            _require_short(cost.decoded_bytes, message.size)
            text_bytes_max = _loop_bytes(message.size)
        plain = self._converter.plain(message, _private(message.body), cost, text_bytes_max)
        parsed = self._check(plain.batch, plain.body, plain.passthrough, app_metadata)
        return replace(parsed, portions=plain.portions, source_bytes=sum(cost.lengths))

    def prepare(self, parsed: ParsedBatch, results: bytes | memoryview) -> Parts | Unrendered:
        """Build the input of `frames` from a batch's results."""
        if self.plan.is_response_plain:
            return _plain_frame(self.plan, parsed, results)
        if self.plan.passes_dictionaries and not self.is_slow(parsed):
            return Unrendered(parsed, results, None, ())
        return self._assembled(parsed, results)

    def _assembled(self, parsed: ParsedBatch, results: bytes | memoryview) -> Parts | Unrendered:
        converter = self._converter
        batch = converter.assemble(parsed.rows, parsed.passthrough, results)
        parts = converter.serialized(batch, parsed.app_metadata)
        if not self.plan.passes_dictionaries:
            return parts
        return Unrendered(parsed, b"", batch, parts)

    def is_slow(self, parsed: ParsedBatch) -> bool:
        """Whether to call `prepare` on a thread."""
        plan = self.plan
        if plan.is_response_plain:
            return False
        if plan.is_wide or parsed.source_bytes > ASSEMBLED_BYTES:
            return True
        # Ranks within a group encode the entries of dictionaries.
        is_large = self._converter.reader.dictionary_bytes > ASSEMBLED_BYTES
        return plan.is_assembled and (parsed.rows > ASSEMBLED_ROWS or is_large)

    def is_slow_to_render(self, response: Response) -> bool:
        """Whether to call `rendered` on a thread: the response has new and large dictionaries."""
        if not isinstance(response, Unrendered):
            return False
        is_small = self._converter.reader.dictionary_bytes <= LOOP_BYTES and not self.plan.is_wide
        return not (is_small or self._converter.has_sent(response.parsed.passthrough))

    def rendered(self, response: Response) -> Rendered:
        """Render the messages of one response for `frames`; call in stream order."""
        return Rendered(self.frames(response))

    def frames(self, response: Response) -> list[Parts]:
        """Render the messages of one response; call in stream order."""
        if isinstance(response, Rendered):
            return response.frames
        if not isinstance(response, Unrendered):
            return [response]
        parsed, results, batch, parts = response
        if batch is None:
            assembled = self._assembled(parsed, results)
            assert isinstance(assembled, Unrendered)
            batch, parts = assembled.batch, assembled.parts
        return self._with_dictionaries(batch, parsed.passthrough, parts)

    def _with_dictionaries(
        self, batch: pa.RecordBatch, passthrough: list[pa.Array], parts: Parts
    ) -> list[Parts]:
        """Put changed dictionaries before the message of a response."""
        converter = self._converter
        if converter.has_sent(passthrough):
            return [parts]
        return [*converter.changed_dictionaries(batch, passthrough), parts]

    def error_frames(self, error: IskanderError) -> list[Parts]:
        """Render an error in place of a result: no rows, and the error as JSON metadata."""
        converter = self._converter
        passthrough = converter.empty()
        metadata = msgspec.json.encode({"iskander": {"error": error.to_wire()}})
        batch = converter.assemble(0, passthrough, b"")
        parts = converter.serialized(batch, metadata)
        if not self.plan.passes_dictionaries:
            return [parts]
        return self._with_dictionaries(batch, passthrough, parts)

    def _check(
        self,
        batch: ipc.Batch,
        body: memoryview | SegmentRange,
        passthrough: list[pa.Array],
        app_metadata: bytes,
    ) -> ParsedBatch:
        """Check a plain batch against the plan, and locate its tensors."""
        plan, rows, nodes, buffers = self.plan, batch.rows, batch.nodes, batch.buffers
        if len(nodes) != 2 * plan.nodes_count or len(buffers) != 2 * plan.buffers_count:
            got = f"{len(nodes) // 2} arrays in {len(buffers) // 2} buffers"
            required = f"its schema requires {plan.nodes_count} in {plan.buffers_count}"
            raise MalformedInput(f"the record batch has {got}; {required}")
        tensors = []
        for column in plan.inputs:
            _require_lengths(column, rows, nodes)
            for index in range(column.first_node, column.first_node + len(column.levels)):
                if nodes[2 * index + 1]:
                    nulls = int(nodes[2 * index + 1])
                    text = f"column `{column.name}` has {nulls} nulls; "
                    text += "the model input does not accept nulls"
                    raise ContractError(text, column=column.name, nulls=nulls)
            assert column.spec is not None
            # Without rows, a string column may omit its offsets.
            length = column.spec.buffer_bytes(rows) if rows else 0
            start, _ = _buffer(column, column.values_buffer, length, buffers, len(body))
            tensors.append((start, start + length))
        if plan.has_string_inputs:
            texts = [column for column in plan.inputs if not column.bits]
            tensors += [_strings_range(column, rows, buffers, _readable(body)) for column in texts]
        _require_disjoint(sum(stop - start for start, stop in tensors), len(body))
        response: ResponseLayout | PassthroughLayout | None = None
        if plan.is_response_plain:
            response = columns = _lay_out_passthrough(plan, batch, body)
            if not plan.has_string_results:
                response = _response_layout(plan, rows, columns, b"")
        if plan.strings:
            total = sum(buffers[2 * (column.values_buffer + 1) + 1] for column in plan.strings)
            require_string_bytes(total, self._limits)
        return ParsedBatch(rows, body, tensors, response, passthrough, app_metadata)


def _loop_bytes(message_bytes: int) -> int:
    """Decoded bytes up to which a message is converted on the event loop."""
    return min(max(LOOP_BYTES, LOOP_FACTOR * message_bytes), WHOLE_BYTES)


def _require_short(decoded_bytes: int, message_bytes: int) -> None:
    """Raise LongMessage if a message is to be converted on a thread."""
    if message_bytes > WHOLE_BYTES or decoded_bytes > _loop_bytes(message_bytes):
        raise LongMessage


def _require_disjoint(total: int, length: int) -> None:
    """Reject buffers that share bytes: a small body could describe a large batch."""
    if total > length:
        sizes = f"{total} bytes in a body of {length} bytes"
        raise MalformedInput(f"the batch's buffers overlap: {sizes}")


def _require_lengths(column: Column, rows: int, nodes: tuple[int, ...]) -> None:
    """Reject a column whose array lengths do not match the batch's rows."""
    for index, level in enumerate(column.levels, column.first_node):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length != rows * level or not 0 <= null_count <= length:
            got = f"has {length} values with {null_count} nulls; {rows} rows make {rows * level}"
            raise MalformedInput(f"column `{column.name}` {got}", column=column.name)


def _buffer(
    column: Column, index: int, required: int, buffers: tuple[int, ...], body_bytes: int
) -> tuple[int, int]:
    """Start and length of a buffer that is inside the body and has the required bytes."""
    start, length = buffers[2 * index], buffers[2 * index + 1]
    if start < 0 or length < required or start + length > body_bytes:
        text = f"column `{column.name}`: a buffer has {length} bytes at {start}, "
        text += f"requires {required}; the body has {body_bytes}"
        raise MalformedInput(text, column=column.name)
    return start, length


def _strings_range(
    column: Column, rows: int, buffers: tuple[int, ...], body: memoryview
) -> tuple[int, int]:
    """Start and end of the bytes of an input's strings, validated as UTF-8."""
    ends = buffers[2 * column.values_buffer]
    start, length = _buffer(column, column.values_buffer + 1, 0, buffers, len(body))
    if not rows:
        return start, start
    count = rows * column.levels[-1]
    offsets = body[ends : ends + (count + 1) * OFFSET_BYTES]
    require_strings(f"column `{column.name}`", count, offsets, body[start : start + length])
    return start, start + int.from_bytes(offsets[-OFFSET_BYTES:], "little")


def _forwarded_ranges(
    column: Column, rows: int, batch: ipc.Batch, body: memoryview
) -> list[tuple[int, int]]:
    """Checked ranges of a passed-through column's buffers."""
    ranges = []
    for place in range(len(column.levels) + (1 if column.bits else 2)):
        required = 0
        if place < len(column.levels):
            node = 2 * (column.first_node + place)
            required = (batch.nodes[node] + 7) // 8 if batch.nodes[node + 1] else 0
        elif column.bits:
            required = (rows * column.levels[-1] * column.bits + 7) // 8
        index = column.first_buffer + place
        start, length = _buffer(column, index, required, batch.buffers, len(body))
        ranges.append((start, start + length))
    if not column.bits and rows:
        buffers = [pa.py_buffer(body[start:stop]) for start, stop in ranges[-3:]]
        null_count = batch.nodes[2 * (column.first_node + len(column.levels)) - 1]
        buffers[0] = buffers[0] if null_count else None
        try:
            count = rows * column.levels[-1]
            array = pa.Array.from_buffers(innermost_type(column.type), count, buffers, null_count)
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            text = f"column `{column.name}`: {ipc.error_text(error)}"
            raise MalformedInput(text, column=column.name) from None
    return ranges


def _plain_frame(plan: Plan, parsed: ParsedBatch, results: bytes | memoryview) -> Parts:
    """Build a plain response.

    Layout:
        The results' body as the worker left it, then the passed-through buffers, each on a
        64-byte boundary.
    """
    response, body = parsed.response, parsed.body
    if not isinstance(response, ResponseLayout):
        assert response is not None
        # Without rows there are no results, and a string column still has one offset.
        results = results or bytes(body_layout(plan.contract.outputs, 0)[1])
        response = _response_layout(plan, parsed.rows, response, results)
    assert len(results) == response.results_bytes
    head = response.head
    if parsed.app_metadata:
        head = data_head(response.header, parsed.app_metadata, response.body_bytes)
    if not response.ranges:
        return head, results
    passthrough: list[bytes | memoryview] = []
    for start, stop, padding in response.ranges:
        passthrough += (_readable(body)[start:stop], padding)
    return head, results, *passthrough


def _lay_out_passthrough(
    plan: Plan, batch: ipc.Batch, body: memoryview | SegmentRange
) -> PassthroughLayout:
    """Check the passed-through columns and lay them out one after the other."""
    rows, nodes, end = batch.rows, batch.nodes, 0
    response_nodes: list[int] = []
    response_buffers: list[int] = []
    ranges: list[tuple[int, int, bytes]] = []
    for column in plan.forwarded:
        _require_lengths(column, rows, nodes)
        first, last = column.first_node, column.first_node + len(column.levels)
        response_nodes += nodes[2 * first : 2 * last]
        for start, stop in _forwarded_ranges(column, rows, batch, _readable(body)):
            padding = bytes(-(stop - start) % ALIGNMENT)
            ranges.append((start, stop, padding))
            response_buffers += (end, stop - start)
            end += stop - start + len(padding)
    _require_disjoint(sum(stop - start for start, stop, _ in ranges), len(body))
    return PassthroughLayout(response_nodes, response_buffers, ranges, end)


def _response_layout(
    plan: Plan, rows: int, passthrough: PassthroughLayout, results: bytes | memoryview
) -> ResponseLayout:
    """Render the response's header; reads `results` only if they contain strings."""
    outputs = plan.contract.outputs
    offsets, results_bytes = body_layout(outputs, rows)
    strings: list[tuple[int, int]] = []
    if plan.has_string_results:
        lengths = string_lengths(outputs, rows, results, offsets)
        strings, results_bytes = string_ranges(outputs, rows, lengths, offsets)
    nodes, buffers = columns_without_nulls(outputs, rows, offsets, strings)
    shifted = list(passthrough.buffers)
    shifted[::2] = [results_bytes + start for start in passthrough.buffers[::2]]
    end = results_bytes + passthrough.length_bytes
    assert plan.template is not None
    nodes, buffers = plan.order.numbers(passthrough.nodes + nodes, shifted + buffers)
    header = bytes(plan.template.render(rows, nodes, buffers, end))
    head = data_head(header, b"", end)
    return ResponseLayout(header, head, results_bytes, passthrough.ranges, end)


def _private(body: memoryview | SegmentRange) -> memoryview:
    """The body, copied if a client can change it."""
    return body.read() if isinstance(body, SegmentRange) else body


def _readable(body: memoryview | SegmentRange) -> memoryview:
    """The body, asserted to be private."""
    assert isinstance(body, memoryview)
    return body
