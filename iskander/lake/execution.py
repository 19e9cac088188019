"""Runtime and limits of a model, on which the last bits of its results depend.

A server names these values in the contract of a model. They are in the fingerprint of a job, and
every call of the job sends the names of the runtimes, so that a server with another runtime rejects
the call.

Pure. Runs in: the operator's tool, drivers and processes of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from iskander.client import ModelDescription
from iskander.errors import RuntimeDiffers

TERM: Final = "runtimes"
SEPARATOR: Final = " | "
"""Separator of the names of runtimes in a term."""
_SHOWN_CHARACTERS: Final = 80


def execution_values(description: ModelDescription) -> dict[str, str]:
    """Return library, providers, threads and batch limits of a model, as texts by name."""
    runtimes = _runtimes(description)
    limits = description.limits
    return {
        "runtime": _join_different(each["library"] or "unknown" for each in runtimes),
        "providers": _join_different(" and ".join(each["providers"]) for each in runtimes),
        "threads": _join_different(str(runtime["threads"]) for runtime in runtimes),
        "max_batch_rows": str(description.max_batch_rows),
        "limits": ", ".join(f"{name} {limits[name]}" for name in sorted(limits)),
        "request": "all rows" if description.is_whole else "batches",
    }


def runtime_terms(description: ModelDescription) -> dict[str, str]:
    """Return terms for calls; a server with other runtimes rejects a call with these terms.

    There are none if the description names no runtimes. If the job cuts the rows into batches, the
    terms say so, and a server whose model does not permit that rejects the calls, too.
    """
    names = [str(runtime["name"]) for runtime in _runtimes(description)]
    return {**({TERM: SEPARATOR.join(names)} if names else {}), **description.cut_terms}


def require_runtimes(planned: ModelDescription, found: ModelDescription, where: str) -> None:
    """Require that all runtimes of a model at a server are among the planned ones.

    Args:
        planned: Description with which a job was planned.
        found: Description of the same model at another time, or of another server.
        where: Server or time of the description `found`, for the message.

    Raises:
        RuntimeDiffers: The server has another runtime.
    """
    wanted, given = _runtimes(planned), _runtimes(found)
    if all(runtime in wanted for runtime in given):
        return
    names = ("runtime", "providers", "threads")
    was, now = execution_values(planned), execution_values(found)
    changed = differences({each: was[each] for each in names}, {name: now[name] for name in names})
    raise RuntimeDiffers(
        f"{where} runs model `{planned.name}` differently: {'; '.join(changed)}. The last bits of "
        "its results may differ; give all servers the same library, providers and threads",
        model=planned.name,
    )


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each value that differs, in the order of the names."""
    return [
        f"{name} was {_short_text(was, name)}, is {_short_text(now, name)}"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name) or (name in was) != (name in now)
    ]


def _short_text(values: Mapping[str, Any], name: str) -> str:
    if values.get(name) in (None, "", [], {}):
        return "not given"
    text = str(values[name])
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _runtimes(description: ModelDescription) -> list[dict[str, Any]]:
    """Return the runtimes of the contract; none if the server names none."""
    found = description.metadata.get("runtimes")
    return list(found) if isinstance(found, list) else []


def _join_different(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts)) or "unknown"
