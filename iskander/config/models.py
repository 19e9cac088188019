"""The settings of a model version and of its lane, declared as those of `config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from iskander.config.section import MIB, Positive, Section
from iskander.contract.tensors import STRING_BYTES


class LoadingConfig(Section, frozen=True, kw_only=True):
    """How model files are opened: what is believed, what it may take, what workers share."""

    trial: Annotated[
        bool,
        Meta(
            description="Open and warm a new model in a process of its own first, so that one that "
            "ends, hangs or bursts its process harms no worker. Models on the CPU only."
        ),
    ] = True
    trial_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that this may take; at most 0.8 of workers.start_s.",
        ),
    ] = 60.0
    trial_bytes: Annotated[
        int,
        Meta(ge=0, description="Private bytes that it may take; 0: what the system has free."),
    ] = 0
    model_bytes: Annotated[
        int, Positive, Meta(description="Bytes of a model's files, and of all its weights.")
    ] = 65_536 * MIB
    share_weights: Annotated[
        bool,
        Meta(
            description="Optimise each model once and map its weights, as the processor reads "
            "them, into every worker, where the trial showed that its results are the same."
        ),
    ] = True
    cache: Annotated[
        str,
        Meta(
            description="Folder of optimised models, which nobody else may write. Empty: "
            "$CACHE_DIRECTORY, else `iskander` below $XDG_CACHE_HOME or ~/.cache."
        ),
    ] = ""
    cache_bytes: Annotated[
        int, Positive, Meta(description="Bytes of it; the least recently used models go first.")
    ] = 16_384 * MIB
    custom_ops: Annotated[
        tuple[str, ...],
        Meta(
            description="Operator libraries that models may ask for: absolute paths, or packages "
            "with a `get_library_path`."
        ),
    ] = ()
    public_key: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9+/]{43}=)?\Z",
            description="Ed25519 public key, 32 bytes as base64. Where it is set, a model is "
            "refused without a `manifest.toml.sig` that fits, and pins of all its files.",
        ),
    ] = ""


SHARED_BACKENDS = ("onnx", "pipeline")
"""Those whose models run beside others in one worker."""


class LaneConfig(Section, frozen=True, kw_only=True):
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


class ModelConfig(Section, frozen=True, kw_only=True):
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
    backend: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z",
            description="What runs it: onnx, python, torch, pipeline, or one that is installed.",
        ),
    ] = "onnx"
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Workers of its own, beside those that serve all models; 0: none, but one "
            "where the backend is neither onnx nor pipeline, or `python` is set.",
        ),
    ] = 0
    python: Annotated[
        str,
        Meta(
            description="Python interpreter of its own workers, such as that of a virtual "
            "environment; relative to this file. Empty: the server's."
        ),
    ] = ""
    trust_pickle: Annotated[
        bool,
        Meta(
            description="Let the model's code unpickle its files. A pickle runs whatever its "
            "author wrote."
        ),
    ] = False
    trusted_types: Annotated[
        tuple[str, ...],
        Meta(description="Types that a skops file may hold beside those that skops trusts."),
    ] = ()
    execution_providers: Annotated[
        tuple[Literal["cpu", "cuda", "tensorrt"], ...],
        Meta(min_length=1, description="In order of preference; each one must be there."),
    ] = ("cpu",)
    provider_options: Annotated[
        dict[Literal["cuda", "tensorrt"], dict[str, str | int | float | bool]],
        Meta(
            description="Options of each, as ONNX Runtime calls them, such as "
            "{cuda = {device_id = 1, gpu_mem_limit = 2147483648}}."
        ),
    ] = msgspec.field(default_factory=dict)
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

    @property
    def own_workers(self) -> int:
        """How many workers serve it and nothing else; 0 where those of all models do."""
        return self.workers or int(self.backend not in SHARED_BACKENDS or bool(self.python))

    @property
    def pool(self) -> str:
        """Name of the workers that serve it: its own, or empty for those of all models."""
        return f"{self.name}/{self.version}" if self.own_workers else ""
