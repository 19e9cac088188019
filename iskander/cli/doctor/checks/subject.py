"""Input of every check, and the texts of sizes and commands that several checks share.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from iskander.cli.doctor.demand import Demand
from iskander.cli.doctor.facts import MachineFacts
from iskander.cli.doctor.finding import Finding
from iskander.cli.doctor.probes import Probes

MIB = 1 << 20


class Subject(NamedTuple):
    """A machine, and what a configuration needs of it."""

    facts: MachineFacts
    probes: Probes
    demand: Demand


Check = Callable[[Subject], Iterator[Finding]]


def mib(length_bytes: int) -> str:
    """A size in MiB, such as `1,024 MiB`."""
    return f"{length_bytes / MIB:,.0f} MiB"


def set_sysctl(name: str, value: object) -> str:
    """The command that sets a kernel parameter until the next boot."""
    return f"sysctl -w {name}={value}"


def set_property(value: str) -> str:
    """The command that sets a limit of the control group of the gateway's systemd unit."""
    return f"systemctl set-property iskander-gateway {value}"


def set_unit(value: str) -> str:
    """The command that opens the unit for a line below [Service]; a restart applies it."""
    return f"systemctl edit iskander-gateway   # [Service] {value}"


UNDO_UNIT = "systemctl revert iskander-gateway"
"""Reverts both."""
