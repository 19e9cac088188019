"""Which lane a stream's batches go to: found by its descriptor, and anew when others are served.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable

from iskander.errors import IskanderError, ModelMoved
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.models import Models


class Target:
    """Of one stream.

    Args:
        find: The lane that a descriptor's bytes mean, for a key of who asks.
        models: Whose revision changes when `find` may say something else.
        key: By which the version is chosen, where versions have shares.

    Attributes:
        lane: None before the descriptor.
    """

    __slots__ = ("_at", "_descriptor", "_find", "_key", "_models", "lane")

    def __init__(self, find: Callable[[bytes, str], Lane], models: Models, key: str) -> None:
        self._find = find
        self._models = models
        self._key = key
        self._descriptor: bytes | None = None
        self._at = -1
        self.lane: Lane | None = None

    @property
    def is_current(self) -> bool:
        """Whether nothing that is served has changed since it was found."""
        return self._at == self._models.revision

    def look(self, descriptor: bytes | None) -> None:
        """Find the lane of a stream that has no schema yet; of the first descriptor that came.

        Raises:
            IskanderError: The descriptor means nothing.
        """
        if self._descriptor is None:
            self._descriptor = descriptor
        if self._descriptor is not None and not self.is_current:
            self._at = self._models.revision
            self.lane = self._find(self._descriptor, self._key)

    def move(self) -> None:
        """Go on with what the descriptor means now, where that takes and returns the same.

        Raises:
            ModelMoved: It does not, and the lane that was asked until now takes no more.
            IskanderError: The descriptor means nothing any more.
        """
        lane, descriptor = self.lane, self._descriptor
        assert lane is not None and descriptor is not None
        self._at = self._models.revision
        try:
            found = self._find(descriptor, self._key)
            if found.contract is not None and found.contract != lane.contract:
                raise ModelMoved(
                    f"model `{found.title}` takes or returns something else than `{lane.title}` "
                    "did when the stream was opened: open another",
                    retry_after_ms=0,
                )
        except IskanderError:
            if not lane.is_served:
                raise
        else:
            if found.contract is not None:
                self.lane = found
