"""Chromium for the tests of the page; skipped by name if it or its driver is missing.

They are in a folder of their own, because the leak check of system tests knows no browser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
AXE = ROOT / "build" / "browser" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the system.

    Of one module, because Playwright occupies the event loop of the thread.
    """
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("`chromium` is missing: apt-get install chromium")
    reason = "playwright is missing: pip install 'iskander[browser]'"
    driver = pytest.importorskip("playwright.sync_api", reason=reason)
    with driver.sync_playwright() as playwright:
        # Root cannot use Chromium's sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    if not AXE.exists():
        pytest.skip("axe-core is missing: npm install --prefix build/browser axe-core")
    return AXE.read_text("utf-8")
