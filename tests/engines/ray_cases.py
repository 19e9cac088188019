"""Cases of `test_ray.py`, in order: they share one cluster, which loses a node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.cluster_utils import Cluster
from support import models
from support.processes import eventually, render_config

from iskander.client import Client
from iskander.errors import ConfigError, ContractError, ModelNotFound, NotReady, Unauthenticated
from iskander.foundation import clock
from iskander.ray import Fleet, addresses, cluster, score

ROWS, FILES, BLOCK_ROWS = 200_000, 20, 10_000
WITHIN_S = 60.0
NODES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return models.row_ids(folder / "ids")


@pytest.fixture(scope="module")
def parquet(folder: Path) -> Path:
    target = folder / "in"
    target.mkdir()
    rows = ROWS // FILES
    for index in range(FILES):
        ids = range(index * rows, (index + 1) * rows)
        table = pa.table({"x": ids, "label": [f"row {x}" for x in ids]})
        pq.write_table(table, target / f"{index:03}.parquet")
    return target


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(NODES - 1):
        started.add_node(num_cpus=1)
    ray.init(address=started.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(scope="module")
def fleet(nodes: Cluster, model: Path) -> Iterator[Fleet]:
    with Fleet(model, name="test", timeout_s=WITHIN_S) as started:
        yield started


def statuses(fleet: Fleet) -> dict[str, dict[str, Any]]:
    found = cluster.call_each(cluster.named_actors(f"{fleet.name}/"), "status", timeout_s=3.0)
    return {key: each for key, each in found.items() if isinstance(each, dict)}


def batches_run(address: str) -> int:
    with Client(address) as client:
        return sum(lane["batch_rows"]["count"] for lane in client.stats()["lanes"].values())


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_each_node_has_a_server(fleet: Fleet) -> None:
    uris = fleet.uris()
    assert set(uris) == {node["NodeID"] for node in ray.nodes()}
    assert len(set(uris.values())) == NODES
    for address in uris.values():
        with Client(address) as client:
            assert client.model("ids").versions == ("1",)
    assert repr(fleet).startswith("Fleet('test', ") and "127.0.0.1:2" in repr(fleet)
    assert Fleet.connect("test").uris() == uris
    with pytest.raises(ConfigError, match="there is a fleet 'test'"):
        Fleet("anything", name="test")
    with pytest.raises(NotReady, match="no fleet 'other'"):
        Fleet.connect("other")


def test_path_that_a_node_cannot_read(nodes: Cluster, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^node \w{8} \(127.*missing: does not exist on this"):
        Fleet(folder / "missing", timeout_s=WITHIN_S)
    (folder / "no-model.onnx").write_text("none")
    with pytest.raises(NotReady, match=r"^node .* ended at its start: .*no-model"):
        Fleet(folder / "no-model.onnx", timeout_s=WITHIN_S)
    assert not [each for each in cluster.named_actors("") if not each.startswith("test/")]


def test_errors_before_anything_runs(fleet: Fleet, parquet: Path) -> None:
    data = ray.data.read_parquet(str(parquet))
    renamed = data.rename_columns({"x": "z"})
    with pytest.raises(ModelNotFound):
        score(data, "other", fleet)
    with pytest.raises(ModelNotFound):
        score(data, "ids", fleet, version="7")
    with pytest.raises(ConfigError, match=r"`keep` has `labels`.*did you mean `label`"):
        score(data, "ids", fleet, keep=["labels"])
    with pytest.raises(ContractError, match="column `label`: wanted int64"):
        score(data, "ids", fleet, columns={"x": "label"})
    schema_of = renamed.schema(fetch_if_missing=False)
    if schema_of is not None:
        with pytest.raises(ContractError, match="column `x` is missing"):
            score(renamed, "ids", fleet)
    clash = ray.data.from_arrow(pa.table({"x": [1], "y": [2]}))
    with pytest.raises(ContractError, match="column `y` is in the dataset and a result"):
        score(clash, "ids", fleet)
    assert score(clash, "ids", fleet, keep=["x"]).take_all() == [{"x": 1, "y": 4}]


def test_killed_server_is_started_again_and_used(fleet: Fleet) -> None:
    """SIGKILL of the gateway, which its actor replaces, then of the actor, which Ray replaces."""
    own = ray.get_runtime_context().get_node_id()
    found = fleet.servers().look_up()
    assert found.preferred is not None and found.preferred.startswith("unix:")
    assert len(found.others) == NODES - 1
    client = found.open({})
    batch = pa.record_batch({"x": [1, 2]})
    for victim in ("pid", "actor"):
        before = statuses(fleet)[own]
        os.kill(before[victim], signal.SIGKILL)
        # Another server scores while this one is away.
        assert client.score("ids", batch)["y"].to_pylist() == [4, 7]

        def is_back(pid: int = before["pid"]) -> bool:
            now = statuses(fleet).get(own)
            return now is not None and now["is_ready"] and now["pid"] != pid

        eventually(is_back, WITHIN_S, "the new server")
        assert not is_alive(before["pid"])
        address = fleet.uris()[own]
        assert address == before["address"]
        batches = batches_run(address)

        def is_used(address: str = address, batches: int = batches) -> bool:
            client.score("ids", batch)
            return batches_run(address) > batches

        eventually(is_used, WITHIN_S, "the use of the new server")
    client.close()


def test_node_killed_in_the_middle(fleet: Fleet, nodes: Cluster, parquet: Path) -> None:
    before = statuses(fleet)
    victim = next(iter(nodes.worker_nodes))
    lost = before[victim.node_id]

    def paused(table: pa.Table) -> pa.Table:
        """A slow step, so that the job has not ended when its first rows arrive."""
        clock.pause_s(0.1)
        return table

    data = ray.data.read_parquet(str(parquet)).repartition(target_num_rows_per_block=BLOCK_ROWS)
    data = data.map_batches(paused, batch_format="pyarrow", batch_size=None)
    scored = score(data, "ids", fleet, keep=["x"], batch_rows=1000, block_rows=None)
    found: list[pa.Table] = []
    others = [each["address"] for key, each in before.items() if key != victim.node_id]
    batches = 0
    for batch in scored.iter_batches(batch_format="pyarrow", batch_size=None):
        if not found:
            nodes.remove_node(victim, allow_graceful=False)
            batches = sum(map(batches_run, others))
        found.append(batch)
    assert sum(map(batches_run, others)) > batches, "the job had ended before"
    table = pa.concat_tables(found).sort_by("x")
    assert table.column_names == ["x", "y"]
    assert table["x"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist() == [3 * x + 1 for x in range(ROWS)]
    eventually(lambda: not is_alive(lost["pid"]), WITHIN_S, "the end of the lost node's server")
    eventually(lambda: set(fleet.uris()) == set(before) - {victim.node_id}, WITHIN_S)


def test_configuration_with_tokens_on_one_node_and_rejected_rows(
    nodes: Cluster, folder: Path, model: Path
) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = folder / "tokens.toml"
    tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nmodels = ["*"]\n')
    tokens.chmod(0o600)
    config = folder / "iskander.toml"
    served = {"name": "numbers", "path": str(model)}
    config.write_text(render_config(models=[served], access={"tokens": str(tokens)}))
    own = ray.get_runtime_context().get_node_id()
    data = ray.data.from_arrow(pa.table({"x": [1, None, 3]}))
    with Fleet(config=config, nodes=[own], token="secret", timeout_s=WITHIN_S) as started:
        assert list(started.uris()) == [own]
        with pytest.raises(Unauthenticated):
            score(data, "numbers", started, client={"token": "other"})
        with pytest.raises(ray.exceptions.RayTaskError, match="null"):
            score(data, "numbers", started).take_all()
        rows = score(data, "numbers", started, on_error="null").take_all()
        assert [row["y"] for row in rows] == [4, None, 10]


def test_new_node_gets_a_server(fleet: Fleet, nodes: Cluster) -> None:
    added = nodes.add_node(num_cpus=1)
    assert added.node_id not in fleet.uris()
    assert added.node_id in fleet.refresh(timeout_s=WITHIN_S)
    assert len(fleet.uris()) == NODES


def test_addresses_instead_of_a_fleet(fleet: Fleet) -> None:
    uris = fleet.uris()
    data = ray.data.range(100).rename_columns({"id": "x"})
    for target in (uris, list(uris.values()), next(iter(uris.values()))):
        rows = score(data, "ids", target, concurrency=1).take_all()
        assert sorted((row["x"], row["y"]) for row in rows) == [(x, 3 * x + 1) for x in range(100)]
    assert (
        addresses.fixed_servers(uris).look_up().preferred
        == uris[ray.get_runtime_context().get_node_id()]
    )


def test_close_leaves_no_process(fleet: Fleet) -> None:
    found = statuses(fleet)
    pids = [each[key] for each in found.values() for key in ("pid", "actor")]
    pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(set(pids)) >= 3 * NODES
    fleet.close()
    eventually(lambda: not any(map(is_alive, pids)), WITHIN_S, "the end of all processes")
    assert fleet.uris() == {}
    with pytest.raises(NotReady, match="no server of the fleet 'test' is ready"):
        fleet.servers()
