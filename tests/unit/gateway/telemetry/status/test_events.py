"""Events: which log records are events, and their bounds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from iskander.config.schema import AdminConfig
from iskander.gateway.telemetry.logs import set_log_level, set_up_logs
from iskander.gateway.telemetry.status.events import EVENTS_MAX, LOGGERS, TEXT_MAX, EventLog

SUPERVISOR = logging.getLogger("iskander.supervisor")


@pytest.fixture
def events() -> Iterator[EventLog]:
    levels = {name: logging.getLogger(name).level for name in ("", *LOGGERS)}
    handlers = logging.getLogger().handlers[:]
    log = EventLog()
    log.start()
    logging.getLogger("iskander").setLevel(logging.DEBUG)
    yield log
    log.stop()
    logging.getLogger("iskander").setLevel(logging.NOTSET)
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_state_changes_are_events(events: EventLog) -> None:
    SUPERVISOR.error("worker %d has ended,\n  with batch %d", 3, 7)

    (event,) = events.events
    assert (event.level, event.text) == ("error", "worker 3 has ended, with batch 7")
    assert event.at_s > 1e9


def test_records_of_calls_tokens_and_debugging_are_no_events(events: EventLog) -> None:
    for name in ("iskander.grpc", "iskander.http", "iskander.access", "iskander.dispatch"):
        logging.getLogger(name).error("call of client `robot-7` failed")
    SUPERVISOR.debug("detail")

    assert not events.events


def test_number_and_length_of_events_are_bounded(events: EventLog) -> None:
    for number in range(EVENTS_MAX + 5):
        SUPERVISOR.info("%d %s", number, "x" * 10_000)

    assert len(events.events) == EVENTS_MAX
    assert events.events[0].text.startswith("5 ")
    assert {len(event.text) for event in events.events} == {TEXT_MAX}


def test_traceback_is_no_part_of_an_event(events: EventLog) -> None:
    try:
        raise ValueError("secret")
    except ValueError:
        SUPERVISOR.exception("failed")

    assert [event.text for event in events.events] == ["failed"]


def test_stopped_log_receives_nothing(events: EventLog) -> None:
    events.stop()
    SUPERVISOR.error("ended")
    assert not events.events


def test_events_do_not_depend_on_the_level_of_the_log(
    events: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("iskander").setLevel(logging.NOTSET)
    set_up_logs(AdminConfig(log_level="error"))

    SUPERVISOR.info("worker 0: attached")
    SUPERVISOR.error("worker 0 has ended")

    assert [event.text for event in events.events] == ["worker 0: attached", "worker 0 has ended"]
    logged = capsys.readouterr().err
    assert "worker 0 has ended" in logged
    assert "attached" not in logged


def test_level_of_the_log_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """In both directions, for loggers with and without events."""
    logging.getLogger("iskander").setLevel(logging.NOTSET)
    loggers = (SUPERVISOR, logging.getLogger("iskander.gateway"))
    set_up_logs(AdminConfig(log_level="info"))
    for level, count in (("debug", 3), ("error", 1), ("info", 2)):
        set_log_level(AdminConfig(log_level=level))
        for logger in loggers:
            for number in (logging.DEBUG, logging.INFO, logging.ERROR):
                logger.log(number, "%s", f"{level} {number}")
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if f" {level} " in line] == lines
        assert len(lines) == count * len(loggers)
