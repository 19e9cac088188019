"""Numbers of random examples, lower under the profile of `make test-fast`."""

from __future__ import annotations

from hypothesis import settings

FAST = "fast"


def up_to(count: int) -> int:
    """`count`, or the number of the profile `fast` if that is loaded and lower."""
    is_fast = settings.get_current_profile_name() == FAST
    return min(count, settings.get_profile(FAST).max_examples) if is_fast else count
