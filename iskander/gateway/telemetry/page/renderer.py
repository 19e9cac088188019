"""HTML of the page, rendered in small steps by a template that escapes every value.

Import this module late: it loads Jinja, in 50 ms, and compiles the template.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from iskander.gateway.telemetry.page.formats import format_cell
from iskander.gateway.telemetry.page.plots import PLOTS, draw
from iskander.gateway.telemetry.page.tables import TABLES
from iskander.gateway.telemetry.status.document import PLOTS_MAX, Status
from iskander.gateway.telemetry.status.history import INTERVAL_S, SAMPLES

PIECES_PER_STEP = 50
"""Pieces of text between two values: 1 us each, and 30 us with a plot."""

_FOLDER = Path(__file__).parent


class PageRenderer:
    """Renders the page; `policy` is its Content-Security-Policy."""

    def __init__(self) -> None:
        style, script = _read("page.css"), _read("page.js")
        self.policy = (
            "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            f"connect-src 'self'; img-src data:; "
            f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        )
        environment = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals.update(
            style=Markup(style),
            script=Markup(script),
            tables=TABLES,
            plots=PLOTS,
            samples=SAMPLES,
            minutes=SAMPLES * INTERVAL_S // 60,
            plots_max=PLOTS_MAX,
            cell=format_cell,
            draw=draw,
            lines=json.dumps([(plot.title, plot.lines) for plot in PLOTS]),
        )
        self._template = environment.from_string(_read("page.html"))

    async def render(self, status: Status) -> bytes:
        """Render a status."""
        pieces = []
        for index, piece in enumerate(self._template.generate(status=status)):
            pieces.append(piece)
            if index % PIECES_PER_STEP == 0:
                await asyncio.sleep(0)
        return "".join(pieces).encode()


def _read(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _hash(text: str) -> str:
    """Source expression of an inline element. Source: CSP level 3, section 6.7.2."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
