"""Shares of ids: exact at their ends, nested, and independent of the pattern of the ids."""

from __future__ import annotations

import pytest

from iskander.gateway.observation.sampling import BITS, is_within, mix, request_id, threshold_of


def test_hash_is_the_published_one() -> None:
    """First values of SplittableRandom with the seeds 0 and 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_ends_of_the_share() -> None:
    ids = range(1000)
    assert all(is_within(each, threshold_of(1.0)) for each in ids)
    assert not any(is_within(each, threshold_of(0.0)) for each in ids)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_share_of_ids_that_are_not_random(share: float) -> None:
    """Clients may count their trace ids, or put a time into the low bits."""
    for step in (1, 1 << 20, 1 << 44):
        taken = sum(is_within(step * each, threshold_of(share)) for each in range(20_000))
        assert abs(taken / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_small_share_is_a_part_of_a_larger_one() -> None:
    small = {each for each in range(10_000) if is_within(each, threshold_of(0.1))}
    large = {each for each in range(10_000) if is_within(each, threshold_of(0.3))}
    assert small < large


def test_id_of_a_request_is_stable_and_its_own() -> None:
    ids = {
        request_id(7, arrived_ns, identity) for arrived_ns in range(50) for identity in range(50)
    }
    assert len(ids) == 2500
    assert request_id(7, 1, 2) == request_id(7, 1, 2) != request_id(8, 1, 2)
    assert all(each < 1 << (2 * BITS) for each in ids)
