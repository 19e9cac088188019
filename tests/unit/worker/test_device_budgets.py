"""Budgets of a process's programs as the limit of their allocator."""

from __future__ import annotations

import contextlib

import pytest
from iskander_worker.devices.budgets import Budgets

GIB = 1 << 30


def test_limit_is_the_sum_of_the_budgets() -> None:
    limits: list[float] = []
    budgets = Budgets(80 * GIB, limits.append)
    with budgets.held(20 * GIB):
        with budgets.held(30 * GIB), budgets.held(20 * GIB):
            assert limits == [0.25, 0.625, 0.875]
        assert limits[3:] == [0.625, 0.25]
    assert limits[-1] == 1.0


def test_program_without_a_budget_has_no_limit() -> None:
    limits: list[float] = []
    budgets = Budgets(80 * GIB, limits.append)
    with budgets.held(20 * GIB), budgets.held(0):
        pass
    assert limits == [0.25, 1.0, 0.25, 1.0]


def test_budgets_beyond_the_device_are_all_of_it() -> None:
    limits: list[float] = []
    with Budgets(10 * GIB, limits.append).held(20 * GIB):
        assert limits == [1.0]


def test_failed_load_returns_its_budget() -> None:
    limits: list[float] = []
    budgets = Budgets(80 * GIB, limits.append)
    with pytest.raises(ValueError, match="no"), contextlib.ExitStack() as stack:
        stack.enter_context(budgets.held(20 * GIB))
        raise ValueError("no")
    assert limits == [0.25, 1.0]
