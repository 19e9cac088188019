"""Settings of shadow versions, common to all models; see `docs/observing.md`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from iskander.config.section import MIB, Live, Positive, Section

Share = Annotated[float, Meta(ge=0, le=1)]
"""Share of the requests of a model's served versions that a candidate also runs."""


class ShadowConfig(Section, frozen=True, kw_only=True):
    """Shadow versions: candidates that run a share of the requests, for comparison only.

    Attributes:
        time_percent: Percent of the time of each worker and of the event loop for shadow batches;
            above it, their requests are dropped.
        bytes: Bytes of the inputs and results of requests that wait for a shadow batch.
        absolute_tolerance: Largest difference of two floats that counts as equal, at 0.
        relative_tolerance: The same, as a share of the served value; the two are added.
    """

    restart_reason: ClassVar[str] = "a comparison has one tolerance from its start"

    time_percent: Live[Annotated[float, Meta(gt=0, le=100)]] = 1.0
    bytes: Live[Positive] = 16 * MIB
    absolute_tolerance: Annotated[float, Meta(ge=0)] = 1e-6
    relative_tolerance: Annotated[float, Meta(ge=0)] = 1e-3
