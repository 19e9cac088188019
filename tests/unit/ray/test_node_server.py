"""Ports and paths of a node's server, and its states without a gateway."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import eventually

from iskander.errors import ConfigError, IskanderError, NotReady
from iskander.ray import node_server
from iskander.ray.fleet import Fleet
from iskander.ray.node_server import NodeServer, ports


def test_ports_depend_on_the_key_alone() -> None:
    assert list(ports("a")) == list(ports("a")) != list(ports("b"))
    last = node_server.PORT_FIRST + node_server.PORTS
    assert all(node_server.PORT_FIRST <= port < last for port in ports("a"))
    assert len(set(ports("a"))) == node_server.PORTS_TRIED


def test_port_that_is_taken_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not node_server._is_free("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match=r"10\.255\.255\.1 is no address of this machine"):
        node_server._is_free("10.255.255.1", 20_000)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        node_server._is_free("no-such-host.invalid", 20_000)


class _Gateway:
    """A gateway whose first port another process takes before the gateway listens."""

    pid, starts = 1, 1

    def __init__(self, listen: str, taken: list[socket.socket]) -> None:
        self.address, self._listen, self._taken = "unix:none", listen, taken
        self._has_ended = False

    def start(self) -> None:
        if not self._taken:
            host, _, port = self._listen.rpartition(":")
            self._taken.append(socket.create_server((host, int(port))))
            self._has_ended = True
            raise NotReady("the gateway ended")

    def is_ready(self) -> bool:
        return not self._has_ended

    def loss_error(self) -> NotReady | None:
        return NotReady("the gateway ended") if self._has_ended else None

    def stop(self) -> None:
        pass


def test_port_that_another_process_takes_during_the_start_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[socket.socket] = []

    @contextlib.contextmanager
    def prepared(*_: object, listen: str, **__: object) -> Iterator[_Gateway]:
        yield _Gateway(listen, taken)

    monkeypatch.setattr(node_server, "prepared_server", prepared)
    server = NodeServer(
        str(tmp_path), is_config=False, host="127.0.0.1", port=0, key=f"fleet/{tmp_path}"
    )
    eventually(lambda: server.status()["is_ready"], what="a second start")
    status = server.status()
    assert (status["starts"], status["failures"], status["error"]) == (2, 0, None)
    assert status["address"] != f"127.0.0.1:{taken[0].getsockname()[1]}"
    assert server.stop()
    taken[0].close()


def test_missing_path_is_the_operators_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "BACKOFF_MAX_S", 1e-6)
    server = NodeServer(
        str(tmp_path / "none"), is_config=False, host="127.0.0.1", port=0, key="fleet/n0"
    )
    eventually(lambda: server.status()["failures"] > 1100, what="many failures")
    status = server.status()
    assert (status["is_ready"], status["pid"]) == (False, None)
    error = IskanderError.from_wire(status["error"])
    assert isinstance(error, ConfigError)
    assert "none: does not exist on this node; the model or configuration must be" in error.message
    assert server.stop()


def test_arguments_of_a_fleet() -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        Fleet()
    with pytest.raises(ConfigError, match="give one of the two"):
        Fleet("model", config="file")
    with pytest.raises(ConfigError, match="`name` is 'a/b'"):
        Fleet("model", name="a/b")
