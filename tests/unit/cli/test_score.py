"""`iskander score`: budget of retries, and interruptions outside of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iskander.cli import score
from iskander.cli.main import build_parser
from iskander.client.calls.retry import Attempts, Deadline, RetryBudget
from iskander.errors import NotReady

STREAMS = 64


def test_all_streams_of_a_job_have_all_attempts() -> None:
    retry = score._retry(STREAMS)
    budget = RetryBudget(retry.budget)
    streams = [Attempts(retry, budget, Deadline(None), lambda _: None) for _ in range(STREAMS)]
    for _ in range(score.ATTEMPTS - 1):
        for each in streams:
            each.wait_after(NotReady("restarting"))
    with pytest.raises(NotReady) as caught:
        streams[0].wait_after(NotReady("restarting"))
    assert caught.value.__notes__ == ["failed after 40 attempts: limit 40 (`attempts`)"]


@pytest.mark.parametrize(
    ("is_begun", "code", "text"),
    [(True, 3, "after the end of the job"), (False, 130, "before the job began")],
)
def test_interruption_outside_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_begun: bool,
    code: int,
    text: str,
) -> None:
    @contextlib.contextmanager
    def connected(*_: Any) -> Iterator[Any]:
        if is_begun:
            yield SimpleNamespace(streams=None)
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "_connected", connected)
    monkeypatch.setattr(score, "_score", lambda *_: 3)
    monkeypatch.setattr(score.signal, "signal", lambda *_: None)
    monkeypatch.setattr(score, "_end_if_busy", lambda _: None)
    words = ["score", "m", "in", "-o", "out", "--server", "127.0.0.1:1", "--progress", "none"]
    assert score.run(build_parser().parse_args(words), None) == code
    assert text in capsys.readouterr().err
