"""Device memory of one session in one slot, and its launches by number of rows.

`DeviceBatch` runs a batch of a session that does not serve yet.

A launch is bound to addresses, so memory and launches have the same life. Rows with a captured
graph have memory of their own, allocated once: a graph repeats the addresses of its capture.

Runs on: worker main; before a session serves, its loading thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import ExecutionFailed
from iskander_worker.backends import Run
from iskander_worker.devices.cuda import Device, DriverError

SLOTS: Final = 2
"""Batches in flight on a device; a session has a workspace for each."""
LAUNCHES_MAX: Final = 64
"""Limit of the kept launches without a graph in a workspace; the oldest is removed first."""


class Launch(Protocol):
    """The computation of a batch between fixed addresses on the device."""

    def run(self, run: Run) -> Sequence[int]:
        """Enqueue the computation, or raise `ExecutionFailed`.

        Returns the address of each output; it is valid until the next run.
        """


class Launcher(Protocol):
    """The part of a model on a device that a workspace uses.

    Attributes:
        stream: Stream on which the model computes.
        graph_rows: Numbers of rows whose computation is captured as a graph.
    """

    device: Device
    stream: int
    graph_rows: tuple[int, ...]

    def prepare(
        self,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
        *,
        is_captured: bool,
    ) -> Launch:
        """Bind a batch to bodies on the device, or raise `ExecutionFailed`."""

    def close(self) -> None:
        """Release the stream, after the model and its launches."""


class Prepared(NamedTuple):
    """A launch, and the address of its input body."""

    input_address: int
    launch: Launch


class Workspace:
    """Device memory of one session in one slot, and the launches that are bound to it."""

    def __init__(
        self, model: Launcher, contract: Contract, inputs: RowCopier, outputs: RowCopier
    ) -> None:
        self._model, self._contract = model, contract
        self._inputs, self._outputs = inputs, outputs
        self._launches: dict[int, Prepared] = {}
        self._captured: dict[int, Prepared] = {}
        self._memory: _Memory | None = None
        self._graph_memory: _Memory | None = None

    def prepare(self, rows: int) -> Prepared:
        """Return a launch for a batch of `rows` rows, or raise `ExecutionFailed`.

        No earlier launch of this workspace may still be running.
        """
        prepared = self._captured.get(rows) or self._launches.get(rows)
        if prepared is not None:
            return prepared
        graph_rows = self._model.graph_rows
        if rows in graph_rows:
            memory = self._graph_memory
            if memory is None:
                memory = self._graph_memory = self._allocate(max(graph_rows))
            prepared = self._captured[rows] = self._bind(rows, memory, is_captured=True)
            return prepared
        memory = self._memory
        if memory is None or memory.rows < rows:
            self._launches.clear()
            self._free(memory)
            self._memory = None
            # A power of two, so that the memory seldom grows.
            memory = self._memory = self._allocate(1 << (rows - 1).bit_length())
        if len(self._launches) >= LAUNCHES_MAX:
            del self._launches[next(iter(self._launches))]
        prepared = self._launches[rows] = self._bind(rows, memory, is_captured=False)
        return prepared

    def close(self) -> None:
        """Free the memory; no launch is running."""
        self._launches.clear()
        self._captured.clear()
        self._free(self._memory)
        self._free(self._graph_memory)
        self._memory = self._graph_memory = None

    def _bind(self, rows: int, memory: _Memory, *, is_captured: bool) -> Prepared:
        launch = self._model.prepare(
            self._contract,
            rows,
            memory.input_address,
            memory.output_address,
            is_captured=is_captured,
        )
        return Prepared(memory.input_address, launch)

    def _allocate(self, rows: int) -> _Memory:
        device = self._model.device
        lengths = [copier.layout(rows)[1] for copier in (self._inputs, self._outputs)]
        addresses: list[int] = []
        try:
            addresses = [device.allocate(lengths[0])]
            addresses.append(device.allocate(lengths[1]))
        except DriverError as error:
            for address in addresses:
                device.free(address)
            if error.is_fatal:
                raise
            raise ExecutionFailed(
                f"no device memory for a batch of {rows} rows ({sum(lengths)} bytes): {error}; "
                "lower max_batch_rows, or the memory of other models on the device"
            ) from None
        return _Memory(rows, *addresses)

    def _free(self, memory: _Memory | None) -> None:
        for address in (memory.input_address, memory.output_address) if memory is not None else ():
            self._model.device.free(address)


class DeviceBatch:
    """One batch between host addresses, whose `run` waits for its end; for warm-up."""

    own_bytes = 0

    def __init__(
        self,
        launcher: Launcher,
        workspace: Workspace,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
    ) -> None:
        self._launcher, self._workspace, self._contract = launcher, workspace, contract
        self._rows = rows
        self._input_address, self._output_address = input_address, output_address

    def run(self, run: Run) -> None:
        """See `Bound`."""
        device, stream, rows = self._launcher.device, self._launcher.stream, self._rows
        try:
            prepared = self._workspace.prepare(rows)
            length = body_layout(self._contract.inputs, rows)[1]
            device.copy_in(prepared.input_address, self._input_address, length, stream)
            addresses = prepared.launch.run(run)
            specs = self._contract.outputs
            offsets, _ = body_layout(specs, rows)
            for spec, offset, source in zip(specs, offsets, addresses, strict=True):
                target = self._output_address + offset
                device.copy_out(target, source, spec.buffer_bytes(rows), stream)
            device.synchronize(stream)
        except DriverError as error:
            raise ExecutionFailed(str(error)) from None


class _Memory(NamedTuple):
    """Bodies for a batch of up to `rows` rows."""

    rows: int
    input_address: int
    output_address: int
