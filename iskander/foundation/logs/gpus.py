"""Events of GPUs: loss, return, and the process that reads NVML."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

gpus = Source("iskander.gpus", "worker")


@gpus.error("worker")
def gpu_lost(*, worker: int, gpu: str, reason: str) -> str:
    """The GPU of a worker cannot be used; its slot is out of service until the GPU returns.

    Do: Read `dmesg | grep -i xid`; reset the card (`nvidia-smi --gpu-reset -i N`) or restart the
    machine. A card that falls off the bus again has a fault of power, cooling or hardware.
    """
    return f"worker {worker} is out of service: {gpu} is lost: {reason}"


@gpus.warning("worker")
def gpu_returned(*, worker: int, gpu: str) -> str:
    """A lost GPU answers again, and its worker is started.

    Do: Nothing, unless it repeats.
    """
    return f"worker {worker} is started again: {gpu} has returned"


@gpus.error("uuid")
def gpu_xid(*, uuid: str, gpu: str, xid: str, count: int) -> str:
    """The driver reported an error of a GPU by its Xid number.

    Do: Look the number up in NVIDIA's "Xid Errors"; some are errors of a program, others of the
    card.
    """
    return f"{gpu}: Xid {xid}, {count} in all since the start"


@gpus.warning()
def gpu_monitor_notice(*, notice: str) -> str:
    """The process that reads NVML cannot read a part of it, or does not start.

    Do: Read the notice; for NVML, run `nvidia-smi` as the account of the gateway.
    """
    return f"GPUs: {notice}"


@gpus.warning()
def gpu_monitor_ended(*, reason: str, pause_s: float) -> str:
    """The process that reads NVML ended or did not answer; it is started again.

    Do: Run `nvidia-smi`: if it does not answer either, a card or the driver has a fault.
    """
    return f"the process that reads NVML {reason}; the next start is in {pause_s:g} s"


@gpus.warning()
def gpu_monitor_stuck(*, processes: int) -> str:
    """Processes that read NVML cannot be ended: GPUs are not monitored.

    Do: Restart the machine: a process in a call of the driver ends only with it.
    """
    return f"{processes} processes that read NVML do not end; the GPUs are not monitored"
