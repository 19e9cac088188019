"""NVML as the file of $NVML_SCRIPT says: the calls that the monitor makes, with their errors.

The folder of this module is on the PYTHONPATH of a process under test, so that it replaces
nvidia-ml-py. The script is read at each call: a test changes it while the process runs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT = 3, 6, 10
NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
NVML_DEVICE_MIG_ENABLE, NVML_VOLATILE_ECC = 1, 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
nvmlEventTypeXidCriticalError = 8
MIB = 1 << 20
_TEXTS = {3: "Not Supported", 4: "No Permission", 6: "Not Found", 9: "Driver Not Loaded",
          10: "Timeout", 15: "GPU is lost", 16: "GPU requires reset"}  # fmt: skip


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS.get(value, "Unknown Error"))
        self.value = value


class NVMLError_Timeout(NVMLError):
    pass


def _script() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["NVML_SCRIPT"]).read_text())
    return found


def _device(uuid: str) -> dict[str, Any]:
    """The facts of a card or a slice. May raise or hang, as the script says."""
    for card in _script()["cards"]:
        for device in (card, *card.get("slices", ())):
            if device["uuid"] == uuid:
                while _hangs(uuid):
                    time.sleep(0.05)
                if error := card.get("error", 0):
                    raise NVMLError(error)
                return {**card, **device}
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def _hangs(uuid: str) -> bool:
    """Whether a call does not return; a file that is gone ends it, so that no process is left."""
    try:
        return any(c["uuid"] == uuid and c.get("hangs", False) for c in _script()["cards"])
    except (OSError, ValueError):
        return False


def _value(uuid: str, key: str) -> Any:
    device = _device(uuid)
    if device.get(key) is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return device[key]


def nvmlInit() -> None:
    script = _script()
    while script.get("hangs", False):
        time.sleep(0.05)
        script = _script()
    if error := script.get("error", 0):
        raise NVMLError(error)


def nvmlSystemGetDriverVersion() -> str:
    return "580.1"


def nvmlDeviceGetCount() -> int:
    return len(_script()["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    uuid: str = _script()["cards"][index]["uuid"]
    _device(uuid)
    return uuid


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    _device(uuid)
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(uuid: str) -> str:
    return next(
        card["uuid"]
        for card in _script()["cards"]
        if any(each["uuid"] == uuid for each in card.get("slices", ()))
    )


def nvmlDeviceGetUUID(uuid: str) -> str:
    return uuid


def nvmlDeviceGetName(uuid: str) -> str:
    device = _device(uuid)
    profile = device.get("profile", "")
    return f"{device['name']} MIG {profile}" if profile else str(device["name"])


def nvmlDeviceGetPciInfo(uuid: str) -> SimpleNamespace:
    return SimpleNamespace(busId=_value(uuid, "pci"))


def nvmlDeviceGetMemoryInfo(uuid: str) -> SimpleNamespace:
    device = _device(uuid)
    if device["memory_mib"] is None:
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    total = device["memory_mib"] * MIB
    return SimpleNamespace(total=total, used=device.get("used_mib", 500) * MIB, free=0)


def nvmlDeviceGetCpuAffinity(uuid: str, words: int) -> list[int]:
    return [sum(1 << cpu for cpu in _value(uuid, "cpus")), *[0] * (words - 1)]


def nvmlDeviceGetMinorNumber(uuid: str) -> int:
    return int(_value(uuid, "minor"))


def nvmlDeviceGetMigMode(uuid: str) -> tuple[int, int]:
    mode = int(_value(uuid, "mig"))
    return mode, mode


def nvmlDeviceGetMaxMigDeviceCount(uuid: str) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(uuid: str, index: int) -> str:
    slices = _device(uuid).get("slices", ())
    if index >= len(slices):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return str(slices[index]["uuid"])


def nvmlDeviceGetGpuInstanceId(uuid: str) -> int:
    return int(_value(uuid, "instance")[0])


def nvmlDeviceGetComputeInstanceId(uuid: str) -> int:
    return int(_value(uuid, "instance")[1])


def nvmlDeviceGetUtilizationRates(uuid: str) -> SimpleNamespace:
    return SimpleNamespace(gpu=_value(uuid, "busy_percent"), memory=0)


def nvmlDeviceGetTemperature(uuid: str, sensor: int) -> int:
    return int(_value(uuid, "celsius"))


def nvmlDeviceGetPowerUsage(uuid: str) -> int:
    return int(_value(uuid, "milliwatts"))


def nvmlDeviceGetCurrentClocksThrottleReasons(uuid: str) -> int:
    return int(_value(uuid, "throttle"))


def nvmlDeviceGetTotalEccErrors(uuid: str, kind: int, counter: int) -> int:
    return int(_value(uuid, "ecc")[kind])


def nvmlDeviceGetCurrPcieLinkGeneration(uuid: str) -> int:
    return int(_value(uuid, "pcie")[0])


def nvmlDeviceGetCurrPcieLinkWidth(uuid: str) -> int:
    return int(_value(uuid, "pcie")[1])


def nvmlDeviceGetPcieReplayCounter(uuid: str) -> int:
    return int(_value(uuid, "replays"))


def nvmlEventSetCreate() -> dict[str, int]:
    """The number of Xid errors of each card that were reported."""
    return {}


def nvmlDeviceRegisterEvents(uuid: str, kinds: int, events: dict[str, int]) -> None:
    if not _script().get("events", True):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    events[uuid] = 0


def nvmlEventSetWait_v2(events: dict[str, int], wait_ms: int) -> SimpleNamespace:
    deadline = time.monotonic() + wait_ms / 1000
    while time.monotonic() < deadline:
        for card in _script()["cards"]:
            xids, reported = card.get("xids", ()), events.get(card["uuid"])
            if reported is not None and len(xids) > reported:
                events[card["uuid"]] = reported + 1
                return SimpleNamespace(device=card["uuid"], eventData=xids[reported])
        time.sleep(0.02)
    raise NVMLError_Timeout(NVML_ERROR_TIMEOUT)
