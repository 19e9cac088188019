"""Declaration of every setting: type, bounds, default and description.

The reference page, the commented default file, `iskander config show` and error texts are
generated from these declarations and from those in `models`, `repository` and `auth`. `loader`
reads them from a file.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from iskander.config.auth import AccessConfig, TlsConfig
from iskander.config.drift import DriftConfig
from iskander.config.events import EventsConfig
from iskander.config.models import LaneConfig, LoadingConfig, ModelConfig
from iskander.config.observation import ObservationConfig, PredictionLogConfig
from iskander.config.repository import RepositoryConfig
from iskander.config.section import (
    MIB,
    Live,
    NotNegative,
    NotNegativeSeconds,
    PollMicroseconds,
    Positive,
    Seconds,
    Section,
    ShortSeconds,
    UpTo1024,
)
from iskander.config.shadow import ShadowConfig
from iskander.config.sources import SourceConfig, SourceReadsConfig
from iskander.config.tracing import TracingConfig
from iskander.foundation.decoders import thread_safe

HEADER_BYTES_MAX = MIB
"""Longest metadata and padding of a batch; they are not part of `limits.bytes`."""


class ServerConfig(Section, frozen=True, kw_only=True):
    """Listeners and processes of the gateway.

    Attributes:
        address: `HOST:PORT`, `unix:PATH`, or a list of them. Port 0: a free port.
        unix_mode: Octal mode of a `unix:` socket.
        unix_owner: Owner of a `unix:` socket: `USER`, `USER:GROUP` or `:GROUP`. Empty: the server's
            user.
        runtime_directory: Folder of locks and of `attach.sock` for workers. Empty:
            $RUNTIME_DIRECTORY, else a folder per address below $XDG_RUNTIME_DIR or /tmp.
        cores: Cpus reserved for the gateway: a cpu list such as `0,8`, or `auto` for one physical
            core per process, on the first NUMA node with at least two more. Empty: any cpu.
        memory: Memory of the whole server, such as `8 GiB`, or `50 %` of the machine or the cgroup.
            The arenas, the budget of received bytes and the buffers of bodies and regions are
            shares of it, unless they are set; at least a third is left for the processes and their
            models. Empty: each has its own default.
        processes: Gateway processes that share the port and the workers.
        busy_poll_us: Microseconds to poll for messages before the gateway sleeps: lower latency for
            CPU time.
        drain_s: Seconds to wait at shutdown for accepted batches.
        lame_duck_s: Seconds at shutdown during which the gateway is not ready and still accepts
            batches, so that load balancers leave first.
        max_connection_age_s: Seconds after which a gRPC or HTTP connection is closed gracefully,
            within 10 % at random, so that clients also connect to new servers. 0: no limit.
        max_connection_age_grace_s: Seconds for the open calls of such a connection; then they end
            with the retryable error `draining`. 0: no limit.
        load_reports: Add a load report (ORCA, `endpoint-load-metrics-bin`) to the trailers of gRPC
            calls, for `weighted_round_robin`.
    """

    restart_reason: ClassVar[str] = "listeners and processes are set up at the start"

    address: str | tuple[str, ...] = "127.0.0.1:50051"
    unix_mode: Annotated[str, Meta(pattern=r"^0?[0-7]{3}\Z")] = "0660"
    unix_owner: str = ""
    runtime_directory: str = ""
    cores: str = ""
    memory: str = ""
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    busy_poll_us: PollMicroseconds = 0
    drain_s: Live[Seconds] = 30.0
    lame_duck_s: Live[Annotated[float, Meta(ge=0, le=3600)]] = 0.0
    max_connection_age_s: Live[NotNegativeSeconds] = 0.0
    max_connection_age_grace_s: Live[NotNegativeSeconds] = 0.0
    load_reports: bool = False


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Limits per batch, stream and port. A request above a limit is rejected.

    Attributes:
        rows: Rows of a batch.
        bytes: Bytes of a batch, decompressed.
        columns: Columns of a batch.
        string_bytes: Bytes of the strings of a batch, passed-through columns included.
        result_bytes: Bytes of the results of a request: a batch, or its rows in one bucket.
        nesting: Depth of a column's type; a primitive type has depth 1.
        fields: Fields of a schema at all depths.
        schema_metadata_bytes: Bytes of the custom metadata of a schema and its fields.
        app_metadata_bytes: Bytes of the `app_metadata` of a batch.
        message_bytes: Bytes of one gRPC message or HTTP body.
        streams: DoExchange streams open at once, and as many calls of other kinds, in
            [shares](../architecture.md#limits) of callers.
        window_batches: Batches of one stream in flight before the server stops reading it.
        window_bytes: Bytes of one stream in flight before the server stops reading it.
        arena_wait_ms: Milliseconds to wait for free space in a full arena.
        connections: Connections of gRPC clients open at once.
        source_percent: Percent of a port's connections for one source, while fewer than an eighth
            are free. A source is an IPv4 address, the first 64 bits of an IPv6 address, or all
            unix sockets.
        receive_bytes: Bytes received and not processed, and unread responses, of all connections.
            Above it, the largest messages are rejected. 0: an eighth of the memory of the machine
            or the cgroup.
    """

    rows: Live[Positive] = 1_048_576
    bytes: Live[Positive] = 64 * MIB
    columns: Live[Positive] = 1024
    string_bytes: Live[Positive] = 16 * MIB
    result_bytes: Live[Positive] = 1024 * MIB
    nesting: Live[Annotated[int, Meta(ge=1, le=64)]] = 16
    fields: Live[Positive] = 4096
    schema_metadata_bytes: Live[NotNegative] = MIB // 4
    app_metadata_bytes: Live[NotNegative] = 4096
    message_bytes: Live[Annotated[int, Meta(ge=1, le=2**31 - 1)]] = 72 * MIB
    streams: Live[Positive] = 1024
    window_batches: Live[Positive] = 8
    window_bytes: Live[Positive] = 64 * MIB
    arena_wait_ms: Live[NotNegative] = 5000
    connections: Live[Positive] = 10_000
    source_percent: Live[Annotated[int, Meta(ge=1, le=100)]] = 25
    receive_bytes: Live[NotNegative] = 0


class TimeoutsConfig(Section, frozen=True, kw_only=True):
    """Timeouts of client connections, checked every 5 s.

    Attributes:
        preface_s: Seconds for the connection preface or greeting.
        headers_s: Seconds from the first to the last byte of a header block, or of a frame without
            message payload.
        idle_s: Seconds without input before the server sends a PING.
        keepalive_s: Seconds for the response to that PING.
        message_s: Seconds that a message may stay below 500 bytes/s, from its first to its last
            byte.
        response_s: Seconds during which a client reads nothing of a response.
    """

    preface_s: Live[ShortSeconds] = 10.0
    headers_s: Live[ShortSeconds] = 10.0
    idle_s: Live[Seconds] = 60.0
    keepalive_s: Live[ShortSeconds] = 20.0
    message_s: Live[ShortSeconds] = 30.0
    response_s: Live[Seconds] = 300.0


class WorkersConfig(Section, frozen=True, kw_only=True):
    """Worker processes and their supervision.

    Attributes:
        groups: Core groups: `auto` for one per NUMA node, `l3` for one per set of cores with a
            common L3 cache, both with a group for each GPU if a model wants one. Or a list of cpu
            lists, `auto` or `l3` for all cores that are not listed, and GPUs, such as ["0-3",
            "4-7", "gpu:0"]: `gpu:` and number, UUID or PCI address, `gpu:0:1` for a MIG slice,
            `gpu:auto` for all.
        count: Number of workers without a GPU; 0: one per core group. A GPU has one.
        gpu_reserve_bytes: Memory of a GPU for the context of CUDA and its libraries, beside the
            budgets of the models, for each worker.
        thread_pool: Compute threads of ONNX models: a pool per model, or one per worker with a
            thread for each physical core.
        channel: Channel between gateway and worker: a unix socket, or ZeroMQ over ipc, which needs
            more CPU time.
        spawn: Start the workers; false if a service manager does, so that they keep their models
            while the gateway restarts.
        busy_poll_us: Microseconds to poll for messages before a worker sleeps.
        start_s: Seconds for a worker to attach and load its models.
        hang_s: Seconds without a heartbeat during a batch before a worker is replaced, or less by
            `hang_factor`.
        hang_factor: Timeout of a batch as a multiple of the slowest similar batch, at least 2 s and
            at most `hang_s`; 0: always `hang_s`.
        quorum: Workers that a model needs to be ready.
        recycle_batches: Batches after which a worker is recycled; 0: no limit.
        recycle_rss_bytes: Resident bytes, arenas included, above which a worker is recycled; 0: no
            limit.
        crash_loop: Consecutive deaths, each within 10 s of service, that are a crash loop.
        model_deaths: Deaths of a model's own worker during its batches, within `model_deaths_s`,
            before its [quarantine](../placement.md#isolation-and-quarantine). 0: no worker of its
            own, and no quarantine.
        model_deaths_s: Seconds over which `model_deaths` are counted, and after which a model
            without a death returns to the shared workers.
        quarantine_s: Seconds for which the requests of a model in quarantine are rejected, at
            first.
        reattach_s: Seconds for which workers wait for a new gateway after theirs died, or, without
            `spawn`, after it ended in any way; 0: no limit.
    """

    restart_reason: ClassVar[str] = "workers are placed and set up when they start"

    groups: Literal["auto", "l3"] | tuple[str, ...] = "auto"
    count: UpTo1024 = 0
    gpu_reserve_bytes: NotNegative = 1024 * MIB
    thread_pool: Literal["model", "worker"] = "model"
    channel: Literal["seqpacket", "zmq"] = "seqpacket"
    spawn: bool = True
    busy_poll_us: PollMicroseconds = 0
    start_s: Seconds = 120.0
    hang_s: Live[Seconds] = 30.0
    hang_factor: Live[Annotated[float, Meta(ge=0, le=1_000_000)]] = 20.0
    quorum: Annotated[int, Meta(ge=1, le=1024)] = 1
    recycle_batches: Live[NotNegative] = 0
    recycle_rss_bytes: Live[NotNegative] = 0
    crash_loop: Live[Annotated[int, Meta(ge=1, le=1000)]] = 5
    model_deaths: Live[Annotated[int, Meta(ge=0, le=1000)]] = 3
    model_deaths_s: Live[Seconds] = 300.0
    quarantine_s: Live[Seconds] = 60.0
    reattach_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0


class ArenaConfig(Section, frozen=True, kw_only=True):
    """Shared memory, allocated at startup.

    Attributes:
        input_bytes: Bytes of the gateway's input arena.
        output_bytes: Bytes of each worker's output arena.
        huge_pages: Allocate arenas from [huge pages](../placement.md#huge-pages) of 2 MiB if enough
            are free.
        lock: Lock the arenas in memory, up to the [limit](../placement.md#locked-memory).
    """

    restart_reason: ClassVar[str] = "shared memory is allocated at the start"

    input_bytes: Positive = 256 * MIB
    output_bytes: Positive = 64 * MIB
    huge_pages: bool = False
    lock: bool = False


class SharedMemoryConfig(Section, frozen=True, kw_only=True):
    """Shared-memory regions for the batches of clients on the same machine.

    Attributes:
        path: Unix socket on which clients request regions, with `server.unix_mode` and
            `unix_owner`. Gateway processes but the first append their number. Empty: disabled.
        region_bytes: Bytes of one region. A client has one region per stream.
        total_bytes: Bytes of all regions of a gateway process.
        regions: Regions allocated at once.
    """

    restart_reason: ClassVar[str] = "the socket is opened at the start"

    path: str = ""
    region_bytes: Live[Positive] = 256 * MIB
    total_bytes: Live[Positive] = 1024 * MIB
    regions: Live[Positive] = 64


class AdminConfig(Section, frozen=True, kw_only=True):
    """Admin endpoints and logging.

    Attributes:
        address: `HOST:PORT` of `/livez`, `/readyz`, `/metrics` and the page over HTTP. Port 0: a
            free port. Empty: disabled. Needs the extra `http`; without the extra, the default is
            empty.
        tls: Serve this port with the certificate of `tls`: probes and scrapers need `https`.
        page: Serve a page with the state of the server at `/`, and its data at `/status.json`.
        log_level: Lowest level to log.
        log_format: Format of log lines on stderr, also of the workers; JSON has a line for each
            event, with its fields.
        triton_metrics: Add metrics of each model with the names of Triton (`nv_inference_*`).
    """

    restart_reason: ClassVar[str] = "the admin port and the log format are set up at the start"

    address: str = "127.0.0.1:50052"
    tls: bool = False
    page: bool = True
    log_level: Live[Literal["debug", "info", "warning", "error"]] = "info"
    log_format: Literal["text", "json"] = "text"
    triton_metrics: bool = False


class InferentialConfig(Section, frozen=True, kw_only=True):
    """The protocol of the package `inferential`, over ZeroMQ.

    Attributes:
        address: `tcp://HOST:PORT`, `tcp://*:PORT` or `ipc://PATH` for clients. Port 0: a free port.
            Empty: disabled.
        errors: Response to a failed observation: none, or a reply with the metadata `error` and
            `error_code`.
        newest_wins: Default of an observation's `newest_wins`, as of `lanes`.
        connections: Clients connected at once.
    """

    restart_reason: ClassVar[str] = "the listener is set up at the start"

    address: str = ""
    errors: Literal["silent", "metadata"] = "silent"
    newest_wins: bool = False
    connections: Live[Positive] = 1024


class HttpConfig(Section, frozen=True, kw_only=True):
    """The Open Inference Protocol over HTTP. Long JSON delays all requests; binary data does not.

    Attributes:
        address: `HOST:PORT`, different from the other ports. Port 0: a free port. Empty: disabled.
            Needs the extra `http`.
        connections: Connections open at once.
        json_bytes: Bytes of a request's JSON, and of results as JSON.
        bodies_bytes: Bytes of all buffered requests and responses.
    """

    restart_reason: ClassVar[str] = "the listener is set up at the start"

    address: str = ""
    connections: Live[Positive] = 1024
    json_bytes: Live[Positive] = MIB
    bodies_bytes: Live[Positive] = 256 * MIB


class ExtensionsConfig(Section, frozen=True, kw_only=True):
    """Settings of installed extensions.

    Attributes:
        protocols: Protocols of other distributions by name, each with a table of its own settings.
    """

    restart_reason: ClassVar[str] = "protocols are created at the start"

    protocols: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


@thread_safe
class Config(Section, frozen=True, kw_only=True):
    """All settings."""

    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    lanes: LaneConfig = LaneConfig()
    workers: WorkersConfig = WorkersConfig()
    loading: LoadingConfig = LoadingConfig()
    arena: ArenaConfig = ArenaConfig()
    shared_memory: SharedMemoryConfig = SharedMemoryConfig()
    admin: AdminConfig = AdminConfig()
    tracing: TracingConfig = TracingConfig()
    events: EventsConfig = EventsConfig()
    observation: ObservationConfig = ObservationConfig()
    prediction_log: PredictionLogConfig = PredictionLogConfig()
    drift: DriftConfig = DriftConfig()
    shadow: ShadowConfig = ShadowConfig()
    inferential: InferentialConfig = InferentialConfig()
    http: HttpConfig = HttpConfig()
    access: AccessConfig = AccessConfig()
    tls: TlsConfig = TlsConfig()
    repository: RepositoryConfig = RepositoryConfig()
    source_reads: SourceReadsConfig = SourceReadsConfig()
    extensions: ExtensionsConfig = ExtensionsConfig()
    models: tuple[ModelConfig, ...] = ()
    sources: tuple[SourceConfig, ...] = ()

    @property
    def is_observed(self) -> bool:
        """Whether requests are, or may be, sampled for the observer process."""
        has_consumer = bool(self.prediction_log.path) or self.drift.enabled
        may_have_models = bool(self.repository.path) and has_consumer
        return may_have_models or any(model.observed_share for model in self.models)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`server.address` as a tuple."""
        address = self.server.address
        return (address,) if isinstance(address, str) else address
