"""Rows and screen of `iskander top`."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace
from support.models import ROOT
from support.observed import make_lane, make_worker, observe

from iskander.cli.command import read_stats as read_stats_of
from iskander.cli.top.screen import COLUMNS, Screen, fit_columns, read_keys
from iskander.cli.top.snapshot import ModelRow, Snapshot, WorkerRow, compare
from iskander.client import Client
from iskander.errors import Unsupported
from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.scheduling.lanes.lane import Lane, Quarantine
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.stats import Stats
from iskander.gateway.telemetry.status.stats_reader import read_stats


def collected(observed: MetricSources, **changes: Any) -> Stats:
    """Returns the stats after a JSON round trip, as a client receives them."""
    encoded = msgspec.json.encode(asyncio.run(read_stats(observed)))
    return replace(msgspec.json.decode(encoded, type=Stats), **changes)


def stats(lanes: list[Lane], uptime_s: float, **changes: Any) -> Stats:
    return collected(observe(lanes), uptime_s=uptime_s, **changes)


def row(name: str, **fields: Any) -> ModelRow:
    values: dict[str, Any] = dict.fromkeys(ModelRow.__struct_fields__)
    return ModelRow(
        **{**values, "name": name, "state": "ready", "workers": 1, "queued": 0, **fields}
    )


def worker(index: int, **fields: Any) -> WorkerRow:
    values: dict[str, Any] = {
        "state": "ready",
        "group": 0,
        "cpus": (index,),
        "batches_per_s": 1.0,
        "in_flight": 0,
        "resident_bytes": 1 << 20,
        "starts": 1,
        "last": "loaded, ready",
    }
    return WorkerRow(name=str(index), **{**values, **fields})


def snapshot(models: list[ModelRow], workers: list[WorkerRow] | None = None) -> Snapshot:
    return Snapshot(
        version="1.2.3",
        process=0,
        uptime_s=70.0,
        ready=True,
        reasons=[],
        streams=1,
        calls=0,
        input_leased_bytes=0,
        input_capacity_bytes=24 << 20,
        resident_bytes=0,
        interval_s=1.0,
        models=models,
        workers=workers or [worker(0)],
    )


def texts(screen: Screen, shown: Snapshot, width: int = 80, height: int = 24) -> list[str]:
    return [text for text, _ in screen.draw(shown, width, height)]


def press(screen: Screen, *keys: str) -> Screen:
    for key in keys:
        screen.press(key)
    return screen


# -- Rows


def test_rates_and_percentiles_are_of_the_interval() -> None:
    lane = make_lane(requests=1000, rows=9000, refused__queue_full=1)
    lane.metrics.total_ns.record(900 * NS_PER_MS)
    before = stats([lane], 10.0)
    lane.counts["requests"] += 20
    lane.counts["rows"] += 60
    lane.counts["refused.queue_full"] += 4
    for _ in range(20):
        lane.metrics.total_ns.record(2 * NS_PER_MS)

    after = compare(before, stats([lane], 12.0))

    (found,) = after.models
    assert after.interval_s == 2
    assert (found.requests_per_s, found.rows_per_s, found.rejected_per_s) == (10, 30, 2)
    assert (found.p50_ms, found.p99_ms) == (1.75, 1.995)


@pytest.mark.parametrize("change", [{"pid": 1}, {"uptime_s": 20.0}])
def test_restarted_gateway_has_no_rates(change: dict[str, Any]) -> None:
    before = stats([make_lane(requests=1000)], **{"uptime_s": 10.0, **change})

    found = compare(before, stats([make_lane(requests=2)], 11.0))

    assert (found.interval_s, found.models[0].requests_per_s) == (None, None)
    assert found.workers[0].batches_per_s is None


def test_new_and_reloaded_models_have_no_negative_rate() -> None:
    before = stats([make_lane("old", requests=1000)], 10.0)

    found = compare(before, stats([make_lane("old", requests=2), make_lane("new")], 11.0))

    assert [model.requests_per_s for model in found.models] == [0, None]
    assert [model.p50_ms for model in found.models] == [None, None]


def test_states_of_models() -> None:
    quarantined, isolated = make_lane("q"), make_lane("i")
    quarantined.quarantine = Quarantine("x", 1)
    isolated.is_isolated = True

    found = compare(None, stats([quarantined, isolated, make_lane("n", is_ready=False)], 1.0))

    assert [model.state for model in found.models] == [
        "quarantined",
        "ready, isolated",
        "not ready",
    ]


def test_worker_rate_is_of_the_same_slot() -> None:
    slot = make_worker(2)
    before = collected(observe([], [slot]), uptime_s=1.0)
    slot.batches += 8

    after = compare(before, collected(observe([], [slot]), uptime_s=3.0))

    assert (after.workers[0].name, after.workers[0].batches_per_s) == ("2", 4)
    assert after.workers[0].last == "attached, loading"


def test_worker_between_the_starts_of_a_crash_loop_is_shown_as_such() -> None:
    slot = make_worker(1, State.ABSENT)
    slot.is_looping = True

    assert compare(None, collected(observe([], [slot]))).workers[0].state == "crash loop"


def test_response_of_another_version_is_an_error_of_the_command() -> None:
    class Server:
        def stats(self) -> dict[str, Any]:
            return {"version": "0.0.1"}

    with pytest.raises(Unsupported, match=r"of another version .*missing required field"):
        read_stats_of(cast(Client, Server()))


# -- Keys


def test_keys_of_a_terminal() -> None:
    assert read_keys(b"q") == ["q"]
    assert read_keys(b"\x1b[A\x1b[Bx\x1b[6~") == ["up", "down", "x", "page down"]
    assert read_keys(b"\x1b") == ["escape"]
    assert read_keys(b"\t\r\x7f/") == ["tab", "enter", "backspace", "/"]
    assert read_keys(b"\x1b[1;5Cq\x1bOP\x1b[15~") == ["q"], "unknown special keys"
    assert read_keys("é\x00".encode()) == []


def test_every_sort_key_of_a_view_is_unique_and_no_command() -> None:
    for columns in COLUMNS.values():
        keys = [column.key for column in columns if column.key]
        assert len(keys) == len(set(keys))
        assert not set(keys) & set("qjkh?/ \t")


def test_documented_keys_are_those_of_each_view() -> None:
    page = (ROOT / "docs" / "observing.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:`.` ?)+) \| (\w+): sort by", page, re.M)
    documented = {view: sorted(re.findall("`(.)`", keys)) for keys, view in rows}
    assert documented == {
        view: sorted(column.key for column in columns if column.key)
        for view, columns in COLUMNS.items()
    }


# -- Screen


def test_rows_are_sorted_by_the_key_and_in_reverse() -> None:
    models = [row("b", requests_per_s=1.0), row("a", requests_per_s=3.0), row("c", p95_ms=9.0)]
    shown = snapshot(models)
    screen = Screen()

    def names() -> str:
        return "".join(each.name for each in screen.rows(shown))

    assert names() == "abc", "the most requests first, unknown last"
    assert press(screen, "r") and names() == "bac"
    assert press(screen, "n") and names() == "abc"
    assert press(screen, "n") and names() == "cba"
    assert press(screen, "p") and names()[0] == "c"


def test_workers_are_sorted_by_number() -> None:
    shown = snapshot([], [worker(10), worker(9, batches_per_s=5.0)])

    assert [each.name for each in press(Screen(), "tab").rows(shown)] == ["9", "10"]
    assert [each.name for each in press(Screen(), "tab", "b").rows(shown)] == ["9", "10"]
    assert [each.name for each in press(Screen(), "tab", "b", "b").rows(shown)] == ["10", "9"]


def test_filter_is_typed_and_removed() -> None:
    shown = snapshot([row("churn/1"), row("fraud/2")])
    screen = press(Screen(), "/", "F", "q", "backspace")
    assert (screen.text, screen.is_typing, screen.is_over) == ("F", True, False)
    assert [each.name for each in screen.rows(shown)] == ["fraud/2"]

    press(screen, "enter", "tab", "tab")
    assert [each.name for each in screen.rows(shown)] == ["fraud/2"]
    assert "filter: F" in texts(screen, shown)[2]
    press(screen, "escape")
    assert len(screen.rows(shown)) == 2


def test_filter_is_bounded() -> None:
    assert len(press(Screen(), "/", *"x" * 1000).text) == 60


@pytest.mark.parametrize("size", [(80, 24), (100, 40), (40, 10), (20, 6), (3, 2), (200, 5)])
@pytest.mark.parametrize("view", ["models", "workers"])
@pytest.mark.parametrize("has_help", [False, True])
def test_every_size_is_filled_exactly(size: tuple[int, int], view: Any, has_help: bool) -> None:
    width, height = size
    models = [row(f"{'long-name' * 9}{index}/123456789") for index in range(30)]
    shown = snapshot(models, [worker(index) for index in range(30)])

    screen = Screen(view=view, sort="name", has_help=has_help)
    lines = texts(screen, shown, width, height)

    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_columns_that_do_not_fit_are_omitted() -> None:
    assert fit_columns("models", 80)[0] == list(COLUMNS["models"])
    heads = [column.head for column in fit_columns("models", 50)[0]]
    assert heads == ["model", "state", "req/s", "rows/s", "queue"]


def test_rows_scroll_within_their_bounds() -> None:
    shown = snapshot([row(f"m{index:02}") for index in range(50)])
    screen = press(Screen(), "n")
    assert texts(screen, shown)[4].startswith("m00")
    assert texts(screen, shown)[-2] == "32 more"

    screen.press("page down", 18)
    assert texts(screen, shown)[4].startswith("m18")
    for _ in range(9):
        screen.press("page down", 18)
    assert texts(screen, shown)[-3].startswith("m49")
    press(screen, "up")
    assert texts(screen, shown)[-3].startswith("m48"), "no dead steps below the end"


def test_unprintable_characters_are_replaced() -> None:
    shown = snapshot([row("\x1b[31mred\x07/1")])

    assert "?[31mred?/1" in texts(Screen(), shown, 120)[4]


def test_error_of_the_connection_and_states_are_styled() -> None:
    shown = snapshot([row("a"), row("b", state="quarantined")])

    lines = press(Screen(), "n").draw(shown, 80, 24, "server unreachable")

    assert lines[1] == ("server unreachable", "bad")
    assert [style for _, style in lines[4:6]] == ["", "bad"]
