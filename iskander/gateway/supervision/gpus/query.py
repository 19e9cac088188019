"""The devices of this machine: files, and NVML in a process with a time limit.

Runs on: the gateway before its loop, and the operator's tool.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from iskander.gateway.supervision.gpus import nvml
from iskander.gateway.supervision.gpus.device import DEVICES_VARIABLE, Gpu, visible
from iskander.gateway.supervision.gpus.inventory import read_gpus, unusable_cards
from iskander.gateway.supervision.gpus.readings import NvmlReport, decode_report

NVML_S: Final = 20.0
"""A machine of eight cards without a persistence daemon takes some seconds."""
REAP_S: Final = 1.0
MODULE: Final = "iskander.gateway.supervision.gpus.monitor"


class Devices(NamedTuple):
    """Devices that this process may use, and notes on what could not be read."""

    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


def read_devices(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Devices:
    """Return the devices of the machine that `CUDA_VISIBLE_DEVICES` leaves to this process."""
    report = ask_nvml()
    gpus = visible(read_gpus(root, report.cards), environment.get(DEVICES_VARIABLE))
    notes = []
    if gpus and report.error:
        text = "the memory of GPUs is unknown, so no budget is checked, and their health is not"
        notes.append(f"{text} monitored: {report.error}")
    if unusable := unusable_cards(root):
        notes.append(f"NVIDIA cards that cannot be used: {', '.join(unusable)}")
    return Devices(gpus, tuple(notes))


def ask_nvml(wait_s: float = NVML_S) -> NvmlReport:
    """Return the cards of NVML, or why there are none."""
    if not nvml.is_installed():
        return NvmlReport(error="nvidia-ml-py is not installed: pip install 'iskander[gpu]'")
    command = [sys.executable, "-P", "-m", MODULE, "--list"]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        return NvmlReport(error=f"the process that reads NVML does not start: {error.strerror}")
    with contextlib.ExitStack() as stack:
        assert child.stdout is not None
        stack.enter_context(child.stdout)
        try:
            raw, _ = child.communicate(timeout=wait_s)
            return decode_report(raw)
        except subprocess.TimeoutExpired:
            child.kill()
            # A process in a call of the driver may not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(REAP_S)
            return NvmlReport(error=f"NVML did not answer within {wait_s:g} s")
        except msgspec.DecodeError:
            return NvmlReport(error=f"the process that reads NVML ended with {child.returncode}")
