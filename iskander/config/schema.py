"""Every setting, declared once: type, bounds, unit, default and a sentence.

The reference page, the commented default file, `iskander config show` and all error texts come
from the declarations below, and for models and lanes from those of `config_models`. `config_file`
reads them from a file. Nothing here touches a model or a core.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from iskander.config.auth import AccessConfig, TlsConfig
from iskander.config.models import LaneConfig, LoadingConfig, ModelConfig
from iskander.config.repository import RepositoryConfig
from iskander.config.section import MIB, Positive, Section
from iskander.decoders import thread_safe

HEADER_ROOM_BYTES = MIB
"""Room beside a batch's body for its metadata and padding."""


class ServerConfig(Section, frozen=True, kw_only=True):
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
    busy_poll_us: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Microseconds for which the gateway goes on looking for messages after its "
            "last work, before it sleeps: less latency for the CPU that nobody else wants.",
        ),
    ] = 0
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


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What one batch or stream may take. Beyond a limit a request is refused by name."""

    rows: Annotated[int, Positive, Meta(description="Rows of a batch.")] = 1_048_576
    bytes: Annotated[int, Positive, Meta(description="Bytes of a batch, decompressed.")] = 64 * MIB
    columns: Annotated[int, Positive, Meta(description="Columns of a batch.")] = 1024
    string_bytes: Annotated[
        int,
        Positive,
        Meta(description="Bytes in a batch's strings: inputs and what passes beside them."),
    ] = 16 * MIB
    result_bytes: Annotated[
        int,
        Positive,
        Meta(description="Bytes of a batch's results, or of those of its rows in one bucket."),
    ] = 1024 * MIB
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
    connections: Annotated[
        int, Positive, Meta(description="Connections of gRPC clients open at once.")
    ] = 10_000
    source_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Percent of a port's connections that one source may hold while fewer than "
            "an eighth are left: an IPv4 address, the first 64 bits of an IPv6 address, or all "
            "clients of unix sockets.",
        ),
    ] = 25
    receive_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes that were received and are not processed, of all connections: "
            "half-received messages, messages that wait, responses that are not read. Above it the "
            "largest are refused. 0: an eighth of the memory of the machine or the cgroup.",
        ),
    ] = 0


class TimeoutsConfig(Section, frozen=True, kw_only=True):
    """How long a client may take. They are looked at every 5 s."""

    preface_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds for the connection preface or greeting."),
    ] = 10.0
    headers_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds from the first byte of a header block, or of a frame without "
            "payload of messages, to its last.",
        ),
    ] = 10.0
    idle_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Seconds without input before a client is sent a PING."),
    ] = 60.0
    keepalive_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds for the answer to that PING.")
    ] = 20.0
    message_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds that a message may fall behind 500 bytes/s, from its first byte "
            "to its last.",
        ),
    ] = 30.0
    response_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds in which a client takes nothing of what was sent to it.",
        ),
    ] = 300.0


class WorkersConfig(Section, frozen=True, kw_only=True):
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
    thread_pool: Annotated[
        Literal["model", "worker"],
        Meta(
            description="Compute threads of ONNX models: each model's own, or one pool for all of "
            "a worker, with one for each physical core. Threads of a pool wait busily for a while "
            "after each batch: it is for many models in one worker."
        ),
    ] = "model"
    spawn: Annotated[
        bool, Meta(description="Start the workers; false where a service manager does.")
    ] = True
    busy_poll_us: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Microseconds for which a worker goes on looking for messages after a "
            "batch, before it sleeps.",
        ),
    ] = 0
    start_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Seconds for a worker to attach and load its models."),
    ] = 120.0
    hang_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds without a heartbeat during a batch, after which a worker is "
            "replaced. Once a model's run times are known, `hang_factor` sets a shorter limit.",
        ),
    ] = 30.0
    hang_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="A worker is replaced when a batch runs this many times as long as the "
            "slowest one like it, at least 2 s and at most `hang_s`; 0: only after `hang_s`.",
        ),
    ] = 20.0
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
    model_deaths: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Worker deaths during batches of one model, within `model_deaths_s`, after "
            "which the model moves to a worker of its own; as many there, and its requests are "
            "refused for `quarantine_s`. 0: never.",
        ),
    ] = 3
    model_deaths_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Seconds over which those deaths are counted.")
    ] = 300.0
    quarantine_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds for which a model is refused; doubled, up to an hour, each time "
            "that it ends a worker again soon after.",
        ),
    ] = 60.0
    reattach_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds that workers outlive a dead gateway; 0: for ever.",
        ),
    ] = 30.0


class ArenaConfig(Section, frozen=True, kw_only=True):
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


class SharedMemoryConfig(Section, frozen=True, kw_only=True):
    """Memory that is lent to clients of this machine, for the bodies of their batches."""

    path: Annotated[
        str,
        Meta(
            description="Path of the unix socket at which clients ask for memory, with the mode "
            "and owner of `server.unix_mode` and `unix_owner`; the other processes of several add "
            "their numbers to it. Empty: none is lent."
        ),
    ] = ""
    region_bytes: Annotated[
        int, Positive, Meta(description="Bytes of one region: a client has one for each stream.")
    ] = 256 * MIB
    total_bytes: Annotated[
        int, Positive, Meta(description="Bytes of all regions, of each process of several.")
    ] = 1024 * MIB
    regions: Annotated[int, Positive, Meta(description="Regions lent at once.")] = 64


class AdminConfig(Section, frozen=True, kw_only=True):
    """What the operator sees."""

    address: Annotated[
        str,
        Meta(
            description="`HOST:PORT` of `/livez`, `/readyz` and `/metrics` over HTTP. Port 0 takes "
            "a free one; empty: none. It wants the extra `http`; without it the default is none."
        ),
    ] = "127.0.0.1:50052"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level to log.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines on stderr: for people, or JSON.")
    ] = "text"


class InferentialConfig(Section, frozen=True, kw_only=True):
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


class HttpConfig(Section, frozen=True, kw_only=True):
    """The Open Inference Protocol over HTTP. All clients wait while one's JSON is parsed."""

    address: Annotated[
        str,
        Meta(
            description="`HOST:PORT`, its own. Port 0 takes a free one; empty: none. It wants the "
            "extra `http`."
        ),
    ] = ""
    connections: Annotated[int, Positive, Meta(description="Connections served at once.")] = 1024
    json_bytes: Annotated[
        int, Positive, Meta(description="Bytes of a request's JSON, and of results put into JSON.")
    ] = MIB
    bodies_bytes: Annotated[
        int, Positive, Meta(description="Bytes of all requests and answers that are held at once.")
    ] = 256 * MIB


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
    inferential: InferentialConfig = InferentialConfig()
    http: HttpConfig = HttpConfig()
    access: AccessConfig = AccessConfig()
    tls: TlsConfig = TlsConfig()
    repository: RepositoryConfig = RepositoryConfig()
    models: Annotated[tuple[ModelConfig, ...], Meta(description="The models to serve.")] = ()

    @property
    def has_shared_models(self) -> bool:
        """Whether there are, or may be, models without workers of their own."""
        return bool(self.repository.path) or not all(model.own_workers for model in self.models)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses as a tuple, however they were written."""
        address = self.server.address
        return (address,) if isinstance(address, str) else address
