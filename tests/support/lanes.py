"""Lanes, requests and callers without a gateway."""

from __future__ import annotations

from typing import Any

from iskander.config.models import LaneConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.row_relation import INDEPENDENT, RowRelation
from iskander.contract.tensors import STRING_BYTES, Contract, TensorSpec
from iskander.errors import IskanderError, QueueFull
from iskander.gateway.scheduling.lanes.admission import select_victims
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NO_TERMS, Request, Terms
from iskander.interprocess.control.messages import ModelSpec

MS = 1_000_000
CONTRACT = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("int64"), ()),),
)


class RecordingCaller:
    """A caller that records its responses."""

    def __init__(self) -> None:
        self.results: list[bytes] = []
        self.errors: list[IskanderError] = []

    @property
    def outcome_count(self) -> int:
        return len(self.results) + len(self.errors)

    @property
    def codes(self) -> list[str]:
        return [error.code for error in self.errors]

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        self.results.append(bytes(results))

    def fail(self, request: Request, error: IskanderError) -> None:
        self.errors.append(error)


def model_of(key: int = 0, rows_max: int = 64) -> ModelSpec:
    return ModelSpec(
        key=key,
        name=f"m{key}",
        version="1",
        backend="onnx",
        path="f",
        execution_providers=("cpu",),
        threads_intra=0,
        threads_inter=0,
        optimization_level="level3",
        is_parallel=False,
        has_memory_pattern=True,
        rows_max=rows_max,
        string_bytes=STRING_BYTES,
        fingerprint="",
    )


def lane_of(
    key: int = 0,
    *,
    rows_max: int = 64,
    contract: Contract | None = None,
    relation: RowRelation = INDEPENDENT,
    **settings: Any,
) -> Lane:
    """A lane with a contract; `settings` are those of `[lane]`."""
    lane = Lane(model_of(key, rows_max), LaneConfig(**settings))
    lane.set_contract(contract or CONTRACT, relation)
    return lane


def request_of(
    lane: Lane,
    rows: int = 1,
    *,
    caller: RecordingCaller | None = None,
    arrived_ns: int = 0,
    is_part: bool = False,
    **terms: Any,
) -> Request:
    """A request without a lease; `terms` are those of `Terms`."""
    values = Terms(**terms) if terms else NO_TERMS
    request = Request(
        lane, caller or RecordingCaller(), rows, [], terms=values, arrived_ns=arrived_ns
    )
    request.is_part = is_part
    request.input_bytes = 8 * rows
    return request


def put(lane: Lane, rows: int = 1, *, now_ns: int = 0, client: str = "", **terms: Any) -> Request:
    """A request in a lane's queue since `now_ns`."""
    request = request_of(lane, rows, arrived_ns=now_ns, client=client, **terms)
    queue(lane, request, now_ns)
    return request


def queue(lane: Lane, request: Request, now_ns: int) -> list[tuple[Request, IskanderError]]:
    """Queue a request without its check, but with the rank and the evictions of a check."""
    lane.rank(request)
    victims: list[Request] | QueueFull = []
    if not lane._unreserved.fits(lane.queue, request):
        older = lane._older(request)
        victims = select_victims(lane.queue, lane.config, request, older, lane.title)
    assert not isinstance(victims, QueueFull)
    return lane.put(request, now_ns, victims)


def cost_of(row_ns: int, base_ns: int) -> CostModel:
    """A learned cost model."""
    cost = CostModel()
    for rows in (1, 16, 1, 16):
        cost.observe(rows, row_ns * rows + base_ns)
    return cost
