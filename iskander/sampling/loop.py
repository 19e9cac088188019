"""Loop of the observer process: copies samples from the arenas and hands them to consumers.

Copies come first, so that the gateway holds its memory for a short time; then one sample is
consumed, and so on. A copy is used only after its verdict (`observation.messages`).

Runs on: the observer process, one thread. Source: unix(7) (SCM_RIGHTS, SOCK_SEQPACKET).
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from iskander.config.models import ModelConfig
from iskander.config.observation import ObservationConfig
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns, wall_ns
from iskander.foundation.logs import observation as log
from iskander.gateway.observation.messages import (
    FRAME_BYTES_MAX,
    INPUT_ARENA,
    SAMPLES_MAX,
    Arena,
    ArenaClosed,
    Copied,
    Model,
    ModelsForgotten,
    Report,
    SampleRef,
    Samples,
    Start,
    Verdicts,
    decode_to_observer,
    encode,
)
from iskander.interprocess.memory.segment import Segment
from iskander.sampling.sample import Consumer, Sample
from iskander.sampling.tensors import DAMAGE_ERRORS, Tensors

Result = TypeVar("Result")

TICK_NS: Final = NS_PER_S // 2
DRAIN_NS: Final = 2 * NS_PER_S
"""Time for the samples that wait at the end; the consumers complete their files afterwards, and the
gateway kills this process after ten seconds."""
TRIM_USED_NS: Final = 5 * NS_PER_S
TRIM_NS: Final = 60 * NS_PER_S
"""Times between two returns of free memory: after samples, and without any."""
SEND_S: Final = 30.0
"""The gateway reads in each iteration of its event loop."""


class Copy(NamedTuple):
    """Private memory with a sample that the gateway has not confirmed, or that waits."""

    ref: SampleRef
    tensors: Tensors
    inputs: pa.Buffer
    outputs: list[pa.Buffer]

    @property
    def bytes(self) -> int:
        """Bytes of the memory."""
        return sum(buffer.size for buffer in (self.inputs, *self.outputs))


class SampledModels(Mapping[tuple[str, str], ModelConfig]):
    """Settings of the models of samples by name and version, known before the first sample."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, int], Tensors] = {}
        self._settings: dict[tuple[str, str], ModelConfig] = {}

    def add(self, model: Model) -> None:
        """Add a model; its settings replace those of an older generation."""
        self.by_key[model.key, model.bucket] = Tensors(model)
        self._settings[model.name, model.version] = model.settings

    def clear(self, needed: Iterable[Model]) -> None:
        """Forget all models, but not the settings of some."""
        self.by_key.clear()
        self._settings = {(each.name, each.version): each.settings for each in needed}

    def __getitem__(self, title: tuple[str, str]) -> ModelConfig:
        """Settings of a model version."""
        return self._settings[title]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Names and versions."""
        return iter(self._settings)

    def __len__(self) -> int:
        """Number of model versions."""
        return len(self._settings)


class ObserverLoop:
    """Receives samples until the gateway closes the connection.

    Args:
        connection: The socket, after `Start`.
        config: Limit of copies.
        models: Receives the models.
        consumers: Consumers by name; each sample goes to all of them.
    """

    def __init__(
        self,
        connection: socket.socket,
        config: ObservationConfig,
        models: SampledModels,
        consumers: Mapping[str, Consumer],
    ) -> None:
        self._connection = connection
        self._connection.settimeout(SEND_S)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAME_BYTES_MAX)
        self._buffer_bytes = config.buffer_bytes
        self._models = models
        self._consumers = consumers
        self._arenas: dict[int, Segment] = {}
        self._unconfirmed: dict[int, Copy] = {}
        self._ready: deque[Copy] = deque()
        self._bytes = 0
        self._has_ended = False
        self._counts = {"consumed": 0, "damaged": 0, "failed": 0}
        self._reported_ns = 0
        self._trimmed_ns = 0
        self._is_used = False
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._poll = poll.poll

    def run(self) -> None:
        """Serve until the end of the connection; then consume what waits, and close."""
        due_ns = now_ns()
        while not self._has_ended:
            wait_ms = 0 if self._ready else max((due_ns - now_ns()) // NS_PER_MS, 0)
            if self._poll(wait_ms):
                self._receive()
            if self._ready:
                self._consume(self._ready.popleft())
            if now_ns() >= due_ns:
                due_ns = now_ns() + TICK_NS
                self._tick()
        drained_ns = now_ns() + DRAIN_NS
        while self._ready and now_ns() < drained_ns:
            self._consume(self._ready.popleft())
        if self._ready:
            log.samples_left(samples=len(self._ready))
        for name, consumer in self._consumers.items():
            self._guarded(name, consumer.close)

    def _receive(self) -> None:
        """Process messages that have arrived; answer their samples with one message.

        The gateway holds memory until the answer, so frames after the first `SAMPLES_MAX` samples
        are left for the next call.
        """
        copied = Copied([], [])
        has_more = True
        while has_more and not self._has_ended:
            try:
                frame, descriptors, _, _ = socket.recv_fds(
                    self._connection, FRAME_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                continue  # Reported once; the frames of the gateway follow.
            if frame:
                self._process(frame, descriptors, copied)
            else:
                self._has_ended = True
            answers = len(copied.tickets) + len(copied.refused)
            has_more = answers < SAMPLES_MAX and bool(self._poll(0))
        if copied.tickets or copied.refused:
            self._send(copied)

    def _process(self, frame: bytes, descriptors: list[int], copied: Copied) -> None:
        message = decode_to_observer(frame)
        match message:
            case Samples(refs):
                for ref in refs:
                    self._copy(ref, copied)
            case Verdicts(valid, invalid):
                for ticket in valid:
                    self._ready.append(self._unconfirmed.pop(ticket))
                for ticket in invalid:
                    self._bytes -= self._unconfirmed.pop(ticket).bytes
            case Arena(number, length):
                self._arenas[number] = Segment.attach(descriptors[0], length, is_writable=False)
            case ArenaClosed(number):
                self._arenas.pop(number).close()
            case Model():
                self._models.add(message)
            case ModelsForgotten():
                copies = (*self._unconfirmed.values(), *self._ready)
                self._models.clear(copy.tensors.model for copy in copies)
            case Start():
                raise AssertionError("a second Start")

    def _copy(self, ref: SampleRef, copied: Copied) -> None:
        size = ref.length_bytes + sum(part.length_bytes for part in ref.outputs)
        if self._bytes + size > self._buffer_bytes:
            copied.refused.append(ref.ticket)
            return
        tensors = self._models.by_key[ref.key, ref.bucket]
        view = self._arenas[INPUT_ARENA].view
        inputs = tensors.copy_inputs(view[ref.offset : ref.offset + ref.length_bytes])
        outputs = [
            tensors.copy_outputs(self._arenas[part.arena].view[part.offset :][: part.length_bytes])
            for part in ref.outputs
        ]
        copy = self._unconfirmed[ref.ticket] = Copy(ref, tensors, inputs, outputs)
        self._bytes += copy.bytes
        copied.tickets.append(ref.ticket)

    def _consume(self, copy: Copy) -> None:
        self._bytes -= copy.bytes
        ref, model = copy.ref, copy.tensors.model
        try:
            inputs = copy.tensors.read_inputs(copy.inputs)
            outputs = copy.tensors.read_outputs(ref.outputs, copy.outputs)
        except DAMAGE_ERRORS as error:
            log.sample_damaged(model=f"{model.name}/{model.version}", reason=str(error))
            self._counts["damaged"] += 1
            return
        sample = Sample(
            model.name, model.version, ref.time_ns, ref.rows, ref.id.hex(), inputs, outputs
        )
        self._counts["consumed"] += 1
        self._is_used = True
        for name, consumer in self._consumers.items():
            self._guarded(name, partial(consumer.consume, sample))

    def _tick(self) -> None:
        self._trim(now_ns())
        for name, consumer in self._consumers.items():
            self._guarded(name, partial(consumer.tick, wall_ns()))
        if now_ns() - self._reported_ns < NS_PER_S:
            return
        self._reported_ns = now_ns()
        values: dict[str, dict[str, Any]] = {"observer": {"counts": dict(self._counts)}}
        for name, consumer in self._consumers.items():
            report = self._guarded(name, consumer.report)
            if report is not None:
                values[name] = report
        self._send(Report(values))

    def _trim(self, now: int) -> None:
        """Return free memory to the system, more often after samples."""
        if now - self._trimmed_ns >= (TRIM_USED_NS if self._is_used else TRIM_NS):
            self._trimmed_ns, self._is_used = now, False
            # Memory of all threads: the allocator keeps what each of them has freed.
            pa.default_memory_pool().release_unused()

    def _guarded(self, name: str, call: Callable[[], Result]) -> Result | None:
        """Call a consumer; its error is its own, and does not stop the others."""
        try:
            return call()
        except Exception as error:
            self._counts["failed"] += 1
            log.consumer_raised(consumer=name, error=error)
            return None

    def _send(self, message: Copied | Report) -> None:
        try:
            self._connection.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self._has_ended = True  # The gateway has ended.


def receive_start(connection: socket.socket) -> Start | None:
    """Receive the first message; None if the gateway has ended."""
    frame = connection.recv(FRAME_BYTES_MAX)
    if not frame:
        return None
    message = decode_to_observer(frame)
    assert isinstance(message, Start)
    return message
