"""Declared events: fields, texts, bounds, tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from iskander.foundation.logs.event import EVENTS, TEXT_MAX, Event, Source


@pytest.fixture
def source() -> Iterator[Source]:
    before = dict(EVENTS)
    yield Source("iskander.test", "worker")
    EVENTS.clear()
    EVENTS.update(before)


@pytest.fixture
def hung(source: Source) -> Event[Any]:
    @source.error("worker")
    def sample_hung(*, worker: int, reason: str) -> str:
        """A sample hangs.

        It has a second paragraph.

        Do: End it; then
        start another.
        """
        return f"sample {worker} hangs: {reason}"

    return sample_hung


def test_declaration_is_read_from_the_function(hung: Event[Any]) -> None:
    assert EVENTS["sample_hung"] is hung
    assert (hung.level, hung.topic, hung.subject) == (logging.ERROR, "worker", ("worker",))
    assert hung.fields == {"worker": int, "reason": str}
    assert hung.meaning == "A sample hangs. It has a second paragraph."
    assert hung.advice == "End it; then start another."
    assert not hung.has_traceback


def test_record_has_text_and_fields(hung: Event[Any], caplog: pytest.LogCaptureFixture) -> None:
    hung(worker=3, reason="100 % of %s")

    (record,) = caplog.records
    assert record.name == "iskander.test" and record.levelno == logging.ERROR
    assert record.getMessage() == "sample 3 hangs: 100 % of %s"
    assert record.__dict__["log_event"] is hung
    assert record.__dict__["log_fields"] == {"worker": 3, "reason": "100 % of %s"}


def test_error_is_a_traceback_and_no_field(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    @source.error()
    def sample_failed(*, error: BaseException) -> str:
        """A sample failed.

        Do: Nothing.
        """
        return f"failed: {error}"

    sample_failed(error=ValueError("no"))

    (record,) = caplog.records
    assert sample_failed.has_traceback and sample_failed.fields == {}
    assert record.__dict__["log_fields"] == {}
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


def test_texts_have_a_maximum_length(hung: Event[Any], caplog: pytest.LogCaptureFixture) -> None:
    hung(worker=1, reason="x" * 100_000)

    (record,) = caplog.records
    assert len(record.getMessage()) == len(record.__dict__["log_fields"]["reason"]) == TEXT_MAX


def test_text_is_not_built_below_the_level(source: Source) -> None:
    built = []

    @source.info()
    def sample_seen(*, number: int) -> str:
        """A sample."""
        built.append(number)
        return "seen"

    logging.getLogger("iskander.test").setLevel(logging.ERROR)
    try:
        sample_seen(number=1)
    finally:
        logging.getLogger("iskander.test").setLevel(logging.NOTSET)
    assert built == []


def test_name_is_unique(source: Source, hung: Event[Any]) -> None:
    def sample_hung(*, worker: int) -> str:
        return ""

    with pytest.raises(AssertionError, match="sample_hung"):
        source.info()(sample_hung)
