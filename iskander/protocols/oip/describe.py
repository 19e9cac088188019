"""What is served, as the Open Inference Protocol and Triton's extensions describe it.

Tools that load a server read a model's metadata with the axis of the rows, and its configuration
without it, since `max_batch_size` is more than 0.

Pure but for the clock. Source: Open Inference Protocol v2; Triton's model configuration,
statistics and model repository extensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from iskander import __version__
from iskander._generated import oip_pb2
from iskander.clock import NS_PER_MS, now_ns, wall_ns
from iskander.contract.buckets import bucketed_tensors
from iskander.contract.tensors import Contract, TensorSpec
from iskander.protocols.oip.tensors import STRINGS
from iskander.repository.models import ModelStatus
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import PRIORITY_DEFAULT, PRIORITY_MAX

SERVER = "iskander"
EXTENSIONS = (
    "model_configuration",
    "schedule_policy",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Those of Triton's that are honoured whole."""

_BACKENDS = {
    "onnx": ("onnxruntime_onnx", "onnxruntime", "model.onnx"),
    "python": ("", "python", "model.py"),
    "torch": ("pytorch_libtorch", "pytorch", "model.pt2"),
    "pipeline": ("ensemble", "", ""),
}
"""Triton's platform, backend and model file for each of ours; others are named as they are."""
_DYNAMIC = -1
_US_PER_MS = 1000


def server_metadata() -> Any:  # noqa: ANN401
    """Name, version and extensions."""
    return oip_pb2.ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS)


def metadata(lane: Lane, versions: Iterable[str]) -> Any:  # noqa: ANN401
    """Of a model that is loaded; every version of it that is served is named."""
    contract = lane.contract
    assert contract is not None
    return oip_pb2.ModelMetadataResponse(
        name=lane.model.name,
        versions=versions,
        platform=_run_by(lane)[0],
        inputs=[
            _tensor(spec, shape)
            for spec, shape in zip(contract.inputs, _shapes(contract), strict=True)
        ],
        outputs=[_tensor(spec, spec.shape) for spec in contract.outputs],
    )


def config(lane: Lane) -> Any:  # noqa: ANN401
    """How a model that is loaded is run, in the words of Triton's ModelConfig."""
    contract, rules = lane.contract, lane.config
    platform, backend, file = _run_by(lane)
    assert contract is not None
    return oip_pb2.ModelConfig(
        name=lane.model.name,
        platform=platform,
        backend=backend,
        max_batch_size=lane.model.rows_max,
        default_model_filename=file,
        input=[
            oip_pb2.ModelInput(name=spec.tensor, data_type=_data_type(spec), dims=shape)
            for spec, shape in zip(contract.inputs, _shapes(contract), strict=True)
        ],
        output=[
            oip_pb2.ModelOutput(name=spec.tensor, data_type=_data_type(spec), dims=spec.shape)
            for spec in contract.outputs
        ],
        dynamic_batching=oip_pb2.ModelDynamicBatching(
            preferred_batch_size=rules.preferred_batch_rows,
            max_queue_delay_microseconds=rules.linger_us,
            priority_levels=PRIORITY_MAX + 1,
            default_priority_level=PRIORITY_DEFAULT + 1,
            default_queue_policy=oip_pb2.ModelQueuePolicy(
                default_timeout_microseconds=int(rules.deadline_ms * _US_PER_MS),
                allow_timeout_override=True,
                max_queue_size=rules.queue_requests,
            ),
        ),
        model_transaction_policy=oip_pb2.ModelTransactionPolicy(decoupled=False),
    )


def statistics(lane: Lane) -> Any:  # noqa: ANN401
    """What a model has done since the start.

    Units: nanoseconds. Waiting and computing are measured for a batch, so that their counts are of
    batches; requests that failed or were refused have no time of their own.
    """
    counts = lane.counts
    failed = sum(
        count for name, count in counts.items() if name.startswith(("failed.", "refused."))
    )
    last_ms = 0
    if counts["completed"]:
        last_ms = (wall_ns() - (now_ns() - lane.ran_ns)) // NS_PER_MS
    duration = oip_pb2.StatisticDuration
    return oip_pb2.ModelStatistics(
        name=lane.model.name,
        version=lane.model.version,
        last_inference=last_ms,
        inference_count=lane.measures.batch_rows.sum,
        execution_count=counts["batches"],
        inference_stats=oip_pb2.InferStatistics(
            success=duration(count=counts["completed"], ns=lane.measures.total_ns.sum),
            fail=duration(count=failed),
            queue=duration(count=len(lane.measures.wait_ns), ns=lane.measures.wait_ns.sum),
            compute_input=duration(),
            compute_infer=duration(count=len(lane.measures.run_ns), ns=lane.measures.run_ns.sum),
            compute_output=duration(),
        ),
    )


def index_entry(standing: ModelStatus) -> Any:  # noqa: ANN401
    """A model version in the repository's index."""
    return oip_pb2.RepositoryIndexResponse.ModelIndex(
        name=standing.name,
        version=standing.version,
        state=standing.state,
        reason=standing.reason,
    )


def _run_by(lane: Lane) -> tuple[str, str, str]:
    """Platform, backend and model file, in Triton's words."""
    backend = lane.model.backend
    return _BACKENDS.get(backend, ("", backend, ""))


def _shapes(contract: Contract) -> list[tuple[int, ...]]:
    """Of each input, without the rows; an axis that is as long as the rows' bucket is open."""
    long = bucketed_tensors(contract)
    return [
        (_DYNAMIC, *spec.shape[1:]) if spec.tensor in long else spec.shape
        for spec in contract.inputs
    ]


def _tensor(spec: TensorSpec, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    return oip_pb2.ModelMetadataResponse.TensorMetadata(
        name=spec.tensor, datatype=spec.type.dtype.oip, shape=(_DYNAMIC, *shape)
    )


def _data_type(spec: TensorSpec) -> str:
    name = spec.type.dtype.oip
    return f"TYPE_{'STRING' if name == STRINGS else name}"
