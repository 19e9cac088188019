"""How much of large messages may be on its way in on one connection.

A message larger than a call's window is given more window bit by bit; that of two thousand calls
at once would be without bound. So many bytes of them come at once, in the order in which they
ask, and one message always: the others have used up their windows, and wait. Who has room that
others wait for, and sends nothing, loses its call.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from iskander.clock import NS_PER_S

if TYPE_CHECKING:
    from iskander.gateway.http2.call import Call

ROOM_BYTES: Final = 256 << 20
STALLED_NS: Final = 30 * NS_PER_S


class Room:
    """That of one connection."""

    def __init__(self) -> None:
        self._held: dict[Call, int] = {}
        self._waiting: dict[Call, int] = {}
        self._taken = 0
        self._moved: dict[Call, tuple[int, int]] = {}

    def take(self, call: Call, size: int) -> bool:
        """Whether a message of this size may come; where not, `give_back` is called when it may."""
        if call in self._held:
            return True
        if self._held and (self._waiting or self._taken + size > ROOM_BYTES):
            self._waiting[call] = size
            return False
        self._held[call] = size
        self._taken += size
        return True

    def leave(self, call: Call) -> None:
        """A message has come, or never will."""
        self._waiting.pop(call, None)
        self._moved.pop(call, None)
        self._taken -= self._held.pop(call, 0)
        while self._waiting:
            other, size = next(iter(self._waiting.items()))
            if self._held and self._taken + size > ROOM_BYTES:
                break
            del self._waiting[other]
            self._held[other] = size
            self._taken += size
            other.give_back()

    def look_after(self, now_ns: int) -> None:
        """End those that send nothing while others wait."""
        if not self._waiting:
            self._moved.clear()
            return
        for call in list(self._held):
            progress = call.progress
            before, since_ns = self._moved.get(call, (-1, now_ns))
            if progress < 0 or progress != before:
                self._moved[call] = progress, now_ns
            elif now_ns - since_ns > STALLED_NS:
                call.give_up()
