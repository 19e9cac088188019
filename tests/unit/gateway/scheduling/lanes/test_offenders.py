"""Sources whose requests ended workers: pauses that double, and what is forgotten."""

from __future__ import annotations

from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.offenders import (
    FORGET_NS,
    PAUSE_FIRST_NS,
    PAUSE_MAX_NS,
    SOURCES_MAX,
    Offenders,
)

A, B = Source("", 1), Source("", 2)


def pause_ms(offenders: Offenders, source: Source, now_ns: int) -> int:
    """Pause of a source in milliseconds; 0: its requests are accepted."""
    error = offenders.error(source, now_ns, "m/1")
    assert error is None or error.retryable
    return 0 if error is None else error.retry_after_ms or 0


def test_pause_doubles_up_to_a_limit_and_ends() -> None:
    """Other sources are not affected."""
    offenders, now = Offenders(), 0
    pauses = []
    for _ in range(12):
        offenders.note(A, now)
        pauses.append(pause_ms(offenders, A, now))
        assert not pause_ms(offenders, B, now)
        now += PAUSE_MAX_NS
        assert not pause_ms(offenders, A, now)
    first, limit = PAUSE_FIRST_NS // NS_PER_MS + 1, PAUSE_MAX_NS // NS_PER_MS + 1
    assert pauses[:3] == [first, 2 * first - 1, 4 * first - 3]
    assert pauses[-1] == limit


def test_source_is_forgotten_after_a_quiet_time() -> None:
    """Its next pause is the shortest again, and nothing is kept of it meanwhile."""
    offenders = Offenders()
    offenders.note(A, 0)
    offenders.note(A, 0)
    now = PAUSE_MAX_NS + FORGET_NS
    assert not pause_ms(offenders, A, now)
    assert not len(offenders)
    offenders.note(A, now)
    assert pause_ms(offenders, A, now) == PAUSE_FIRST_NS // NS_PER_MS + 1


def test_number_of_sources_is_limited() -> None:
    """The one that was noted longest ago is forgotten first."""
    offenders = Offenders()
    for number in range(SOURCES_MAX + 1):
        offenders.note(Source("", number), 0)
    assert len(offenders) == SOURCES_MAX
    assert not pause_ms(offenders, Source("", 0), 0)
    assert pause_ms(offenders, Source("", SOURCES_MAX), 0)


def test_source_with_a_token_is_the_same_on_all_its_connections() -> None:
    offenders = Offenders()
    offenders.note(Source("scoring", 1), 0)
    assert pause_ms(offenders, Source("scoring", 2), 0)
    assert not pause_ms(offenders, Source("other", 1), 0)
    assert offenders.is_known(Source("scoring", 3), PAUSE_MAX_NS)
    assert not offenders.is_known(Source("other", 1), PAUSE_MAX_NS)
