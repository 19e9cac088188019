"""Page-locking of an attachment's two arenas with the CUDA driver.

The device then copies directly from and to an arena, beside the processor. A worker maps the input
arena read-only; the driver locks such memory only with a flag that not every device supports.
Without page-locking, batches pass through a page-locked stage.

Runs on: worker main.
"""

from __future__ import annotations

from iskander.interprocess.memory.segment import Segment
from iskander_worker.devices.cuda import Device, DriverError


class PageLockedArenas:
    """Input and output arena of an attachment, page-locked as far as the driver allows.

    Attributes:
        notices: What was not locked, and its effect.
    """

    def __init__(self, device: Device, inputs: Segment, outputs: Segment) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.notices: list[str] = []
        self._device = device
        self._locked: list[Segment] = []
        self.is_input_locked = self._lock("input", inputs)
        self.is_output_locked = self._lock("output", outputs)

    def release(self) -> None:
        """Undo the locking, before the arenas are unmapped; no copy is pending."""
        for segment in self._locked:
            self._device.unregister(segment.address)
        self._locked.clear()

    def _lock(self, label: str, segment: Segment) -> bool:
        is_read_only = segment.view.readonly
        try:
            self._device.register(segment.address, len(segment), is_read_only=is_read_only)
        except DriverError as error:
            if error.is_fatal:
                raise
            access = "read-only " if is_read_only else ""
            self.notices.append(
                f"the {label} arena ({len(segment)} bytes, {access}mapping) is not page-locked for "
                f"{self._device.name}, so each batch is copied once more: {error}"
            )
            return False
        self._locked.append(segment)
        return True
