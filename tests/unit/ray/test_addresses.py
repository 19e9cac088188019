"""Addresses of servers as seen from one node of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iskander.engines.addresses import Addresses
from iskander.errors import IskanderError
from iskander.ray.addresses import FixedServers, FleetServers, fixed_servers
from iskander.ray.node_server import _point_link_to, local_socket


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Answers of the actors by node id; this node is `n1`."""
    answers: dict[str, Any] = {}
    monkeypatch.setattr("iskander.ray.cluster.own_node_id", lambda: "n1")
    monkeypatch.setattr("iskander.ray.cluster.own_host", lambda: "10.0.0.2")
    monkeypatch.setattr("iskander.ray.cluster.named_actors", lambda prefix: dict(answers))
    monkeypatch.setattr("iskander.ray.cluster.call_each", lambda actors, *_, **__: actors)
    monkeypatch.setattr("iskander.ray.node_server.temporary_folder", lambda: tmp_path)
    return answers


def test_fixed_servers(statuses: dict[str, Any]) -> None:
    table = fixed_servers({"n0": "a:1", "n1": "b:1"})
    assert table.look_up() == Addresses("b:1", ("a:1",))
    listed = fixed_servers(["10.0.0.1:1", "10.0.0.2:1"])
    assert listed.look_up() == Addresses("10.0.0.2:1", ("10.0.0.1:1",))
    assert fixed_servers("a:1") == FixedServers(unplaced=("a:1",))
    assert fixed_servers("a:1").look_up() == Addresses(None, ("a:1",))
    with pytest.raises(IskanderError, match="`target` has no address"):
        fixed_servers([])


def test_servers_of_a_fleet(statuses: dict[str, Any], tmp_path: Path) -> None:
    """The last address of one that is not ready, none of a node that is lost."""
    servers = FleetServers("f/", {"n0": "a:1", "n1": "b:1", "n2": "c:1"})
    statuses["n0"] = statuses["n1"] = {"is_ready": False}
    statuses["n3"] = {"is_ready": True, "address": "d:1"}
    assert servers.look_up() == Addresses("b:1", ("a:1", "d:1"))
    statuses["n0"] = {"is_ready": True, "address": "a:2"}
    assert servers.look_up() == Addresses("b:1", ("a:2", "d:1"))
    _point_link_to(local_socket("f/n1"), tmp_path / "server.sock")
    assert servers.look_up() == Addresses(f"unix:{local_socket('f/n1')}", ("a:2", "d:1"))
    del statuses["n1"]
    local_socket("f/n1").unlink()
    assert servers.look_up() == Addresses(None, ("a:2", "d:1"))


def test_path_of_a_node_leads_to_its_present_socket(
    statuses: dict[str, Any], tmp_path: Path
) -> None:
    path, others = local_socket("f/n1"), [local_socket("f/n0"), local_socket("g/n1")]
    assert len({path, *others}) == 3
    for name in ("first", "second"):
        (tmp_path / name).touch()
        _point_link_to(path, tmp_path / name)
        assert path.resolve() == tmp_path / name
    _point_link_to(others[0], tmp_path / "gone")
    _point_link_to(others[1], tmp_path / "second")
    assert sorted(tmp_path.glob("isk-*")) == sorted([path, others[1]])
