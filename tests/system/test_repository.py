"""Models added, changed and removed in the repository folder of a running server."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tritonclient.http as triton_http
from onnx import TensorProto
from support import models
from support.dealt import client_of
from support.processes import BIN, Gateway, eventually, running, suspended
from support.reference_client import ReferenceClient
from support.repositories import Folder, scaled

from iskander._generated import oip_pb2
from iskander.client import OFF, Client
from iskander.errors import IskanderError, ModelMoved, ModelNotFound, NotReady, Unsupported

REFERENCE = str(Path(models.__file__).with_name("repository_client.py"))

X = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


@contextlib.contextmanager
def serving(
    folder: Path,
    served: list[dict[str, Any]] | None = None,
    groups: tuple[str, ...] = ("0", "1"),
    **repository: Any,
) -> Iterator[Gateway]:
    settings = {"path": str(folder / "models"), "settle_ms": 50, **repository}
    workers = {"groups": list(groups), "reattach_s": 5.0}
    with running(folder, served or [], repository=settings, workers=workers) as gateway:
        yield gateway
        gateway.wait_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    reference = ReferenceClient(REFERENCE)
    yield reference
    reference.close()


def factor(client: Client, name: str = "m", version: str | None = None) -> int:
    """Factor of the model that served the request."""
    return int(client.score(name, X, version=version)["y"][0].as_py())


def listed(client: Client) -> dict[str, str]:
    """State of each version, by `name/version`."""
    return {f"{m['name']}/{m['version']}": m["state"] for m in client.models()}


def reason(client: Client, title: str) -> str:
    return next(m["reason"] for m in client.models() if f"{m['name']}/{m['version']}" == title)


def test_changes_of_the_folder_are_served(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    with serving(tmp_path) as gateway, gateway.client() as client:
        assert factor(client) == 3
        folder.put("m", 1, 5)
        eventually(lambda: factor(client) == 5, what="the change")
        folder.put("n", 1, 7)
        eventually(lambda: listed(client).get("n/1") == "ready", what="the new model")
        assert factor(client, "n") == 7
        folder.put("m", 2, 11)
        eventually(lambda: factor(client) == 11, what="the new version")
        eventually(
            lambda: listed(client) == {"m/2": "ready", "n/1": "ready"},
            what="the removal of the old version",
        )
        folder.remove("n")
        eventually(lambda: "n/1" not in listed(client), what="the removal of the model")
        with pytest.raises(ModelNotFound, match="there is no model `n`; available: m"):
            factor(client, "n")
        assert client.health()["ready"]


class Stream(threading.Thread):
    """One open stream that records its batches and results."""

    def __init__(self, gateway: Gateway, number: int, stop: threading.Event) -> None:
        super().__init__(name=f"stream {number}")
        self._address, self._number, self._stop_event = gateway.address, number, stop
        self.sent: list[int] = []
        self.results: list[list[int]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._address, retry=OFF) as client:
                for scored in client.stream("m", self._batches()):
                    self.results.append(scored["y"].to_pylist())
        except Exception as error:
            self.error = error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Batches unique to this stream, with several in flight."""
        turn = 0
        while not self._stop_event.is_set():
            turn += 1
            first = 1 + self._number * 1_000_000 + turn
            time.sleep(0.005)  # Leaves CPU time for the reloads.
            self.sent.append(first)
            yield pa.record_batch({"x": pa.array([first, first + 7], pa.int64())})


@pytest.mark.slow
def test_reloads_under_load_lose_and_mix_up_no_results(tmp_path: Path) -> None:
    """Eight streams stay open; each result has the stream's own rows and a single factor."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 2)
    stop = threading.Event()
    with serving(tmp_path) as gateway, gateway.client() as client:
        streams = [Stream(gateway, number, stop) for number in range(8)]
        try:
            for stream in streams:
                stream.start()
            eventually(lambda: all(stream.results for stream in streams), what="the first results")
            for turn in range(20):
                folder.put("m", 1, 3 + turn)
                eventually(lambda turn=turn: factor(client) == 3 + turn, what=f"reload {turn}")
        finally:
            stop.set()
            for stream in streams:
                stream.join(30)
        seen = set()
        for stream in streams:
            assert stream.error is None
            assert len(stream.results) == len(stream.sent)
            for first, values in zip(stream.sent, stream.results, strict=True):
                factors = {values[0] / first, values[1] / (first + 7)}
                assert len(factors) == 1 and factors <= {float(f) for f in range(2, 23)}
                seen |= factors
        assert {2.0, 22.0} <= seen
        stats = client.stats()
        assert stats["lanes"]["m/1"]["failed"] == stats["lanes"]["m/1"]["refused"] == {}
        eventually(lambda: len(gateway.text().split("unloaded generation")) == 41, what="unloads")


@pytest.mark.slow
def test_queued_requests_run_on_the_replaced_generation(tmp_path: Path) -> None:
    """The new generation serves at once; the old one is unloaded when its queue is empty."""
    folder = Folder(tmp_path / "models")
    folder.write_settings("m", "max_batch_rows = 1\n")
    folder.put("m", 1, models.slow(tmp_path / "slow", 40))
    results: dict[int, list[int]] = {}
    with serving(tmp_path, groups=("0",)) as gateway, gateway.client() as client:

        def send(first: int) -> None:
            with gateway.client() as own:
                batch = pa.record_batch({"x": pa.array([first], pa.int64())})
                results[first] = own.score("m", batch)["y"].to_pylist()

        callers = [threading.Thread(target=send, args=(900 + n,), daemon=True) for n in range(16)]
        for caller in callers:
            caller.start()
        queued = lambda: client.stats()["lanes"]["m/1"]["queued"]  # noqa: E731
        eventually(lambda: queued() >= 4, what="a queue")
        folder.put("m", 1, 5)
        eventually(lambda: "is draining" in gateway.text(), what="the change")
        assert len(results) < len(callers), "no request was queued at the replacement"
        assert factor(client) == 5
        eventually(lambda: len(results) == len(callers), within_s=60, what="all results")
        eventually(lambda: "unloaded generation" in gateway.text(), what="the unload")
    assert results == {900 + n: [900 + n] for n in range(16)}


def test_failed_load_keeps_the_old_version_and_reports_the_reason(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    with serving(tmp_path) as gateway, gateway.client() as client:
        folder.put("m", 1, broken_manifest(folder))
        eventually(lambda: "changed files are not served" in reason(client, "m/1"), what="a reason")
        assert factor(client) == 3
        broken = folder.make(5)
        (broken / "model.onnx").write_bytes(b"no model")
        folder.put("m", 2, broken)
        eventually(lambda: listed(client).get("m/2") == "unavailable", what="the failure")
        assert "is no ONNX model" in reason(client, "m/2")
        assert factor(client) == factor(client, version="1") == 3
        health = client.health()
        assert health["ready"] and "version 2" in health["models"]["m"]["reason"]
        folder.put("m", 2, 7)
        eventually(lambda: factor(client) == 7, what="the repaired version")
        eventually(
            lambda: listed(client) == {"m/2": "ready"}, what="the removal of the old version"
        )


def broken_manifest(folder: Folder) -> Path:
    made = folder.make(5)
    (made / "manifest.toml").write_text("format = 1\n")
    return made


def test_incomplete_folder_is_not_loaded(tmp_path: Path) -> None:
    """Neither under a temporary name, nor without its marker."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    (folder.root / "m" / "1" / ".complete").touch()
    with serving(tmp_path, marker=".complete") as gateway, gateway.client() as client:
        half = folder.make(5)
        (half / "labels.txt").write_text("one")
        target = folder.root / "m" / "2"
        target.mkdir()
        (target / "model.onnx").write_bytes((half / "model.onnx").read_bytes()[:40])
        folder.put("n", 1, 11)
        folder.put("o", 1, 13)
        (folder.root / "o" / "1" / ".complete").touch()
        # A complete model is served, so the scan has seen the incomplete ones too.
        eventually(lambda: listed(client).get("o/1") == "ready", what="the complete model")
        assert listed(client) == {"m/1": "ready", "o/1": "ready"}
        (target / "model.onnx").write_bytes((half / "model.onnx").read_bytes())
        (target / ".complete").touch()
        eventually(lambda: factor(client) == 5, what="the completed version")
        assert "generation" in gateway.text() and "cannot serve" not in gateway.text()


def test_versions_have_aliases_splits_and_a_default(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    folder.put("m", 2, 5)
    folder.put("m", 3, 7)
    folder.write_settings("m", 'default = "stable"\naliases = {stable = 1, canary = 2}')
    with serving(tmp_path) as gateway, gateway.client() as client:
        assert factor(client) == factor(client, version="stable") == 3
        assert factor(client, version="canary") == factor(client, version="2") == 5
        assert factor(client, version="3") == 7  # Selected by the version policy.
        with pytest.raises(ModelNotFound, match="aliases: stable, canary"):
            factor(client, version="none")
        assert reference.run("factors", address=gateway.address) == [3]
        assert reference.run("factors", address=gateway.address, version="canary") == [5]

        folder.write_settings(
            "m", "aliases = {stable = 1, canary = 2}\nsplit = {stable = 1, canary = 1}"
        )
        keys = [f"user-{number}" for number in range(40)]

        def selected() -> list[int]:
            return [selected_by(client, key) for key in keys]

        eventually(lambda: set(selected()) == {3, 5}, what="the split")
        first = selected()
        assert selected() == first
        assert reference.run("factors", address=gateway.address, keys=keys) == first
        assert "1 of 2" in next(m for m in client.models() if m["version"] == "2")["routes"]

        folder.write_settings(
            "m", "aliases = {stable = 1, canary = 2}\nsplit = {stable = 0, canary = 1}"
        )
        eventually(lambda: set(selected()) == {5}, what="version 2 for all keys")


def selected_by(client: Client, key: str) -> int:
    (scored,) = client.stream("m", [X], terms={"route_key": key})
    return int(scored["y"][0].as_py())


def test_streams_move_to_an_equal_contract_and_end_if_it_differs(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    next_batch, is_over = threading.Semaphore(1), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        while next_batch.acquire(timeout=60) and not is_over.is_set():
            yield X

    with serving(tmp_path) as gateway, gateway.client() as client:
        with gateway.client() as other:
            results = other.stream("m", batches())
            assert next(results)["y"][0].as_py() == 3
            folder.put("m", 1, 5)
            eventually(lambda: factor(client) == 5, what="the change")
            next_batch.release()
            assert next(results)["y"][0].as_py() == 5
            folder.put("m", 1, folder.make(7, TensorProto.FLOAT))
            eventually(lambda: "generation 2 of m/1: enough" in gateway.text(), what="the change")
            next_batch.release()
            with pytest.raises(ModelMoved, match=r"the contract of model .* differs") as caught:
                next(results)
            assert caught.value.retryable
            is_over.set()
            next_batch.release()
        floats = pa.record_batch({"x": pa.array([1], pa.float32())})
        assert client.score("m", floats)["y"][0].as_py() == 7


@pytest.mark.slow
def test_models_are_loaded_and_unloaded_by_all_protocols(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    folder = Folder(tmp_path / "models")
    for name, made in (("m", 3), ("n", 5), ("o", 7)):
        folder.put(name, 1, made)
    settings = {"path": str(tmp_path / "models"), "control": "explicit", "load": ["o"]}
    with (
        running(
            tmp_path,
            [],
            repository=settings,
            http={"address": "127.0.0.1:0"},
            workers={"groups": ["0", "1"], "reattach_s": 5.0},
        ) as gateway,
        gateway.client() as client,
    ):
        address = gateway.address
        http_address = gateway.stats()["http_address"]
        assert listed(client) == {"o/1": "ready"}

        assert client.load("m") == ["1"]
        assert factor(client) == 3
        folder.put("m", 1, 11)
        folder.put("m", 2, 13)
        assert factor(client) == 3
        assert client.load("m") == ["2"]
        assert factor(client) == 13
        assert client.unload("m") == ["2"]
        with pytest.raises(ModelNotFound):
            factor(client)

        assert reference.run("control", address=address, call="load", name="m") is None
        assert reference.run("index", address=address)["m/2"] == ["READY", ""]
        assert reference.run("factors", address=address) == [13]
        assert reference.run("control", address=address, call="unload", name="m") is None
        assert "m" not in {title[0] for title in reference.run("index", address=address)}
        assert reference.run("control", address=address, call="load", name="m") is None
        response = reference.run("unload_by_first_field", address=address, name="m")
        assert oip_pb2.RepositoryModelUnloadResponse.FromString(bytes.fromhex(response)) == (
            oip_pb2.RepositoryModelUnloadResponse(model_name="m", is_unloaded=True)
        )
        assert "m" not in {title[0] for title in reference.run("index", address=address)}
        assert "there is no model `x`" in reference.run(
            "control", address=address, call="load", name="x"
        )

        with triton_http.InferenceServerClient(http_address) as http:
            http.load_model("n")
            assert factor(client, "n") == 5
            http.unload_model("n")
            assert [m["name"] for m in http.get_model_repository_index()] == ["o"]

        done = command("load", "n", "--address", address)
        assert (done.returncode, done.stdout) == (0, "n: version 1 served\n")
        (folder.root / "n" / "1" / "model.onnx").write_bytes(b"broken")
        done = command("load", "n", "--address", address)
        assert done.returncode == 78 and "is no ONNX model" in done.stderr
        assert factor(client, "n") == 5
        done = command("models", "--address", address)
        assert "n/1: its changed files are not served" in done.stdout
        done = command("unload", "n", "--version", "1", "--address", address)
        assert (done.returncode, done.stdout) == (0, "n: version 1 unloaded\n")
        assert command("unload", "n", "--address", address).returncode == 1
        gateway.wait_idle()


def test_load_completes_after_its_caller_times_out(tmp_path: Path) -> None:
    """Otherwise both versions would be served."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    settings = {"path": str(tmp_path / "models"), "control": "explicit", "load": ["m"]}
    with (
        running(tmp_path, [], repository=settings, workers={"count": 1}) as gateway,
        gateway.client() as client,
        Client(gateway.address, timeout_s=0.5) as short_timeout,
    ):
        folder.put("m", 2, 5)
        (worker,) = gateway.worker_pids()
        with suspended(worker), pytest.raises(IskanderError):
            short_timeout.load("m")
        eventually(lambda: listed(client) == {"m/2": "ready"}, what="the new version alone")
        assert factor(client) == 5


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "iskander"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_configured_model_is_reloaded_by_a_call(tmp_path: Path) -> None:
    Folder(tmp_path / "models")
    path = scaled(tmp_path / "m", 3)
    with (
        serving(tmp_path, [{"name": "m", "path": str(path)}]) as gateway,
        gateway.client() as client,
    ):
        assert factor(client) == 3
        scaled(path, 5)
        assert client.load("m") == ["1"]
        assert factor(client) == 5
        with pytest.raises(Unsupported, match="configuration"):
            client.unload("m")


def test_worker_started_after_a_change_loads_the_current_files(tmp_path: Path) -> None:
    """It cannot load the files that the others serve, so all workers load the current ones."""
    Folder(tmp_path / "models")
    path = scaled(tmp_path / "m", 3)
    with (
        serving(tmp_path, [{"name": "m", "path": str(path)}]) as gateway,
        gateway.client() as client,
    ):
        scaled(path, 5)
        assert factor(client) == 3
        gateway.kill_worker(1)
        eventually(lambda: factor(client) == 5, what="the change")
        gateway.wait_full()
        lanes = gateway.stats()["lanes"]
        assert lanes["m/1"]["workers"] == 2


def test_failed_load_at_the_start_is_reported_and_other_models_are_served(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    folder.put("n", 1, broken_manifest(folder))
    with serving(tmp_path) as gateway, gateway.client() as client:
        assert factor(client) == 3
        stats = gateway.stats()
        assert not stats["ready"] and "n/1" in stats["reasons"][0]
        with pytest.raises(NotReady, match="failed to load"):
            factor(client, "n")
        folder.put("n", 1, 5)
        eventually(lambda: gateway.stats()["ready"], what="readiness")
        assert factor(client, "n") == 5


def test_every_process_serves_changes_of_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    with (
        running(
            tmp_path,
            [],
            repository={"path": str(tmp_path / "models"), "settle_ms": 50},
            server={"processes": 2},
            workers={"groups": ["0"], "reattach_s": 5.0},
        ) as gateway,
        client_of(gateway, 0) as first,
        client_of(gateway, 1) as second,
    ):
        for client in (first, second):
            assert factor(client) == 3
        folder.put("m", 1, 5)
        for number, client in enumerate((first, second)):
            change = f"the change in process {number}"
            eventually(lambda client=client: factor(client) == 5, what=change)
