"""Terms of a Flight stream: headers, app_metadata, precedence and errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from iskander.errors import MalformedInput, RemoteLoop
from iskander.gateway.auth.grants import ANONYMOUS
from iskander.gateway.auth.source import Source
from iskander.gateway.protocols import stream_terms as terms_module
from iskander.gateway.protocols.stream_terms import CACHE_MAX, CACHED_BYTES_MAX, StreamTerms
from iskander.gateway.protocols.terms import HOPS_MAX
from iskander.gateway.scheduling.request import NEVER_NS, Terms

NOW_NS, WALL_NS = 1_000_000_000_000, 1_700_000_000_000_000_000
ENCODERS = {"json": msgspec.json.encode, "msgpack": msgspec.msgpack.encode}
FULL = {
    "client": "robot-7",
    "priority": 0,
    "urgency": 0.5,
    "deadline_ms": 20,
    "ttl_ms": 50.5,
    "steps_remaining": 3,
    "timestamp_ns": WALL_NS - 7_000_000,
    "newest_wins": True,
    "run_alone": True,
}
CALL_TERMS = {name: value for name, value in FULL.items() if name != "timestamp_ns"}
"""`timestamp_ns` applies to one batch."""
FULL_TERMS = Terms(
    client="robot-7",
    is_named=True,
    priority=0,
    urgency=0.5,
    budget_ms=20.0,
    ttl_ms=50.5,
    steps_remaining=3,
    age_ms=7.0,
    is_newest_wins=True,
    is_alone=True,
)
INVALID: list[tuple[str, Any]] = [
    ("client", ""),
    ("client", "x" * 129),
    ("priority", -1),
    ("priority", 10),
    ("priority", "high"),
    ("urgency", -0.1),
    ("urgency", 1.1),
    ("urgency", "nan"),
    ("deadline_ms", -1),
    ("deadline_ms", 86_400_001),
    ("deadline_ms", "soon"),
    ("ttl_ms", -1),
    ("steps_remaining", -1),
    ("steps_remaining", 1.5),
    ("timestamp_ns", -1),
    ("newest_wins", "maybe"),
    ("deadline", 20),
]
VALID: list[tuple[str, Any, str, Any]] = [
    ("client", "x" * 128, "client", "x" * 128),
    ("priority", 9, "priority", 9),
    ("urgency", 1, "urgency", 1.0),
    ("urgency", 0, "urgency", 0.0),
    ("deadline_ms", 0, "budget_ms", 0.0),
    ("deadline_ms", 86_400_000, "budget_ms", 86_400_000.0),
    ("ttl_ms", 0.5, "ttl_ms", 0.5),
    ("steps_remaining", 0, "steps_remaining", 0),
    ("timestamp_ns", WALL_NS + 1, "age_ms", 0.0),
]


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms_module, "wall_ns", lambda: WALL_NS)


def stream(deadline_ns: int | None = None, **headers: Any) -> StreamTerms:
    """Returns the terms of a call with these headers in gRPC form: text, names with dashes."""
    pairs = [
        (f"iskander-{name.replace('_', '-')}", str(value).lower() if value is True else str(value))
        for name, value in headers.items()
    ]
    return StreamTerms([("user-agent", "x"), *pairs, ("x-bin", b"\xff")], deadline_ns)


def metadata_of(**terms: Any) -> bytes:
    return msgspec.json.encode({"iskander": terms})


def test_stream_without_terms_gets_defaults_and_a_unique_client() -> None:
    first, second = stream().of(b""), stream().of(b"")

    assert first == Terms(client=first.client)
    assert not first.is_named and first.client != second.client


def test_headers_apply_to_every_batch() -> None:
    terms = stream(**CALL_TERMS)

    assert terms.of(b"") == terms.of(b"anything") == replace(FULL_TERMS, age_ms=0.0)
    with pytest.raises(MalformedInput, match="applies to one batch"):
        stream(timestamp_ns=WALL_NS)


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_metadata_applies_to_its_batch(encode: Any) -> None:
    terms = stream()

    assert terms.of(encode({"iskander": FULL, "other": [1, {"iskander": 5}]})) == FULL_TERMS
    assert not terms.of(b"").is_named


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("name", FULL)
def test_batch_terms_override_stream_terms(name: str, encode: Any) -> None:
    """Each field separately, and also with the value 0."""
    other = {
        "client": "arm",
        "priority": 7,
        "urgency": 0.0,
        "deadline_ms": 0,
        "ttl_ms": 0,
        "steps_remaining": 0,
        "timestamp_ns": WALL_NS,
        "newest_wins": False,
        "run_alone": False,
    }
    field = {
        "deadline_ms": "budget_ms",
        "newest_wins": "is_newest_wins",
        "run_alone": "is_alone",
        "timestamp_ns": "age_ms",
    }
    terms = stream(**CALL_TERMS).of(encode({"iskander": {name: other[name]}}))

    expected = replace(FULL_TERMS, age_ms=0.0)  # A timestamp applies to one batch.
    if name != "timestamp_ns":
        expected = replace(expected, **{field.get(name, name): other[name]})
    assert terms == expected


def test_batch_can_name_the_client_of_an_unnamed_stream() -> None:
    terms = stream()

    assert terms.of(metadata_of(client="a")).is_named
    assert terms.of(metadata_of(priority=3)) == Terms(client=terms.of(b"").client, priority=3)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\x00\x01\x02",
        b"iskander",
        b'"iskander"',
        b"[1, 2]",
        b'{"a": "iskander"}',
        b'{"iskander": ',
        b'  {"iskander"} ',
        b'{"iskander": null}',
        b"\xff\xfeiskander",
        b"{iskander}",
        msgspec.msgpack.encode(["iskander", {"priority": 99}]),
        msgspec.msgpack.encode({"a": {"iskander": {"priority": 99}}}),
        msgspec.msgpack.encode({"iskander": {"priority": 0}})[:-1],
        msgspec.msgpack.encode({1: "iskander"}),
    ],
)
def test_unrelated_metadata_is_ignored(metadata: bytes) -> None:
    terms = stream(priority=4)

    assert terms.of(metadata) == terms.of(b"") and terms.of(metadata).priority == 4


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_arbitrary_bytes_are_ignored(before: bytes, after: bytes) -> None:
    terms = StreamTerms([], None)

    assert terms.of(before + b"iskander" + after) == terms.of(b"")


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_terms_are_rejected(name: str, value: Any) -> None:
    """In headers and in metadata; the error names the field."""
    with pytest.raises(MalformedInput, match="the call's `iskander-` headers") as caught:
        stream(**{name: value})
    assert name in caught.value.message

    for encode in ENCODERS.values():
        value = float("nan") if value == "nan" and encode is msgspec.msgpack.encode else value
        terms = stream()
        for _ in range(2):
            with pytest.raises(MalformedInput, match="the batch's app_metadata") as caught:
                terms.of(encode({"iskander": {name: value}}))
            assert name in caught.value.message
        assert terms.of(b"") == Terms(client=terms.of(b"").client)


@pytest.mark.parametrize("value", [5, "x", [1], True])
@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_terms_that_are_not_an_object_are_rejected(encode: Any, value: Any) -> None:
    with pytest.raises(MalformedInput):
        stream().of(encode({"iskander": value}))


@pytest.mark.parametrize(("name", "value", "field", "expected"), VALID)
def test_values_at_the_bounds_are_accepted(
    name: str, value: Any, field: str, expected: Any
) -> None:
    if name in CALL_TERMS:
        assert getattr(stream(**{name: value}).of(b""), field) == expected
    assert getattr(stream().of(metadata_of(**{name: value})), field) == expected


def test_unknown_field_is_rejected() -> None:
    with pytest.raises(MalformedInput):
        stream().of(b'{"iskander": {"$": 1}}')


@pytest.mark.parametrize(
    ("headers", "is_in_band"),
    [({}, False), ({"errors": "end"}, False), ({"errors": "in-band"}, True)],
)
def test_errors_header_selects_in_band_errors(headers: dict[str, str], is_in_band: bool) -> None:
    assert stream(**headers).is_in_band is is_in_band


def test_errors_term_is_valid_only_in_headers() -> None:
    with pytest.raises(MalformedInput, match="errors"):
        stream(errors="somewhere")
    with pytest.raises(MalformedInput, match="errors"):
        stream().of(metadata_of(errors="in-band"))


def test_stream_has_the_call_deadline() -> None:
    assert stream(deadline_ns=NOW_NS).deadline_ns == NOW_NS
    assert stream().deadline_ns == NEVER_NS


def test_age_is_computed_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of metadata does not contain the age."""
    terms, metadata = stream(), metadata_of(timestamp_ns=WALL_NS)
    assert terms.of(metadata).age_ms == 0

    monkeypatch.setattr(terms_module, "wall_ns", lambda: WALL_NS + 1_000_000_000)
    assert terms.of(metadata).age_ms == 1000


def test_metadata_cache_is_bounded() -> None:
    terms: Any = stream()
    first = terms.of(metadata_of(priority=1))
    assert terms.of(metadata_of(priority=1)) is first

    for steps in range(3 * CACHE_MAX):
        assert terms.of(metadata_of(steps_remaining=steps)).steps_remaining == steps
        assert len(terms._cache) <= CACHE_MAX


def test_long_metadata_is_not_cached() -> None:
    """Otherwise a stream keeps 64 texts of any length."""
    terms = StreamTerms((), None)
    for length in range(CACHED_BYTES_MAX + 10):
        metadata = msgspec.json.encode({"iskander": {"priority": 1}, "own": "x" * length})
        assert terms.of(metadata).priority == 1
    assert terms._cache is not None
    assert all(len(each) <= CACHED_BYTES_MAX for each in terms._cache)


def test_client_names_are_separate_for_each_token() -> None:
    """A caller cannot use the queue position or quota of another token's client."""
    terms = StreamTerms([("iskander-client", "robot-7")], None, Source("fleet"))
    assert terms.of(b"").client == "fleet/robot-7"
    assert terms.of(b'{"iskander": {"client": "robot-8"}}').client == "fleet/robot-8"
    assert terms.route_key == "robot-7"  # Routing by split ignores the token.
    anonymous = StreamTerms([("iskander-client", "fleet/robot-7")], None, Source(ANONYMOUS))
    assert anonymous.of(b"").client == f"{ANONYMOUS}/fleet/robot-7"


def test_unnamed_streams_are_separate_clients() -> None:
    one, other = (StreamTerms((), None, Source("fleet")).of(b"") for _ in range(2))
    assert one.client != other.client and one.client.startswith("fleet/stream ")
    assert not one.is_named and not other.is_named


def test_hops_of_a_call_apply_to_its_batches() -> None:
    terms = StreamTerms([("iskander-hops", str(HOPS_MAX))], None)
    assert terms.of(b"").hops == HOPS_MAX
    assert terms.of(b'{"iskander": {"priority": 0}}').hops == HOPS_MAX
    with pytest.raises(RemoteLoop, match="passed 5 gateways, limit 4"):
        StreamTerms([("iskander-hops", str(HOPS_MAX + 1))], None)
    with pytest.raises(MalformedInput):
        StreamTerms([], None).of(b'{"iskander": {"hops": 1}}')
