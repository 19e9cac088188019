"""Every control message between gateway and worker: direction, answer, fields with units.

    birth                                    work
    worker -> gateway  Hello                 gateway -> worker  Load      -> Loaded | LoadFailed
    gateway -> worker  Welcome | Refused     gateway -> worker  Unload    -> Unloaded
                                             gateway -> worker  Execute   -> Done | Failed, Stepped
                                             gateway -> worker  Drain     -> (exit 0)
                                             worker -> gateway  Leaving   -> Drain
                                             worker -> gateway  Notice

A message is a msgpack array that begins with a tag. At birth a frame is a message; at work it is an
array of messages: what is ready together travels, and wakes the other side, together.
`PROTOCOL_VERSION` is raised with every change of these bytes; a worker says it first, and a gateway
of another one refuses it.
"""

from __future__ import annotations

import msgspec

from iskander.contract.tensors import Contract
from iskander.errors import ProtocolError

PROTOCOL_VERSION = 12


class LoadingSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a worker believes of model files, and what opening one may take.

    Attributes:
        is_tried: A new model is opened in a process of its own first.
        trial_s: Seconds that this may take.
        trial_bytes: Private bytes that it may take; 0 for what the system has free.
        model_bytes: Of a model's files, and of all its weights.
        is_shared: Weights are mapped from `cache`, a folder; empty where there is none.
        cache_bytes: Of the folder.
        custom_ops: Operator libraries that models may ask for.
        public_key: Ed25519, base64; models are refused without its signature. Empty for none.
    """

    is_tried: bool = False
    trial_s: float = 60.0
    trial_bytes: int = 0
    model_bytes: int = 1 << 36
    is_shared: bool = False
    cache: str = ""
    cache_bytes: int = 1 << 34
    custom_ops: tuple[str, ...] = ()
    public_key: str = ""


class ModelSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a worker loads one model version.

    Attributes:
        key: Number by which `Execute` names it; the gateway's own, never used twice.
        threads_intra: Compute threads within an operator; 0 for one a physical core of the worker.
        string_bytes: The most bytes of one string in its results.
        fingerprint: Equal for equal files and options; what is loaded already is kept.
        pool: Workers that it is for: its own, or empty for those of all models.
        provider_options: Of execution providers, by their names.
        trust_pickle: Its code may unpickle files.
        trusted_types: Types that its skops files may hold beside the usual ones.
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


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker asks to be taken on.

    Attributes:
        group: Core group that it was started for; None for any.
        index: The place it had with an earlier gateway; None for a newborn.
        cpus: Cores that it is pinned to already; empty for a newborn.
        pool: The one model that it is to serve, as `NAME/VERSION`; empty for those of all models.
    """

    protocol: int
    version: str
    group: int | None
    index: int | None
    cpus: tuple[int, ...]
    pool: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The gateway takes the worker on; carries descriptors (`attach.DESCRIPTORS`).

    Attributes:
        incarnation: Number of this life of the worker, never used twice.
        cpus: Those that it is to pin itself to; `cores` is how many physical cores they are of.
        node: NUMA node whose memory it is to prefer; None for no preference.
        reattach_s: How long to wait for another gateway when this one is gone; 0 for ever.
        siblings: Attach sockets of the other processes of this gateway, to be served too.
        has_one_pool: Whether its ONNX models compute with one pool of threads.
        busy_poll_us: How long to look for more before it sleeps.
    """

    incarnation: int
    index: int
    group: int
    cpus: tuple[int, ...]
    cores: int
    node: int | None
    input_bytes: int
    output_bytes: int
    beat_bytes: int
    reattach_s: float
    siblings: tuple[str, ...] = ()
    has_one_pool: bool = False
    busy_poll_us: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The gateway does not take the worker on, and why."""

    code: str
    message: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load and warm a model version beside the work, then answer `Loaded` or `LoadFailed`."""

    model: ModelSpec


class Unload(msgspec.Struct, frozen=True, array_like=True, tag="unload"):
    """Give a loaded model up, by its key; no batch of it is under way, and none comes."""

    model: int


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one request, and where their results go.

    Attributes:
        input_offset: Where the request's input body begins in the input arena, in bytes.
        request_rows: Rows of the whole request, which decide how that body lies.
        first: The first of its rows that is meant.
        rows: How many, at least 1.
        output_offset: Where the body of these rows' results begins in the worker's output arena.
    """

    input_offset: int
    request_rows: int
    first: int
    rows: int
    output_offset: int


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Run one batch; answer `Done` or `Failed`.

    Attributes:
        batch_id: Never used twice by a gateway; at least 1.
        model: The model's key.
        rows: Rows that the model is run with: those of the slices, and what fills it up to them.
        slices: Of one or more requests, in the batch's order.
        bucket: Number of the bucket that all rows are in; 0 where the model has none.
    """

    batch_id: int
    model: int
    rows: int
    slices: tuple[Slice, ...]
    bucket: int = 0


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Finish what came before this message, then exit with 0.

    Where several gateway processes share the worker, only the first one's ends it, once the others
    have let go too; the others' end what they have of it.

    Attributes:
        is_stopping: The gateway stops, so the others do by themselves.
    """

    is_stopping: bool = False


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The model is loaded and has computed its warm-up batches."""

    model: int
    contract: Contract
    providers: tuple[str, ...]
    threads: int
    load_ms: float


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served by this worker."""

    model: int
    code: str
    message: str


class Unloaded(msgspec.Struct, frozen=True, array_like=True, tag="unloaded"):
    """The worker has the model no longer."""

    model: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The batch is computed and its results lie where `Execute` said.

    Attributes:
        run_ns: Time from the message to the answer.
    """

    batch_id: int
    run_ns: int


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Beside the `Done` of a pipeline: name and nanoseconds of each of its steps."""

    model: int
    steps: tuple[tuple[str, int], ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The batch was not computed; `code` is that of an `IskanderError`."""

    batch_id: int
    code: str
    message: str


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The worker was asked to stop: send it nothing but `Drain`."""


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """Something of its place was refused to the worker; it serves all the same, slower."""

    text: str


ToGatewayAtBirth = Hello
ToWorkerAtBirth = Welcome | Refused
ToWorker = Execute | Load | Unload | Drain
ToGateway = Done | Failed | Stepped | Loaded | LoadFailed | Unloaded | Leaving | Notice

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
