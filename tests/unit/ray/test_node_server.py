"""Ports and paths of a node's server, and its states without a gateway."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.processes import eventually

from iskander.errors import ConfigError, IskanderError
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
