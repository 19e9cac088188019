"""Exit codes of the three commands.

A code has one meaning; from 64 on it is that of sysexits.h.

Pure. Source: sysexits(3); 130 is the shell's code for SIGINT.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from iskander.errors import (
    ConfigError,
    Draining,
    IskanderError,
    ManifestError,
    NotReady,
    PermissionDenied,
    SegmentError,
    Unauthenticated,
)


class ExitCode(IntEnum):
    """Codes of all commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    QUARANTINED = 3
    UNAVAILABLE = 69
    BUG = 70
    MEMORY = 71
    DEVICE = 74
    PROTOCOL = 76
    PERMISSION = 77
    CONFIG = 78
    INTERRUPTED = 130


MEANINGS: Final[dict[str, dict[ExitCode, str]]] = {
    "iskander": {
        ExitCode.DONE: "success",
        ExitCode.FAILED: "failed, or a check found a problem",
        ExitCode.USAGE: "wrong usage",
        ExitCode.QUARANTINED: "`score`: all rows are scored, some are in quarantine",
        ExitCode.UNAVAILABLE: "no server answers, or it is not ready",
        ExitCode.PERMISSION: "the token is missing, invalid or not sufficient",
        ExitCode.CONFIG: "invalid configuration, model or manifest",
        ExitCode.INTERRUPTED: "interrupted",
    },
    "iskander-gateway": {
        ExitCode.DONE: "drained",
        ExitCode.USAGE: "wrong usage",
        ExitCode.UNAVAILABLE: "workers not ready",
        ExitCode.MEMORY: "the system refused memory",
        ExitCode.CONFIG: "invalid configuration, model or manifest",
        ExitCode.INTERRUPTED: "immediate stop by a second signal",
    },
    "iskander-worker": {
        ExitCode.DONE: "drained",
        ExitCode.USAGE: "wrong usage",
        ExitCode.UNAVAILABLE: "no gateway",
        ExitCode.BUG: "a bug",
        ExitCode.MEMORY: "the system refused memory",
        ExitCode.DEVICE: "a fault of the GPU",
        ExitCode.PROTOCOL: "the gateway speaks another version or rejected this worker",
        ExitCode.CONFIG: "the interpreter of the model's workers lacks something",
    },
}
"""Meaning of each code that a command uses."""


def summary(command: str) -> str:
    """A sentence for `--help`, such as `Exit codes: 0 drained; 2 wrong usage`."""
    pairs = (f"{code} {meaning}" for code, meaning in MEANINGS[command].items())
    return f"Exit codes: {'; '.join(pairs)}."


def code_of(error: IskanderError) -> ExitCode:
    """The code with which `iskander` ends after an error."""
    if isinstance(error, ConfigError | ManifestError):
        return ExitCode.CONFIG
    if isinstance(error, NotReady | Draining):
        return ExitCode.UNAVAILABLE
    if isinstance(error, PermissionDenied | Unauthenticated):
        return ExitCode.PERMISSION
    return ExitCode.MEMORY if isinstance(error, SegmentError) else ExitCode.FAILED
