"""CUDA driver, called through ctypes: memory, streams, events and errors of one device.

The driver's library belongs to the system's driver package and has a stable interface. Its streams
and addresses are those of the runtime inside ONNX Runtime and PyTorch: a process has one primary
context for a device. Every call releases the interpreter lock.

Runs on: worker main, and its loading thread. Source: CUDA Driver API 12 and 13; a host function is
not called after an error of the context.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final, Protocol

from iskander.foundation.clock import now_ns

LIBRARY: Final = "libcuda.so.1"

NOT_READY: Final = 600
FATAL: Final = frozenset(
    {4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}
)
"""Codes of errors after which every call of this process fails: faults of a kernel or the card."""

capture_lock: Final = threading.RLock()
"""Held to capture a graph, to launch a batch, and to release a model: some calls beside a capture,
such as an allocation, make it fail."""

_HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
_REGISTER_READ_ONLY: Final = 8
_NON_BLOCKING: Final = 1
_NO_TIMES: Final = 2
_NAME_BYTES: Final = 256
_MAJOR, _MINOR = 75, 76
"""Device attributes of the compute capability."""
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuLaunchHostFunc": (c_void_p, c_void_p, c_void_p),
}


class DriverError(Exception):
    """A failed call of the driver; `code` is the result that the driver returned."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_fatal(self) -> bool:
        """Whether this process cannot use the device any more."""
        return self.code in FATAL


class DeviceLost(Exception):
    """This process cannot use its device any more; it must exit."""


class Device(Protocol):
    """One device, as `CudaDevice` implements it; addresses, streams and events are numbers.

    Attributes:
        number: Index of the device among those that this process can see.
        name: Product name with the compute capability, as in `NVIDIA H100 (9.0)`.
        copied_in: Total bytes that `copy_in` copied to the device.
        copied_out: Total bytes that `copy_out` copied to the host.
        signalled_ns: Times at which a `signal` was reached, oldest first; the caller removes them.
    """

    number: int
    name: str
    copied_in: int
    copied_out: int
    signalled_ns: deque[int]

    def use(self) -> None:
        """Make the device's context current in the calling thread; works after a fault too."""

    def register(self, address: int, length_bytes: int, *, is_read_only: bool) -> None:
        """Page-lock host memory, or raise a `DriverError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`; does nothing after a fault."""

    def allocate(self, length_bytes: int) -> int:
        """Allocate device memory, or raise a `DriverError`."""

    def free(self, address: int) -> None:
        """Free device memory that no stream uses; does nothing after a fault."""

    def allocate_host(self, length_bytes: int) -> int:
        """Allocate page-locked host memory, or raise a `DriverError`."""

    def free_host(self, address: int) -> None:
        """Free page-locked host memory that no stream uses."""

    def copy_in(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """Enqueue a copy from the host; it blocks if that memory is not page-locked."""

    def copy_out(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """Enqueue a copy to the host; it blocks if that memory is not page-locked."""

    def copy_within(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """Enqueue a copy between two ranges of device memory."""

    def create_stream(self) -> int:
        """Create a stream, independent of the default stream."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream after its last operation; does nothing after a fault."""

    def create_event(self) -> int:
        """Create an event."""

    def record(self, event: int, stream: int) -> None:
        """Record an event behind the operations of a stream."""

    def wait(self, stream: int, event: int) -> None:
        """Let the later operations of a stream wait for the last record of an event."""

    def signal(self, stream: int, fd: int) -> None:
        """Enqueue an increment of an eventfd; it does not happen after an error."""

    def synchronize(self, stream: int) -> None:
        """Wait for a stream; raises the `DriverError` of its operations."""

    def synchronize_all(self) -> None:
        """Wait for all streams and their signals; raises the `DriverError` of the context."""

    def require_healthy(self, stream: int) -> None:
        """Raise the `DriverError` of the context, without waiting for the stream."""


@contextlib.contextmanager
def idle(device: Device) -> Iterator[None]:
    """Keep a device idle while the block releases memory of a library; raise `DeviceLost`.

    A destructor of ONNX Runtime holds the interpreter lock while it waits for the device, and the
    signal of a batch needs that lock.
    """
    with capture_lock:
        try:
            device.use()
            device.synchronize_all()
        except DriverError as error:
            raise DeviceLost(str(error)) from None
        yield


@functools.cache
def open_device(number: int) -> CudaDevice:
    """Open a device, once for this process; raise a `DriverError` without a driver or device."""
    return CudaDevice(number)


class CudaDevice:
    """See `Device`. It is open until the process exits."""

    def __init__(self, number: int) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(-1, f"the CUDA driver cannot be loaded: {error}") from None
        for name, signature in _SIGNATURES.items():
            getattr(self._library, name).argtypes = signature
        self.number = number
        self.copied_in = self.copied_out = 0
        self.signalled_ns: deque[int] = deque()
        device, context = c_int(), c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), number)
        product = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", product, _NAME_BYTES, device)
        capability = [c_int(), c_int()]
        for value, attribute in zip(capability, (_MAJOR, _MINOR), strict=True):
            self._call("cuDeviceGetAttribute", byref(value), attribute, device)
        self.name = f"{product.value.decode()} ({capability[0].value}.{capability[1].value})"
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._context = context
        self._host_function = _HostFunction(self._on_signal)
        self._on_signal_address = ctypes.cast(self._host_function, c_void_p)
        self.use()

    def use(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def register(self, address: int, length_bytes: int, *, is_read_only: bool) -> None:
        """See `Device`."""
        flags = _REGISTER_READ_ONLY if is_read_only else 0
        self._call("cuMemHostRegister_v2", address, length_bytes, flags)

    def unregister(self, address: int) -> None:
        """See `Device`."""
        with contextlib.suppress(DriverError):
            self._call("cuMemHostUnregister", address)

    def allocate(self, length_bytes: int) -> int:
        """See `Device`."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), length_bytes)
        return address.value

    def free(self, address: int) -> None:
        """See `Device`."""
        with contextlib.suppress(DriverError):
            self._call("cuMemFree_v2", address)

    def allocate_host(self, length_bytes: int) -> int:
        """See `Device`."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), length_bytes, 0)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy_in(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """See `Device`."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, length_bytes, stream)
        self.copied_in += length_bytes

    def copy_out(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """See `Device`."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, length_bytes, stream)
        self.copied_out += length_bytes

    def copy_within(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, length_bytes, stream)

    def create_stream(self) -> int:
        """See `Device`."""
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """See `Device`."""
        with contextlib.suppress(DriverError):
            self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        """See `Device`."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _NO_TIMES)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def signal(self, stream: int, fd: int) -> None:
        self._call("cuLaunchHostFunc", stream, self._on_signal_address, fd)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        self._call("cuCtxSynchronize")

    def require_healthy(self, stream: int) -> None:
        """See `Device`."""
        try:
            self._call("cuStreamQuery", stream)
        except DriverError as error:
            if error.code != NOT_READY:
                raise

    def _on_signal(self, fd: int) -> None:
        """Run on a thread of the driver, in which calls of the driver are not allowed."""
        self.signalled_ns.append(now_ns())
        os.eventfd_write(fd, 1)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DriverError(code, f"{name} failed: {self._error_text(code)}")

    def _error_text(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(c_int(code), byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA error {code})"
