"""Errors of batch scoring: inputs, state folders and filters.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

from iskander.errors import Fault, IskanderError


class SourceChanged(
    IskanderError, code="source_changed", fault=Fault.CLIENT, status="FAILED_PRECONDITION"
):
    """An input file is gone, or its size, time or ETag differs from the plan."""


class SourceError(IskanderError, code="source", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """An input cannot be read: no files, mixed formats, different schemas or invalid bytes."""


class JobConflict(IskanderError, code="job_conflict", fault=Fault.CLIENT, status="ABORTED"):
    """The state folder belongs to another job, or another process uses it now."""


class FilterError(IskanderError, code="filter", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """The filter is not in the language of filters, or it does not fit the columns."""


class StateError(IskanderError, code="state", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"):
    """The state folder of a job cannot be read or written: no space or no permission."""
