"""Model metadata, configuration and statistics as protobuf messages.

Load generators expect the axis of the rows in a model's metadata, and not in its configuration,
because `max_batch_size` is more than 0.

Pure but for the clock. Source: Open Inference Protocol v2; Triton's model configuration,
statistics and model repository extensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from iskander import __version__
from iskander._generated import oip_pb2
from iskander.contract.processing.buckets import bucketed_tensors
from iskander.contract.tensors import Contract, TensorSpec
from iskander.foundation.clock import NS_PER_MS, now_ns, wall_ns
from iskander.gateway.protocols.oip.tensors import STRINGS
from iskander.gateway.repository.models import ModelStatus
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import PRIORITY_DEFAULT, PRIORITY_MAX

SERVER = "iskander"
EXTENSIONS = (
    "model_configuration",
    "schedule_policy",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Triton's extensions with full support."""

_BACKENDS = {
    "onnx": ("onnxruntime_onnx", "onnxruntime", "model.onnx"),
    "python": ("", "python", "model.py"),
    "torch": ("pytorch_libtorch", "pytorch", "model.pt2"),
    "pipeline": ("ensemble", "", ""),
}
"""Triton's platform, backend and model file for each backend; others keep their name."""
_DYNAMIC = -1
_US_PER_MS = 1000


def server_metadata() -> Any:  # noqa: ANN401
    """Return name, version and extensions."""
    return oip_pb2.ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS)


def metadata(lane: Lane, versions: Iterable[str]) -> Any:  # noqa: ANN401
    """Describe a loaded model, with all of its served versions."""
    contract = lane.contract
    assert contract is not None
    return oip_pb2.ModelMetadataResponse(
        name=lane.model.name,
        versions=versions,
        platform=_backend_names(lane)[0],
        inputs=[_tensor(spec, shape) for spec, shape in _inputs(contract)],
        outputs=[_tensor(spec, spec.shape) for spec in contract.outputs],
    )


def config(lane: Lane) -> Any:  # noqa: ANN401
    """Return the configuration of a loaded model as Triton's ModelConfig."""
    contract, settings = lane.contract, lane.config
    platform, backend, file = _backend_names(lane)
    is_apart = lane.rules.is_apart
    assert contract is not None
    return oip_pb2.ModelConfig(
        name=lane.model.name,
        platform=platform,
        backend=backend,
        max_batch_size=lane.model.rows_max,
        default_model_filename=file,
        input=[
            oip_pb2.ModelInput(name=spec.tensor, data_type=_data_type(spec), dims=shape)
            for spec, shape in _inputs(contract)
        ],
        output=[
            oip_pb2.ModelOutput(name=spec.tensor, data_type=_data_type(spec), dims=spec.shape)
            for spec in contract.outputs
        ],
        dynamic_batching=oip_pb2.ModelDynamicBatching(
            preferred_batch_size=() if is_apart else settings.preferred_batch_rows,
            max_queue_delay_microseconds=0 if is_apart else settings.linger_us,
            priority_levels=PRIORITY_MAX + 1,
            default_priority_level=PRIORITY_DEFAULT + 1,
            default_queue_policy=oip_pb2.ModelQueuePolicy(
                default_timeout_microseconds=int(settings.deadline_ms * _US_PER_MS),
                allow_timeout_override=True,
                max_queue_size=settings.queue_requests,
            ),
        ),
        model_transaction_policy=oip_pb2.ModelTransactionPolicy(decoupled=False),
    )


def statistics(lane: Lane) -> Any:  # noqa: ANN401
    """Return a model's statistics since the start.

    Units: nanoseconds. Queue and run times are measured for each batch, so their counts are of
    batches; failed and rejected requests have no time.
    """
    counts, measures = lane.counts, lane.metrics
    failed = sum(n for name, n in counts.items() if name.startswith(("failed.", "refused.")))
    ran_ms = (wall_ns() - (now_ns() - lane.ran_ns)) // NS_PER_MS
    duration = oip_pb2.StatisticDuration
    return oip_pb2.ModelStatistics(
        name=lane.model.name,
        version=lane.model.version,
        last_inference=ran_ms if counts["completed"] else 0,
        inference_count=measures.batch_rows.sum,
        execution_count=counts["batches"],
        inference_stats=oip_pb2.InferStatistics(
            success=duration(count=counts["completed"], ns=measures.total_ns.sum),
            fail=duration(count=failed),
            queue=duration(count=len(measures.wait_ns), ns=measures.wait_ns.sum),
            compute_input=duration(),
            compute_infer=duration(count=len(measures.run_ns), ns=measures.run_ns.sum),
            compute_output=duration(),
        ),
    )


def index_entry(status: ModelStatus) -> Any:  # noqa: ANN401
    """Return a model version's entry in the repository index."""
    return oip_pb2.RepositoryIndexResponse.ModelIndex(
        name=status.name, version=status.version, state=status.state, reason=status.reason
    )


def _backend_names(lane: Lane) -> tuple[str, str, str]:
    """Return Triton's platform, backend and model file."""
    backend = lane.model.backend
    return _BACKENDS.get(backend, ("", backend, ""))


def _inputs(contract: Contract) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Yield each input and its shape without rows; an axis with the bucket's length is dynamic."""
    bucketed = bucketed_tensors(contract)
    for spec in contract.inputs:
        yield spec, (_DYNAMIC, *spec.shape[1:]) if spec.tensor in bucketed else spec.shape


def _tensor(spec: TensorSpec, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    return oip_pb2.ModelMetadataResponse.TensorMetadata(
        name=spec.tensor, datatype=spec.type.dtype.oip, shape=(_DYNAMIC, *shape)
    )


def _data_type(spec: TensorSpec) -> str:
    name = spec.type.dtype.oip
    return f"TYPE_{'STRING' if name == STRINGS else name}"
