"""One call of inference over HTTP, with a submitter that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.lanes import lane_of

from iskander.auth.grants import FULL_GRANT
from iskander.auth.source import Source
from iskander.config.schema import HttpConfig, LimitsConfig
from iskander.errors import Cancelled, DeadlineExceeded, IskanderError, Overloaded
from iskander.protocols.oip.http.body import BodyQuota
from iskander.protocols.oip.http.infer import HttpInference
from iskander.protocols.oip.http.messages import ParsedRequest
from iskander.protocols.tensors import RequestTensors
from iskander.scheduling.request import Terms
from iskander.transport.receive_budget import ReceiveBudget

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}
).encode()


class ScriptedSubmitter:
    """Stands for the real one."""

    def __init__(self, answer: Callable[[RequestTensors], Awaitable[bytes]]) -> None:
        self.limits = LimitsConfig()
        self.calls = 0
        self.terms: list[Terms] = []
        self.callers: list[object] = []
        self._answer = answer

    def require_open(self) -> None: ...

    @contextlib.contextmanager
    def open_call(self, caller: object = None) -> Iterator[None]:
        self.callers.append(caller)
        self.calls += 1
        yield
        self.calls -= 1

    async def infer(self, _: Any, offered: RequestTensors, *, terms: Terms) -> bytes:
        self.terms.append(terms)
        return await self._answer(offered)


class Models:
    """One model, whatever is asked for."""

    def find_loaded(self, name: str, version: str | None, key: str) -> Any:
        return lane_of()


async def tripled(offered: RequestTensors) -> bytes:
    return (3 * np.frombuffer(offered.tensors[0], np.int64)).tobytes()


class Client:
    """The other end of a call.

    Attributes:
        gone: Set, when it leaves.
        sent: What it was sent.
    """

    def __init__(self, body: bytes = BODY, **headers: str) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.submitter: ScriptedSubmitter | None = None
        self._pieces = [{"type": "http.request", "body": body, "more_body": False}]
        named = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        self._scope: dict[str, Any] = {
            "type": "http",
            "headers": named,
            "path_params": {"name": "m0"},
            "grant": FULL_GRANT,
            "client": ("10.0.0.9", 1234),
        }

    async def ask(self, submitter: ScriptedSubmitter, **config: Any) -> bytes:
        """The body of the answer."""
        self._scope["is_surplus"] = config.pop("is_surplus", False)
        self.submitter = submitter
        budget = ReceiveBudget(config.pop("receive_bytes", 1 << 30))
        settings = HttpConfig(**config)
        infer = HttpInference(
            Models(),  # type: ignore[arg-type]
            submitter,  # type: ignore[arg-type]
            settings,
            BodyQuota(settings.bodies_bytes, budget, 10.0, [].append),
        )
        try:
            await infer(self._scope, self._receive, self._send)
        finally:
            assert budget.used_bytes == 0
        return b"".join(message["body"] for message in self.sent[1:])

    async def _receive(self) -> Any:
        if self._pieces:
            return self._pieces.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        assert self.submitter is not None and self.submitter.calls == 1, "the call is not held"
        self.sent.append(message)


def test_a_call_is_held_until_its_answer_is_written() -> None:
    async def run() -> None:
        submitter, client = ScriptedSubmitter(tripled), Client()
        assert json.loads(await client.ask(submitter))["outputs"][0]["data"] == [3, 6]
        assert submitter.calls == 0

    asyncio.run(run())


def test_a_parameter_goes_before_a_header() -> None:
    async def run() -> list[Terms]:
        submitter = ScriptedSubmitter(tripled)
        headers = {"iskander_client": "a", "iskander_deadline_ms": "30"}
        body = json.loads(BODY) | {"parameters": {"iskander_client": "b"}}
        await Client(json.dumps(body).encode(), **headers).ask(submitter)
        await Client(iskander_timestamp_ns="1").ask(submitter)
        return submitter.terms

    both, stamped = asyncio.run(run())

    assert (both.client, both.budget_ms) == ("b", 30.0)
    assert stamped.age_ms > 0


@pytest.mark.parametrize(
    ("headers", "parameters", "wanted"),
    [
        ({"iskander_priority": "5"}, {"priority": 1}, Terms(client="c", priority=0)),
        ({"iskander_priority": "5"}, {"priority": 0}, Terms(client="c", priority=5)),
        ({"iskander_priority": "5"}, {"iskander_priority": 0}, Terms(client="c", priority=0)),
        ({"iskander_deadline_ms": "30"}, {"timeout": 50_000}, Terms(client="c", budget_ms=50.0)),
        (
            {"iskander_urgency": "1", "iskander_newest_wins": "true", "iskander_ttl_ms": "9"},
            {"iskander_urgency": 0, "iskander_newest_wins": False},
            Terms(client="c", urgency=0.0, is_newest_wins=False, ttl_ms=9.0),
        ),
    ],
)
def test_every_parameter_goes_before_its_header(
    headers: dict[str, str], parameters: dict[str, Any], wanted: Terms
) -> None:
    submitter = ScriptedSubmitter(tripled)
    body = json.loads(BODY) | {"parameters": parameters}
    asyncio.run(Client(json.dumps(body).encode(), iskander_client="c", **headers).ask(submitter))

    (terms,) = submitter.terms
    source = Source(connection="10.0.0.9:1234")
    assert terms == replace(wanted, is_named=True, source=source)


def test_all_connections_of_an_address_are_one_caller() -> None:
    """Or one client would hold every place, with a connection for each."""

    async def answer(_: RequestTensors) -> bytes:
        return bytes(16)

    submitter = ScriptedSubmitter(answer)
    asyncio.run(Client().ask(submitter))
    assert submitter.callers == ["10.0.0.9"]


def test_a_client_that_leaves_ends_what_is_asked_for_it() -> None:
    async def run() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def never(_: RequestTensors) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        client = Client()
        asking = asyncio.create_task(client.ask(ScriptedSubmitter(never)))
        await begun.wait()
        client.gone.set()
        with pytest.raises(Cancelled):
            await asking
        await ended.wait()
        assert client.sent == []

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_refused_request_is_forgotten_at_once() -> None:
    """Collections are rare, and bodies large."""

    async def refuse(_: RequestTensors) -> bytes:
        await asyncio.sleep(0)
        raise DeadlineExceeded("late")

    async def run() -> None:
        with pytest.raises(IskanderError):
            await Client().ask(ScriptedSubmitter(refuse))

    with collections_off():
        asyncio.run(run())
        assert not [each for each in gc.get_objects() if type(each) is ParsedRequest]


def test_a_port_that_is_full_and_bodies_that_are_too_many_are_refused() -> None:
    async def run() -> None:
        for config in (
            {"is_surplus": True},
            {"bodies_bytes": len(BODY) - 1},
            {"receive_bytes": 1000},
        ):
            client = Client()
            with pytest.raises(Overloaded):
                await client.ask(ScriptedSubmitter(tripled), **config)

    asyncio.run(run())


@contextlib.contextmanager
def collections_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
