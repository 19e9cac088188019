"""The Open Inference Protocol's calls, with those of Triton's extensions that mean something here.

Runs on: gateway loop. Source: Open Inference Protocol v2 over gRPC; Triton's extensions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import DecodeError

from iskander._generated import oip_pb2
from iskander.auth.grants import Grant
from iskander.errors import MalformedInput, NotReady, Unsupported
from iskander.protocols.oip import describe
from iskander.protocols.oip.infer import Inference
from iskander.protocols.oip.stream import InferStream
from iskander.protocols.oip.unary import Refuse, UnaryInfer
from iskander.protocols.oip.wire import scan
from iskander.protocols.stream_terms import StreamTerms
from iskander.protocols.submit import RequestSubmitter
from iskander.repository.models import Models
from iskander.repository.peers import Peers
from iskander.scheduling.lane import Lane
from iskander.transport.http2.call import Call, Message

SERVICE: Final = "inference.GRPCInferenceService"

Answer = Callable[[Any, Grant], Any]
Change = Callable[[Any, Grant], Awaitable[Any]]


class OipService:
    """The calls of GRPCInferenceService.

    Args:
        models: What is served.
        desk: Has rows computed, and knows whether the server stops.
        siblings: Bring models and let them go, in all processes.
    """

    def __init__(self, models: Models, desk: RequestSubmitter, siblings: Peers) -> None:
        self._models = models
        self._siblings = siblings
        self._desk = desk
        self._inference = Inference(models, desk)
        self._streams: set[InferStream] = set()
        self._answers: dict[str, Answer] = {
            "ServerLive": lambda *_: oip_pb2.ServerLiveResponse(live=True),
            "ServerReady": lambda *_: oip_pb2.ServerReadyResponse(ready=models.is_ready),
            "ServerMetadata": lambda *_: describe.server_metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": _nothing_of("SystemSharedMemoryStatus"),
            "CudaSharedMemoryStatus": _nothing_of("CudaSharedMemoryStatus"),
            "SystemSharedMemoryUnregister": _nothing_to_unregister("SystemSharedMemoryUnregister"),
            "CudaSharedMemoryUnregister": _nothing_to_unregister("CudaSharedMemoryUnregister"),
            "SystemSharedMemoryRegister": _not_offered("this server reads no shared memory"),
            "CudaSharedMemoryRegister": _not_offered("this server reads no memory of a GPU"),
            "TraceSetting": _not_offered("this server writes no traces"),
            "LogSettings": _not_offered("logging is set when the server is started"),
        }

    def answer(self, name: str, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        """The answer of a call, for who has its messages in another encoding.

        Raises:
            IskanderError: Why there is none.
        """
        return self._answers[name](request, grant)

    def unary(self) -> dict[str, Callable[[bytes, Grant], Awaitable[bytes]]]:
        """The calls of one message and one answer, by the name of their method."""
        answers = {name: _at_once(answer) for name, answer in self._answers.items()}
        answers |= {"RepositoryModelLoad": self.load, "RepositoryModelUnload": self.unload}
        return {name: _coded(name, answer) for name, answer in answers.items()}

    def look_at_grants(self) -> None:
        """Who may ask what has changed."""
        for stream in list(self._streams):
            stream.look_at_grant()

    def infer_at_once(self, message: Message, call: Call, refuse: Refuse) -> bool:
        """Answer a call whose message is there, in this turn and that in which the results come.

        Returns:
            Whether that is so; otherwise it is for `infer`.

        Raises:
            IskanderError: Why there is no answer.
        """
        return UnaryInfer(self._inference, self._desk, call, refuse).begin(message)

    async def infer(self, raw: Message, call: Call) -> None:
        """Answer one request."""
        with self._desk.held(caller=call.caller):
            terms = StreamTerms(call.metadata, call.deadline_ns, call.source)
            scanned = scan(raw, self._desk.limits)
            await call.answer(*await self._inference.answer(scanned, terms, call))

    async def stream_infer(self, call: Call) -> None:
        """Requests in, responses out; see `InferStream`."""
        stream = InferStream(call, self._inference, self._desk.limits)
        with self._desk.held(stream.drain, call.caller):
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
        except NotReady:  # It is being loaded, or does not load.
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
        lanes = [lane for lane in self._models if grant.may_ask(lane.model.name)]
        if request.name:
            found = self._find(request, grant)
            lanes = [lane for lane in lanes if lane.model.name == request.name]
            if request.version:
                lanes = [found]
        return oip_pb2.ModelStatisticsResponse(model_stats=map(describe.statistics, lanes))

    def _repository_index(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        return oip_pb2.RepositoryIndexResponse(
            models=[
                describe.index_entry(standing)
                for standing in self._models.index()
                if (standing.state == "READY" or not request.ready) and grant.may_ask(standing.name)
            ]
        )

    async def load(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        """Load a model; the answer comes when it is served, or says why it is not.

        Raises:
            IskanderError: Why it is not.
        """
        grant.require_manage(_named(request))
        if request.parameters:
            raise Unsupported("a load takes no parameters here; settings are in `model.toml`")
        name = _named(request)
        await self._siblings.load(name)
        return oip_pb2.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def unload(self, request: Any, grant: Grant) -> Any:  # noqa: ANN401
        """Serve a model no longer.

        Raises:
            IskanderError: Why it still is.
        """
        name = _named(request)
        grant.require_manage(name)
        await self._siblings.unload(name)
        return oip_pb2.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)


def _named(request: Any) -> str:  # noqa: ANN401
    """The model that a load or unload means, in either of the layouts in use."""
    name: str = request.model_name or request.repository_name
    return name


def _at_once(answer: Answer) -> Change:
    async def answer_later(request: Any, grant: Grant) -> Any:  # noqa: ANN401
        return answer(request, grant)

    return answer_later


def _coded(name: str, answer: Change) -> Callable[[bytes, Grant], Awaitable[bytes]]:
    """A call from bytes to bytes."""

    async def serve(raw: bytes, grant: Grant) -> bytes:
        response: bytes = (await answer(_parsed(name, raw), grant)).SerializeToString()
        return response

    return serve


def _parsed(name: str, raw: bytes) -> Any:  # noqa: ANN401
    try:
        return getattr(oip_pb2, f"{name}Request").FromString(raw)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedInput(f"the message is not a {name}Request") from None


def _nothing_of(name: str) -> Answer:
    kind = getattr(oip_pb2, f"{name}Response")
    return lambda *_: kind()


def _nothing_to_unregister(name: str) -> Answer:
    """Tools forget all regions before they begin; that there are none is what they want."""
    kind = getattr(oip_pb2, f"{name}Response")

    def answer(request: Any, _: Grant) -> Any:  # noqa: ANN401
        if request.name:
            raise Unsupported("there are no regions; this server takes no shared memory")
        return kind()

    return answer


def _not_offered(why: str) -> Answer:
    def answer(*_: Any) -> Any:  # noqa: ANN401
        raise Unsupported(why)

    return answer
