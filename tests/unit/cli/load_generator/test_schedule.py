"""Intended send times of an open loop."""

from __future__ import annotations

from itertools import pairwise, takewhile

import pytest

from iskander.cli.load_generator.schedule import Load, due_times_ns
from iskander.foundation.clock import NS_PER_S


def test_constant_arrivals_are_evenly_spaced() -> None:
    times = due_times_ns(200, "constant", 1)
    assert [next(times) for _ in range(3)] == [5_000_000, 10_000_000, 15_000_000]


@pytest.mark.parametrize("rate", [1000.0, 0.5])
def test_poisson_arrivals_have_the_rate_and_their_variance(rate: float) -> None:
    seconds = 20_000 / rate
    times = list(takewhile(lambda at: at < seconds * NS_PER_S, due_times_ns(rate, "poisson", 1)))
    assert times == sorted(times)
    # The count of a Poisson process has the standard deviation 141.
    assert abs(len(times) - 20_000) < 5 * 141
    gaps = [(after - before) / NS_PER_S for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)


def test_titles() -> None:
    assert (Load(4).title, Load(64, 250.0).title) == ("4 clients", "250/s")
