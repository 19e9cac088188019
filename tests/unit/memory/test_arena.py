"""The arena: leases never overlap, none is lost, and no stale one is taken for a live one."""

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

from iskander.errors import SegmentError
from iskander.memory.arena import GRAIN_BYTES, Arena, Lease

GRAINS = 12
CAPACITY = GRAINS * GRAIN_BYTES


def in_grains(length_bytes: int) -> int:
    """What a lease of that many bytes takes, by the documented rule."""
    return max(-(-length_bytes // GRAIN_BYTES), 1) * GRAIN_BYTES


class ArenaMachine(RuleBasedStateMachine):
    """An arena beside the plainest model of it: the owner of every grain."""

    live = Bundle("live")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY + GRAIN_BYTES // 2)
        self.owners: list[Lease | None] = [None] * GRAINS
        self.generations: set[int] = set()

    @rule(target=live, length_bytes=st.integers(-1, CAPACITY))
    def lease(self, length_bytes: int) -> object:
        wanted = in_grains(length_bytes) // GRAIN_BYTES
        fits = (
            start
            for start in range(GRAINS - wanted + 1)
            if not any(self.owners[start : start + wanted])
        )
        first = next(fits, None)
        lease = self.arena.lease(length_bytes)
        if first is None:
            assert lease is None
            return multiple()
        assert lease is not None
        assert (lease.offset, lease.length_bytes) == (first * GRAIN_BYTES, wanted * GRAIN_BYTES)
        assert lease.generation not in self.generations
        self.generations.add(lease.generation)
        self.owners[first : first + wanted] = [lease] * wanted
        return lease

    @rule(length_bytes=st.integers(CAPACITY + 1, 1 << 40))
    def refuse_what_never_fits(self, length_bytes: int) -> None:
        with pytest.raises(SegmentError, match=f"{length_bytes} bytes can never fit"):
            self.arena.lease(length_bytes)

    @rule(target=dead, lease=consumes(live))
    def give_back(self, lease: Lease) -> Lease:
        assert self.arena.is_live(lease)
        self.arena.give_back(lease)
        self.owners = [None if owner == lease else owner for owner in self.owners]
        return lease

    @rule(lease=dead)
    def refuse_a_stale_lease(self, lease: Lease) -> None:
        assert not self.arena.is_live(lease)
        with pytest.raises(SegmentError, match=f"lease {lease.generation} "):
            self.arena.give_back(lease)

    @rule(lease=live, generations=st.integers(1, 3), grains=st.integers(0, 2))
    def refuse_a_forged_lease(self, lease: Lease, generations: int, grains: int) -> None:
        length_bytes = lease.length_bytes + grains * GRAIN_BYTES
        forged = Lease(lease.offset, length_bytes, lease.generation + generations)
        assert not self.arena.is_live(forged)
        with pytest.raises(SegmentError):
            self.arena.give_back(forged)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.arena.validate()
        held = {owner for owner in self.owners if owner is not None}
        assert len(self.arena) == len(held)
        assert self.arena.leased_bytes == GRAIN_BYTES * sum(map(bool, self.owners))
        assert all(self.arena.is_live(lease) for lease in held)

    def teardown(self) -> None:
        """No leak: with everything given back the whole arena is one free range again."""
        for lease in {owner for owner in self.owners if owner is not None}:
            self.arena.give_back(lease)
        self.arena.validate()
        assert (self.arena.leased_bytes, len(self.arena)) == (0, 0)
        whole = self.arena.lease(CAPACITY)
        assert whole is not None
        assert (whole.offset, whole.length_bytes) == (0, CAPACITY)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def leased(arena: Arena, length_bytes: int = GRAIN_BYTES) -> Lease:
    lease = arena.lease(length_bytes)
    assert lease is not None
    return lease


def test_a_stale_lease_is_refused_after_its_offset_was_leased_again() -> None:
    """The address is the same one, so only the generation can tell the two holders apart."""
    arena = Arena(CAPACITY)
    stale = leased(arena)
    arena.give_back(stale)
    fresh = leased(arena)

    assert fresh.offset == stale.offset
    with pytest.raises(SegmentError):
        arena.give_back(stale)

    assert not arena.is_live(stale)
    assert arena.is_live(fresh)
    arena.give_back(fresh)
    assert arena.leased_bytes == 0


def test_first_fit_takes_the_lowest_hole_that_is_long_enough() -> None:
    arena = Arena(CAPACITY)
    small, _, large, _ = (leased(arena, grains * GRAIN_BYTES) for grains in (1, 1, 3, 1))
    arena.give_back(small)
    arena.give_back(large)

    assert leased(arena, 2 * GRAIN_BYTES).offset == large.offset
    assert leased(arena, 1 * GRAIN_BYTES).offset == small.offset
    assert leased(arena, 1 * GRAIN_BYTES).offset == large.offset + 2 * GRAIN_BYTES


def test_one_request_at_a_time_stays_at_one_address() -> None:
    arena = Arena(CAPACITY)
    offsets = set()
    for length_bytes in (1, 100, GRAIN_BYTES, 5 * GRAIN_BYTES, 3):
        lease = leased(arena, length_bytes)
        offsets.add(lease.offset)
        arena.give_back(lease)

    assert offsets == {0}


def test_a_full_arena_gives_none_until_something_is_given_back() -> None:
    arena = Arena(CAPACITY)
    whole = leased(arena, CAPACITY)

    assert arena.lease(1) is None
    arena.give_back(whole)
    assert arena.lease(1) is not None


def test_free_bytes_in_two_holes_do_not_make_one_lease() -> None:
    arena = Arena(3 * GRAIN_BYTES)
    first, middle, last = leased(arena), leased(arena), leased(arena)
    arena.give_back(first)
    arena.give_back(last)

    assert arena.lease(2 * GRAIN_BYTES) is None
    arena.give_back(middle)
    assert leased(arena, 3 * GRAIN_BYTES).offset == 0


@pytest.mark.parametrize("length_bytes", [CAPACITY + 1, 1 << 62])
def test_what_no_empty_arena_could_hold_is_an_error_and_not_a_wait(length_bytes: int) -> None:
    arena = Arena(CAPACITY)

    with pytest.raises(SegmentError, match=f"arena of {CAPACITY}"):
        arena.lease(length_bytes)

    assert arena.leased_bytes == 0


def test_an_arena_of_no_bytes_holds_nothing() -> None:
    arena = Arena(0)

    with pytest.raises(SegmentError):
        arena.lease(0)


def test_repr_shows_the_state_in_one_line() -> None:
    arena = Arena(CAPACITY)
    leased(arena)

    assert repr(arena) == (f"<Arena {GRAIN_BYTES}/{CAPACITY} bytes in 1 leases, 1 free ranges>")
