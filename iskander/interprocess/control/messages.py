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
"""Maximum run time of a batch; a faulty clock must not decide which lane is next."""


class LoadingSpec(msgspec.Struct, frozen=True, array_like=True):
    """Trust in model files, and limits of a load.

    Attributes:
        is_sandboxed: Whether a new model is loaded in a sandboxed process first.
        sandbox_s: Timeout of the sandboxed load.
        sandbox_bytes: Limit of the sandboxed process's private memory; 0 for the system's free
            memory.
        model_bytes: Limit of a model's files, and of all its weights.
        is_shared: Whether weights are mapped from files in `cache`.
        cache: Folder of weights that workers share; empty for no folder.
        cache_bytes: Limit of all files in `cache`.
        custom_ops: Operator libraries that models may request.
        public_key: Ed25519 key in base64; models without a signature of this key are rejected.
            Empty: no model needs a signature.
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
        key: Number of the model in `Execute`; the gateway assigns it and never reuses it.
        threads_intra: Compute threads within an operator; 0 for a thread per physical core of the
            worker.
        string_bytes: Limit of one string in the model's results.
        fingerprint: Text that is equal for equal files and options; a worker keeps a loaded model
            with the same fingerprint.
        pool: Name of the model's own worker pool; empty for the shared pool.
        trust_pickle: Whether the model's code may unpickle files.
        trusted_types: Types that the model's skops files may contain beside the usual types.
        devices: Kinds of workers that load the model: `cpu`, `gpu`.
        gpu_memory_bytes: Memory of a GPU that the model needs; 0: not declared.
        pad_to: Numbers of rows to which the model's batches are padded; empty: no padding.
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
        group: Core group for which the worker was started; None for any group.
        index: The worker's slot at an earlier gateway; None for a new process.
        cpus: Cpus to which the worker is pinned; empty for a new process.
        pool: The only model that the worker serves, as `NAME/VERSION`; empty for the shared pool.
    """

    protocol: int
    version: str
    group: int | None
    index: int | None
    cpus: tuple[int, ...]
    pool: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Registration of a worker; the message carries descriptors (`attach.DESCRIPTORS`).

    Attributes:
        incarnation: Number of this registration, never reused.
        cpus: Cpus to which the worker pins itself; `cores` is the number of their physical cores.
        node: Preferred NUMA node for memory; None for no preference.
        reattach_s: Time to wait for another gateway when this gateway is gone; 0: no limit.
        peers: Attach sockets of the gateway's other processes, which the worker also serves.
        has_one_pool: Whether the worker's ONNX models share one thread pool.
        busy_poll_us: Time for which the worker polls for messages before it sleeps.
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
    """Load and warm a model version while batches run, then answer `Loaded` or `LoadFailed`."""

    model: ModelSpec


class Unload(msgspec.Struct, frozen=True, array_like=True, tag="unload"):
    """Release the loaded model with the key `model`.

    No batch of the model is in flight or follows.
    """

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
        batch_id: Number of the batch, at least 1; a gateway never reuses a number.
        rows: Number of rows of the model's run: the rows of the slices, and padding.
        bucket: Number of the bucket of all rows; 0 if the model has no buckets.
        deadline_ns: Latest deadline of the callers; 0 if a caller has no deadline.
        hops: Maximum number of gateways that a request of the batch passed before this gateway.
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

    Of several gateway processes, only the first process ends the worker by `Drain`. The `Drain` of
    any other process comes before and only detaches the worker from that process.

    Attributes:
        is_stopping: Whether the whole gateway stops, so that the other processes drain by
            themselves.
    """

    is_stopping: bool = False


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """Answer to `Load`: the model is loaded and has computed its warm-up batches.

    Attributes:
        files_sha256: Hash of the names and contents of the model's files, in hexadecimal; empty if
            there are too many files.
        rows: Whether the rows of a batch affect each other's results.
        library: Name and version of the library that computes the model's batches; empty if
            unknown.
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
    """Answer to `Load`: this worker cannot serve the model."""

    model: int
    code: str
    message: str


class Unloaded(msgspec.Struct, frozen=True, array_like=True, tag="unloaded"):
    """Answer to `Unload`: the worker has released the model."""

    model: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Answer to `Execute`: the batch was computed in `run_ns`, from the message to the answer."""

    batch_id: int
    run_ns: Annotated[int, Meta(ge=0, le=RUN_NS_MAX)]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Name and nanoseconds of each step of a pipeline; sent with the batch's `Done`."""

    model: int
    steps: tuple[tuple[str, int], ...]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Bytes that a worker copied to and from its GPU since its last message; sent with `Done`."""

    in_bytes: int
    out_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Answer to `Execute`: the batch was not computed; `code` is the code of an `IskanderError`.

    Attributes:
        is_input: Whether the rows' values are the cause: the model does run with other rows.
        row: First row of the request that also fails alone; None if unknown.
        column: Column of the values that are the cause; empty if unknown.
    """

    batch_id: int
    code: str
    message: str
    retry_after_ms: int | None = None
    is_input: bool = False
    row: int | None = None
    column: str = ""


class Probed(msgspec.Struct, frozen=True, array_like=True, tag="probed"):
    """Answer to `Probe`: why the model's remote server is not ready.

    Empty if it is ready, or if the model has no remote server.
    """

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
