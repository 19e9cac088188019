"""Servers of one job: those that run the model differently are rejected by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from iskander.client import OFF, ModelDescription
from iskander.engines.runtimes import CALL_S, common_runtimes
from iskander.errors import ModelNotFound, NotReady, RuntimeDiffers

SCHEMA: Any = None


def described(library: str = "ONNX Runtime 1.31.1", threads: int = 2) -> ModelDescription:
    provider = "CPUExecutionProvider"
    runtime = {
        "library": library,
        "providers": [provider],
        "threads": threads,
        "name": f"{library}, {provider}, threads {threads}",
    }
    return ModelDescription(
        name="m",
        version="3",
        ready=True,
        backend="onnx",
        max_batch_rows=100,
        limits={"rows": 100},
        versions=("3",),
        aliases={},
        input_schema=SCHEMA,
        output_schema=SCHEMA,
        input_types={},
        passthrough="none",
        ranked_within=(),
        metadata={"runtimes": [runtime]},
    )


class Servers:
    """Servers by address: a description, or the error of a call."""

    def __init__(self, **servers: ModelDescription | Exception) -> None:
        self.servers = servers
        self.opened: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0

    def open(self, address: str, **options: Any) -> Any:
        self.opened.append((address, options))

        def model(name: str, *, version: str) -> Any:
            found = self.servers[address]
            assert (name, version) == ("m", "3")
            if isinstance(found, Exception):
                raise found
            return SimpleNamespace(description=found)

        def close() -> None:
            self.closed += 1

        return SimpleNamespace(model=model, close=close)

    def compared(self) -> dict[str, str]:
        return common_runtimes(
            described(), list(self.servers), {"token": "t"}, open_client=self.open
        )


def test_equal_servers_have_one_term() -> None:
    servers = Servers(a=described(), b=described())
    assert servers.compared() == {
        "runtimes": "ONNX Runtime 1.31.1, CPUExecutionProvider, threads 2"
    }
    options = {"token": "t", "timeout_s": CALL_S, "retry": OFF, "shared_bytes": 0}
    assert servers.opened == [("a", options), ("b", options)] and servers.closed == 2


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (described(threads=4), "server b runs model `m` differently: threads was 2, is 4"),
        (described("ONNX Runtime 1.32.0"), "runtime was ONNX Runtime 1.31.1, is ONNX Runtime 1.32"),
    ],
)
def test_server_that_differs_is_rejected_by_name(other: ModelDescription, text: str) -> None:
    servers = Servers(a=described(), b=other)
    with pytest.raises(RuntimeDiffers, match=text):
        servers.compared()
    assert servers.closed == 2


def test_server_that_is_away_is_left_to_its_calls() -> None:
    assert Servers(a=described(), b=NotReady("away")).compared()["runtimes"]
    with pytest.raises(ModelNotFound):
        Servers(a=described(), b=ModelNotFound("none")).compared()


def test_single_server_is_not_asked_again() -> None:
    servers = Servers(a=described())
    assert servers.compared() and servers.opened == []
