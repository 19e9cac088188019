"""Every setting, declared once: type, bounds, unit, default and a sentence.

The reference page, the commented default file, `iskander config show` and all error texts come
from the declarations below. `config_file` reads them from a file. Nothing here touches a model or
a core.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from iskander.contract.tensors import STRING_BYTES

MIB = 1 << 20
HEADER_ROOM_BYTES = MIB
"""Room beside a batch's body for its metadata and padding."""

Positive = Meta(ge=1)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ServerConfig(_Section, frozen=True, kw_only=True):
    """Where the gateway listens and where it keeps its sockets."""

    address: Annotated[
        str | tuple[str, ...],
        Meta(description="`HOST:PORT`, `unix:PATH`, or a list of them. Port 0 takes a free one."),
    ] = "127.0.0.1:50051"
    unix_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}\Z", description="Mode of a `unix:` socket, octal.")
    ] = "0660"
    unix_owner: Annotated[
        str,
        Meta(description="`USER`, `USER:GROUP` or `:GROUP` to own a `unix:` socket; empty: us."),
    ] = ""
    runtime_directory: Annotated[
        str,
        Meta(
            description="Folder for the attach socket and locks; workers are started "
            "with its `attach.sock`. Empty: $RUNTIME_DIRECTORY, else a folder per address below "
            "$XDG_RUNTIME_DIR or /tmp."
        ),
    ] = ""
    cores: Annotated[
        str,
        Meta(
            description="Cpus of the gateway that no worker gets: `auto` is one physical core for "
            "each of its processes, of the first NUMA node that has two more, else a cpu list such "
            "as `0,8`. Empty: it runs anywhere."
        ),
    ] = ""
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Gateway processes that share the port; the workers serve all of them.",
        ),
    ] = 1
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that a stopping gateway waits for accepted batches.",
        ),
    ] = 30.0
    lame_duck_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds that a stopping gateway says that it is not ready and still takes "
            "batches, so that balancers look elsewhere first.",
        ),
    ] = 0.0


class LimitsConfig(_Section, frozen=True, kw_only=True):
    """What one batch or stream may take. Beyond a limit a request is refused by name."""

    rows: Annotated[int, Positive, Meta(description="Rows of a batch.")] = 1_048_576
    bytes: Annotated[int, Positive, Meta(description="Bytes of a batch, decompressed.")] = 64 * MIB
    columns: Annotated[int, Positive, Meta(description="Columns of a batch.")] = 1024
    string_bytes: Annotated[
        int,
        Positive,
        Meta(description="Bytes in a batch's strings: inputs and what passes beside them."),
    ] = 16 * MIB
    nesting: Annotated[
        int, Meta(ge=1, le=64, description="Depth of a column's type; a primitive has 1.")
    ] = 16
    message_bytes: Annotated[
        int, Positive, Meta(description="Bytes of one gRPC message or HTTP body.", le=2**31 - 1)
    ] = 72 * MIB
    streams: Annotated[int, Positive, Meta(description="DoExchange streams open at once.")] = 1024
    window_batches: Annotated[
        int, Positive, Meta(description="Batches of one stream in flight; then reading pauses.")
    ] = 8
    window_bytes: Annotated[
        int, Positive, Meta(description="Bytes of one stream in flight; then reading pauses.")
    ] = 64 * MIB
    arena_wait_ms: Annotated[
        int, Meta(ge=0, description="Milliseconds to wait for room in a full arena.")
    ] = 5000


class LaneConfig(_Section, frozen=True, kw_only=True):
    """How requests for one model version wait and are put together; `[models.lane]` overrides."""

    policy: Annotated[
        str,
        Meta(
            min_length=1,
            description="Whose turn it is: deadline_aware, model_deadline, tiered_deadline, "
            "batch_optimized, priority_tiered, round_robin, fifo, or one that is installed.",
        ),
    ] = "deadline_aware"
    linger_us: Annotated[
        int,
        Meta(ge=0, le=10_000_000, description="Microseconds to wait for a fuller batch."),
    ] = 0
    preferred_batch_rows: Annotated[
        tuple[Annotated[int, Positive], ...],
        Meta(description="Rows that the model runs best with; a batch is closed at one of them."),
    ] = ()
    pad_to: Annotated[
        tuple[Annotated[int, Positive], ...],
        Meta(
            description="The only numbers of rows that the model is run with; a batch is filled up "
            "to the next one. A model with a fixed batch axis has its own."
        ),
    ] = ()
    queue_requests: Annotated[int, Positive, Meta(description="Requests that wait.")] = 4096
    queue_rows: Annotated[int, Positive, Meta(description="Rows that wait.")] = 4_194_304
    queue_bytes: Annotated[
        int,
        Positive,
        Meta(
            description="Bytes of the inputs that wait. Beyond the arena's size streams wait for "
            "room there; below it they are refused."
        ),
    ] = 512 * MIB
    client_requests: Annotated[
        int, Positive, Meta(description="Requests of one client, waiting or running.")
    ] = 1024
    overflow: Annotated[
        Literal["reject", "drop_oldest", "drop_lowest_priority"],
        Meta(description="Who gives way when the queue is full: the newcomer, or one that waits."),
    ] = "reject"
    ttl_ms: Annotated[
        float,
        Meta(ge=0, le=86_400_000, description="Milliseconds that a request may wait; 0: for ever."),
    ] = 30_000.0
    deadline_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            description="Latency budget in milliseconds of a request that names none; 0: none.",
        ),
    ] = 0.0
    patience_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400_000,
            description="By when a request without a deadline wants to run, for its rank only; and "
            "what one level of priority counts for.",
        ),
    ] = 100.0
    staleness_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            description="Age in milliseconds of an observation that is not worth a run any more, "
            "by its client's `timestamp_ns`; 0: any age.",
        ),
    ] = 0.0
    newest_wins: Annotated[
        bool, Meta(description="A client's newer request replaces its older one that still waits.")
    ] = False
    refuse_late: Annotated[
        bool,
        Meta(description="Refuse at once what the learned cost says cannot meet its deadline."),
    ] = True
    weight: Annotated[
        float, Meta(ge=0.01, le=1000, description="Share of the workers against other models.")
    ] = 1.0


class WorkersConfig(_Section, frozen=True, kw_only=True):
    """The worker processes."""

    groups: Annotated[
        Literal["auto", "l3"] | tuple[str, ...],
        Meta(
            description="Core groups: `auto` is one for each NUMA node, `l3` one for each set of "
            "cores that share an L3 cache (of chiplets there are several in a node), or a list of "
            'cpu lists such as ["0-3", "4-7"].'
        ),
    ] = "auto"
    count: Annotated[
        int, Meta(ge=0, le=1024, description="Workers in all; 0: one for each group.")
    ] = 0
    spawn: Annotated[
        bool, Meta(description="Start the workers; false where a service manager does.")
    ] = True
    start_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Seconds for a worker to attach and load its models."),
    ] = 120.0
    hang_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds without a beat while a batch runs; then it is replaced.",
        ),
    ] = 30.0
    quorum: Annotated[
        int, Meta(ge=1, le=1024, description="Workers that a model needs to be called ready.")
    ] = 1
    recycle_batches: Annotated[
        int, Meta(ge=0, description="Batches after which a worker is replaced in order; 0: never.")
    ] = 0
    recycle_rss_bytes: Annotated[
        int, Meta(ge=0, description="Resident bytes above which it is, arenas included; 0: never.")
    ] = 0
    crash_loop: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Deaths in a row, none after 10 s of service, that are called a loop.",
        ),
    ] = 5
    reattach_s: Annotated[
        float,
        Meta(
            ge=0, le=86_400, description="Seconds that workers outlive their gateway; 0: for ever."
        ),
    ] = 30.0


class ArenaConfig(_Section, frozen=True, kw_only=True):
    """Shared memory, taken whole at start."""

    input_bytes: Annotated[
        int, Positive, Meta(description="Input arena of the gateway, in bytes.")
    ] = 256 * MIB
    output_bytes: Annotated[
        int, Positive, Meta(description="Output arena of each worker, in bytes.")
    ] = 64 * MIB
    huge_pages: Annotated[
        bool,
        Meta(
            description="Take the arenas from huge pages of 2 MiB where there are enough, reserved "
            "by `vm.nr_hugepages` or transparent by `shmem_enabled`. The log says what came of it."
        ),
    ] = False
    lock: Annotated[
        bool,
        Meta(
            description="Keep the arenas from being swapped out, as far as the limit of locked "
            "memory goes. The log says whether it did."
        ),
    ] = False


class AdminConfig(_Section, frozen=True, kw_only=True):
    """What the operator sees."""

    address: Annotated[
        str,
        Meta(
            description="`HOST:PORT` of `/livez`, `/readyz` and `/metrics` over HTTP. Port 0 takes "
            "a free one; empty: none."
        ),
    ] = "127.0.0.1:50052"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level to log.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines on stderr: for people, or JSON.")
    ] = "text"


class InferentialConfig(_Section, frozen=True, kw_only=True):
    """The protocol of the package `inferential`, over ZeroMQ."""

    address: Annotated[
        str,
        Meta(
            description="`tcp://HOST:PORT`, `tcp://*:PORT` or `ipc://PATH` for its clients. Port 0 "
            "takes a free one; empty: none."
        ),
    ] = ""
    errors: Annotated[
        Literal["silent", "metadata"],
        Meta(
            description="What an observation that fails is answered with: nothing, as its clients "
            "expect, or a reply whose metadata has the keys `error` and `error_code`."
        ),
    ] = "silent"
    newest_wins: Annotated[
        bool,
        Meta(
            description="A client's newer observation for a model replaces its older one that "
            "still waits, where its metadata does not say."
        ),
    ] = False
    connections: Annotated[int, Positive, Meta(description="Clients connected at once.")] = 1024


class HttpConfig(_Section, frozen=True, kw_only=True):
    """The Open Inference Protocol over HTTP. All clients wait while one's JSON is parsed."""

    address: Annotated[
        str, Meta(description="`HOST:PORT`, its own. Port 0 takes a free one; empty: none.")
    ] = ""
    connections: Annotated[int, Positive, Meta(description="Connections served at once.")] = 1024
    json_bytes: Annotated[
        int, Positive, Meta(description="Bytes of a request's JSON, and of results put into JSON.")
    ] = MIB
    bodies_bytes: Annotated[
        int, Positive, Meta(description="Bytes of all requests and answers that are held at once.")
    ] = 256 * MIB


class ModelConfig(_Section, frozen=True, kw_only=True):
    """One model version to serve."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}\Z", description="Name to call it.")
    ]
    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Model file, or folder with `model.onnx`; relative to this file. "
            "A `manifest.toml` beside the model is its contract.",
        ),
    ]
    version: Annotated[
        str | int | None,
        Meta(description="Version; the folder's name where that is a number, else 1."),
    ] = None
    backend: Annotated[Literal["onnx"], Meta(description="What runs it.")] = "onnx"
    execution_providers: Annotated[
        tuple[Literal["cpu", "cuda", "tensorrt"], ...],
        Meta(min_length=1, description="In order of preference; each one must be there."),
    ] = ("cpu",)
    intra_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Threads within an operator; 0: one for each physical core of the worker, "
            "since two of one core take turns at its arithmetic.",
        ),
    ] = 0
    inter_threads: Annotated[
        int, Meta(ge=0, le=1024, description="Operators at once, with parallel_execution; 0: 1.")
    ] = 0
    optimization_level: Annotated[
        Literal["disable", "level1", "level2", "level3"],
        Meta(description="Graph optimisation by ONNX Runtime."),
    ] = "level3"
    parallel_execution: Annotated[bool, Meta(description="Run independent operators at once.")] = (
        False
    )
    memory_pattern: Annotated[
        bool, Meta(description="Plan memory from the first run's shapes.")
    ] = True
    max_batch_rows: Annotated[
        int, Positive, Meta(description="Rows of a batch; a request with more is split.")
    ] = 65_536
    result_string_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31 - 1,
            description="Bytes of the longest string in a result. Room for all of them at this "
            "length is kept in the output arena while a batch runs; a longer one fails it.",
        ),
    ] = STRING_BYTES
    lane: Annotated[
        LaneConfig, Meta(description="A `[models.lane]` table: settings of `[lanes]`, overridden.")
    ] = LaneConfig()


class Config(_Section, frozen=True, kw_only=True):
    """All settings."""

    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    lanes: LaneConfig = LaneConfig()
    workers: WorkersConfig = WorkersConfig()
    arena: ArenaConfig = ArenaConfig()
    admin: AdminConfig = AdminConfig()
    inferential: InferentialConfig = InferentialConfig()
    http: HttpConfig = HttpConfig()
    models: Annotated[
        tuple[ModelConfig, ...], Meta(min_length=1, description="The models to serve.")
    ]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses as a tuple, however they were written."""
        address = self.server.address
        return (address,) if isinstance(address, str) else address
