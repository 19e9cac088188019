"""Arena: leases do not overlap or leak, and stale leases are errors."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)
from support.random_examples import up_to

from iskander.errors import SegmentError
from iskander.interprocess.memory.arena import GRAIN_BYTES, Arena, Lease

GRAINS = 12
CAPACITY = GRAINS * GRAIN_BYTES


def round_up_to_grains(length_bytes: int) -> int:
    """Return the size of a lease of that many bytes, by the documented rule."""
    return max(-(-length_bytes // GRAIN_BYTES), 1) * GRAIN_BYTES


class ArenaMachine(RuleBasedStateMachine):
    """Compares an arena with a simple model: the owner of each grain."""

    live = Bundle("live")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY + GRAIN_BYTES // 2)
        self.owners: list[Lease | None] = [None] * GRAINS
        self.generations: set[int] = set()

    @rule(target=live, length_bytes=st.integers(-1, CAPACITY))
    def lease(self, length_bytes: int) -> object:
        grains = round_up_to_grains(length_bytes) // GRAIN_BYTES
        fits = (
            start
            for start in range(GRAINS - grains + 1)
            if not any(self.owners[start : start + grains])
        )
        first = next(fits, None)
        lease = self.arena.lease(length_bytes)
        if first is None:
            assert lease is None
            return multiple()
        assert lease is not None
        assert (lease.offset, lease.length_bytes) == (first * GRAIN_BYTES, grains * GRAIN_BYTES)
        assert lease.generation not in self.generations
        self.generations.add(lease.generation)
        self.owners[first : first + grains] = [lease] * grains
        return lease

    @rule(length_bytes=st.integers(CAPACITY + 1, 1 << 40))
    def reject_a_lease_that_never_fits(self, length_bytes: int) -> None:
        with pytest.raises(SegmentError, match=f"{length_bytes} bytes can never fit"):
            self.arena.lease(length_bytes)

    @rule(target=dead, lease=consumes(live))
    def give_back(self, lease: Lease) -> Lease:
        assert self.arena.is_live(lease)
        self.arena.give_back(lease)
        self.owners = [None if owner == lease else owner for owner in self.owners]
        return lease

    @rule(lease=dead)
    def reject_a_stale_lease(self, lease: Lease) -> None:
        assert not self.arena.is_live(lease)
        with pytest.raises(SegmentError, match=f"lease {lease.generation} "):
            self.arena.give_back(lease)

    @rule(lease=live, generations=st.integers(1, 3), grains=st.integers(0, 2))
    def reject_a_forged_lease(self, lease: Lease, generations: int, grains: int) -> None:
        length_bytes = lease.length_bytes + grains * GRAIN_BYTES
        forged = Lease(lease.offset, length_bytes, lease.generation + generations)
        assert not self.arena.is_live(forged)
        with pytest.raises(SegmentError):
            self.arena.give_back(forged)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.arena.validate()
        owners = {owner for owner in self.owners if owner is not None}
        assert len(self.arena) == len(owners)
        assert self.arena.leased_bytes == GRAIN_BYTES * sum(map(bool, self.owners))
        assert all(self.arena.is_live(lease) for lease in owners)

    def teardown(self) -> None:
        """After all leases are released, the whole arena is one free range."""
        for lease in {owner for owner in self.owners if owner is not None}:
            self.arena.give_back(lease)
        self.arena.validate()
        assert (self.arena.leased_bytes, len(self.arena)) == (0, 0)
        full = self.arena.lease(CAPACITY)
        assert full is not None
        assert (full.offset, full.length_bytes) == (0, CAPACITY)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=up_to(60), stateful_step_count=40, deadline=None)


def new_lease(arena: Arena, length_bytes: int = GRAIN_BYTES) -> Lease:
    lease = arena.lease(length_bytes)
    assert lease is not None
    return lease


def test_range_is_free_after_its_last_holder() -> None:
    """A shadow run or a sample holds the lease of a finished request."""
    arena = Arena(CAPACITY)
    lease = arena.lease(CAPACITY)
    assert lease is not None
    lease.holders += 1

    arena.give_back(lease)
    assert arena.is_live(lease) and arena.lease(1) is None
    arena.give_back(lease)

    assert not arena.is_live(lease) and arena.lease(CAPACITY) is not None


def test_stale_lease_is_rejected_after_its_offset_is_leased_again() -> None:
    """Both leases have the same address, so only the generation differs."""
    arena = Arena(CAPACITY)
    stale = new_lease(arena)
    arena.give_back(stale)
    fresh = new_lease(arena)

    assert fresh.offset == stale.offset
    with pytest.raises(SegmentError):
        arena.give_back(stale)

    assert not arena.is_live(stale)
    assert arena.is_live(fresh)
    arena.give_back(fresh)
    assert arena.leased_bytes == 0


def test_lease_uses_the_lowest_free_range_that_fits() -> None:
    arena = Arena(CAPACITY)
    small, _, large, _ = (new_lease(arena, grains * GRAIN_BYTES) for grains in (1, 1, 3, 1))
    arena.give_back(small)
    arena.give_back(large)

    assert new_lease(arena, 2 * GRAIN_BYTES).offset == large.offset
    assert new_lease(arena, 1 * GRAIN_BYTES).offset == small.offset
    assert new_lease(arena, 1 * GRAIN_BYTES).offset == large.offset + 2 * GRAIN_BYTES


def test_sequential_leases_reuse_one_address() -> None:
    arena = Arena(CAPACITY)
    offsets = set()
    for length_bytes in (1, 100, GRAIN_BYTES, 5 * GRAIN_BYTES, 3):
        lease = new_lease(arena, length_bytes)
        offsets.add(lease.offset)
        arena.give_back(lease)

    assert offsets == {0}


def test_full_arena_returns_none_until_a_release() -> None:
    arena = Arena(CAPACITY)
    full = new_lease(arena, CAPACITY)

    assert arena.lease(1) is None
    arena.give_back(full)
    assert arena.lease(1) is not None


def test_two_separate_free_ranges_do_not_make_one_lease() -> None:
    arena = Arena(3 * GRAIN_BYTES)
    first, middle, last = new_lease(arena), new_lease(arena), new_lease(arena)
    arena.give_back(first)
    arena.give_back(last)

    assert arena.lease(2 * GRAIN_BYTES) is None
    arena.give_back(middle)
    assert new_lease(arena, 3 * GRAIN_BYTES).offset == 0


@pytest.mark.parametrize("length_bytes", [CAPACITY + 1, 1 << 62])
def test_lease_larger_than_the_arena_is_an_error(length_bytes: int) -> None:
    arena = Arena(CAPACITY)

    with pytest.raises(SegmentError, match=f"arena of {CAPACITY}"):
        arena.lease(length_bytes)

    assert arena.leased_bytes == 0


def test_arena_of_zero_bytes_has_no_leases() -> None:
    arena = Arena(0)

    with pytest.raises(SegmentError):
        arena.lease(0)


def test_repr_shows_the_state_in_one_line() -> None:
    arena = Arena(CAPACITY)
    new_lease(arena)

    assert repr(arena) == (f"<Arena {GRAIN_BYTES}/{CAPACITY} bytes in 1 leases, 1 free ranges>")
