"""What an Open Inference Protocol request says about its urgency, in its `parameters`.

`priority` and `timeout` are the protocol's own: 1 is the highest priority and 0 the default, which
here are 0 and 1; the timeout is in microseconds. Terms of Flight's headers have the same names here
and mean the same: `iskander-deadline-ms`, also spelled `iskander_deadline_ms`. A parameter that is
neither means nothing here.

Pure. Source: Open Inference Protocol v2 and Triton's `schedule_policy` and `sequence` extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from iskander.errors import MalformedInput, Unsupported
from iskander.protocols.terms import ClientTerms
from iskander.scheduling.request import PRIORITY_MAX

_PREFIX = "iskander_"
_US_PER_MS = 1000
_DAY_US = 86_400_000_000
_WHOLE_END = 1 << 64
"""JSON has numbers beyond, which are no number of anything."""
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


def said_in(parameters: Mapping[str, Any], where: str = "parameters") -> ClientTerms | None:
    """The terms in a request's parameters; None where there are none.

    Args:
        parameters: With others among them.
        where: What to call them in an error.

    Raises:
        MalformedInput: One is not what it may be.
        Unsupported: The request is one of a sequence, which no model here keeps a state for.
    """
    for name in _SEQUENCES:
        if parameters.get(name):
            raise Unsupported(f"parameter `{name}`: no model here keeps a state between requests")
    ours = {}
    for name, value in parameters.items():
        plain = name.replace("-", "_")
        if plain.startswith(_PREFIX):
            ours[plain.removeprefix(_PREFIX)] = value
    priority = _whole(parameters, "priority")
    if priority:
        ours.setdefault("priority", min(priority - 1, PRIORITY_MAX))
    timeout_us = _whole(parameters, "timeout")
    if timeout_us > _DAY_US:
        raise MalformedInput(
            f"parameter `timeout`: wanted at most a day, {_DAY_US} microseconds, got {timeout_us}"
        )
    if not ours and not timeout_us:
        return None
    try:
        said = msgspec.convert(ours, ClientTerms, strict=False)
        if timeout_us:
            timeout_ms = timeout_us / _US_PER_MS
            if said.deadline_ms is not None:
                timeout_ms = min(timeout_ms, said.deadline_ms)
            fields = msgspec.structs.asdict(said) | {"deadline_ms": timeout_ms}
            said = msgspec.convert(fields, ClientTerms)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"the request's {where}: {error}") from None
    return said


def said_over(first: ClientTerms | None, otherwise: ClientTerms | None) -> ClientTerms | None:
    """What is said in two places: as the first says it, and the other where that is silent."""
    if first is None or otherwise is None:
        return first or otherwise
    said = {
        name: value for name, value in msgspec.structs.asdict(first).items() if value is not None
    }
    return msgspec.structs.replace(otherwise, **said)


def _whole(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < _WHOLE_END:
        raise MalformedInput(f"parameter `{name}`: wanted a whole number from 0, got {value!r}")
    return value
