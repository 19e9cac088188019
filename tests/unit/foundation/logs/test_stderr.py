"""Handler of stderr: format, journal, repeats."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iskander.foundation.logs import stderr, workers
from iskander.foundation.logs.repeats import FIRST
from iskander.foundation.logs.stderr import StderrHandler, is_journal_stream, set_up


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, hook = root.handlers[:], sys.excepthook
    yield
    for handler in root.handlers:
        if isinstance(handler, StderrHandler):
            handler.close()
    root.handlers[:] = handlers
    sys.excepthook = hook


class Written:
    """Lines of stderr during a test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        self._lines += self._capsys.readouterr().err.splitlines()
        return self._lines


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Written:
    return Written(capsys)


def test_repeats_are_summed_up_at_the_end(written: Written) -> None:
    handler = set_up("json")
    for number in range(FIRST + 4):
        workers.worker_ended(worker=1, running=str(number))
    assert len(written.lines()) == FIRST

    timer = handler._timer
    assert timer is not None
    handler.close()
    last = json.loads(written.lines()[-1])
    assert (last["event"], last["repeated"], last["running"]) == ("worker_ended", 4, str(FIRST + 3))
    timer.join(10)
    assert not timer.is_alive()


def test_repeats_are_summed_up_by_a_timer(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "WINDOW_S", 0.01)
    handler = set_up("text")
    for number in range(FIRST + 4):
        workers.worker_ended(worker=1, running=str(number))
    timer = handler._timer
    if timer is not None:
        timer.join(10)

    assert written.lines()[-1].endswith(f"has ended, {FIRST + 3} (repeated 4 times in 1 s)")


def test_journal_is_recognized_by_device_and_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "journal").open("w") as stream:
        status = os.fstat(stream.fileno())
        assert not is_journal_stream(stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal_stream(stream)
        # A redirected stderr of a service is no journal.
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_journal_stream(stream)
    assert not is_journal_stream(io.StringIO())


@pytest.mark.parametrize(
    ("set_up_process", "event"),
    [
        (stderr.set_up_worker, "worker_crashed"),
        (stderr.set_up_child, "auxiliary_process_crashed"),
    ],
)
def test_uncaught_exception_of_a_process_is_an_event(
    set_up_process: Callable[[], None],
    event: str,
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(stderr.FORMAT_VARIABLE, "json")
    set_up_process()

    error = ValueError("no")
    sys.excepthook(ValueError, error, None)

    (line,) = map(json.loads, written.lines())
    assert (line["event"], line["pid"]) == (event, os.getpid())
    assert line["exception"] == "ValueError: no"
