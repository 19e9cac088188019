"""Remote servers that differ, are lost, return, need credentials, or are the gateway itself."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import trustme
from onnx import TensorProto, helper
from support import models
from support.oip_stub import Stub
from support.processes import BIN, Gateway, eventually, running
from support.remotes import mode, remote, score, served

from iskander.client import Client
from iskander.contract.column_types import ColumnType
from iskander.errors import RemoteDenied, RemoteLoop, RemoteUnavailable


def reason_of(gateway: Gateway) -> str:
    """Why the server is not ready, by its admin port; empty if it is."""
    connection = http.client.HTTPConnection(gateway.stats()["admin_address"], timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read().decode()
        return "" if answer.status == 200 else text


def test_lost_connection_outage_and_return(tmp_path: Path) -> None:
    """A killed server makes the model not ready, and a restarted one ready again."""
    with Stub(tmp_path) as first:
        far = served(remote(tmp_path / "far", first.address))
        near = {"name": "near", "path": str(models.row_ids(tmp_path / "near"))}
        with running(tmp_path, [far, near]) as gateway:
            with pytest.raises(RemoteUnavailable, match="cannot be reached"):
                score(gateway, "far", mode("exit"))

            def is_out() -> bool:
                with contextlib.suppress(RemoteUnavailable):
                    score(gateway, "far", mode("double"))
                return bool(gateway.stats()["lanes"]["far/1"]["outage"])

            eventually(is_out, what="an outage")
            with pytest.raises(RemoteUnavailable) as raised:
                score(gateway, "far", mode("double"))
            assert raised.value.retry_after_ms == 1000
            assert first.address in reason_of(gateway)
            with gateway.client() as client:
                assert first.address in client.health()["models"]["far"]["reason"]
            near_rows = pa.record_batch({"x": pa.array([1], pa.int64())})
            assert score(gateway, "near", near_rows) == {"y": [4]}
            with Stub(tmp_path, first.port):
                gateway.wait_ready()
                assert score(gateway, "far", mode("double")) == {"y": [0.0]}
                assert reason_of(gateway) == ""
                assert [each["starts"] for each in gateway.stats()["workers"]] == [1, 1]


def test_two_addresses_share_calls_and_survive_the_loss_of_one(tmp_path: Path) -> None:
    with Stub(tmp_path) as one, Stub(tmp_path) as two:
        path = remote(tmp_path / "far", one.address, two.address)
        with running(tmp_path, [served(path)]) as gateway:
            for _ in range(4):
                assert score(gateway, "far", mode("double")) == {"y": [0.0]}
            assert len(one.events("ModelInfer")) == len(two.events("ModelInfer")) == 2
            one.kill()
            for _ in range(8):
                assert score(gateway, "far", mode("double")) == {"y": [0.0]}
            assert gateway.stats()["ready"]


@pytest.mark.slow
def test_nothing_is_lost_for_clients_that_retry(tmp_path: Path) -> None:
    """Clients send while the server is killed and started again; each result is right."""
    results: list[list[float]] = []
    is_over = threading.Event()

    def send() -> None:
        with Client(gateway.address, shared_bytes=0) as client:
            while not is_over.is_set():
                table = client.score("far", mode("double"), timeout_s=60.0)
                results.append(table.column("y").to_pylist())

    with Stub(tmp_path) as first:
        path = remote(tmp_path / "far", first.address)
        with running(tmp_path, [served(path, workers=2)]) as gateway:
            threads = [threading.Thread(target=send) for _ in range(4)]
            for thread in threads:
                thread.start()
            first.wait_for("ModelInfer", 20)
            first.kill()
            eventually(lambda: gateway.stats()["lanes"]["far/1"]["outage"], what="an outage")
            with Stub(tmp_path, first.port) as second:
                second.wait_for("ModelInfer", 20)
                is_over.set()
                for thread in threads:
                    thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert results and all(result == [0.0] for result in results)


def test_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with Stub(tmp_path, token="first") as stub:
        path = remote(tmp_path / "far", stub.address, token_file=str(token))
        with running(tmp_path, [served(path)]) as gateway:
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}
            token.write_text("a-wrong-one")
            with pytest.raises(RemoteDenied, match=r"remote.token_file"):
                score(gateway, "far", mode("double"))
            token.write_text("first")
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}
            token.unlink()
            with pytest.raises(RemoteDenied, match="cannot be used: No such file"):
                score(gateway, "far", mode("double"))


def test_tls_with_a_client_certificate_and_headers(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "server", "key", "client")}
    authority.cert_pem.write_to_path(files["ca"])
    issued = authority.issue_cert("models.example")
    issued.cert_chain_pems[0].write_to_path(files["server"])
    issued.private_key_pem.write_to_path(files["key"])
    own = authority.issue_cert("gateway")
    own.cert_chain_pems[0].write_to_path(files["client"])
    own.private_key_pem.write_to_path(files["client"] + ".key")
    tls = {
        "ca": files["ca"],
        "certificate": files["client"],
        "key": files["client"] + ".key",
        "server_name": "models.example",
    }
    with Stub(tmp_path, tls=(files["server"], files["key"], files["ca"])) as stub:
        path = remote(tmp_path / "far", stub.address, tls=tls, metadata={"application": "ranker"})
        with running(tmp_path, [served(path)]) as gateway:
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}
            headers = stub.events("ModelInfer")[-1]["headers"]
            assert headers["application"] == "ranker"
            assert headers["iskander-hops"] == "1"


STRINGS = ["a", "", "größer", "x" * 300]


def test_types_shapes_and_several_inputs_through_two_gateways(tmp_path: Path) -> None:
    """The same results as of the first gateway: numbers, booleans, halves, strings, axes."""
    kinds = {
        "b": (TensorProto.BOOL, "bool", [True, False, True, True]),
        "h": (TensorProto.FLOAT16, "float16", np.array([1, 2, 3, 4], np.float16)),
        "i": (TensorProto.INT8, "int8", np.array([-1, 2, 3, 4], np.int8)),
        "u": (TensorProto.UINT64, "uint64", np.array([2**63, 2, 3, 4], np.uint64)),
        "s": (TensorProto.STRING, "utf8", STRINGS),
    }
    cube = np.arange(24, dtype=np.float32)
    info = helper.make_tensor_value_info
    names = [*kinds, "c"]
    models.save(
        tmp_path / "same",
        [helper.make_node("Identity", [name], [f"{name}_"]) for name in names],
        [*(info(n, e, ["rows"]) for n, (e, _, _) in kinds.items()), info("c", 1, ["rows", 2, 3])],
        [
            *(info(f"{n}_", e, ["rows"]) for n, (e, _, _) in kinds.items()),
            info("c_", 1, ["rows", 2, 3]),
        ],
    )
    types = {name: kind for name, (_, kind, _) in kinds.items()} | {
        "c": str(ColumnType("float32", (2, 3)))
    }
    rows = {name: pa.array(values) for name, (_, _, values) in kinds.items()}
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(cube.reshape(4, 2, 3))
    batch = pa.record_batch(rows | {"c": tensor})
    limits = {"result_string_bytes": 300, "max_batch_rows": 1024}
    near = {"name": "same", "path": str(tmp_path / "same"), **limits}
    (tmp_path / "near").mkdir()
    (tmp_path / "front").mkdir()
    with running(tmp_path / "near", [near]) as behind:
        columns = types, {f"{name}_": kind for name, kind in types.items()}
        path = remote(tmp_path / "far", behind.address, model="same", columns=columns)
        far = served(path, **limits)
        with running(tmp_path / "front", [far]) as gateway:
            expected = score(behind, "same", batch)
            assert score(gateway, "far", batch) == expected
            assert (
                expected["s_"] == STRINGS and expected["c_"][3] == cube[18:].reshape(2, 3).tolist()
            )
            with gateway.client() as client:  # Several requests share a batch.
                found = list(client.stream("far", [batch.slice(k, 1) for k in range(4)]))
            assert [each.column("s_")[0].as_py() for each in found] == STRINGS
            (worker,) = gateway.worker_pids()
            mapped = {Path(each.path).name for each in psutil.Process(worker).memory_maps()}
            assert not [name for name in mapped if "onnxruntime" in name or "arrow" in name]


def started_with(tmp_path: Path, path: Path, **sections: Any) -> str:
    """The error of a gateway that cannot start."""
    gateway = Gateway(tmp_path, [served(path)], **sections)
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() != 0
        return gateway.text()
    finally:
        gateway.end()


def test_manifest_of_the_metadata(tmp_path: Path) -> None:
    def derived(name: str, *, is_right: bool = True) -> str:
        command = [str(BIN / "iskander"), "manifest", "--remote", stub.address, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == is_right, done.stderr
        return done.stdout if is_right else done.stderr

    with Stub(tmp_path, metadata=([["x", "FP64", [-1]]], [["y", "FP64", [-1]]])) as stub:
        written = derived("stub/2")
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "manifest.toml").write_text(written)
        assert tomllib.loads(written)["remote"]["version"] == "2"
        with running(tmp_path, [served(tmp_path / "far")]) as gateway:
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}
    assert "cannot be reached" in derived("stub", is_right=False)


def test_differences_from_the_metadata_prevent_the_load(tmp_path: Path) -> None:
    metadata = [["x", "FP32", [-1]]], [["y", "FP64", [-1]]]
    with Stub(tmp_path, metadata=metadata) as stub:
        path = remote(tmp_path / "far", stub.address)
        text = started_with(tmp_path, path)
        assert f"does not match remote model `stub` at {stub.address}" in text
        assert "input `x` is a tensor(float) in the graph and `float64` in the manifest" in text

        remote(tmp_path / "far", stub.address, is_metadata_checked=False)
        with running(tmp_path, [served(path)]) as gateway:
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}


def test_server_that_is_not_there_prevents_the_start_for_now(tmp_path: Path) -> None:
    """The exit code lets a service manager try again, unlike that of a wrong manifest."""
    with Stub(tmp_path) as stub:
        path = remote(tmp_path / "far", stub.address)
    gateway = Gateway(tmp_path, [served(path)])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 69
        assert "cannot be reached" in gateway.text()
    finally:
        gateway.end()


def test_silent_server_does_not_delay_a_load_beyond_the_limit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        text = started_with(tmp_path, remote(tmp_path / "far", address, connect_s=0.5))
    assert f"{address} cannot be reached" in text


def test_gateway_rejects_itself_as_the_remote_server(tmp_path: Path) -> None:
    """At start it does not listen yet, so its own address is refused later: in a reload."""
    with Stub(tmp_path) as stub:
        path = remote(tmp_path / "far", stub.address)
        with running(tmp_path, [served(path)]) as gateway, gateway.client() as client:
            remote(tmp_path / "far", gateway.address, model="far")
            with pytest.raises(RemoteLoop, match="this server itself"):
                client.load("far")
            assert score(gateway, "far", mode("double")) == {"y": [0.0]}


@pytest.mark.slow
def test_longer_loops_end_at_the_limit_of_hops(tmp_path: Path) -> None:
    """Two gateways whose models refer to each other, each with workers for all hops."""
    (tmp_path / "near").mkdir()
    (tmp_path / "front").mkdir()
    with Stub(tmp_path) as stub:
        one = remote(tmp_path / "one", stub.address)
        with running(tmp_path / "near", [served(one, workers=3)]) as near:
            two = remote(tmp_path / "two", near.address, model="one")
            with running(tmp_path / "front", [served(two, workers=3)]) as front:
                assert score(front, "two", mode("double")) == {"y": [0.0]}
                remote(tmp_path / "one", front.address, model="two")
                with near.client() as client:
                    client.load("one")
                with pytest.raises(RemoteLoop, match="form a loop"):
                    score(front, "two", mode("double"))
