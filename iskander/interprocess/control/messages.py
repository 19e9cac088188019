"""Control messages between gateway and worker: direction, answer, and fields with units.

    handshake                                work
    worker -> gateway  Hello                 gateway -> worker  Load      -> Loaded | LoadFailed
    gateway -> worker  Welcome | Refused     gateway -> worker  Unload    -> Unloaded
                                             gateway -> worker  Execute   -> Done | Failed,
                                                                             Stepped, Copied
                                             gateway -> worker  Probe     -> Probed
                                             gateway -> worker  Drain     -> (exit 0)
                                             worker -> gateway  Leaving   -> Drain
                                             worker -> gateway  Notice

A message is a msgpack array that begins with a tag. In the handshake a frame is one message; at
work it is an array of messages, so that messages that are ready together cost one wakeup.
`PROTOCOL_VERSION` is raised with every change of these bytes. A worker sends it first, and a
gateway of another version rejects the worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.tensors import Contract
from iskander.errors import ProtocolError
from iskander.foundation.clock import NS_PER_S

PROTOCOL_VERSION = 20
RUN_NS_MAX = 86_400 * NS_PER_S
"""Of a batch; a faulty clock must not decide which lane is next."""


class LoadingSpec(msgspec.Struct, frozen=True, array_like=True):
    """Trust in model files, and limits of a load.

    Attributes:
        is_sandboxed: A new model is loaded in a sandboxed process first.
        sandbox_s: Timeout of the sandboxed load.
        sandbox_bytes: Limit of its private memory; 0 for the free memory of the system.
        model_bytes: Limit of a model's files, and of all its weights.
        is_shared: Weights are mapped from `cache`, a folder; empty for none.
        cache_bytes: Limit of the folder.
        custom_ops: Operator libraries that models may request.
        public_key: Ed25519, base64; models without its signature are rejected. Empty for none.
        engine_s: Timeout of a sandboxed build of TensorRT engines.
    """

    is_sandboxed: bool = False
    sandbox_s: float = 60.0
    sandbox_bytes: int = 0
    model_bytes: int = 1 << 36
    is_shared: bool = False
    cache: str = ""
    cache_bytes: int = 1 << 34
    custom_ops: tuple[str, ...] = ()
    public_key: str = ""
    engine_s: float = 900.0


class ModelSpec(msgspec.Struct, frozen=True, array_like=True):
    """Load parameters of one model version.

    Attributes:
        key: Number of the model in `Execute`; assigned by the gateway, never reused.
        threads_intra: Compute threads within an operator; 0 for one a physical core of the worker.
        string_bytes: Limit of one string in its results.
        fingerprint: Equal for equal files and options; a loaded model with it is kept.
        pool: Worker pool: its own, or empty for the shared pool.
        trust_pickle: Its code may unpickle files.
        trusted_types: Types that its skops files may contain beside the usual ones.
        devices: Kinds of workers that load it: `cpu`, `gpu`.
        gpu_memory_bytes: Its memory of a GPU; 0: not declared.
        pad_to: Numbers of rows that its batches are padded to; empty for none.
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
    string_bytes: int
    fingerprint: str
    pool: str = ""
    trust_pickle: bool = False
    trusted_types: tuple[str, ...] = ()
    loading: LoadingSpec = LoadingSpec()
    provider_options: dict[str, dict[str, str]] = {}
    devices: tuple[str, ...] = ("cpu",)
    gpu_memory_bytes: int = 0
    pad_to: tuple[int, ...] = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Registration request of a worker.

    Attributes:
        group: Core group that it was started for; None for any.
        index: Its slot at an earlier gateway; None for a new process.
        cpus: Cpus that it is pinned to; empty for a new process.
        pool: The only model that it serves, as `NAME/VERSION`; empty for the shared pool.
    """

    protocol: int
    version: str
    group: int | None
    index: int | None
    cpus: tuple[int, ...]
    pool: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Registration of a worker; carries descriptors (`attach.DESCRIPTORS`).

    Attributes:
        incarnation: Number of this registration, never reused.
        cpus: Cpus to pin itself to; `cores` is the number of their physical cores.
        node: Preferred NUMA node for memory; None for no preference.
        reattach_s: Time to wait for another gateway when this one is gone; 0: no limit.
        peers: Attach sockets of the other processes of this gateway, to be served too.
        has_one_pool: Whether its ONNX models share one thread pool.
        busy_poll_us: Time to poll for messages before it sleeps.
        channel: Path of the ipc sockets of a ZeroMQ channel, without the suffix; empty for the
            socket of this message.
    """

    incarnation: int
    index: int
    group: int
    cpus: tuple[int, ...]
    cores: int
    node: int | None
    input_bytes: int
    output_bytes: int
    heartbeat_bytes: int
    reattach_s: float
    peers: tuple[str, ...] = ()
    has_one_pool: bool = False
    busy_poll_us: int = 0
    channel: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Rejection of a registration, with the reason."""

    code: str
    message: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load and warm a model version beside the work, then answer `Loaded` or `LoadFailed`."""

    model: ModelSpec


class Unload(msgspec.Struct, frozen=True, array_like=True, tag="unload"):
    """Release a loaded model, by its key; none of its batches is in flight or follows."""

    model: int


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one request, and the location of their results.

    Attributes:
        input_offset: Offset of the request's body in the input arena, in bytes.
        request_rows: Rows of the whole request, which determine the layout of its body.
        rows: Number of rows from `first`, at least 1.
        output_offset: Offset of the body of these rows' results in the worker's output arena.
    """

    input_offset: int
    request_rows: int
    first: int
    rows: int
    output_offset: int


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Run one batch; answer `Done` or `Failed`.

    Attributes:
        batch_id: Never reused by a gateway; at least 1.
        rows: Rows that the model runs with: those of the slices, and padding.
        bucket: Number of the bucket of all rows; 0 if the model has none.
        deadline_ns: Deadline of the last caller; 0 if one of them has none.
        hops: Gateways that its requests passed before this one, at most.
    """

    batch_id: int
    model: int
    rows: int
    slices: tuple[Slice, ...]
    bucket: int = 0
    deadline_ns: int = 0
    hops: int = 0


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Check whether the remote server of a model is ready; answer `Probed`."""

    model: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Finish all earlier messages, then exit with 0.

    Of several gateway processes, only the first one's `Drain` ends the worker, after those of the
    others, which only detach it from them.

    Attributes:
        is_stopping: The whole gateway stops, so the other processes drain by themselves.
    """

    is_stopping: bool = False


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The model is loaded and has computed its warm-up batches.

    Attributes:
        files_sha256: Hash of the names and contents of the model's files, in hexadecimal; empty if
            there are too many files.
        rows: Whether its rows affect each other's results.
        library: Name and version of the library that computes its batches; empty if unknown.
    """

    model: int
    contract: Contract
    providers: tuple[str, ...]
    threads: int
    load_ms: float
    files_sha256: str = ""
    rows: RowRelation = RowRelation()
    library: str = ""


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served by this worker."""

    model: int
    code: str
    message: str


class Unloaded(msgspec.Struct, frozen=True, array_like=True, tag="unloaded"):
    """The worker has released the model."""

    model: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The batch was computed; `run_ns` is the time from the message to the answer."""

    batch_id: int
    run_ns: Annotated[int, Meta(ge=0, le=RUN_NS_MAX)]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Name and nanoseconds of each step of a pipeline; sent with its `Done`."""

    model: int
    steps: tuple[tuple[str, int], ...]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Bytes that a worker copied to and from its GPU since its last message; sent with `Done`."""

    in_bytes: int
    out_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The batch was not computed; `code` is that of an `IskanderError`.

    Attributes:
        is_input: The model runs other rows, so the values of these are the cause.
        row: First row of the request that fails alone; None if it is unknown.
        column: Column of the values that are the cause; empty if it is unknown.
    """

    batch_id: int
    code: str
    message: str
    retry_after_ms: int | None = None
    is_input: bool = False
    row: int | None = None
    column: str = ""


class Probed(msgspec.Struct, frozen=True, array_like=True, tag="probed"):
    """Why the remote server of a model is not ready; empty if it is, or if there is none."""

    model: int
    reason: str


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The worker received a stop signal and accepts nothing but `Drain`."""


class LoadStep(msgspec.Struct, frozen=True, array_like=True, tag="load_step"):
    """A long step of a load is still running, such as a build of TensorRT engines."""

    model: int
    step: str
    seconds: float


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """The system denied part of the worker's placement; the worker serves, but slower."""

    text: str


ToGatewayHandshake = Hello
ToWorkerHandshake = Welcome | Refused
ToWorker = Execute | Load | Unload | Probe | Drain
ToGateway = (
    Done
    | Failed
    | Stepped
    | Copied
    | Probed
    | LoadStep
    | Loaded
    | LoadFailed
    | Unloaded
    | Leaving
    | Notice
)

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(ToGatewayHandshake).decode
decode_welcome = msgspec.msgpack.Decoder(ToWorkerHandshake).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
decode_to_gateway = msgspec.msgpack.Decoder(list[ToGateway]).decode


def require_protocol(version: int) -> None:
    """Raise a `ProtocolError` unless the peer uses this protocol version."""
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer uses version {version} of the control protocol, expected "
            f"{PROTOCOL_VERSION}; run gateway and workers from one installation"
        )
