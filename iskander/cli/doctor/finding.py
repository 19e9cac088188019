"""Result of one check of the machine."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Severity of a finding.

    A problem prevents a start or ends processes. A warning costs speed or capacity, or is a risk.
    A note is a fact that an operator may want to change.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One finding.

    Attributes:
        check: Name of the check, stable and part of the interface.
        found: What was found, with the values.
        why: Why it matters, one sentence.
        fix: Command, or change of a setting or unit, that corrects it. Empty: nothing to do.
        undo: How to revert the fix.
    """

    check: str
    state: State
    found: str
    why: str = ""
    fix: str = ""
    undo: str = ""
