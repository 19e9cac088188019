"""Service of the Open Inference Protocol and of Triton's extensions.

Runs on: gateway loop. Source: Open Inference Protocol v2 over gRPC; Triton's extensions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from iskander._generated import oip_pb2
from iskander.errors import MalformedInput, NotReady, Unsupported
from iskander.gateway.auth.audit import AuditLog
from iskander.gateway.auth.grants import Grant
from iskander.gateway.auth.origin import Origin
from iskander.gateway.protocols.oip import describe
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.stream import InferStream
from iskander.gateway.protocols.oip.unary import Reject, UnaryInfer
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.repository.models import Models
from iskander.gateway.repository.peers import Peers
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.transport.http2.call import Call, Message

SERVICE: Final = "inference.GRPCInferenceService"

Answer = Callable[[Any, Grant], Any]
AsyncAnswer = Callable[[Any, Grant], Awaitable[Any]]
Administer = Callable[[Any, Grant, Origin], Awaitable[Any]]


class OipService:
    """The calls of GRPCInferenceService; `peers` load and unload models in all processes.

    Attributes:
        audit: Records loads and unloads.
    """

    def __init__(self, models: Models, submitter: RequestSubmitter, peers: Peers) -> None:
        self._models = models
        self._peers = peers
        self._submitter = submitter
        self._inference = Inference(models, submitter)
        self._streams: set[InferStream] = set()
        self.audit = AuditLog()
        self._answers: dict[str, Answer] = {
            "ServerLive": lambda *_: oip_pb2.ServerLiveResponse(live=True),
            "ServerReady": lambda *_: oip_pb2.ServerReadyResponse(ready=models.is_ready),
            "ServerMetadata": lambda *_: describe.server_metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": lambda *_: oip_pb2.SystemSharedMemoryStatusResponse(),
            "CudaSharedMemoryStatus": lambda *_: oip_pb2.CudaSharedMemoryStatusResponse(),
            "SystemSharedMemoryUnregister": _unregister("System"),
            "CudaSharedMemoryUnregister": _unregister("Cuda"),
            "SystemSharedMemoryRegister": _unsupported("the server does not read shared memory"),
            "CudaSharedMemoryRegister": _unsupported("the server does not read GPU memory"),
            "TraceSetting": _unsupported("traces are configured at the start of the server"),
            "LogSettings": _unsupported("logging is configured at the start of the server"),
        }

    def answer(self, name: str, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        """Answer a call with parsed messages, as HTTP needs."""
        return self._answers[name](request, grant)

    def unary(self) -> dict[str, Callable[[bytes, Grant], Awaitable[bytes]]]:
        """Return the unary calls that change nothing, except ModelInfer, by method name."""
        answers = {name: _async(answer) for name, answer in self._answers.items()}
        return {name: _with_encoding(name, answer) for name, answer in answers.items()}

    def administrative(self) -> dict[str, Callable[[bytes, Call], Awaitable[None]]]:
        """Return the calls that the audit log has, by method name."""
        return {
            "RepositoryModelLoad": partial(_administer, "RepositoryModelLoad", self.load),
            "RepositoryModelUnload": partial(_administer, "RepositoryModelUnload", self.unload),
        }

    def check_grants(self) -> None:
        """Drain the streams whose token is no longer valid."""
        for stream in list(self._streams):
            stream.check_grant()

    def infer_inline(self, message: Message, call: Call, reject: Reject) -> bool:
        """Answer a complete call without a task."""
        call.receive()  # From here on, only the request refers to the message.
        UnaryInfer(self._inference, call, reject).start(message)
        return True

    async def infer(self, message: Message, call: Call, reject: Reject) -> None:
        """Answer a call whose message arrived after the call."""
        call.task = None  # The call outlives this task.
        UnaryInfer(self._inference, call, reject).start(message)

    async def stream_infer(self, call: Call) -> None:
        """Serve a stream of requests; see `InferStream`."""
        stream = InferStream(call, self._inference)
        with self._submitter.open_call(stream.drain, call.caller) as opened:
            opened.lend(stream.idle_since_ns, stream.give_way)
            self._streams.add(stream)
            try:
                await stream.run()
            finally:
                self._streams.discard(stream)

    def _find(self, request: Any, grant: Grant) -> Lane:  # noqa: ANN401
        grant.require_model(request.name)
        return self._models.find(request.name, request.version or None)

    def _find_loaded(self, request: Any, grant: Grant) -> Lane:  # noqa: ANN401
        grant.require_model(request.name)
        return self._models.find_loaded(request.name, request.version or None)

    def _model_ready(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        try:
            lane = self._find(request, grant)
            is_ready = self._models.is_lane_ready(lane) and not self._models.is_stopping
        except NotReady:
            is_ready = False
        return oip_pb2.ModelReadyResponse(ready=is_ready)

    def _model_metadata(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        lane = self._find_loaded(request, grant)
        name = lane.model.name
        versions = [each.model.version for each in self._models if each.model.name == name]
        return describe.metadata(lane, versions)

    def _model_config(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        lane = self._find_loaded(request, grant)
        return oip_pb2.ModelConfigResponse(config=describe.config(lane))

    def _model_statistics(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        lanes = [lane for lane in self._models if grant.may_call(lane.model.name)]
        if request.name:
            found = self._find(request, grant)
            lanes = [lane for lane in lanes if lane.model.name == request.name]
            if request.version:
                lanes = [found]
        return oip_pb2.ModelStatisticsResponse(model_stats=map(describe.statistics, lanes))

    def _repository_index(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        return oip_pb2.RepositoryIndexResponse(
            models=[
                describe.index_entry(status)
                for status in self._models.index()
                if (status.state == "READY" or not request.ready) and grant.may_call(status.name)
            ]
        )

    async def load(self, request: Any, grant: Grant, origin: Origin) -> Any:  # noqa: ANN401
        """Load a model; return when it is served."""
        name = _model_name(request)
        with self.audit.action("load", name, grant.name, origin):
            grant.require_manage(name)
            if request.parameters:
                text = "a load request accepts no parameters; settings are in `model.toml`"
                raise Unsupported(text)
            await self._peers.load(name)
        return oip_pb2.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def unload(self, request: Any, grant: Grant, origin: Origin) -> Any:  # noqa: ANN401
        """Unload a model."""
        name = _model_name(request)
        with self.audit.action("unload", name, grant.name, origin):
            grant.require_manage(name)
            await self._peers.unload(name)
        return oip_pb2.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)


def _model_name(request: Any) -> str:  # noqa: ANN401
    """Return the model of a load or unload; two message layouts are in use."""
    name: str = request.model_name or request.repository_name
    return name


def _async(answer: Answer) -> AsyncAnswer:
    async def answer_async(request: Any, grant: Grant) -> Any:  # noqa: ANN401
        return answer(request, grant)

    return answer_async


def _with_encoding(name: str, answer: AsyncAnswer) -> Callable[[bytes, Grant], Awaitable[bytes]]:
    """Adapt a call to accept and return serialized messages."""
    kind = getattr(oip_pb2, f"{name}Request")

    async def serve(raw: bytes, grant: Grant) -> bytes:
        try:
            request = kind.FromString(raw)
        except (DecodeError, UnicodeDecodeError):
            raise MalformedInput(f"the message is not a {name}Request") from None
        response: bytes = (await answer(request, grant)).SerializeToString()
        return response

    return serve


async def _administer(name: str, act: Administer, raw: bytes, call: Call) -> None:
    """Answer a call that the audit log has."""

    async def answer(request: Any, grant: Grant) -> Any:  # noqa: ANN401
        return await act(request, grant, call.origin)

    await call.answer(await _with_encoding(name, answer)(raw, call.grant))


def _unregister(memory: str) -> Answer:
    """Accept to unregister all regions, as many tools do first; reject a named region."""
    kind = getattr(oip_pb2, f"{memory}SharedMemoryUnregisterResponse")

    def answer(request: Any, _: Grant) -> Any:  # noqa: ANN401
        if request.name:
            raise Unsupported("no region is registered: the server does not read shared memory")
        return kind()

    return answer


def _unsupported(why: str) -> Answer:
    def answer(*_: Any) -> Any:  # noqa: ANN401
        raise Unsupported(why)

    return answer
