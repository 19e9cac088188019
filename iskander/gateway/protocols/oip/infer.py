"""Steps of one Open Inference Protocol request over gRPC: lookup, tensors, response.

`PendingInfer` has their order.

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.tensors import Contract
from iskander.errors import ContractError
from iskander.gateway.auth.grants import Grant
from iskander.gateway.protocols.oip.request import (
    COPIES,
    ParsedRequest,
    copied_bytes,
    read_head,
    tensors_of,
)
from iskander.gateway.protocols.oip.tensors import raw_tensor
from iskander.gateway.protocols.oip.wire import Scanned, raw_head, with_id
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.tensors import (
    NAME_MAX,
    InputMatch,
    RequestTensors,
    match_inputs,
    read_inputs,
    result_ranges,
    result_tensors,
)
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.transport.http2.call import Call, Message

REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 4096
FINAL: Final = "triton_final_response"

_Layout: TypeAlias = tuple[Contract, list[int], bytes, list[tuple[bytes, int, int]] | None]
"""A response without its id and tensors: contract, indexes of its outputs, serialized head; prefix
of each output on the wire and its range in the results, or None if outputs need a conversion."""

_Key: TypeAlias = tuple[int, int, tuple[str, ...], bool]
"""Of a response layout: model, rows, requested outputs, whether it has the final flag."""


class CachedRequest:
    """A parsed request without the bytes of its tensors, shared by equal requests.

    `match` maps the tensors of the last such request to the inputs; None if unknown.
    """

    __slots__ = ("match", "parsed")

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.match: InputMatch | None = None


class ResolvedRequest:
    """A request with its model version, before its tensors are read."""

    __slots__ = ("cached", "contract", "id", "lane")

    def __init__(
        self, cached: CachedRequest, lane: Lane, contract: Contract, request_id: bytes
    ) -> None:
        self.cached = cached
        self.lane = lane
        self.contract = contract
        self.id = request_id


class Inference:
    """Reads requests and writes responses; caches parsed requests and response layouts.

    Attributes:
        submitter: Takes the requests.
    """

    def __init__(self, models: Models, submitter: RequestSubmitter) -> None:
        self._models = models
        self.submitter = submitter
        self._requests: dict[bytes, CachedRequest] = {}
        self._limits = submitter.limits  # Of the cached requests.
        self._layouts: dict[_Key, _Layout] = {}

    def find(self, scanned: Scanned, terms: StreamTerms, grant: Grant) -> ResolvedRequest:
        """Parse a request and find its model version, which must be permitted and loaded."""
        cached = self._parse(scanned.head)
        parsed = cached.parsed
        grant.require_model(parsed.model)
        route_key = terms.route_key_of(parsed.terms)
        lane = self._models.find_loaded(parsed.model, parsed.version, route_key)
        contract = lane.contract
        assert contract is not None
        if parsed.outputs:
            known = [spec.tensor for spec in contract.outputs]
            for name in parsed.outputs:
                if name not in known:
                    raise ContractError(
                        f"`{name[:NAME_MAX]}` is not an output of the model; it has "
                        f"{', '.join(known)}"
                    )
        return ResolvedRequest(cached, lane, contract, scanned.id)

    def tensors(
        self, resolved: ResolvedRequest, scanned: Scanned, call: Call
    ) -> tuple[RequestTensors, int]:
        """Read a request's tensors on the event loop, and charge the call for copies.

        Returns the tensors and the charged bytes, which the caller releases.
        """
        cached, contract, raw = resolved.cached, resolved.contract, scanned.raw
        match = cached.match
        if match is not None and match.contract is contract:
            tensors = match.offered(raw)
            if tensors is not None:  # They are slices of the message.
                return tensors, 0
        tensors = _tensors(cached.parsed, scanned, contract, self.submitter.limits)
        if raw:
            cached.match = match_inputs(contract, raw, tensors)
        has_copies = scanned.typed or cached.parsed.strings >= 0
        charged_bytes = tensors.size if has_copies and tensors.rows else 0
        if charged_bytes:
            call.charge_memory(charged_bytes)
        return tensors, charged_bytes

    def charge_reading(self, resolved: ResolvedRequest, scanned: Scanned, call: Call) -> int:
        """Charge the call for reading the tensors in a thread; the caller releases these bytes."""
        limit_bytes = COPIES * self.submitter.limits.bytes
        charged_bytes = min(copied_bytes(resolved.cached.parsed, scanned), limit_bytes)
        call.charge_memory(charged_bytes)
        return charged_bytes

    async def tensors_by_thread(
        self, resolved: ResolvedRequest, scanned: Scanned
    ) -> RequestTensors:
        """Read a request's tensors in a thread, after `charge_reading`."""
        limits = self.submitter.limits
        return await asyncio.to_thread(
            _tensors, resolved.cached.parsed, scanned, resolved.contract, limits
        )

    def response(
        self,
        resolved: ResolvedRequest,
        rows: int,
        results: bytes | memoryview,
        *,
        is_streamed: bool = False,
    ) -> list[Message]:
        """Return a ModelInferResponse in parts; tensors are slices of the results if possible."""
        parsed, lane, contract = resolved.cached.parsed, resolved.lane, resolved.contract
        has_final_flag = is_streamed and parsed.needs_final_flag
        key = (lane.model.key, rows, parsed.outputs, has_final_flag)
        layout = self._layouts.get(key)
        if layout is None or layout[0] is not contract:
            layout = self._layout(key, lane, contract)
        _, outputs, head, ranges = layout
        parts: list[Message] = [with_id(head, resolved.id)]
        if ranges is None:
            tensors = result_tensors(contract, rows, results)
            for index in outputs:
                tensor = raw_tensor(tensors[index])
                parts += (raw_head(len(tensor)), tensor)
        else:
            for prefix, begin, end in ranges:
                is_all = end - begin == len(results)
                parts += (prefix, results if is_all else memoryview(results)[begin:end])
        return parts

    def _parse(self, head: bytes) -> CachedRequest:
        """Parse a request, or return the cached one."""
        if self._limits is not self.submitter.limits:
            self._limits = self.submitter.limits
            self._requests.clear()
        cached = self._requests.get(head)
        if cached is None:
            cached = CachedRequest(read_head(head, self.submitter.limits.columns))
            if len(self._requests) >= REMEMBERED_MAX:
                self._requests.clear()
            if len(head) <= REMEMBERED_BYTES_MAX:
                self._requests[head] = cached
        return cached

    def _layout(self, key: _Key, lane: Lane, contract: Contract) -> _Layout:
        """Build and cache a response layout."""
        _, rows, names, has_final_flag = key
        known = [spec.tensor for spec in contract.outputs]
        outputs = [known.index(name) for name in names or known]
        spans = result_ranges(contract, rows)
        ranges: list[tuple[bytes, int, int]] | None = None
        if spans is not None:
            chosen = [spans[index] for index in outputs]
            ranges = [(raw_head(end - begin), begin, end) for begin, end in chosen]
        message = oip_pb2.ModelInferResponse(
            model_name=lane.model.name,
            model_version=lane.model.version,
            outputs=[
                oip_pb2.ModelInferResponse.InferOutputTensor(
                    name=spec.tensor, datatype=spec.type.dtype.oip, shape=(rows, *spec.shape)
                )
                for spec in [contract.outputs[index] for index in outputs]
            ],
        )
        if has_final_flag:
            message.parameters[FINAL].bool_param = True
        layout: _Layout = contract, outputs, message.SerializeToString(), ranges
        if len(self._layouts) >= REMEMBERED_MAX:
            self._layouts.clear()
        self._layouts[key] = layout
        return layout


def _tensors(
    parsed: ParsedRequest, scanned: Scanned, contract: Contract, limits: LimitsConfig
) -> RequestTensors:
    """Match a request's tensors to the contract; on any thread."""
    return read_inputs(contract, tensors_of(parsed, scanned, contract, limits), limits)
