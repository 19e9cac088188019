"""Request terms (priority, timeout, client) in the `parameters` of a request.

`priority` and `timeout` are the protocol's own: 1 is the highest priority and 0 the default, which
become 0 and 1 here; the timeout is in microseconds. Flight's header terms have the same names and
the same meaning: `iskander-deadline-ms`, also spelled `iskander_deadline_ms`. Other parameters are
ignored.

Pure. Source: Open Inference Protocol v2 and Triton's `schedule_policy` and `sequence` extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from iskander.errors import MalformedInput, Unsupported
from iskander.gateway.protocols.terms import ClientTerms
from iskander.gateway.scheduling.request import PRIORITY_MAX

_PREFIX = "iskander_"
_US_PER_MS = 1000
_DAY_US = 86_400_000_000
_INTEGER_END = 1 << 64
"""JSON integers have no upper limit."""
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


def parse_terms(parameters: Mapping[str, Any], where: str = "parameters") -> ClientTerms | None:
    """Parse the terms in a request's parameters; return None if there are none."""
    for name in _SEQUENCES:
        if parameters.get(name):
            raise Unsupported(f"parameter `{name}`: no model keeps state between requests")
    fields = {}
    for name, value in parameters.items():
        plain = name.replace("-", "_")
        if plain.startswith(_PREFIX):
            fields[plain.removeprefix(_PREFIX)] = value
    priority = _integer(parameters, "priority")
    if priority:
        fields.setdefault("priority", min(priority - 1, PRIORITY_MAX))
    timeout_us = _integer(parameters, "timeout")
    if timeout_us > _DAY_US:
        raise MalformedInput(f"parameter `timeout`: {timeout_us} us, limit {_DAY_US} us, a day")
    if not fields and not timeout_us:
        return None
    try:
        terms = msgspec.convert(fields, ClientTerms, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"the request's {where}: {error}") from None
    if timeout_us:
        timeout_ms = timeout_us / _US_PER_MS
        if terms.deadline_ms is not None:
            timeout_ms = min(timeout_ms, terms.deadline_ms)
        terms = msgspec.structs.replace(terms, deadline_ms=timeout_ms)
    return terms


def merge_terms(first: ClientTerms | None, otherwise: ClientTerms | None) -> ClientTerms | None:
    """Merge two sets of terms; the first takes precedence."""
    if first is None or otherwise is None:
        return first or otherwise
    fields = msgspec.structs.asdict(first).items()
    return msgspec.structs.replace(otherwise, **{name: v for name, v in fields if v is not None})


def _integer(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < _INTEGER_END:
        raise MalformedInput(
            f"parameter `{name}`: expected an integer of at least 0, got {value!r}"
        )
    return value
