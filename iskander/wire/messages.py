"""Every control message between gateway and worker: direction, answer, fields with units.

    unix socket (birth and death)            ZMQ (work)
    worker -> gateway  Hello                 gateway -> worker  Load      -> Loaded | LoadFailed
    gateway -> worker  Welcome | Refused     gateway -> worker  Execute   -> Done | Failed
                                             gateway -> worker  Drain     -> (exit 0)
                                             worker -> gateway  Leaving   -> Drain

A message is a msgpack array that begins with a tag. Over ZMQ a frame is an array of messages: what
is ready together travels, and wakes the other side, together. `PROTOCOL_VERSION` is raised with
every change of these bytes; a worker says it first, and a gateway of another one refuses it.
"""

from __future__ import annotations

import msgspec

from iskander.contract.tensors import Contract
from iskander.errors import ProtocolError

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 1 << 20


class ModelSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a worker loads one model version.

    Attributes:
        key: Number by which `Execute` names it; the gateway's own, one per model version.
        threads_intra: Compute threads within an operator; 0 for all cores of the worker.
        fingerprint: Equal for equal files and options; what is loaded already is kept.
    """

    key: int
    name: str
    version: str
    backend: str
    path: str
    execution_providers: tuple[str, ...]
    threads_intra: int
    threads_inter: int
    optimization_level: str
    is_parallel: bool
    has_memory_pattern: bool
    rows_max: int
    fingerprint: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker asks to be taken on.

    Attributes:
        group: Core group that it was started for; None for any.
        index: The place it had with an earlier gateway; None for a newborn.
        cpus: Cores that it is pinned to already; empty for a newborn.
    """

    protocol: int
    version: str
    group: int | None
    index: int | None
    cpus: tuple[int, ...]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The gateway takes the worker on; carries the input, output and beat descriptors.

    Attributes:
        incarnation: Number of this life; every answer carries it.
        node: NUMA node of the cores, where there are several.
        work_address: ZMQ address that the worker listens on.
        results_address: ZMQ address that the gateway listens on.
        reattach_s: How long to wait for another gateway when this one is gone; 0 for ever.
    """

    incarnation: int
    index: int
    group: int
    cpus: tuple[int, ...]
    node: int | None
    work_address: str
    results_address: str
    input_bytes: int
    output_bytes: int
    beat_bytes: int
    reattach_s: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The gateway does not take the worker on, and why."""

    code: str
    message: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load and warm a model version, then answer `Loaded` or `LoadFailed`."""

    model: ModelSpec


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Run one batch; answer `Done` or `Failed`.

    Attributes:
        batch_id: Never used twice by a gateway.
        model: The model's key.
        rows: Rows of the batch, at least 1.
        input_offset: Where the input body begins in the input arena, in bytes.
        output_offset: Where the output body begins in the worker's output arena, in bytes.
    """

    batch_id: int
    model: int
    rows: int
    input_offset: int
    output_offset: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Finish what came before this message, then exit with 0."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker listens for work; the first thing it says over ZMQ."""

    incarnation: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The model is loaded and has computed its warm-up batches."""

    incarnation: int
    model: int
    contract: Contract
    providers: tuple[str, ...]
    threads: int
    load_ms: float


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served by this worker."""

    incarnation: int
    model: int
    code: str
    message: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The batch is computed and its results lie where `Execute` said.

    Attributes:
        run_ns: Time from the message to the answer.
    """

    incarnation: int
    batch_id: int
    run_ns: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The batch was not computed; `code` is that of an `IskanderError`."""

    incarnation: int
    batch_id: int
    code: str
    message: str


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The worker was asked to stop: send it nothing but `Drain`."""

    incarnation: int


ToGatewayAtBirth = Hello
ToWorkerAtBirth = Welcome | Refused
ToWorker = Execute | Load | Drain
ToGateway = Done | Failed | Ready | Loaded | LoadFailed | Leaving

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(ToGatewayAtBirth).decode
decode_welcome = msgspec.msgpack.Decoder(ToWorkerAtBirth).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
decode_to_gateway = msgspec.msgpack.Decoder(list[ToGateway]).decode


def require_protocol(theirs: int) -> None:
    """Refuse to talk to a process that speaks another version.

    Raises:
        ProtocolError: The versions differ.
    """
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other process speaks version {theirs} of the control protocol and this one "
            f"version {PROTOCOL_VERSION}; run gateway and workers from one installation"
        )
