"""Errors of outputs.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

from iskander.errors import Fault, IskanderError


class OutputExists(
    IskanderError, code="output_exists", fault=Fault.CLIENT, status="FAILED_PRECONDITION"
):
    """The output exists, and `overwrite` does not permit to change it."""


class OutputError(IskanderError, code="output", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"):
    """The output cannot be written: no space, no permission, or a lost staged file."""
