"""gRPC's interoperability test cases, by gRPC's clients in Python, JavaScript and Go.

The server is `support/interop_server.py`: grpc.testing.TestService on the gateway's own listener. A
client runs all its cases on one channel. After each case the server has no open call and no charged
memory, and its limits have ended no call.

`docs/conformance.md` lists the cases that have a limit or do not apply. The server never compresses
its responses, which gRPC allows: `server_compressed_unary` and `server_compressed_streaming` only
check the responses to clients that request compression.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.interop_server import InteropServer
from support.processes import eventually
from support.toolchains import INTEROP, CaseClient, built_go, installed_npm, tool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
CASES = [
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
    "custom_metadata",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
]
COMPRESSED = [
    "client_compressed_unary",
    "client_compressed_streaming",
    "server_compressed_unary",
    "server_compressed_streaming",
]
LOAD = ["concurrent_large_unary", "rpc_soak", "channel_soak"]
CLIENTS = {
    "python": [*CASES, *COMPRESSED, *LOAD],
    "python_aio": CASES,
    "js": [*CASES, *COMPRESSED],
    "go": [*CASES, *COMPRESSED],
}


def python_command(kind: str) -> list[str]:
    return [sys.executable, str(INTEROP / "clients" / "grpc_python.py"), "ADDRESS", kind]


def js_command() -> list[str]:
    script = installed_npm("grpc_js", INTEROP / "protos" / "interop.proto")
    return [tool("node", "apt-get install nodejs"), str(script), "ADDRESS"]


def go_command() -> list[str]:
    return [str(built_go("grpc_go")), "ADDRESS"]


COMMANDS: dict[str, Callable[[], list[str]]] = {
    "python": lambda: python_command("sync"),
    "python_aio": lambda: python_command("aio"),
    "js": js_command,
    "go": go_command,
}


@pytest.fixture(scope="module")
def server() -> Iterator[InteropServer]:
    server = InteropServer()
    yield server
    assert server.close() == 0


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, server: InteropServer) -> Iterator[CaseClient]:
    command = COMMANDS[request.param]()
    client = CaseClient([server.address if word == "ADDRESS" else word for word in command])
    yield client
    client.close()


def test_the_page_names_the_number_of_cases() -> None:
    (number,) = re.findall(r"test_grpc_interop\.py` \| all (\d+) that apply", PAGE.read_text())
    assert int(number) == len({case for cases in CLIENTS.values() for case in cases})


@pytest.mark.parametrize(
    ("client", "case"),
    [
        pytest.param(
            client,
            case,
            id=f"{client}-{case}",
            marks=[pytest.mark.slow] if case in LOAD else [],
        )
        for client, cases in CLIENTS.items()
        for case in cases
    ],
    indirect=["client"],
)
def test_case(server: InteropServer, client: CaseClient, case: str) -> None:
    assert client.run(case) == "ok"
    idle = {"calls": 0, "bytes": 0, "ended": {}}
    eventually(lambda: server.state() == idle, within_s=5.0, what="an idle server")
