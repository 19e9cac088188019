"""Runtime of a loaded model: library, execution providers and threads.

Library, providers and threads change the last bits of results. So two jobs, or two servers of one
job, need the same runtime if their results must have equal bits.

Pure. Runs on: gateway and workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LIBRARY_CHARACTERS_MAX = 200
PROVIDERS_MAX = 16
RUNTIMES_MAX = 16
"""Maximum number of runtimes of one model version; they differ by the devices and cores of its
workers."""
SEPARATOR = " | "


class Runtime(NamedTuple):
    """The library, providers and threads that compute the batches of a model in a worker.

    Attributes:
        library: Name and version, such as `ONNX Runtime 1.31.1`; empty if unknown.
        providers: Execution providers, the preferred one first.
        threads: Compute threads of the model.
    """

    library: str
    providers: tuple[str, ...]
    threads: int

    @property
    def name(self) -> str:
        """Text that identifies the runtime, in ASCII."""
        text = (
            f"{self.library or 'unknown'}, {' and '.join(self.providers)}, threads {self.threads}"
        )
        return text.replace("|", "/").encode("ascii", "backslashreplace").decode()


def make_runtime(library: str, providers: Iterable[str], threads: int) -> Runtime:
    """Make a runtime from the values that a worker sent; cut each value to its limit."""
    names = [provider[:LIBRARY_CHARACTERS_MAX] for provider in providers]
    return Runtime(library[:LIBRARY_CHARACTERS_MAX], tuple(names[:PROVIDERS_MAX]), threads)


def with_runtime(known: tuple[Runtime, ...], new: Runtime) -> tuple[Runtime, ...]:
    """Add a runtime to the sorted ones of a model version, `RUNTIMES_MAX` at most."""
    if new in known or len(known) >= RUNTIMES_MAX:
        return known
    return tuple(sorted((*known, new)))


def unexpected_runtimes(runtimes: Iterable[Runtime], expected: str) -> str:
    """Return the names of the runtimes that are not expected; empty if all are expected.

    Args:
        runtimes: Runtimes of a model version.
        expected: Names of the expected runtimes, with `SEPARATOR` between the names.
    """
    names = expected.split(SEPARATOR)
    return SEPARATOR.join(runtime.name for runtime in runtimes if runtime.name not in names)
