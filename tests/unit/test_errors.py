"""Errors: stable codes, wire form, and size limits for gRPC trailers."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander import errors
from iskander.config.reference import settings as known_settings
from iskander.errors import MESSAGE_BYTES_MAX, Fault, IskanderError, shorten, utf8_problem

WIRE_BYTES_MAX = 2048
"""Limit for text and detail together: peers drop the status above it."""

# Literal because clients compare them: a change here is a change of the interface.
CODES = {
    "contract": (errors.ContractError, "client", False, "INVALID_ARGUMENT", None),
    "malformed": (errors.MalformedInput, "client", False, "INVALID_ARGUMENT", None),
    "limit": (errors.LimitExceeded, "client", False, "INVALID_ARGUMENT", None),
    "model_not_found": (errors.ModelNotFound, "client", False, "NOT_FOUND", None),
    "region_not_found": (errors.RegionNotFound, "client", False, "NOT_FOUND", None),
    "cross_site": (errors.CrossSiteRequest, "client", False, "PERMISSION_DENIED", None),
    "model_moved": (errors.ModelMoved, "nobody", True, "UNAVAILABLE", None),
    "unauthenticated": (errors.Unauthenticated, "client", False, "UNAUTHENTICATED", None),
    "permission_denied": (errors.PermissionDenied, "client", False, "PERMISSION_DENIED", None),
    "runtime_differs": (errors.RuntimeDiffers, "operator", False, "FAILED_PRECONDITION", None),
    "unsupported": (errors.Unsupported, "client", False, "UNIMPLEMENTED", None),
    "overloaded": (errors.Overloaded, "nobody", True, "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    "queue_full": (errors.QueueFull, "nobody", True, "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    "client_over_share": (
        errors.ClientOverShare,
        "client",
        True,
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
    ),
    "rate_limited": (errors.RateLimited, "client", True, "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    "arena_full": (errors.ArenaFull, "nobody", True, "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    "dropped": (errors.DroppedFromQueue, "nobody", True, "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    "superseded": (errors.Superseded, "client", False, "ABORTED", None),
    "deadline_unreachable": (
        errors.DeadlineUnreachable,
        "nobody",
        True,
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
    ),
    "deadline_exceeded": (errors.DeadlineExceeded, "nobody", False, "DEADLINE_EXCEEDED", None),
    "cancelled": (errors.Cancelled, "client", False, "CANCELLED", None),
    "poisoned": (errors.PoisonedRequest, "model", False, "INTERNAL", None),
    "model_quarantined": (errors.ModelQuarantined, "model", True, "UNAVAILABLE", None),
    "not_ready": (errors.NotReady, "operator", True, "UNAVAILABLE", None),
    "connection_failed": (errors.ConnectionFailed, "operator", True, "UNAVAILABLE", None),
    "draining": (errors.Draining, "nobody", True, "UNAVAILABLE", None),
    "execution_failed": (errors.ExecutionFailed, "model", False, "INTERNAL", None),
    "remote_unavailable": (errors.RemoteUnavailable, "operator", True, "UNAVAILABLE", None),
    "remote_overloaded": (
        errors.RemoteOverloaded,
        "nobody",
        True,
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
    ),
    "remote_not_ready": (errors.RemoteNotReady, "operator", True, "UNAVAILABLE", None),
    "remote_denied": (errors.RemoteDenied, "operator", False, "FAILED_PRECONDITION", None),
    "remote_timeout": (errors.RemoteTimeout, "operator", False, "DEADLINE_EXCEEDED", None),
    "remote_loop": (errors.RemoteLoop, "operator", False, "FAILED_PRECONDITION", None),
    "remote_rejected": (errors.RemoteRejected, "client", False, "INVALID_ARGUMENT", None),
    "remote_failed": (errors.RemoteFailed, "model", False, "INTERNAL", None),
    "remote_answer": (errors.RemoteAnswerInvalid, "operator", False, "INTERNAL", None),
    "source_not_found": (errors.SourceNotFound, "client", False, "NOT_FOUND", None),
    "source_changed": (errors.SourceChanged, "client", False, "FAILED_PRECONDITION", None),
    "source": (errors.SourceError, "client", False, "INVALID_ARGUMENT", None),
    "filter": (errors.FilterError, "client", False, "INVALID_ARGUMENT", None),
    "ticket": (errors.TicketRejected, "client", False, "INVALID_ARGUMENT", None),
    "reader_lost": (errors.ReaderLost, "server", True, "UNAVAILABLE", None),
    "manifest": (errors.ManifestError, "operator", False, "FAILED_PRECONDITION", None),
    "config": (errors.ConfigError, "operator", False, "FAILED_PRECONDITION", None),
    "protocol": (errors.ProtocolError, "server", False, "INTERNAL", None),
    "segment": (errors.SegmentError, "server", False, "INTERNAL", None),
    "internal": (errors.IskanderError, "server", False, "INTERNAL", None),
}
HTTP = {
    "contract": 400,
    "malformed": 400,
    "limit": 413,
    "cross_site": 403,
    "unauthenticated": 401,
    "permission_denied": 403,
    "model_not_found": 404,
    "region_not_found": 404,
    "model_moved": 503,
    "unsupported": 501,
    "overloaded": 503,
    "queue_full": 503,
    "client_over_share": 429,
    "rate_limited": 429,
    "arena_full": 503,
    "dropped": 503,
    "superseded": 409,
    "deadline_unreachable": 503,
    "deadline_exceeded": 504,
    "cancelled": 499,
    "model_quarantined": 503,
    "not_ready": 503,
    "connection_failed": 503,
    "draining": 503,
    "remote_unavailable": 503,
    "remote_overloaded": 503,
    "remote_not_ready": 503,
    "remote_timeout": 504,
    "remote_rejected": 400,
    "source_not_found": 404,
    "source": 400,
    "filter": 400,
    "ticket": 400,
    "reader_lost": 503,
}
"""All other codes have HTTP status 500."""
KINDS = [pytest.param(kind, id=code) for code, (kind, *_) in CODES.items()]


def subclasses(kind: type[IskanderError]) -> set[type[IskanderError]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_every_error_is_listed() -> None:
    """A new error needs an entry here, because its code must not change later."""
    defined = {kind for kind in subclasses(IskanderError) if kind.__module__ == "iskander.errors"}

    assert {kind.code: kind for kind in defined} == {code: row[0] for code, row in CODES.items()}
    assert len(defined) == len(CODES)


@pytest.mark.parametrize("code", CODES)
def test_code_fault_retry_and_status_are_stable(code: str) -> None:
    kind, fault, is_retryable, status, flight_status = CODES[code]

    assert (kind.code, kind.fault.value, kind.retryable) == (code, fault, is_retryable)
    assert (kind.status, kind.flight_status) == (status, flight_status)
    assert kind.http_status == HTTP.get(code, 500)


def test_every_fault_is_used() -> None:
    assert {kind.fault for kind, *_ in CODES.values()} == set(Fault)


def test_duplicate_code_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="contract"):
        type("Second", (IskanderError,), {}, code="contract", fault=Fault.CLIENT, status="ABORTED")


@pytest.mark.parametrize("kind", KINDS)
def test_error_round_trips_through_json(kind: type[IskanderError]) -> None:
    """Clients receive the error as JSON."""
    error = kind("column `a`: wanted b, got c", retry_after_ms=5, column="a", wanted=7)

    decoded = IskanderError.from_wire(msgspec.json.decode(msgspec.json.encode(error.to_wire())))

    assert type(decoded) is kind
    assert decoded.message == str(decoded) == "column `a`: wanted b, got c"
    assert decoded.fields == {"column": "a", "wanted": 7}
    assert decoded.retry_after_ms == 5
    assert decoded.to_wire() == error.to_wire()


def test_column_and_model_are_properties_of_a_decoded_error() -> None:
    error = errors.ContractError("column `a`: wanted b, got c", column="a", model="tabular")

    decoded = IskanderError.from_wire(error.to_wire())

    assert (error.column, error.model) == ("a", "tabular")
    assert (decoded.column, decoded.model) == ("a", "tabular")


def test_unknown_column_and_model_are_none() -> None:
    error = errors.Overloaded("full", model=None)

    assert error.column is None
    assert error.model is None


def test_wire_form_is_flat_and_omits_unknown_fields() -> None:
    assert errors.Overloaded("full", model=None).to_wire() == {
        "code": "overloaded",
        "fault": "nobody",
        "retryable": True,
        "message": "full",
    }


def test_unknown_code_is_decoded_as_a_plain_error() -> None:
    """An older client must accept errors of a newer server."""
    decoded = IskanderError.from_wire({"code": "of the future", "message": "no", "hint": "wait"})

    assert type(decoded) is IskanderError
    assert (decoded.message, decoded.fields) == ("no", {"hint": "wait"})


@pytest.mark.parametrize("wire", [{"code": ["x"]}, {"message": 5}, {"retry_after_ms": "1"}])
def test_wire_form_of_a_faulty_peer_is_decoded_with_defaults(wire: dict[str, Any]) -> None:
    decoded = IskanderError.from_wire({**wire, "self": 1})

    assert (type(decoded), decoded.message) == (IskanderError, "")
    assert (decoded.retry_after_ms, decoded.fields) == (None, {})


def test_empty_wire_form_is_decoded_as_a_plain_error() -> None:
    assert type(IskanderError.from_wire({})) is IskanderError


def largest(kind: type[IskanderError], character: str) -> IskanderError:
    long_text = character * 10_000
    return kind(long_text, retry_after_ms=2**31, model=long_text, version=long_text, wanted=2**62)


@pytest.mark.parametrize("kind", KINDS)
def test_largest_error_of_each_kind_fits_in_a_trailer(kind: type[IskanderError]) -> None:
    assert len(msgspec.json.encode(largest(kind, "x").to_wire())) <= WIRE_BYTES_MAX


@pytest.mark.parametrize("character", ["é", "名", "😀", '"', "\\", "\n", "\x00", "\x7f"])
def test_largest_error_fits_in_a_trailer_with_any_characters(character: str) -> None:
    """Names come from the client, and JSON escapes can need six times the bytes."""
    error = largest(errors.ModelNotFound, character)

    assert len(msgspec.json.encode(error.to_wire())) <= WIRE_BYTES_MAX


def test_short_message_is_unchanged() -> None:
    text = "é" * (MESSAGE_BYTES_MAX // 2)

    assert shorten(text) == text


def test_lone_surrogates_can_be_encoded() -> None:
    """File names can contain invalid UTF-8, which Python decodes to lone surrogates."""
    error = errors.ManifestError("no \udcff", column="\udcff")

    assert msgspec.json.encode(error.to_wire())


@settings(deadline=None)
@given(st.text(alphabet=string.ascii_letters + "é名😀\ud800", min_size=1), st.integers(1, 2000))
def test_long_message_is_truncated_between_characters(piece: str, times: int) -> None:
    """The limit counts UTF-8 bytes, no character is split, and the text ends with `...`."""
    text = piece * times

    cut = shorten(text)

    encodable = text.encode("utf-8", "replace").decode()
    assert len(cut.encode()) <= MESSAGE_BYTES_MAX
    if cut != encodable:
        assert cut.endswith("...")
        assert encodable.startswith(cut[:-3])
        assert len(cut.encode()) > MESSAGE_BYTES_MAX - 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("é\U00010000", ""),
        ("a\udcffb", r"`a\xffb` is not UTF-8"),
        ("\ud800", r"`\ud800` is not UTF-8"),
        ("\udc80\udfff", r"`\x80\udfff` is not UTF-8"),
        ("a" * 300 + "\udcff", "`" + "a" * 200 + "` is not UTF-8"),
    ],
)
def test_bytes_that_are_not_utf8_are_shown(text: str, problem: str) -> None:
    assert utf8_problem(text) == problem
    utf8_problem(text).encode()


def test_failed_run_with_its_cause() -> None:
    """The fault is the client's, with the status of invalid input; the code stays."""
    failed = errors.ExecutionFailed("stof", model="m")
    assert (failed.fault, failed.status, failed.http_status) == (Fault.MODEL, "INTERNAL", 500)
    failed.blame_input()
    located = failed.located(5, "age").located(7, "age")
    assert located.message == "row 7, column `age`: stof"
    wire = located.to_wire()
    assert (wire["code"], wire["fault"], wire["retryable"]) == ("execution_failed", "client", False)
    assert (wire["row"], wire["column"], wire["model"]) == (7, "age", "m")
    received = IskanderError.from_wire(wire)
    assert isinstance(received, errors.ExecutionFailed)
    assert (received.row, received.column, received.fault) == (7, "age", Fault.CLIENT)
    assert (received.status, received.http_status) == ("INVALID_ARGUMENT", 400)
    assert errors.ExecutionFailed("stof").fault is Fault.MODEL
    assert IskanderError.from_wire({"code": "internal", "fault": "client"}).fault is Fault.SERVER


def test_settings_of_errors_exist() -> None:
    paths = {setting.path for setting in known_settings()}
    sections = {path.partition(".")[0] for path in paths}
    named = {name for kind in IskanderError._by_code.values() for name in kind.settings}
    assert named and named <= paths | sections
    for code in ("limit", "queue_full", "arena_full", "overloaded"):
        assert IskanderError._by_code[code].settings, code
