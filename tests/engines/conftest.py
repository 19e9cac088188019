"""Tests with engines: only with ISKANDER_ENGINES=1, which also makes a missing engine a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENABLED = "ISKANDER_ENGINES"
HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless they are enabled."""
    for item in items:
        if HERE in item.path.parents and ENABLED not in os.environ:
            reason = f"with engines: `make test-engines`, or {ENABLED}=1"
            item.add_marker(pytest.mark.skip(reason=reason))
