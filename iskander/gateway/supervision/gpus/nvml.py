"""Calls of NVML: cards and slices once, and readings of one device.

Only for a short-lived process: NVML holds descriptors of the driver, and a call for a card that has
fallen off the bus may never return. A value that a card does not support is None.

Runs on: the monitor process. Source: NVML API Reference; nvidia-ml-py (`pynvml`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from iskander.gateway.supervision.gpus.readings import (
    GpuReading,
    NvmlCard,
    NvmlReport,
    NvmlSlice,
    throttles_of,
)

ValueT = TypeVar("ValueT")

MODULE: Final = "pynvml"
_AFFINITY_WORDS: Final = 64
"""Words of a mask of 4,096 cpus."""
_WORD_BITS: Final = 64
_MILLI: Final = 1000


def is_installed() -> bool:
    return find_spec(MODULE) is not None


def open_library() -> Any:  # noqa: ANN401
    """Initialize NVML and return its binding, or raise OSError with the reason."""
    nvml = import_module(MODULE)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise OSError(str(error)) from None
    return nvml


def read_report() -> NvmlReport:
    """Return all cards."""
    try:
        nvml = open_library()
    except OSError as error:
        return NvmlReport(error=str(error))
    try:
        cards = tuple(_cards(nvml))
        return NvmlReport(cards, _text(nvml.nvmlSystemGetDriverVersion()))
    except nvml.NVMLError as error:
        return NvmlReport(error=str(error))


class XidEvents:
    """Xid errors of cards. A driver or a sandbox may not support them: then there are none."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401
        self._nvml = nvml
        self._set = nvml.nvmlEventSetCreate()

    def add(self, card: Any) -> None:  # noqa: ANN401
        """Report the errors of a card too, by its handle."""
        nvml = self._nvml
        nvml.nvmlDeviceRegisterEvents(card, nvml.nvmlEventTypeXidCriticalError, self._set)

    def wait(self, wait_ms: int) -> tuple[str, int] | None:
        """Return the UUID of a card and its Xid error; None after the time limit."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._set, wait_ms)
        except nvml.NVMLError_Timeout:
            return None
        return _text(nvml.nvmlDeviceGetUUID(event.device)), event.eventData


class DeviceReader:
    """Reads one device, a card or a slice, by its UUID.

    Attributes:
        card: Handle of the card; None until the first reading.
        card_uuid: UUID of the card; that of the device until the first reading.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:  # noqa: ANN401
        self._nvml = nvml
        self._uuid = uuid
        self._lost_codes = {
            nvml.NVML_ERROR_GPU_IS_LOST: "it is lost",
            nvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset",
            nvml.NVML_ERROR_NOT_FOUND: "it is not on the bus",
        }
        self._device: Any = None
        self.card: Any = None
        self.card_uuid = uuid

    def read(self) -> GpuReading:
        """Return a reading; `lost` if no process can use the device."""
        nvml = self._nvml
        try:
            if self._device is None:
                self._open()
            memory = nvml.nvmlDeviceGetMemoryInfo(self._device)
            return self._values(memory.used, memory.total)
        except nvml.NVMLError as error:
            reason = self._lost_codes.get(error.value, "")
            text = str(error)
            return GpuReading(self._uuid, lost=f"{reason} ({text})" if reason else "", error=text)

    def _open(self) -> None:
        nvml = self._nvml
        device = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        is_slice = self._uuid.startswith("MIG-")
        of_slice = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
        card = of_slice(device) if is_slice else device
        self.card_uuid = _text(nvml.nvmlDeviceGetUUID(card))
        self.card, self._device = card, device  # Last, for the thread that counts Xid errors.

    def _values(self, used_bytes: int, total_bytes: int) -> GpuReading:
        nvml, card = self._nvml, self.card
        replays = nvml.nvmlDeviceGetPcieReplayCounter
        reasons = getattr(
            nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        )

        def errors(kind: int) -> int | None:
            return self._ask(nvml.nvmlDeviceGetTotalEccErrors, card, kind, nvml.NVML_VOLATILE_ECC)

        # NVML measures the load of whole cards only.
        is_card = card is self._device
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, card) if is_card else None
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, card)
        return GpuReading(
            self._uuid,
            utilization=rates.gpu / 100 if rates is not None else None,
            memory_used_bytes=used_bytes,
            memory_total_bytes=total_bytes,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, card, 0),
            power_w=power / _MILLI if power is not None else None,
            throttles=throttles_of(self._ask(reasons, card) or 0),
            ecc_corrected=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            pcie_generation=self._ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, card),
            pcie_width=self._ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, card),
            pcie_replays=self._ask(replays, card),
        )

    def _ask(self, call: Callable[..., ValueT], *arguments: Any) -> ValueT | None:  # noqa: ANN401
        """Return a value; None if the device does not support it."""
        nvml = self._nvml
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            if error.value in self._lost_codes:
                raise
            return None


def _cards(nvml: Any) -> Iterator[NvmlCard]:  # noqa: ANN401
    """Yield the cards that answer."""
    for position in range(nvml.nvmlDeviceGetCount()):
        try:
            yield _card(nvml, nvml.nvmlDeviceGetHandleByIndex(position))
        except nvml.NVMLError:
            continue


def _card(nvml: Any, handle: Any) -> NvmlCard:  # noqa: ANN401
    def ask(call: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    mode = ask(nvml.nvmlDeviceGetMigMode, handle)
    is_mig = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    # An unprivileged container may read the memory of slices, and not that of their card.
    read_memory = nvml.nvmlDeviceGetMemoryInfo
    memory = ask(read_memory, handle) if is_mig else read_memory(handle)
    return NvmlCard(
        pci=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory.total if memory is not None else 0,
        cpus=_affinity(ask(nvml.nvmlDeviceGetCpuAffinity, handle, _AFFINITY_WORDS)),
        minor=ask(nvml.nvmlDeviceGetMinorNumber, handle),
        is_mig=is_mig,
        slices=tuple(_slices(nvml, handle)) if is_mig else (),
    )


def _slices(nvml: Any, handle: Any) -> Iterator[NvmlSlice]:  # noqa: ANN401
    for position in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except nvml.NVMLError:
            continue  # An unused position.
        # `NVIDIA H100 80GB HBM3 MIG 1g.10gb`
        profile = _text(nvml.nvmlDeviceGetName(device)).rpartition("MIG ")[2]
        numbers = nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId
        yield NvmlSlice(
            uuid=_text(nvml.nvmlDeviceGetUUID(device)),
            profile=profile,
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(device).total,
            instance=(numbers[0](device), numbers[1](device)),
        )


def _affinity(words: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the cpus in a mask of 64-bit words."""
    return tuple(
        at * _WORD_BITS + bit
        for at, word in enumerate(words or ())
        for bit in range(_WORD_BITS)
        if word >> bit & 1
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
