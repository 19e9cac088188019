"""A real Prometheus with the alert rules: each alert fires by its cause, and none by normal load.

A minute of the rules is a second here. Thresholds in seconds are not scaled. All of it takes six
minutes, so only `make test-all` runs it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import trustme
from support import http2, models, python_models
from support.gpus import ScriptedNvml
from support.http2 import END_HEADERS
from support.processes import MIB, Gateway, eventually, running, suspended
from support.prometheus import PROMETHEUS, Prometheus, free_port
from support.repositories import Folder

from iskander.client import Tls
from iskander.errors import IskanderError
from iskander.gateway.auth.tokens import add_token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ISKANDER_TEST_ALL" not in os.environ, reason="minutes: `make test-all`"),
    pytest.mark.skipif(PROMETHEUS is None, reason="needs `prometheus`: apt-get install prometheus"),
]

ONE = {"groups": ["0"], "count": 1}
WITHIN_S = 90.0
BUSY = "IskanderEventLoopLagging"
"""Other programs on the machine can cause it."""
SOURCE = """
import time
class Model(Base):
    def predict(self, batch):
        time.sleep(batch.column("x")[0].as_py() / 1000)
        return tripled(batch)
"""
"""A model that takes as many milliseconds as the first row says, without using a CPU."""
LEAK = """
class Model(Base):
    kept = []
    def predict(self, batch):
        self.kept.append(b"x" * batch.column("x")[0].as_py())
        return tripled(batch)
"""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"))
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def ids(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}]


def sleeping(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    return [python_models.entry(folder / "sleeping", SOURCE, **settings)]


@contextlib.contextmanager
def watched(
    prometheus: Prometheus, folder: Path, served: list[dict[str, Any]], **sections: Any
) -> Iterator[Gateway]:
    """A gateway that Prometheus scrapes under the name of the folder."""
    address = f"127.0.0.1:{free_port()}"
    with running(folder, served, admin={"address": address}, **sections) as gateway:
        prometheus.scrape(folder.name, address)
        try:
            yield gateway
        finally:
            prometheus.forget(folder.name)


def wait_firing(
    prometheus: Prometheus, folder: Path, *names: str, cause: Callable[[], Any] = lambda: None
) -> None:
    """Wait until alerts fire, and cause their cause again and again meanwhile."""

    def are_firing() -> bool:
        cause()
        return prometheus.firing(folder.name) >= set(names)

    try:
        eventually(are_firing, WITHIN_S, f"alerts {', '.join(names)}")
    except AssertionError as error:
        raise AssertionError(f"{error}; firing: {prometheus.firing(folder.name)}") from None


class Load:
    """Clients that score one-row batches of a value continuously, until the block ends."""

    def __init__(self, gateway: Gateway, model: str, value: int, clients: int) -> None:
        self._gateway, self._model, self._value = gateway, model, value
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.answered = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        batch = pa.record_batch({"x": pa.array([self._value], pa.int64())})
        with self._gateway.client() as client:
            while not self._is_over.wait(0.02):
                with contextlib.suppress(IskanderError):
                    client.score(self._model, batch, timeout_s=30)
                    self.answered += 1


def test_normal_load_causes_no_alert(prometheus: Prometheus, tmp_path: Path) -> None:
    """Tokens, TLS, a watched repository, two models, and workers that are recycled in turn."""
    token = add_token(tmp_path / "tokens.toml", "scorer", ("*",))
    authority = trustme.CA()
    sign(tmp_path, authority)
    authority.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    Folder(tmp_path / "models").put("tripled", 1, 3)
    with watched(
        prometheus,
        tmp_path,
        ids(tmp_path),
        workers={"groups": ["0", "1"], "recycle_batches": 500},
        access={"tokens": "tokens.toml"},
        tls={"certificate": str(tmp_path / "chain.pem"), "key": str(tmp_path / "key.pem")},
        repository={"path": "models"},
        token=token,
        secrecy=Tls(roots=tmp_path / "roots.pem"),
    ) as gateway:
        fired: set[str] = set()
        with Load(gateway, "ids", 1, clients=2) as one, Load(gateway, "tripled", 1, 1) as two:
            deadline = time.monotonic() + 75
            while time.monotonic() < deadline:
                fired |= prometheus.firing(tmp_path.name)
                time.sleep(0.5)
        assert one.answered > 100 and two.answered > 50
        assert any(worker["ends"].get("replaced") for worker in gateway.stats()["workers"])
        assert fired <= {BUSY}
        burn = prometheus.query(f'model:iskander_latency_burn:rate1h{{instance="{tmp_path.name}"}}')
        assert sorted(sample["metric"]["model"] for sample in burn) == ["ids", "tripled"]


def test_faults_of_a_card(prometheus: Prometheus, tmp_path: Path) -> None:
    """NVML is scripted: heat, an uncorrected memory error, silence, and the loss of the card."""
    nvml = ScriptedNvml(tmp_path)
    variables = [f"{name}={value}" for name, value in nvml.environment.items()]
    served = [each | {"placement": "any"} for each in ids(tmp_path)]
    workers = {"groups": ["0", "gpu:0"], "count": 1}
    with watched(prometheus, tmp_path, served, workers=workers, prefix=("env", *variables)):
        nvml.change(0, throttle=0x40)
        wait_firing(prometheus, tmp_path, "IskanderGpuThrottled")
        nvml.change(0, throttle=0, ecc=[0, 1])
        wait_firing(prometheus, tmp_path, "IskanderGpuErrors")
        nvml.change(0, hangs=True)
        wait_firing(prometheus, tmp_path, "IskanderGpuSilent")
        nvml.change(0, hangs=False, error=15)
        wait_firing(prometheus, tmp_path, "IskanderGpuLost")


def test_killed_gateway(prometheus: Prometheus, tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, ids(tmp_path), workers=dict(ONE))
    try:
        gateway.start()
        prometheus.scrape(tmp_path.name, gateway.stats()["admin_address"])
        gateway.end()
        wait_firing(prometheus, tmp_path, "IskanderDown")
    finally:
        prometheus.forget(tmp_path.name)
        gateway.end()


def test_killed_process_of_two(prometheus: Prometheus, tmp_path: Path) -> None:
    """Its restarts are delayed more and more."""
    with watched(
        prometheus, tmp_path, ids(tmp_path), server={"processes": 2}, workers=dict(ONE)
    ) as gateway:
        kill = killer_of_process(gateway, 1)
        wait_firing(prometheus, tmp_path, "IskanderProcessDown", cause=kill)


def killer_of_process(gateway: Gateway, index: int) -> Callable[[], None]:
    def kill() -> None:
        for child in Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text().strip() == f"isk-gateway-{index}":
                    os.kill(int(child), signal.SIGKILL)

    return kill


def test_gateway_that_is_started_again_and_again(prometheus: Prometheus, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    gateway = Gateway(tmp_path, ids(tmp_path), workers=dict(ONE), admin={"address": address})

    def restart() -> None:
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        gateway.start()
        started_s = time.time()
        eventually(
            lambda: prometheus.query(
                f'iskander_start_time_seconds{{instance="{tmp_path.name}"}} > {started_s - 5}'
            ),
            what="a scrape of the new process",
        )

    try:
        gateway.start()
        prometheus.scrape(tmp_path.name, address)
        wait_firing(prometheus, tmp_path, "IskanderRestarting", cause=restart)
    finally:
        prometheus.forget(tmp_path.name)
        gateway.end()


def test_gateway_without_workers(prometheus: Prometheus, tmp_path: Path) -> None:
    """The service manager starts no workers."""
    with watched(prometheus, tmp_path, ids(tmp_path), workers={**ONE, "spawn": False}):
        wait_firing(prometheus, tmp_path, "IskanderNotReady", "IskanderModelWithoutWorker")


def test_worker_killed_again_and_again(prometheus: Prometheus, tmp_path: Path) -> None:
    with watched(prometheus, tmp_path, ids(tmp_path), workers=dict(ONE)) as gateway:

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                gateway.kill_worker()

        wait_firing(prometheus, tmp_path, "IskanderWorkerCrashLoop", cause=kill)


def test_worker_stopped_during_a_batch(prometheus: Prometheus, tmp_path: Path) -> None:
    with (
        watched(prometheus, tmp_path, ids(tmp_path), workers={**ONE, "hang_s": 2.0}) as gateway,
        Load(gateway, "ids", 1, clients=1),
        suspended(gateway.worker_pids()[0]),
    ):
        wait_firing(prometheus, tmp_path, "IskanderWorkerHung")


def test_idle_worker_stopped(prometheus: Prometheus, tmp_path: Path) -> None:
    """It is not replaced, because it has no batch: only the age of its heartbeat grows."""
    with watched(prometheus, tmp_path, ids(tmp_path), workers=dict(ONE)) as gateway:
        with suspended(gateway.worker_pids()[0]):
            wait_firing(prometheus, tmp_path, "IskanderWorkerHung")
        assert gateway.stats()["workers"][0]["ends"].get("hang", 0) == 0


def test_model_that_ends_workers(prometheus: Prometheus, tmp_path: Path) -> None:
    path = str(models.fragile(tmp_path / "fragile"))
    batch = pa.record_batch({"x": [-(1 << 63)]})
    with watched(
        prometheus,
        tmp_path,
        [{"name": "fragile", "path": path, "intra_threads": 1}],
        workers={**ONE, "model_deaths": 2, "quarantine_s": 60.0},
    ) as gateway:

        def score() -> None:
            with gateway.client() as client, contextlib.suppress(IskanderError):
                client.score("fragile", batch)

        score()
        wait_firing(prometheus, tmp_path, "IskanderModelIsolated")
        wait_firing(prometheus, tmp_path, "IskanderModelQuarantined", cause=score)


def test_broken_model_in_the_repository(prometheus: Prometheus, tmp_path: Path) -> None:
    repository = Folder(tmp_path / "models")
    repository.put("tripled", 1, 3)
    with watched(prometheus, tmp_path, [], workers=dict(ONE), repository={"path": "models"}):
        broken = repository.make(4)
        (broken / "model.onnx").write_bytes(b"no model")
        repository.put("tripled", 2, broken)
        wait_firing(prometheus, tmp_path, "IskanderModelLoadFailed")


def test_model_that_fails(prometheus: Prometheus, tmp_path: Path) -> None:
    path = str(models.picky(tmp_path / "picky", 10))
    with (
        watched(
            prometheus, tmp_path, [{"name": "picky", "path": path}], workers=dict(ONE)
        ) as gateway,
        Load(gateway, "picky", 11, clients=1),
    ):
        wait_firing(prometheus, tmp_path, "IskanderRequestsFailing", "IskanderCallsFailing")


def test_more_clients_than_a_slow_model_can_serve(prometheus: Prometheus, tmp_path: Path) -> None:
    """Two batches in flight and four in the queue, of ten clients."""
    served = sleeping(tmp_path, max_batch_rows=1, lane={"queue_requests": 4})
    with (
        watched(prometheus, tmp_path, served, workers=dict(ONE)) as gateway,
        Load(gateway, "sleeping", 100, clients=10),
    ):
        wait_firing(prometheus, tmp_path, "IskanderOverloaded")


def test_slow_model(prometheus: Prometheus, tmp_path: Path) -> None:
    """Requests of 0.7 s, six at a time: the last waits for 3 s."""
    served = sleeping(tmp_path, max_batch_rows=1)
    names = ("IskanderQueueWaitHigh", "IskanderLatencyBudgetBurning")
    with (
        watched(prometheus, tmp_path, served, workers=dict(ONE)) as gateway,
        Load(gateway, "sleeping", 700, clients=6),
    ):
        wait_firing(prometheus, tmp_path, *names)


def test_leases_of_requests_that_a_stopped_worker_does_not_run(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    """Three of five requests fit."""
    batch = pa.record_batch({"x": pa.array(range(1_000_000), pa.int64())})
    with watched(prometheus, tmp_path, ids(tmp_path), workers=dict(ONE)) as gateway:
        threads = []
        with suspended(gateway.worker_pids()[0]):

            def score() -> None:
                with gateway.client() as client, contextlib.suppress(IskanderError):
                    client.score("ids", batch, timeout_s=60)

            for _ in range(5):
                threads.append(threading.Thread(target=score))
                threads[-1].start()
            wait_firing(prometheus, tmp_path, "IskanderArenaFull")
        for thread in threads:
            thread.join()


def test_incomplete_messages_above_the_receive_budget(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    body = http2.message(bytes(39 * MIB // 10))[:-1]
    fields = http2.request_fields("/inference.GRPCInferenceService/ModelInfer", ())
    with (
        watched(
            prometheus,
            tmp_path,
            ids(tmp_path),
            workers=dict(ONE),
            limits={"receive_bytes": 64 * MIB, "message_bytes": 20 * MIB},
        ) as gateway,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(8):
            connection = stack.enter_context(connected(gateway.address))
            connection.sendall(http2.PREFACE + http2.settings())
            for stream_id in range(1, 7, 2):
                connection.sendall(http2.headers(stream_id, fields, END_HEADERS))
                for at in range(0, len(body), MIB):
                    connection.sendall(http2.data(stream_id, body[at : at + MIB], 0))
        wait_firing(prometheus, tmp_path, "IskanderReceiveMemoryFull")


def test_more_connections_than_file_descriptors(prometheus: Prometheus, tmp_path: Path) -> None:
    with (
        watched(
            prometheus,
            tmp_path,
            ids(tmp_path),
            workers=dict(ONE),
            prefix=(str(shutil.which("prlimit")), "--nofile=256:256"),
        ) as gateway,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(260):
            stack.enter_context(connected(gateway.address))
        names = ("IskanderDescriptorsExhausted", "IskanderConnectionsRefused")
        wait_firing(prometheus, tmp_path, *names)


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def test_gateway_that_gets_no_processor_time(prometheus: Prometheus, tmp_path: Path) -> None:
    """It is stopped for two thirds of the time."""
    with watched(prometheus, tmp_path, ids(tmp_path), workers=dict(ONE)) as gateway:

        def delay() -> None:
            with suspended(gateway.pid):
                time.sleep(0.2)
            time.sleep(0.1)

        wait_firing(prometheus, tmp_path, "IskanderEventLoopLagging", cause=delay)


def test_certificate_and_token_file(prometheus: Prometheus, tmp_path: Path) -> None:
    """The certificate expires in one day; then the files are replaced by garbage."""
    token = add_token(tmp_path / "tokens.toml", "scorer", ("*",))
    authority = trustme.CA()
    sign(tmp_path, authority, datetime.timedelta(days=1))
    authority.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    with watched(
        prometheus,
        tmp_path,
        ids(tmp_path),
        workers=dict(ONE),
        access={"tokens": "tokens.toml"},
        tls={"certificate": str(tmp_path / "chain.pem"), "key": str(tmp_path / "key.pem")},
        token=token,
        secrecy=Tls(roots=tmp_path / "roots.pem"),
    ):
        wait_firing(prometheus, tmp_path, "IskanderCertificateExpiring")
        assert "IskanderReloadFailed" not in prometheus.firing(tmp_path.name)
        for name in ("tokens.toml", "key.pem"):
            (tmp_path / name).write_text("no such thing")
        valid = f'iskander_reload_valid{{instance="{tmp_path.name}"}} == 0'
        eventually(lambda: len(prometheus.query(valid)) == 2, what="two failed reloads")
        wait_firing(prometheus, tmp_path, "IskanderReloadFailed")
        sign(tmp_path, authority)
        add_valid_tokens(tmp_path / "tokens.toml")
        eventually(lambda: not prometheus.firing(tmp_path.name), 60, "the end of the alerts")


def add_valid_tokens(path: Path) -> None:
    path.unlink()
    add_token(path, "scorer", ("*",))


def test_rejected_configuration(prometheus: Prometheus, tmp_path: Path) -> None:
    """A reload of a configuration that needs a restart."""
    with watched(
        prometheus, tmp_path, ids(tmp_path), server={"processes": 2}, workers=dict(ONE)
    ) as gateway:
        text = gateway.config.read_text()
        gateway.config.write_text(text.replace('"127.0.0.1:0"', '"127.0.0.1:1"', 1))
        gateway.signal(signal.SIGHUP)
        wait_firing(prometheus, tmp_path, "IskanderReloadFailed")
        gateway.config.write_text(text)
        gateway.signal(signal.SIGHUP)
        eventually(lambda: not prometheus.firing(tmp_path.name), 60, "the end of the alert")


def test_model_that_keeps_memory(prometheus: Prometheus, tmp_path: Path) -> None:
    """A megabyte for each of its batches, about twenty in a second."""
    served = [python_models.entry(tmp_path / "leaking", LEAK)]
    with (
        watched(prometheus, tmp_path, served, workers=dict(ONE)) as gateway,
        Load(gateway, "leaking", MIB, clients=1),
    ):
        wait_firing(prometheus, tmp_path, "IskanderWorkerMemoryGrowing")


def test_inputs_that_differ_from_the_reference(prometheus: Prometheus, tmp_path: Path) -> None:
    """The first 500 rows are the reference; then all values grow."""
    served = [ids(tmp_path)[0] | {"drift": {"share": 1.0}}]
    with watched(
        prometheus,
        tmp_path,
        served,
        workers=dict(ONE),
        drift={"enabled": True, "window_s": 6.0, "record_rows": 500, "folder": "references"},
    ) as gateway:
        random = np.random.default_rng(0)

        def score(low: int) -> None:
            values = pa.array(random.integers(low, low + 1000, 500), pa.int64())
            with gateway.client() as client:
                client.score("ids", pa.record_batch({"x": values}))

        score(0)
        wait_firing(prometheus, tmp_path, "IskanderModelDrift", cause=lambda: score(5000))


def test_prediction_log_that_cannot_be_written(prometheus: Prometheus, tmp_path: Path) -> None:
    """The path of the folder is a file, so that the observer process ends at each start."""
    (tmp_path / "log").write_text("no folder")
    served = [ids(tmp_path)[0] | {"prediction_log": {"share": 1.0}}]
    with (
        watched(
            prometheus, tmp_path, served, workers=dict(ONE), prediction_log={"path": "log"}
        ) as gateway,
        Load(gateway, "ids", 1, clients=1),
    ):
        wait_firing(prometheus, tmp_path, "IskanderSamplesDropped")


def sign(
    folder: Path, authority: trustme.CA, life: datetime.timedelta = datetime.timedelta(days=90)
) -> None:
    """Writes a certificate and its key, each by a rename."""
    expires = datetime.datetime.now(datetime.UTC) + life
    issued = authority.issue_cert("127.0.0.1", "localhost", not_after=expires)
    for name, pem in (
        ("chain.pem", b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ("key.pem", issued.private_key_pem.bytes()),
    ):
        (folder / f".{name}").write_bytes(pem)
        (folder / f".{name}").replace(folder / name)
