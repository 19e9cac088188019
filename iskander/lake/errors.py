"""Errors of batch scoring: jobs and state folders.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

from iskander.errors import Fault, IskanderError


class JobConflict(IskanderError, code="job_conflict", fault=Fault.CLIENT, status="ABORTED"):
    """The state folder belongs to another job, or another process uses it now."""


class StateError(IskanderError, code="state", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"):
    """The state folder of a job cannot be read or written: no space or no permission."""
