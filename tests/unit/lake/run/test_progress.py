"""Progress as plain lines, JSON lines and a bar, with a scripted clock."""

from __future__ import annotations

import io
import json

import pytest

from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S
from iskander.lake.run.progress import BarProgress, LineProgress, NoProgress, open_progress


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return int(self.seconds * NS_PER_S)


def lines(*, is_json: bool = False) -> tuple[LineProgress, list[str], Clock]:
    written: list[str] = []
    clock = Clock()
    return LineProgress(written.append, is_json=is_json, now_ns=clock), written, clock


def test_one_line_in_five_seconds() -> None:
    progress, written, clock = lines()
    progress.start(1000, 4, rows_done=0, units_done=0)
    for second in range(1, 12):
        clock.seconds = float(second)
        progress.advance(50)
    assert len(written) == 2
    assert written[0] == "iskander: 250 rows (25%), 0/4 units, 50 rows/s, 15 s left\n"


def test_rows_of_an_earlier_run_count_in_the_share_but_not_in_the_rate() -> None:
    progress, written, clock = lines()
    progress.start(1000, 4, rows_done=500, units_done=2)
    clock.seconds = 10.0
    progress.advance(100)
    assert written == ["iskander: 600 rows (60%), 2/4 units, 10 rows/s, 40 s left\n"]


def test_unknown_rows_have_no_share() -> None:
    progress, written, clock = lines()
    progress.start(None, 1, rows_done=0, units_done=0)
    clock.seconds = 5.0
    progress.advance(100)
    assert written == ["iskander: 100 rows, 0/1 units, 20 rows/s\n"]


def test_close_writes_the_last_line_once() -> None:
    progress, written, clock = lines(is_json=True)
    progress.start(100, 1, rows_done=0, units_done=0)
    clock.seconds = 2.0
    progress.advance(100)
    progress.finish_unit()
    progress.close()
    progress.close()
    (line,) = written
    assert json.loads(line) == {
        "rows": 100,
        "rows_total": 100,
        "units": 1,
        "units_total": 1,
        "rows_per_s": 50.0,
        "seconds": 2.0,
        "left_s": 0.0,
    }


def test_close_before_start_writes_nothing() -> None:
    progress, written, _ = lines()
    progress.close()
    assert written == []


def test_bar_shows_units_and_rows() -> None:
    pytest.importorskip("rich")
    file = io.StringIO()
    progress = BarProgress(file)
    progress.start(100, 2, rows_done=0, units_done=1)
    progress.advance(100)
    progress.finish_unit()
    progress.close()
    assert "2/2 units" in file.getvalue()
    assert "100 rows" in file.getvalue()


def test_kinds() -> None:
    assert isinstance(open_progress("none"), NoProgress)
    assert isinstance(open_progress("json"), LineProgress)
    with pytest.raises(ConfigError, match="expected auto, bar, plain, json, none"):
        open_progress("loud")
