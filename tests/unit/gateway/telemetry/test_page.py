"""Page of the admin port: escaping, content, formats, plots and its Content-Security-Policy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from support.models import ROOT
from support.statuses import HOSTILE, hostile, status

from iskander.gateway.telemetry.page.formats import format_cell, plot_path
from iskander.gateway.telemetry.page.plots import PLOTS, draw
from iskander.gateway.telemetry.page.renderer import PageRenderer
from iskander.gateway.telemetry.page.tables import TABLES, kind_of
from iskander.gateway.telemetry.status.document import (
    CODES_MAX,
    GPUS_MAX,
    MEMORY_MAX,
    MODELS_MAX,
    PLOTS_MAX,
    REASONS_MAX,
    WORKERS_MAX,
    ModelStatus,
    Status,
)
from iskander.gateway.telemetry.status.events import EVENTS_MAX, TEXT_MAX
from iskander.gateway.telemetry.status.history import INTERVAL_S

RENDERER = PageRenderer()


def render(content: Status) -> str:
    return asyncio.run(RENDERER.render(content)).decode()


class Tags(HTMLParser):
    """The elements and attribute names of a page, and its text outside of styles and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_errors_are_text(text: str) -> None:
    harmless, page = Tags(render(hostile("name"))), Tags(render(hostile(text)))

    assert page.tags == harmless.tags
    assert page.attributes == harmless.attributes
    assert not any(name.startswith("on") for name in page.attributes)
    assert page.text.count(text) >= 10


def test_page_has_no_inline_handlers_styles_or_other_hosts() -> None:
    page = render(hostile("name"))

    assert "style" not in Tags(page).attributes
    assert re.findall(r"https?://[^\s\"']+", page) == [
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
    ]
    assert re.findall(r'(?:src|href)="([^"#]+)', page) == ["data:,", "status.json", "metrics"]


@pytest.mark.parametrize("tag", ["style", "script"])
def test_policy_has_the_hash_of_the_inline_element(tag: str) -> None:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", render(status()), re.DOTALL)

    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert f"{tag}-src 'sha256-{digest}'" in RENDERER.policy
    assert "unsafe" not in RENDERER.policy
    assert "default-src 'none'" in RENDERER.policy
    assert "frame-ancestors 'none'" in RENDERER.policy


def test_tables_have_captions_and_heads_with_scope() -> None:
    page = render(hostile("name"))

    assert page.count("<caption>") == len(TABLES)
    assert page.count('<th scope="col"') == sum(len(table.columns) for table in TABLES)
    # A row of the models is in two tables.
    assert page.count('<th scope="row"') == 6
    assert not re.search(r"<th(?! scope)", page.replace("<thead", ""))


@pytest.mark.parametrize(
    ("field", "annotation", "kind"),
    [
        ("state", str, "state"),
        ("name", str, "text"),
        ("at_s", float, "time"),
        ("oldest_s", float, "seconds"),
        ("heartbeat_s", float | None, "seconds"),
        ("rows_per_s", float | None, "number"),
        ("limit_bytes", int | None, "bytes"),
        ("locked", bool | None, "flag"),
        ("cpus", tuple[int, ...], "ranges"),
        ("notices", tuple[str, ...], "texts"),
        ("utilization", float | None, "percent"),
        ("ends", dict[str, int], "codes"),
        ("batches", int, "number"),
    ],
)
def test_kind_of_a_column_follows_from_its_field(field: str, annotation: Any, kind: str) -> None:
    assert kind_of(field, annotation) == kind


def test_rows_that_are_left_out_are_counted() -> None:
    page = render(status(left_out={"models": 7, "workers": 0}))

    assert re.findall(r'<p class="more">(.*?)</p>', page) == ["7 more", "7 more"]


def test_documented_limits_are_those_of_the_lists() -> None:
    text = (ROOT / "docs" / "observing.md").read_text("utf-8")

    numbers = f"{MODELS_MAX}, {WORKERS_MAX}, {GPUS_MAX}, {MEMORY_MAX}, {EVENTS_MAX}"
    assert f"| models, workers, GPUs, rows of memory, events | {numbers};" in text
    assert f"for the {PLOTS_MAX} models with the most requests" in text
    assert f"| {TEXT_MAX} characters, {REASONS_MAX}, {CODES_MAX} |" in text
    assert f"interval of {INTERVAL_S} s" in text


def test_not_ready_server_shows_its_reasons() -> None:
    page = render(status(ready=False, reasons=["model `a/1`: its workers are loading"]))

    assert "<strong>Not ready</strong>" in page
    assert "<li>model `a/1`: its workers are loading</li>" in page
    assert "<title>Not ready: " in page


def test_renderer_yields_to_the_loop() -> None:
    models = [ModelStatus(name=f"m{index}", version="1", state="serving") for index in range(100)]
    turns = 0

    async def run() -> None:
        nonlocal turns
        task = asyncio.ensure_future(RENDERER.render(status(models=models)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

    asyncio.run(run())

    assert turns > 20


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("number", None, "-"),
        ("number", 0, "0"),
        ("number", 1234567, "1,234,567"),
        ("number", 3.0, "3"),
        ("number", 0.1234, "0.12"),
        ("number", 12.34, "12.3"),
        ("number", 1234.5, "1,234"),
        ("bytes", 0, "0 B"),
        ("bytes", 1536, "1.50 KiB"),
        ("bytes", 24 << 20, "24 MiB"),
        ("bytes", 3 << 50, "3,072 TiB"),
        ("seconds", 0.25, "0.25 s"),
        ("seconds", 61, "1 min 1 s"),
        ("seconds", 7260, "2 h 1 min"),
        ("seconds", 90_000 * 2, "2 d 2 h"),
        ("percent", 0.4, "40"),
        ("percent", 0.1234, "12.3"),
        ("ranges", (0, 1, 2, 5), "0-2,5"),
        ("ranges", (), "-"),
        ("texts", ("a", "b"), "a; b"),
        ("texts", (), "-"),
        ("flag", True, "yes"),
        ("flag", False, "no"),
        ("codes", {}, "-"),
        ("codes", {"queue_full": 1200, "x": 1}, "queue_full 1,200, x 1"),
        ("time", 1_700_000_000.9, "2023-11-14 22:13:20"),
        ("text", "", "-"),
        ("state", "serving", "serving"),
    ],
)
def test_formats(kind: Any, value: Any, text: str) -> None:
    assert format_cell(kind, value) == text


def test_path_of_a_plot_is_interrupted_by_unknown_values() -> None:
    assert plot_path([None, 0.0, 2.0, None, 1.0], 2.0) == "M1 39h0L2 1M4 20h0"
    assert plot_path([0.0, 0.0], 0.0) == "M0 39h0L1 39"
    assert plot_path([], 0.0) == ""


def test_plot_shows_newest_values_and_the_scale() -> None:
    total = next(plot for plot in PLOTS if plot.title == "Total ms")
    series: dict[str, list[float | None]] = {
        "total_p50_ms": [1.0, 2.0],
        "total_p95_ms": [1.5, None],
        "total_p99_ms": [40.0, 3.0],
    }

    drawn = draw(total, ModelStatus(name="m", version="1", state="serving", series=series))

    assert drawn.text == "p50 2, p95 -, p99 3, max 40"
    assert [label for label, _ in drawn.paths] == ["p50", "p95", "p99"]
