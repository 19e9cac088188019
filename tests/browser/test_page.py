"""Page of the admin port in Chromium: content without scripts, live updates, and accessibility.

Most tests answer the requests of the page themselves, so that every value and the time are theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from support import models
from support.processes import eventually, running
from support.statuses import HOSTILE, hostile, status

from iskander.gateway.telemetry.page.renderer import PageRenderer
from iskander.gateway.telemetry.page.tables import TABLES
from iskander.gateway.telemetry.status.document import ModelStatus, Status

HOST = "http://page.localhost"
RENDERER = PageRenderer()
LONG = "a-model-with-a-very-long-name" * 4
PHONE = {"width": 360, "height": 740}


class Site:
    """The server of a page: answers with `status`, and counts its requests.

    `problems` are messages of the console, dialogs, and requests to other hosts.
    """

    def __init__(self, page: Any, content: Status) -> None:
        self.page = page
        self.is_down = False
        self.polls = 0
        self.problems: list[str] = []
        self.show(content)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        page.route("**/*", self._answer)

    def show(self, content: Status) -> None:
        """Change the status."""
        self.status = content
        # The thread of the tests has Playwright's loop.
        with ThreadPoolExecutor(1) as executor:
            page = executor.submit(asyncio.run, RENDERER.render(content)).result()
        self._html = page.decode()

    def open(self) -> Site:
        self.page.goto(f"{HOST}/")
        return self

    def poll(self) -> None:
        """Let the page update itself once; its time stands still otherwise."""
        before = self.polls
        self.page.clock.run_for(1000)
        eventually(lambda: self._has_polled(before), what="an update")

    def _has_polled(self, before: int) -> bool:
        self.page.wait_for_timeout(20)
        return self.polls > before

    def _answer(self, route: Any) -> None:
        url = route.request.url
        if url == f"{HOST}/":
            headers = {"content-security-policy": RENDERER.policy}
            route.fulfill(body=self._html, content_type="text/html", headers=headers)
        elif url == f"{HOST}/status.json":
            self.polls += 1
            if self.is_down:
                route.abort()
            else:
                route.fulfill(body=msgspec.json.encode(self.status).decode())
        else:
            self.problems.append(url)
            route.abort()


Opener = Callable[..., Site]


@pytest.fixture
def site(browser: Any) -> Iterator[Opener]:
    """Opens a page with a status; its clock only runs in `poll`, unless it is live."""
    contexts = []

    def start(content: Status, *, has_clock: bool = True, **options: Any) -> Site:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        if has_clock:
            page.clock.install(time=0)
        return Site(page, content).open()

    yield start
    for context in contexts:
        context.close()


def texts(page: Any) -> list[list[list[str]]]:
    """The text of each cell, in each row of each table."""
    script = """() => [...document.querySelectorAll("table")].map((table) =>
        [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent)))"""
    found: list[list[list[str]]] = page.evaluate(script)
    return found


def elements(page: Any) -> list[Any]:
    """Every element of the main part: name, attributes and own text."""
    script = """() => [...document.querySelectorAll("main *")].map((node) => [
        node.localName,
        [...node.attributes].map(({ name, value }) => `${name}=${value}`).sort(),
        [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE)
            .map((child) => child.data.trim()).join(""),
    ])"""
    found: list[Any] = page.evaluate(script)
    return found


def busy(**fields: Any) -> Status:
    """A status with all formats of values."""
    text = hostile("name")
    worker = msgspec.structs.replace(text.workers[0], state="ready", heartbeat_s=0.5)
    model = msgspec.structs.replace(
        text.models[0],
        state="serving",
        requests_per_s=1234.5,
        rows_per_s=98765.25,
        total_p50_ms=0.26,
        total_p95_ms=12.34,
        queue_bytes=3 << 20,
        oldest_s=75.4,
        batch_rows=17.6,
        refusals={"queue_full": 12345, "not_ready": 1},
    )
    others = [
        ModelStatus(name="other", version="2", state=state, reason="why")
        for state in ("loading", "failed", "quarantined")
    ]
    return status(
        models=[model, *others], workers=[worker], events=text.events, uptime_s=100_000.0, **fields
    )


# -- Without scripts


def test_tables_are_complete_without_scripts(site: Opener) -> None:
    opened = site(busy(), java_script_enabled=False, has_clock=False)
    page = opened.page

    assert [page.locator("table caption").nth(i).inner_text() for i in range(len(TABLES))] == [
        table.caption for table in TABLES
    ]
    assert page.get_by_role("row", name="name name serving").first.is_visible()
    assert page.get_by_text("Reload the page to update it.").is_visible()
    assert not page.locator("#pause").is_visible()
    assert page.locator("svg").count() == 5
    assert opened.polls == 0
    assert opened.problems == []


# -- Updates


def test_hostile_names_and_errors_stay_text(site: Opener) -> None:
    opened = site(hostile(HOSTILE[0]))
    assert texts(opened.page)[0][1][:2] == [HOSTILE[0], HOSTILE[0]]
    for text in HOSTILE[1:]:
        opened.show(hostile(text))
        opened.poll()
        eventually(lambda text=text: texts(opened.page)[0][1][0] == text, what=f"the name {text}")
    assert opened.page.locator("img, main script").count() == 0
    assert opened.problems == []


@pytest.mark.parametrize(
    "before", [status(), hostile("other"), busy()], ids=["empty", "bad", "busy"]
)
def test_script_writes_what_the_server_renders(site: Opener, before: Status) -> None:
    """The formats of both are equal, whatever the page showed before."""
    content = busy(left_out={"models": 3})
    rendered = elements(site(content).page)
    opened = site(before)
    opened.show(content)
    opened.poll()

    opened.page.get_by_text("98,765").first.wait_for()
    assert elements(opened.page) == rendered
    assert opened.problems == []


def test_readiness_is_updated_with_its_reasons(site: Opener) -> None:
    opened = site(status())
    opened.show(status(ready=False, reasons=["model `a/1`: its workers are loading"]))
    opened.poll()

    opened.page.get_by_text("model `a/1`: its workers are loading").wait_for()
    assert opened.page.title().startswith("Not ready")
    assert opened.page.locator("#ready").get_attribute("data-value") == "not ready"


def test_page_polls_once_a_second_and_stops_while_it_is_hidden(site: Opener) -> None:
    opened = site(status())
    hide = """(is) => {
        Object.defineProperty(document, "hidden", { value: is, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    for expected in (1, 2, 3):
        opened.poll()
        assert opened.polls == expected

    opened.page.evaluate(hide, True)
    opened.page.clock.run_for(10_000)
    assert opened.polls == 3
    opened.page.evaluate(hide, False)
    opened.poll()
    assert opened.polls == 4


def test_pause_stops_the_updates(site: Opener) -> None:
    opened = site(status())
    opened.page.get_by_role("button", name="Pause updates").click()
    opened.page.clock.run_for(10_000)
    assert opened.polls == 0

    opened.page.get_by_role("button", name="Resume updates").click()
    opened.poll()


def test_server_without_an_answer_is_shown(site: Opener) -> None:
    opened = site(status())
    opened.is_down = True
    opened.poll()
    opened.page.get_by_text("No answer from the server since 00:00:01 UTC").wait_for()

    opened.is_down = False
    opened.poll()
    opened.page.get_by_text("No answer").wait_for(state="detached")


def test_page_of_a_restarted_gateway_is_loaded_again(site: Opener) -> None:
    opened = site(status(started_ms=5))
    opened.show(status(started_ms=6, version="9.9.9"))
    opened.poll()

    opened.page.get_by_text("Version 9.9.9").wait_for()


# -- Layout and accessibility


def test_dark_and_light_follow_the_system(site: Opener) -> None:
    script = "getComputedStyle(document.body).backgroundColor"
    colors = {
        scheme: site(status(), color_scheme=scheme).page.evaluate(script)
        for scheme in ("light", "dark")
    }

    assert colors == {"light": "rgb(246, 247, 248)", "dark": "rgb(15, 19, 24)"}


@pytest.mark.parametrize("text", ["m", f"/srv/{LONG}: {LONG}"])
def test_phone_has_no_horizontal_scroll(site: Opener, text: str) -> None:
    page = site(hostile(text), viewport=PHONE).page

    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate("document.querySelector('.scroll').scrollWidth") > PHONE["width"]


def test_keyboard_reaches_everything_in_order_and_the_focus_is_visible(site: Opener) -> None:
    page = site(busy()).page
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        script = """() => {
            const { tagName, textContent, id } = document.activeElement;
            const label = document.activeElement.getAttribute("aria-labelledby");
            const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
            return [tagName, label ?? textContent, `${outlineStyle} ${outlineWidth}`];
        }"""
        tag, name, outline = page.evaluate(script)
        if tag == "BODY":
            break
        reached.append(name)
        assert outline == "solid 3px", name

    captions = [table.caption for table in TABLES]
    assert reached == [
        "Pause updates",
        captions[0],
        "Plots",
        *captions[1:],
        *(f"title-{table.key}" for table in TABLES),
        "Status as JSON",
        "metrics for Prometheus",
    ]


def test_updates_keep_the_focus(site: Opener) -> None:
    opened = site(status())
    opened.page.get_by_role("region", name="Workers").last.focus()
    opened.show(busy())
    opened.poll()

    eventually(lambda: texts(opened.page)[0][1][0] == "name", what="the update")
    focused = opened.page.evaluate("document.activeElement.getAttribute('aria-labelledby')")
    assert focused == "title-workers"


def test_accessibility_tree_names_tables_columns_and_plots(site: Opener) -> None:
    page = site(busy()).page
    tree = page.locator("body").aria_snapshot()

    for table in TABLES:
        assert f'- table "{table.caption}"' in tree
        assert f'- heading "{table.caption}" [level=2]' in tree
    assert '- columnheader "Requests/s"' in tree
    assert '- rowheader "name"' in tree
    assert '- navigation "Sections"' in tree
    assert "- main" in tree
    assert "- banner" in tree
    assert "Total ms: p50 2, p95 2, p99 2, max 2" in tree


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(site: Opener, axe: str, scheme: str) -> None:
    page = site(busy(reasons=["not served"]), color_scheme=scheme, bypass_csp=True).page
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(({ violations }) => violations)")

    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


# -- A real gateway


def test_values_change_under_load(browser: Any, tmp_path: Path) -> None:
    """The page of a gateway that scores; no message in the console, no request elsewhere."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path))}]
    batch = pa.RecordBatch.from_pydict({"x": pa.array(range(7), pa.int64())})
    admin = {"address": "127.0.0.1:0"}
    with running(tmp_path, served, workers={"groups": ["0"], "count": 1}, admin=admin) as gateway:
        address = gateway.stats()["admin_address"]
        page = browser.new_page()
        problems, urls = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"http://{address}/")
        (before,) = texts(page)[0][1:]
        with gateway.client() as client:

            def has_rates() -> bool:
                for _ in range(20):
                    client.score("ids", batch)
                page.wait_for_timeout(50)
                cells = dict(zip(*texts(page)[0][:2], strict=True))
                return all(cells[head] not in ("-", "0") for head in ("Requests/s", "p99 ms"))

            eventually(has_rates, what="rates on the page")
        queues = dict(zip(*texts(page)[1][:2], strict=True))
        drawn = page.locator("figure path").first.get_attribute("d")
        page.close()
    assert before[2] == "serving"
    assert int(queues["Batches"].replace(",", "")) > 0
    assert drawn.startswith("M")
    assert problems == []
    assert set(urls) == {f"http://{address}/", f"http://{address}/status.json"}
