"""Settings of model versions, of their lanes, and of model loading."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from iskander.config.drift import ModelDriftConfig
from iskander.config.observation import ModelLogConfig
from iskander.config.section import (
    MIB,
    Live,
    Milliseconds,
    NotNegative,
    Positive,
    Seconds,
    Section,
    UpTo1024,
)
from iskander.config.shadow import Share
from iskander.contract.tensors import STRING_BYTES


class LoadingConfig(Section, frozen=True, kw_only=True):
    """Model loading: sandboxed load, weight cache, operator libraries, signatures.

    Attributes:
        sandbox: Load and warm a new model in a [sandboxed process](../loading.md) first. CPU models
            only.
        sandbox_s: Timeout of the sandboxed load in seconds; at most 0.8 of workers.start_s.
        engine_s: Timeout of the build of TensorRT engines in a sandbox, in seconds; at most 0.8 of
            workers.start_s.
        sandbox_bytes: Private bytes of the sandboxed load; 0: the free memory of the system.
        model_bytes: Bytes of a model's files, and of all its weights.
        share_weights: Map the prepacked weights of a model into every worker
            ([weights](../loading.md#shared-weights)).
        cache: Folder of optimized models; no other user may have write access. Empty:
            $CACHE_DIRECTORY, else `iskander` below $XDG_CACHE_HOME or ~/.cache.
        cache_bytes: Bytes of the cache; the least recently used models are evicted first.
        custom_ops: Operator libraries that models may use: absolute paths, or packages with a
            `get_library_path`.
        public_key: Ed25519 public key, 32 bytes as base64. If set, a model needs a valid
            `manifest.toml.sig` and hashes of its files in the manifest.
    """

    restart_reason: ClassVar[str] = "models are loaded with it"

    sandbox: bool = True
    sandbox_s: Seconds = 60.0
    engine_s: Seconds = 900.0
    sandbox_bytes: NotNegative = 0
    model_bytes: Positive = 65_536 * MIB
    share_weights: bool = True
    cache: str = ""
    cache_bytes: Positive = 16_384 * MIB
    custom_ops: tuple[str, ...] = ()
    public_key: Annotated[str, Meta(pattern=r"^([A-Za-z0-9+/]{43}=)?\Z")] = ""

    def cache_folder(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the folder of the cache; empty if neither it nor a home is set."""
        home = environment.get("HOME")
        cache_home = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
        own = environment.get("CACHE_DIRECTORY", "").partition(":")[0]
        return self.cache or own or (f"{cache_home}/iskander" if cache_home else "")


SHARED_BACKENDS = ("onnx", "pipeline")
"""Backends whose models share workers."""
REMOTE = "remote"
"""Backend whose models run on another server: their workers wait, and get no cores of their own."""
GPU_PROVIDERS = frozenset(("cuda", "tensorrt"))
"""Execution providers that need a GPU."""


class LaneConfig(Section, frozen=True, kw_only=True):
    """Queue and batching of one model version; `[models.lane]` overrides.

    Attributes:
        policy: Queue order: deadline_aware, model_deadline, tiered_deadline, batch_optimized,
            priority_tiered, round_robin, fifo, or the name of an installed policy.
        linger_us: Microseconds to wait for a fuller batch.
        preferred_batch_rows: Batch sizes in rows at which a batch is closed.
        pad_to: Batch sizes in rows to which batches are padded. Ignored for a model with a fixed
            batch axis.
        queue_requests: Queued requests.
        queue_rows: Queued rows.
        queue_bytes: Bytes of queued inputs. Above the arena's size, streams wait for space in the
            arena; below it, requests are rejected.
        client_requests: Queued and running requests of one client.
        overflow: Request to reject when the [queue is full](../scheduling.md#overload).
        ttl_ms: Milliseconds of a request in the queue; 0: no limit.
        deadline_ms: Default latency budget of a request in milliseconds; 0: none.
        patience_ms: Assumed deadline in milliseconds of a request without one, only for its rank;
            also the weight of one priority level.
        staleness_ms: Maximum age in milliseconds of an observation, from its client's
            `timestamp_ns`; 0: no limit.
        newest_wins: A client's newer request replaces its older queued one.
        refuse_late: Reject a request at once if its estimated cost exceeds its deadline.
        weight: Relative share of the workers among all models.
    """

    restart_reason: ClassVar[str] = "a queue is built with it when the model is loaded"

    policy: Annotated[str, Meta(min_length=1)] = "deadline_aware"
    linger_us: Live[Annotated[int, Meta(ge=0, le=10_000_000)]] = 0
    preferred_batch_rows: Live[tuple[Positive, ...]] = ()
    pad_to: tuple[Positive, ...] = ()
    queue_requests: Live[Positive] = 4096
    queue_rows: Live[Positive] = 4_194_304
    queue_bytes: Live[Positive] = 512 * MIB
    client_requests: Live[Positive] = 1024
    overflow: Live[Literal["reject", "drop_oldest", "drop_lowest_priority"]] = "reject"
    ttl_ms: Live[Milliseconds] = 30_000.0
    deadline_ms: Live[Milliseconds] = 0.0
    patience_ms: Annotated[float, Meta(gt=0, le=86_400_000)] = 100.0
    staleness_ms: Live[Milliseconds] = 0.0
    newest_wins: Live[bool] = False
    refuse_late: Live[bool] = True
    weight: Live[Annotated[float, Meta(ge=0.01, le=1000)]] = 1.0


class ModelConfig(Section, frozen=True, kw_only=True):
    """One model version to serve.

    Attributes:
        name: Name of the model.
        path: Model file, or folder with `model.onnx`; relative to this file. A `manifest.toml`
            beside the model is its contract.
        version: Version; by default the folder's name if it is a number, else 1.
        backend: Backend: onnx, python, torch, pipeline, remote, or the name of an installed one.
        workers: Workers for this model only; 0: the shared ones, or one if the backend is neither
            onnx nor pipeline, or `python` is set.
        python: Python interpreter of its own workers, such as that of a virtual environment;
            relative to this file. Empty: the server's interpreter.
        trust_pickle: Allow the model's code to unpickle its files, which can run any code.
        trusted_types: Types to trust in a skops file, in addition to those that skops trusts.
        execution_providers: Execution providers in order of preference; all must be available.
        provider_options: Options of each provider, with the names of ONNX Runtime, such as
            {cuda = {cudnn_conv_algo_search = "HEURISTIC"}}. A worker of a GPU sees one device,
            number 0.
        placement: Workers that load the model: with a GPU, without one, or both. Empty: `gpu` if
            `execution_providers` names cuda or tensorrt, else `cpu`.
        gpu_memory_bytes: Memory of a GPU for weights and workspace ([budgets](../gpu.md#budgets)).
            0: not declared; such a model does not share a GPU.
        intra_threads: Threads within an operator; 0: one for each physical core of the worker.
        inter_threads: Operators in parallel, with parallel_execution; 0: 1.
        optimization_level: Graph optimization by ONNX Runtime.
        parallel_execution: Run independent operators in parallel.
        memory_pattern: Plan memory from the shapes of the first run.
        max_batch_rows: Rows of a batch; a request with more is split, or rejected if its
            [rows](../models.md#rows) may depend on each other.
        result_string_bytes: Bytes of the longest string in a result, reserved for each string in
            the output arena. A longer one fails the batch.
        shadow_share: Share of the requests of other versions that this version runs too, as a
            [shadow](../observing.md#shadow-versions). 0: paused. By default it is no shadow.
        lane: `[models.lane]` table with settings that override `[lanes]`.
        prediction_log: `[models.prediction_log]` table: `share` of its requests that are logged (0
            to 1), columns to `omit`, columns to `hash`.
        drift: `[models.drift]` table: `share` of its requests that are summarized (0 to 1).
    """

    restart_reason: ClassVar[str] = "the models of the file are loaded at the start"

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}\Z")]
    path: Annotated[str, Meta(min_length=1)]
    version: str | int | None = None
    backend: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")] = "onnx"
    workers: UpTo1024 = 0
    python: str = ""
    trust_pickle: bool = False
    trusted_types: tuple[str, ...] = ()
    execution_providers: Annotated[
        tuple[Literal["cpu", "cuda", "tensorrt"], ...], Meta(min_length=1)
    ] = ("cpu",)
    provider_options: dict[Literal["cuda", "tensorrt"], dict[str, str | int | float | bool]] = (
        msgspec.field(default_factory=dict)
    )
    placement: Literal["", "gpu", "cpu", "any"] = ""
    gpu_memory_bytes: NotNegative = 0
    intra_threads: UpTo1024 = 0
    inter_threads: UpTo1024 = 0
    optimization_level: Literal["disable", "level1", "level2", "level3"] = "level3"
    parallel_execution: bool = False
    memory_pattern: bool = True
    max_batch_rows: Positive = 65_536
    result_string_bytes: Annotated[int, Meta(ge=1, le=2**31 - 1)] = STRING_BYTES
    shadow_share: Live[Share | None] = None
    lane: Live[LaneConfig] = LaneConfig()
    prediction_log: ModelLogConfig = ModelLogConfig()
    drift: ModelDriftConfig = ModelDriftConfig()

    @property
    def observed_share(self) -> float:
        """Share of its requests that the observer process receives."""
        return max(self.prediction_log.share, self.drift.share)

    @property
    def own_workers(self) -> int:
        """Number of workers that serve only this model; 0 with shared workers."""
        return self.workers or int(self.backend not in SHARED_BACKENDS or bool(self.python))

    @property
    def pool(self) -> str:
        """Name of its pool of workers; empty for the shared pool."""
        return f"{self.name}/{self.version}" if self.own_workers else ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Kinds of workers that load the model: `cpu`, `gpu` or both."""
        wanted = "gpu" if GPU_PROVIDERS.intersection(self.execution_providers) else "cpu"
        wanted = self.placement or wanted
        return ("cpu", "gpu") if wanted == "any" else (wanted,)
