"""What an observation says about its urgency.

Fields of the envelope, and strings of its metadata: `observe(..., deadline_ms="30")`. Metadata of
any other name means nothing here.

Pure. Source: the protocol of the package `inferential` 1.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.clock import NS_PER_MS
from iskander.decoders import thread_safe
from iskander.errors import MalformedInput
from iskander.scheduling.request import PRIORITY_MAX, Terms

_DAY_MS = 86_400_000
Milliseconds = Annotated[float, Meta(ge=0, le=_DAY_MS)]


@thread_safe
class InferentialTerms(msgspec.Struct, frozen=True):
    """What metadata may say.

    Attributes:
        deadline_ms: Milliseconds from its arrival within which an answer is of use.
        ttl_ms: Milliseconds that it may wait for a worker.
        newest_wins: A newer observation of this client takes its place while it waits.
    """

    deadline_ms: Milliseconds | None = None
    ttl_ms: Milliseconds | None = None
    newest_wins: bool | None = None


NOTHING = InferentialTerms()
NAMES = frozenset(InferentialTerms.__struct_fields__)


def read_terms(
    envelope: Any,  # noqa: ANN401
    client: str,
    *,
    newest_wins: bool,
    wall_ns: int,
    source: Source = UNKNOWN_SOURCE,
) -> Terms:
    """The terms of an observation.

    Args:
        envelope: An `Observation`; priorities beyond ours are the lowest, and urgency is cut to
            what it may be.
        client: Whose it is.
        newest_wins: Where its metadata does not say.
        wall_ns: The time, for its age.
        source: Whose share of the queue it takes.

    Raises:
        MalformedInput: Metadata of ours is not what it may be.
    """
    said = _read_metadata(envelope.metadata)
    urgency, stamp_ns = envelope.urgency, envelope.timestamp_ns
    steps = envelope.steps_remaining if envelope.HasField("steps_remaining") else None
    return Terms(
        client=client,
        is_named=True,
        priority=min(envelope.priority, PRIORITY_MAX),
        urgency=min(urgency, 1.0) if urgency > 0 else 0.0,  # Also what is not a number.
        budget_ms=said.deadline_ms,
        ttl_ms=said.ttl_ms,
        steps_remaining=steps,
        age_ms=max(wall_ns - stamp_ns, 0) / NS_PER_MS if stamp_ns else 0.0,
        is_newest_wins=newest_wins if said.newest_wins is None else said.newest_wins,
        source=source,
    )


def _read_metadata(metadata: Mapping[str, str]) -> InferentialTerms:
    ours = {name: metadata[name] for name in NAMES if name in metadata}
    if not ours:
        return NOTHING
    try:
        return msgspec.convert(ours, InferentialTerms, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        wanted = "true or false" if name == "newest_wins" else f"milliseconds from 0 to {_DAY_MS}"
        raise MalformedInput(
            f"the observation's metadata: `{name}` is {ours.get(name, '')[:100]!r}, wanted {wanted}"
        ) from None
