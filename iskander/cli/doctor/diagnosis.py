"""Registry of all checks, and their findings for one machine.

Pure.
"""

from __future__ import annotations

from iskander.cli.doctor.checks import cpus, limits, memory, runtimes, system
from iskander.cli.doctor.checks.subject import Subject
from iskander.cli.doctor.finding import Finding

CHECKS = (*memory.CHECKS, *cpus.CHECKS, *limits.CHECKS, *system.CHECKS, *runtimes.CHECKS)


def diagnose(subject: Subject) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(subject)]
