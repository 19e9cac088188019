"""Models that come, change and go in a folder, while a real server serves."""

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
from iskander.client import Client
from iskander.errors import IskanderError, ModelMoved, ModelNotFound, NotReady, Unsupported

JUDGE = str(Path(models.__file__).with_name("repository_client.py"))

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
    reference = ReferenceClient(JUDGE)
    yield reference
    reference.close()


def factor(client: Client, name: str = "m", version: str | None = None) -> int:
    """Which model answers."""
    return int(client.score(name, X, version=version)["y"][0].as_py())


def listed(client: Client) -> dict[str, str]:
    """State of each version, by `name/version`."""
    return {f"{m['name']}/{m['version']}": m["state"] for m in client.models()}


def reason(client: Client, title: str) -> str:
    return next(m["reason"] for m in client.models() if f"{m['name']}/{m['version']}" == title)


def test_a_folder_is_followed(tmp_path: Path) -> None:
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
        eventually(lambda: listed(client) == {"m/2": "ready", "n/1": "ready"}, what="the old to go")
        folder.take("n")
        eventually(lambda: "n/1" not in listed(client), what="the model to go")
        with pytest.raises(ModelNotFound, match="there is no model `n`; available: m"):
            factor(client, "n")
        assert client.health()["ready"]


class Stream(threading.Thread):
    """One stream that is never closed, and knows what it was answered."""

    def __init__(self, gateway: Gateway, number: int, stop: threading.Event) -> None:
        super().__init__(name=f"stream {number}")
        self._address, self._number, self._over = gateway.address, number, stop
        self.sent: list[int] = []
        self.answers: list[list[int]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                for scored in client.stream("m", self._batches()):
                    self.answers.append(scored["y"].to_pylist())
        except Exception as error:
            self.error = error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Batches that nobody else sends, some in flight at once."""
        turn = 0
        while not self._over.is_set():
            turn += 1
            first = 1 + self._number * 1_000_000 + turn
            time.sleep(0.005)  # Eight at full speed would leave the reloads nothing to run on.
            self.sent.append(first)
            yield pa.record_batch({"x": pa.array([first, first + 7], pa.int64())})


@pytest.mark.slow
def test_under_load_twenty_reloads_lose_nothing_and_mix_nothing_up(tmp_path: Path) -> None:
    """Eight streams stay open; each answer is that of its own rows by one of the models."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 2)
    stop = threading.Event()
    with serving(tmp_path) as gateway, gateway.client() as client:
        streams = [Stream(gateway, number, stop) for number in range(8)]
        try:
            for stream in streams:
                stream.start()
            eventually(lambda: all(stream.answers for stream in streams), what="the first answers")
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
            assert len(stream.answers) == len(stream.sent)
            for first, answer in zip(stream.sent, stream.answers, strict=True):
                factors = {answer[0] / first, answer[1] / (first + 7)}
                assert len(factors) == 1 and factors <= {float(f) for f in range(2, 23)}
                seen |= factors
        assert {2.0, 22.0} <= seen
        stats = client.stats()
        assert stats["lanes"]["m/1"]["failed"] == stats["lanes"]["m/1"]["refused"] == {}
        eventually(lambda: len(gateway.text().split("unloaded generation")) == 41, what="unloads")


@pytest.mark.slow
def test_what_waits_when_its_model_is_replaced_is_answered_by_it(tmp_path: Path) -> None:
    """The new one is found at once; the old one is given up when its queue is done."""
    folder = Folder(tmp_path / "models")
    folder.say("m", "max_batch_rows = 1\n")
    folder.put("m", 1, models.slow(tmp_path / "slow", 40))
    answers: dict[int, list[int]] = {}
    with serving(tmp_path, groups=("0",)) as gateway, gateway.client() as client:

        def ask(first: int) -> None:
            with gateway.client() as own:
                batch = pa.record_batch({"x": pa.array([first], pa.int64())})
                answers[first] = own.score("m", batch)["y"].to_pylist()

        callers = [threading.Thread(target=ask, args=(900 + n,), daemon=True) for n in range(16)]
        for caller in callers:
            caller.start()
        queued = lambda: client.stats()["lanes"]["m/1"]["queued"]  # noqa: E731
        eventually(lambda: queued() >= 4, what="a queue")
        folder.put("m", 1, 5)
        eventually(lambda: "is draining" in gateway.text(), what="the change")
        assert len(answers) < len(callers), "nothing waited when it was replaced"
        assert factor(client) == 5
        eventually(lambda: len(answers) == len(callers), within_s=60, what="every answer")
        eventually(lambda: "unloaded generation" in gateway.text(), what="its worker without it")
    assert answers == {900 + n: [900 + n] for n in range(16)}


def test_what_does_not_load_leaves_the_old_one_and_says_why(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    with serving(tmp_path) as gateway, gateway.client() as client:
        folder.put("m", 1, broken_manifest(folder))
        eventually(lambda: "a change of it is not served" in reason(client, "m/1"), what="a reason")
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
        eventually(lambda: listed(client) == {"m/2": "ready"}, what="the old to go")


def broken_manifest(folder: Folder) -> Path:
    made = folder.make(5)
    (made / "manifest.toml").write_text("format = 1\n")
    return made


def test_a_half_written_folder_is_not_loaded(tmp_path: Path) -> None:
    """Neither one under another name, nor one without its marker."""
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
        # What is whole is served by then, so that the others were looked at, too.
        eventually(lambda: listed(client).get("o/1") == "ready", what="what is whole")
        assert listed(client) == {"m/1": "ready", "o/1": "ready"}
        (target / "model.onnx").write_bytes((half / "model.onnx").read_bytes())
        (target / ".complete").touch()
        eventually(lambda: factor(client) == 5, what="what has become whole")
        assert "generation" in gateway.text() and "cannot serve" not in gateway.text()


def test_versions_have_names_shares_and_a_default(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    folder.put("m", 2, 5)
    folder.put("m", 3, 7)
    folder.say("m", 'default = "stable"\naliases = {stable = 1, canary = 2}')
    with serving(tmp_path) as gateway, gateway.client() as client:
        assert factor(client) == factor(client, version="stable") == 3
        assert factor(client, version="canary") == factor(client, version="2") == 5
        assert factor(client, version="3") == 7  # The policy's own.
        with pytest.raises(ModelNotFound, match="aliases: stable, canary"):
            factor(client, version="none")
        assert reference.run("factors", address=gateway.address) == [3]
        assert reference.run("factors", address=gateway.address, version="canary") == [5]

        folder.say("m", "aliases = {stable = 1, canary = 2}\nsplit = {stable = 1, canary = 1}")
        keys = [f"user-{number}" for number in range(40)]

        def drawn() -> list[int]:
            return [one_of(client, key) for key in keys]

        eventually(lambda: set(drawn()) == {3, 5}, what="the split")
        chosen = drawn()
        assert drawn() == chosen
        assert reference.run("factors", address=gateway.address, keys=keys) == chosen
        assert "1 of 2" in next(m for m in client.models() if m["version"] == "2")["routes"]

        folder.say("m", "aliases = {stable = 1, canary = 2}\nsplit = {stable = 0, canary = 1}")
        eventually(lambda: set(drawn()) == {5}, what="all to go over")


def one_of(client: Client, key: str) -> int:
    (scored,) = client.stream("m", [X], terms={"route_key": key})
    return int(scored["y"][0].as_py())


def test_streams_move_with_an_equal_contract_and_end_with_another(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    more, is_over = threading.Semaphore(1), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        while more.acquire(timeout=60) and not is_over.is_set():
            yield X

    with serving(tmp_path) as gateway, gateway.client() as client:
        with gateway.client() as other:
            answers = other.stream("m", batches())
            assert next(answers)["y"][0].as_py() == 3
            folder.put("m", 1, 5)
            eventually(lambda: factor(client) == 5, what="the change")
            more.release()
            assert next(answers)["y"][0].as_py() == 5
            folder.put("m", 1, folder.make(7, TensorProto.FLOAT))
            eventually(lambda: "generation 2 of m/1: enough" in gateway.text(), what="the change")
            more.release()
            with pytest.raises(ModelMoved, match=r"the contract of model .* differs") as caught:
                next(answers)
            assert caught.value.retryable
            is_over.set()
            more.release()
        floats = pa.record_batch({"x": pa.array([1], pa.float32())})
        assert client.score("m", floats)["y"][0].as_py() == 7


def test_models_come_and_go_by_calls_of_all_kinds(
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
        answer = reference.run("unload_by_first_field", address=address, name="m")
        assert oip_pb2.RepositoryModelUnloadResponse.FromString(bytes.fromhex(answer)) == (
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

        said = command("load", "n", "--address", address)
        assert (said.returncode, said.stdout) == (0, "n: version 1 served\n")
        (folder.root / "n" / "1" / "model.onnx").write_bytes(b"broken")
        said = command("load", "n", "--address", address)
        assert said.returncode == 1 and "is no ONNX model" in said.stderr
        assert factor(client, "n") == 5
        said = command("models", "--address", address)
        assert "n/1: a change of it is not served" in said.stdout
        said = command("unload", "n", "--version", "1", "--address", address)
        assert (said.returncode, said.stdout) == (0, "n: version 1 unloaded\n")
        assert command("unload", "n", "--address", address).returncode == 1
        gateway.wait_idle()


def test_a_load_goes_on_when_its_caller_waits_no_longer(tmp_path: Path) -> None:
    """Or the version before would be served beside the new one."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    settings = {"path": str(tmp_path / "models"), "control": "explicit", "load": ["m"]}
    with (
        running(tmp_path, [], repository=settings, workers={"count": 1}) as gateway,
        gateway.client() as client,
        Client(gateway.address, timeout_s=0.5) as hasty,
    ):
        folder.put("m", 2, 5)
        (worker,) = gateway.worker_pids()
        with suspended(worker), pytest.raises(IskanderError):
            hasty.load("m")
        eventually(lambda: listed(client) == {"m/2": "ready"}, what="the new version alone")
        assert factor(client) == 5


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "iskander"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_a_configured_model_is_loaded_anew_by_a_call(tmp_path: Path) -> None:
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


def test_a_worker_that_comes_after_a_change_does_not_hold_anything_up(tmp_path: Path) -> None:
    """It cannot have what the others serve; all of them get what is there now."""
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


def test_a_model_that_does_not_load_at_the_start_is_named_and_the_rest_is_served(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    folder.put("n", 1, broken_manifest(folder))
    with serving(tmp_path) as gateway, gateway.client() as client:
        assert factor(client) == 3
        stats = gateway.stats()
        assert not stats["ready"] and "n/1" in stats["reasons"][0]
        with pytest.raises(NotReady, match="does not load"):
            factor(client, "n")
        folder.put("n", 1, 5)
        eventually(lambda: gateway.stats()["ready"], what="readiness")
        assert factor(client, "n") == 5


def test_each_of_several_processes_follows_the_folder(tmp_path: Path) -> None:
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
