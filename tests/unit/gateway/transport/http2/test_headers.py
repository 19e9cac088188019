"""HTTP/2 header blocks: request decoding, malformed blocks, work limits, response encoding."""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http2 import END_HEADERS, END_STREAM, HAS_PRIORITY, PADDED, Fields, request_fields
from support.http2 import block as block_of

from iskander.gateway.transport.http2 import response_headers as headers
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode, StreamError
from iskander.gateway.transport.http2.header_block_reader import (
    FIELD_COST_BYTES,
    FIELDS_MAX,
    HUFFMAN_BYTES_MAX,
    TABLE_UPDATES_MAX,
    HeaderBlockReader,
    scan,
)
from iskander.gateway.transport.http2.request_headers import (
    BINARY_PARTS_MAX,
    HEADER_LIST_BYTES_MAX,
    RequestHeaders,
    read_request,
)
from iskander.gateway.transport.http2.status import RpcError, Status

VALUE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)
NAME = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=20)
FIELDS = st.lists(st.tuples(NAME, VALUE), max_size=8)


def read(raw: bytes) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in hpack.Decoder().decode(raw)]


def request(*extra: tuple[str, str]) -> RequestHeaders:
    return read_request(request_fields(extra=extra))


def size_of(fields: Fields) -> int:
    return sum(len(name) + len(value) + 32 for name, value in fields)


class TestResponses:
    @given(FIELDS)
    def test_fields_round_trip(self, fields: Fields) -> None:
        fields = [(name + ".", value) for name, value in fields]
        assert read(headers.block(fields)) == fields

    @pytest.mark.parametrize("length", [0, 126, 127, 128, 254, 255, 16_000, 20_000])
    def test_string_lengths_around_prefix_limits_round_trip(self, length: int) -> None:
        fields = [("n" * max(length, 1), "v" * length), ("after", "it")]
        assert read(headers.block(fields)) == fields

    def test_response_headers_of_grpc(self) -> None:
        assert dict(read(headers.RESPONSE)) == {
            ":status": "200",
            "content-type": "application/grpc",
            "grpc-accept-encoding": "identity,deflate,gzip",
        }

    def test_trailers_contain_the_status_and_an_optional_message(self) -> None:
        assert read(headers.trailers(Status.OK, "", ())) == [("grpc-status", "0")]
        assert read(headers.trailers(Status.INTERNAL, "why", [("a", "b")])) == [
            ("grpc-status", "13"),
            ("grpc-message", "why"),
            ("a", "b"),
        ]

    @given(st.text())
    def test_messages_are_percent_encoded(self, message: str) -> None:
        encoded = dict(read(headers.trailers(Status.INTERNAL, message, ()))).get("grpc-message", "")
        assert unquote(encoded, errors="strict") == message
        assert re.fullmatch(r"([\x20-\x24\x26-\x7e]|%[0-9A-F]{2})*", encoded)

    @given(st.binary(max_size=100))
    def test_binary_metadata_is_base64_without_padding(self, raw: bytes) -> None:
        encoded = dict(read(headers.trailers(Status.OK, "", [("it-bin", raw)])))["it-bin"]
        assert "=" not in encoded
        assert base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True) == raw


class TestRequests:
    def test_request_fields_become_path_encoding_and_metadata(self) -> None:
        head = request(("grpc-encoding", "gzip"), ("a", "1"), ("b", "2"), ("a", "3"))
        assert (head.path, head.timeout_ns, head.encoding) == ("/t/M", None, "gzip")
        assert head.metadata == (("a", "1"), ("b", "2"), ("a", "3"))

    def test_transport_headers_are_not_metadata(self) -> None:
        ours = [("user-agent", "x"), ("grpc-accept-encoding", "gzip"), ("grpc-internal", "x")]
        assert request(*ours).metadata == ()

    @pytest.mark.parametrize(
        ("value", "ns"),
        [
            ("0n", 0),
            ("1n", 1),
            ("2u", 2_000),
            ("3m", 3_000_000),
            ("4S", 4 * 10**9),
            ("5M", 300 * 10**9),
            ("6H", 6 * 3600 * 10**9),
            ("99999999n", 99_999_999),
            ("00000001S", 10**9),
        ],
    )
    def test_timeout_units(self, value: str, ns: int) -> None:
        assert request(("grpc-timeout", value)).timeout_ns == ns

    @pytest.mark.parametrize(
        "value", ["", "1", "S", "-1S", "1.5S", "1s", " 1S", "1S ", "123456789n", "1SS"]
    )
    def test_malformed_timeouts_are_rejected(self, value: str) -> None:
        with pytest.raises(RpcError, match="grpc-timeout"):
            request(("grpc-timeout", value))

    @given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.booleans())
    def test_padded_unpadded_and_joined_binary_values_are_decoded(
        self, values: list[bytes], is_padded: bool
    ) -> None:
        parts = [base64.b64encode(value).decode() for value in values]
        value = ",".join(part if is_padded else part.rstrip("=") for part in parts)

        assert request(("k-bin", value)).metadata == tuple(("k-bin", value) for value in values)

    @pytest.mark.parametrize("value", ["*", "a", "aaaaa", "aa aa", "====", "\xe9\xe9\xe9\xe9",
                                      "akGk=", "akGk=z", "aa=a", "aaa=="])  # fmt: skip
    def test_binary_values_that_are_not_base64_are_rejected(self, value: str) -> None:
        with pytest.raises(RpcError, match="not base64"):
            request(("k-bin", value))

    @pytest.mark.parametrize(
        "fields",
        [
            request_fields(without=["content-type"]),
            request_fields(without=["content-type"], extra=[("content-type", "text/html")]),
            request_fields(without=[":method"], extra=[(":method", "GET")]),
        ],
    )
    def test_requests_other_than_grpc_are_rejected(self, fields: Fields) -> None:
        with pytest.raises(RpcError, match="not a gRPC call"):
            read_request(fields)

    @pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;a=b"])
    def test_content_types_with_a_suffix_are_accepted(self, kind: str) -> None:
        fields = request_fields(without=["content-type"], extra=[("content-type", kind)])
        assert read_request(fields).path == "/t/M"

    def test_header_list_above_the_size_limit_is_rejected(self) -> None:
        left = HEADER_LIST_BYTES_MAX - size_of(request_fields(extra=[("k", "")]))
        assert request(("k", "v" * left)).metadata[0][0] == "k"
        with pytest.raises(RpcError, match="16,385 bytes, limit 16,384") as caught:
            request(("k", "v" * (left + 1)))
        assert caught.value.status is Status.RESOURCE_EXHAUSTED

    def test_binary_header_values_are_counted_before_decoding(self) -> None:
        """ "!" is not base64: a decoder would report another error."""
        assert len(request(("k-bin", "," * (BINARY_PARTS_MAX - 1))).metadata) == BINARY_PARTS_MAX
        with pytest.raises(RpcError, match="binary header values: 129, limit 128"):
            request(("k-bin", "!" + "," * BINARY_PARTS_MAX))
        with pytest.raises(RpcError, match="bytes, limit 16,384"):
            request(("k-bin", "!" + "," * 60_000))

    @pytest.mark.parametrize(
        "fields",
        [
            request_fields(without=[":method"]),
            request_fields(without=[":path"]),
            request_fields(without=[":scheme"]),
            request_fields(without=[":path"], extra=[(":path", "")]),
            request_fields(extra=[(":path", "/t/N")]),
            request_fields(extra=[(":status", "200")]),
            request_fields(extra=[(":unknown", "x")]),
            [*request_fields(without=[":path"]), (":path", "/t/M")],
            request_fields(extra=[("Upper", "x")]),
            request_fields(extra=[("a b", "x")]),
            request_fields(extra=[("", "x")]),
            request_fields(extra=[("k", "a\r\nb")]),
            request_fields(extra=[("k", "a\0b")]),
            request_fields(extra=[("connection", "close")]),
            request_fields(extra=[("transfer-encoding", "chunked")]),
            request_fields(without=["te"], extra=[("te", "gzip")]),
            request_fields(extra=[("content-length", "-1")]),
            request_fields(extra=[("content-length", "9" * 5000)]),
        ],
    )
    def test_malformed_request_is_a_stream_error(self, fields: Fields) -> None:
        with pytest.raises(StreamError) as caught:
            read_request(fields)
        assert caught.value.code is ErrorCode.PROTOCOL_ERROR


class TestBlocks:
    @given(FIELDS, st.lists(st.integers(0, 200), max_size=6), st.none() | st.integers(0, 9))
    def test_fragmented_block_is_assembled(
        self, fields: Fields, cuts: list[int], padding: int | None
    ) -> None:
        fields = request_fields(extra=[(f"x{name}", value) for name, value in fields])
        raw = block_of(fields)
        ends = [*sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
        fragments = [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        flags, first = END_STREAM | HAS_PRIORITY, b"ppppp" + fragments[0]
        if padding is not None:
            flags, first = flags | PADDED, bytes([padding]) + first + bytes(padding)

        blocks = HeaderBlockReader()
        blocks.on_headers(5, flags, memoryview(first))
        for fragment in fragments[1:]:
            assert blocks.is_open
            blocks.on_continuation(5, memoryview(fragment))
        stream_id, is_last, ended = blocks.end()
        assert (stream_id, is_last, ended.pairs) == (5, True, fields)
        assert not blocks.is_open

    def test_blocks_share_the_dynamic_table(self) -> None:
        encoder, blocks = hpack.Encoder(), HeaderBlockReader()
        for stream_id in (1, 3, 5):
            fields = request_fields(extra=[("client", "robot-7"), ("n", str(stream_id))])
            raw = memoryview(encoder.encode(fields))
            blocks.on_headers(stream_id, END_HEADERS, raw)
            number, is_last, ended = blocks.end()
            assert (number, is_last, ended.pairs) == (stream_id, False, fields)
        assert len(raw) < 20

    def test_identical_requests_are_decoded_once(self) -> None:
        """The first block changes the dynamic table, so caching begins with the second."""
        blocks, encoder, requests = HeaderBlockReader(), hpack.Encoder(), []
        for stream_id in (1, 3, 5):
            raw = encoder.encode(request_fields(extra=[("client", "robot-7")]))
            blocks.on_headers(stream_id, END_HEADERS, memoryview(raw))
            requests.append(blocks.end()[2].request())
        first, again, _ = requests
        assert again is requests[2]
        assert (first.path, first.metadata) == (again.path, again.metadata)
        assert (first.path, first.metadata) == ("/t/M", (("client", "robot-7"),))

    @pytest.mark.parametrize("stream_id", [1, 3])
    def test_continuation_without_an_open_block_is_rejected(self, stream_id: int) -> None:
        blocks = HeaderBlockReader()
        if stream_id == 3:
            blocks.on_headers(1, 0, memoryview(b""))
        with pytest.raises(ConnectionBroken) as caught:
            blocks.on_continuation(stream_id, memoryview(b""))
        assert caught.value.code is ErrorCode.PROTOCOL_ERROR

    def test_block_above_the_size_limit_is_rejected(self) -> None:
        blocks = HeaderBlockReader()
        blocks.on_headers(1, 0, memoryview(bytes(65_536)))
        blocks.on_continuation(1, memoryview(b""))
        with pytest.raises(ConnectionBroken) as caught:
            blocks.on_continuation(1, memoryview(b"\0"))
        assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM

    @given(st.binary(max_size=200))
    def test_random_bytes_are_a_block_or_a_compression_error(self, raw: bytes) -> None:
        blocks = HeaderBlockReader()
        blocks.on_headers(1, END_HEADERS, memoryview(raw))
        try:
            blocks.end()
        except ConnectionBroken as error:
            assert error.code is ErrorCode.COMPRESSION_ERROR

    @pytest.mark.parametrize("block", [b"\xff", b"\x00\x81\xff\x00", b"\xff\x80\x01"])
    def test_error_of_an_invalid_block_contains_no_addresses(self, block: bytes) -> None:
        """Error texts of `hpack` contain memory addresses."""
        blocks = HeaderBlockReader()
        blocks.on_headers(1, END_HEADERS, memoryview(block))
        with pytest.raises(ConnectionBroken) as caught:
            blocks.end()
        assert str(caught.value) == "invalid header block"

    def test_small_block_that_expands_above_the_limit_is_rejected(self) -> None:
        blocks, encoder = HeaderBlockReader(), hpack.Encoder()
        first = encoder.encode([("bomb", "b" * 4000)])
        blocks.on_headers(1, END_HEADERS, memoryview(first + b"\xbe" * 20))
        with pytest.raises(ConnectionBroken):
            blocks.end()

    def test_memory_of_an_ended_block_is_freed(self) -> None:
        blocks = HeaderBlockReader()
        blocks.on_headers(1, END_HEADERS, memoryview(block_of([("k", "v" * 60_000)])))
        blocks.end()
        assert len(blocks._block) == 0

    @given(
        st.lists(
            st.tuples(st.integers(0, 5), st.booleans()) | st.sampled_from([0, 64, 200, 4096]),
            max_size=40,
        )
    )
    def test_repeated_blocks_are_decoded_with_the_current_table(
        self, steps: list[tuple[int, bool] | int]
    ) -> None:
        """The table changes its size, and some fields are never indexed."""
        encoder, blocks, plain = hpack.Encoder(), HeaderBlockReader(), hpack.Decoder()
        changes = 0
        for step in steps:
            if isinstance(step, int):
                # hpack drops a pending change if the size is set again; a block has two at most.
                if step != encoder.header_table_size and changes < TABLE_UPDATES_MAX:
                    encoder.header_table_size = step
                    changes += 1
                continue
            changes = 0
            number, is_sensitive = step
            fields = [(f"name-{number % 3}", f"value-{number}"), (":method", "POST")]
            raw = (
                encoder.encode(fields, huffman=False)
                if not is_sensitive
                else encoder.encode([hpack.NeverIndexedHeaderTuple(*each) for each in fields])
            )
            blocks.on_headers(1, END_HEADERS, memoryview(raw))
            expected = [(str(name), str(value)) for name, value in plain.decode(raw)]
            assert blocks.end()[2].pairs == expected == fields

    @pytest.mark.parametrize(
        ("block", "limit"),
        [
            (b"\x20" * TABLE_UPDATES_MAX, b"\x20"),
            (b"\x82" * FIELDS_MAX, b"\x82"),
            (b"\x00\x01a\xff\x81\xbf\x01" + bytes(HUFFMAN_BYTES_MAX), b"\x00\x01a\x81\x1f"),
            (b"\x7f\xff\xff\xff\xff\x0f", b"\x7f\xff\xff\xff\xff\xff\x0f"),
        ],
        ids=["table size updates", "fields", "Huffman-coded bytes", "integer"],
    )
    def test_work_of_a_block_is_limited_before_decoding(self, block: bytes, limit: bytes) -> None:
        assert scan(block) > 0
        with pytest.raises(ConnectionBroken) as caught:
            scan(block + limit)
        assert caught.value.code in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.COMPRESSION_ERROR)

    @given(FIELDS, st.booleans())
    def test_cost_of_a_block_counts_fields_and_huffman_codes(
        self, fields: Fields, is_coded: bool
    ) -> None:
        raw = hpack.Encoder().encode(fields, huffman=is_coded)
        assert scan(raw) >= len(raw) + FIELD_COST_BYTES * len(fields)
        assert (scan(raw) == len(raw) + FIELD_COST_BYTES * len(fields)) or is_coded

    @given(st.binary(max_size=100))
    def test_any_bytes_can_be_scanned(self, raw: bytes) -> None:
        try:
            assert scan(raw) >= len(raw)
        except ConnectionBroken as error:
            assert error.code in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.COMPRESSION_ERROR)
