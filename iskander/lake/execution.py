"""Runtime and limits of a model: values that the last bits of results depend on.

A server names them in the contract of a model. They are in the fingerprint of a job, and every call
of the job sends the names of the runtimes, so that a server with another one rejects it.

Pure. Runs in: the operator's tool, drivers and processes of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from iskander.client import ModelDescription
from iskander.errors import RuntimeDiffers

TERM: Final = "runtimes"
SEPARATOR: Final = " | "
"""Between the names of runtimes in a term."""
_SHOWN_CHARACTERS: Final = 80


def execution(description: ModelDescription) -> dict[str, str]:
    """Return what runs a model, by name: library, providers, threads, and limits of batches."""
    runtimes = _runtimes(description)
    limits = description.limits
    return {
        "runtime": _joined(each["library"] or "unknown" for each in runtimes),
        "providers": _joined(" and ".join(each["providers"]) for each in runtimes),
        "threads": _joined(str(each["threads"]) for each in runtimes),
        "max_batch_rows": str(description.max_batch_rows),
        "limits": ", ".join(f"{name} {limits[name]}" for name in sorted(limits)),
        "request": "all rows" if description.is_whole else "batches",
    }


def runtime_terms(description: ModelDescription) -> dict[str, str]:
    """Return terms for calls, with which a server with other runtimes rejects them.

    They are empty if the description names no runtimes. If the job cuts the rows into batches, the
    terms say so, and a server whose model does not permit that rejects the calls, too.
    """
    names = [str(each["name"]) for each in _runtimes(description)]
    return {**({TERM: SEPARATOR.join(names)} if names else {}), **description.cut_terms}


def require_runtimes(planned: ModelDescription, found: ModelDescription, where: str) -> None:
    """Require that a server runs a model only with runtimes that were planned.

    Args:
        planned: Description with which a job was planned.
        found: Description of the same model at another time, or of another server.
        where: Server or time of the description `found`, for the message.

    Raises:
        RuntimeDiffers: The server has another runtime.
    """
    wanted, given = _runtimes(planned), _runtimes(found)
    if all(each in wanted for each in given):
        return
    names = ("runtime", "providers", "threads")
    was, now = execution(planned), execution(found)
    changed = differences({each: was[each] for each in names}, {each: now[each] for each in names})
    raise RuntimeDiffers(
        f"{where} runs model `{planned.name}` differently: {'; '.join(changed)}. The last bits of "
        "its results may differ; give all servers the same library, providers and threads",
        model=planned.name,
    )


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each value that differs, in the order of the names."""
    return [
        f"{name} was {_shown(was, name)}, is {_shown(now, name)}"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name) or (name in was) != (name in now)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    if values.get(name) in (None, "", [], {}):
        return "not given"
    text = str(values[name])
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _runtimes(description: ModelDescription) -> list[dict[str, Any]]:
    """Runtimes of the contract; none if the server names none."""
    found = description.metadata.get("runtimes")
    return list(found) if isinstance(found, list) else []


def _joined(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts)) or "unknown"
