"""The prediction log of a real server, read by Polars and DuckDB."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import psutil
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import flight
from support import models, python_models
from support.models import ROOT
from support.processes import MIB, Gateway, eventually, running, suspended

from iskander.errors import IskanderError

PAGE = (ROOT / "docs" / "observing.md").read_text()
GLOB = "model=*/**/*.parquet"
ALL = {"share": 1.0}
ONE = {"groups": ["0"], "count": 1}
PEOPLE = """
class Model(Base):
    def predict(self, batch):
        labels = [name.upper() for name in batch.column("name").to_pylist()]
        return pa.record_batch({"label": labels, "points": batch.column("age")})
"""


def ids(folder: Path, name: str = "ids", **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": str(models.row_ids(folder / name)), **settings}


def logged(folder: Path, model: str = "ids") -> pl.DataFrame:
    """All rows of complete files of a model."""
    if not list(folder.glob(f"log/model={model}/**/*.parquet")):
        return pl.DataFrame()
    frame = pl.read_parquet(folder / f"log/model={model}/**/*.parquet", hive_partitioning=True)
    return frame.sort("time", "trace_id", "row")


def observation(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = gateway.stats()["observation"]
    return found


def count(gateway: Gateway, name: str) -> int:
    """A counter of the log's last report."""
    report = observation(gateway)["report"].get("prediction_log", {"counts": {}})
    found: int = report["counts"].get(name, 0)
    return found


def score(gateway: Gateway, values: list[int], model: str = "ids") -> None:
    with gateway.client() as client:
        client.score(model, pa.record_batch({"x": values}))


def require_consistent(frame: pl.DataFrame) -> None:
    """Every row is `y = 3 x + 1`, and all rows of a request have one value."""
    assert frame.filter(pl.col("y") != 3 * pl.col("x") + 1).is_empty()
    assert frame.group_by("trace_id").agg(pl.col("x").n_unique())["x"].to_list() in (
        [1] * frame["trace_id"].n_unique(),
        [],
    )


class Clients:
    """Clients that score rows of one value each, until the end of the block."""

    def __init__(self, gateway: Gateway, count: int = 2, rows: int = 16) -> None:
        self._gateway, self._rows = gateway, rows
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.sent: list[int] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors

    def _run(self, number: int) -> None:
        value = number * 1_000_000
        try:
            with self._gateway.client() as client:
                while not self._is_over.is_set():
                    value += 1
                    batch = pa.record_batch({"x": np.full(self._rows, value)})
                    scored = client.score("ids", batch)
                    assert scored["y"].to_pylist() == [3 * value + 1] * self._rows
                    with self._lock:
                        self.sent.append(value)
                    time.sleep(0.002)
        except BaseException as error:
            self.errors.append(error)
            raise


@pytest.fixture(scope="module")
def logging_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A server with one model for each question."""
    folder = tmp_path_factory.mktemp("prediction-log")
    served = [
        ids(folder, prediction_log=ALL),
        ids(folder, "some", prediction_log={"share": 0.25}),
        ids(folder, "none"),
        ids(folder, "typo", prediction_log={"share": 1.0, "omit": ["X"]}),
        ids(folder, "pieces", prediction_log=ALL, max_batch_rows=4),
        {"name": "picky", "path": str(models.picky(folder / "picky", 100)), "prediction_log": ALL},
        people(folder),
    ]
    log = {"path": "log", "file_s": 0.3, "key_file": "log.key"}
    with running(folder, served, workers=dict(ONE), prediction_log=log) as gateway:
        yield gateway


def people(folder: Path) -> dict[str, Any]:
    """A Python model with names."""
    manifest = """
format = 1
[[inputs]]
column = "name"
tensor = "name"
type = "utf8"
[[inputs]]
column = "age"
tensor = "age"
type = "int64"
[[outputs]]
column = "label"
tensor = "label"
type = "utf8"
[[outputs]]
column = "points"
tensor = "points"
type = "int64"
"""
    settings = {"share": 1.0, "omit": ["points"], "hash": ["name", "label"]}
    return python_models.entry(
        folder / "people",
        PEOPLE,
        manifest=manifest,
        max_batch_rows=1000,
        prediction_log=settings,
    )


@pytest.mark.slow
def test_off_by_default(tmp_path: Path) -> None:
    with running(tmp_path, [ids(tmp_path)], workers=dict(ONE)) as gateway:
        score(gateway, [1])
        assert observation(gateway) == {}
        names = [child.name() for child in psutil.Process(gateway.pid).children()]
        assert "isk-observer" not in names


def test_rows_are_those_of_the_request(logging_gateway: Gateway) -> None:
    """With the caller's trace id, although traces are off."""
    trace_id = secrets.token_hex(16)
    headers = [(b"traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-00".encode())]
    client = flight.connect(f"grpc://{logging_gateway.address}")
    options = flight.FlightCallOptions(headers=headers)
    descriptor = flight.FlightDescriptor.for_path("ids")
    batch = pa.record_batch({"x": [10, 20, 30]})
    before = time.time()
    writer, reader = client.do_exchange(descriptor, options)
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
        assert reader.read_all()["y"].to_pylist() == [31, 61, 91]
    client.close()

    wait_all_written(logging_gateway)
    frame = logged(logging_gateway.folder).filter(pl.col("trace_id") == trace_id)
    assert frame.select("row", "x", "y").rows() == [(0, 10, 31), (1, 20, 61), (2, 30, 91)]
    times = frame["time"].dt.timestamp("us").unique().to_list()
    assert len(times) == 1 and before <= times[0] / 1e6 <= time.time()
    assert frame["version"].unique().to_list() == [1]


def test_share_of_the_requests(logging_gateway: Gateway) -> None:
    before = observation(logging_gateway)["samples"].get("handed_over", 0)
    with logging_gateway.client() as client:
        for value in range(400):
            client.score("some", pa.record_batch({"x": [value, value]}))
            if value < 20:
                client.score("none", pa.record_batch({"x": [value]}))
    wait_all_written(logging_gateway)
    frame = logged(logging_gateway.folder, "some")
    require_consistent(frame)
    taken = frame["trace_id"].n_unique()
    assert 2 * taken == len(frame)
    assert 50 < taken < 150  # 100, and five standard deviations of 8.7.
    assert observation(logging_gateway)["samples"]["handed_over"] - before == taken
    assert logged(logging_gateway.folder, "none").is_empty()


def test_request_in_several_batches_is_one_sample(logging_gateway: Gateway) -> None:
    with logging_gateway.client() as client:
        client.score("pieces", pa.record_batch({"x": list(range(10))}))
    wait_all_written(logging_gateway)
    frame = logged(logging_gateway.folder, "pieces")
    assert frame.select("row", "x", "y").rows() == [(n, n, 3 * n + 1) for n in range(10)]
    assert frame["trace_id"].n_unique() == 1


def test_failed_requests_are_not_logged(logging_gateway: Gateway) -> None:
    with logging_gateway.client() as client:
        client.score("picky", pa.record_batch({"x": [1]}))
        with pytest.raises(IskanderError):
            client.score("picky", pa.record_batch({"x": [2, 500]}))
    wait_all_written(logging_gateway)
    assert logged(logging_gateway.folder, "picky")["x"].to_list() == [1]


def test_hashed_and_omitted_columns(logging_gateway: Gateway) -> None:
    """The example of the page finds the hash of a name."""
    batch = pa.record_batch({"name": ["customer 17", "ann"], "age": [40, 50]})
    with logging_gateway.client() as client:
        assert client.score("people", batch)["points"].to_pylist() == [40, 50]
    wait_all_written(logging_gateway)
    folder = logging_gateway.folder
    frame = logged(folder, "people")
    assert "points" not in frame.columns
    assert frame["age"].to_list() == [40, 50]
    (example,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "key =" in code
    ]
    example = example.replace('"log.key"', repr(str(folder / "log.key")))
    names: dict[str, Any] = {}
    exec(example, names)
    assert frame["name"][0] == names["hashed"]
    key = blake2b((folder / "log.key").read_bytes()).digest()
    assert frame["label"][1] == blake2b(b"ANN", digest_size=16, key=key).hexdigest()
    for path in folder.glob("log/model=people/**/*.parquet"):
        assert b"customer" not in path.read_bytes()


def test_misspelt_column_stops_the_log_of_its_model(logging_gateway: Gateway) -> None:
    with logging_gateway.client() as client:
        client.score("typo", pa.record_batch({"x": [1]}))
    eventually(lambda: count(logging_gateway, "unknown_column") == 1, what="a dropped sample")
    wait_all_written(logging_gateway)
    assert logged(logging_gateway.folder, "typo").is_empty()
    reason = "models.prediction_log.omit of typo/1: there is no column `X`; the columns are x, y"
    eventually(lambda: reason in logging_gateway.text(), what="the reason in the log")


def wait_all_written(gateway: Gateway) -> None:
    """Wait until nothing of the log is in memory."""

    def is_written() -> bool:
        state = observation(gateway)
        report = state["report"].get("prediction_log", {})
        handed = state["samples"].get("handed_over", 0)
        taken = state["report"].get("observer", {"counts": {"consumed": -1}})["counts"]["consumed"]
        is_idle = not list(gateway.folder.glob("log/.writing/*/writing/*"))
        return bool(
            not state["held_requests"]
            and taken == handed
            and report["buffered_bytes"] == 0
            and is_idle
        )

    eventually(is_written, what="complete files")


def page_blocks(folder: Path) -> tuple[str, str]:
    """The queries of the page, in Python and SQL, for a log."""
    (python,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "scan_" in code]
    (sql,) = re.findall(r"```sql\n(.*?)```", PAGE, re.S)
    root = f"{folder}/log/"
    return python.replace('"log/', f'"{root}').replace("churn", "ids"), sql.replace(
        "'log/", f"'{root}"
    ).replace("churn", "ids")


@pytest.mark.slow
def test_log_is_readable_while_it_is_written(tmp_path: Path) -> None:
    """With the queries of the page: the rows only grow, and in the end all of them are there."""
    python, sql = page_blocks(tmp_path)
    log = {"path": "log", "file_s": 0.1, "file_bytes": 20_000}
    served = [ids(tmp_path, prediction_log=ALL)]
    seen: list[int] = []
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        with Clients(gateway) as clients:
            eventually(lambda: list(tmp_path.glob("log/" + GLOB)), what="a file")
            while len(set(seen)) < 8:
                names: dict[str, Any] = {}
                exec(python, names)
                seen.append(names["recent"]["rows"].sum())
                (rows,) = duckdb.execute(f"SELECT sum(rows) FROM ({sql})").fetchall()[0]
                assert rows >= seen[-1]
                seen.append(rows)
        assert seen == sorted(seen)
        assert len(list(tmp_path.glob("log/" + GLOB))) > 5
        wait_all_written(gateway)
        samples = observation(gateway)["samples"]
    frame = logged(tmp_path)
    require_consistent(frame)
    # On a busy machine, the process may be too slow for some.
    assert sum(samples.values()) == len(clients.sent)
    assert len(frame) == 16 * samples["handed_over"]
    assert set(frame["x"].unique().to_list()) <= set(clients.sent)


def test_full_arenas_drop_samples_and_delay_no_request(tmp_path: Path) -> None:
    """The observer process is stopped, and requests of 3 MB need the arenas of 24 and 16 MiB."""
    served = [ids(tmp_path, prediction_log=ALL)]
    rows = 3 * MIB // 8
    with running(
        tmp_path,
        served,
        workers=dict(ONE),
        limits={"rows": 1 << 20, "arena_wait_ms": 1},
        prediction_log={"path": "log", "file_s": 0.2},
        observation={"held_bytes": 1 << 30, "held_s": 60.0},
    ) as gateway:
        pid = observation(gateway)["pid"]
        with suspended(pid), gateway.client() as client:
            for value in range(12):
                batch = pa.record_batch({"x": np.full(rows, value)})
                assert client.score("ids", batch)["y"][0].as_py() == 3 * value + 1
            state = observation(gateway)
            assert state["samples"]["pressure"] >= 6
            assert state["held_bytes"] <= 40 * MIB
        wait_all_written(gateway)
        gateway.wait_idle()
    require_consistent(logged(tmp_path))


@pytest.mark.slow
def test_killed_process_is_replaced_and_serving_is_not_affected(tmp_path: Path) -> None:
    log = {"path": "log", "file_s": 0.2}
    served = [ids(tmp_path, prediction_log=ALL)]
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        pid = observation(gateway)["pid"]
        with Clients(gateway) as clients:
            eventually(lambda: not logged(tmp_path).is_empty(), what="rows")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: observation(gateway)["starts"] == 2, what="another process")
            sent = len(clients.sent)
            last = max(clients.sent)
            eventually(lambda: logged(tmp_path)["x"].max() > last, what="new rows")
            assert len(clients.sent) > sent
        gateway.wait_idle()
        assert "the observer process ended with -9" in gateway.text()
    require_consistent(logged(tmp_path))


@pytest.mark.slow
def test_full_disk_drops_samples_until_there_is_space(tmp_path: Path) -> None:
    """By a limit of the file size of the running process: `write` fails as on a full disk."""
    log = {"path": "log", "file_s": 0.2}
    served = [ids(tmp_path, prediction_log=ALL)]
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        process = str(observation(gateway)["pid"])
        subprocess.run(["prlimit", "--pid", process, "--fsize=0:unlimited"], check=True)
        score(gateway, [1])
        eventually(lambda: count(gateway, "write_failed"), what="a dropped sample")
        failure = observation(gateway)["report"]["prediction_log"]["failure"]
        assert "cannot be written" in failure
        score(gateway, [2])
        subprocess.run(["prlimit", "--pid", process, "--fsize=unlimited:unlimited"], check=True)
        score(gateway, [3])
        eventually(lambda: 3 in logged(tmp_path).to_dict(as_series=False).get("x", []), what="rows")
        wait_all_written(gateway)
        assert observation(gateway)["report"]["prediction_log"]["failure"] == ""
        assert "prediction_log: works again" in gateway.text()
        assert not list(tmp_path.glob("log/.writing/*/writing/*"))
    assert 1 not in logged(tmp_path)["x"].to_list()


@pytest.mark.slow
def test_drain_writes_the_last_samples(tmp_path: Path) -> None:
    served = [ids(tmp_path, prediction_log=ALL)]
    log = {"path": "log", "file_s": 3600.0}
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        with gateway.client() as client:
            for value in range(200):
                client.score("ids", pa.record_batch({"x": [value]}))
        assert logged(tmp_path).is_empty()
    assert sorted(logged(tmp_path)["x"].to_list()) == list(range(200))


@pytest.mark.slow
def test_killed_gateway_leaves_a_complete_log_and_no_process(tmp_path: Path) -> None:
    gateway = Gateway(
        tmp_path,
        [ids(tmp_path, prediction_log=ALL)],
        workers={**ONE, "reattach_s": 0.1},
        prediction_log={"path": "log", "file_s": 3600.0},
    )
    try:
        gateway.start()
        score(gateway, [5])
        eventually(lambda: observation(gateway)["report"].get("observer", {}).get("counts", {}).get(
            "consumed"), what="a consumed sample")  # fmt: skip
        observer = psutil.Process(observation(gateway)["pid"])
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        eventually(lambda: not observer.is_running(), what="the end of the observer")
        assert logged(tmp_path)["x"].to_list() == [5]
    finally:
        gateway.end()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_object_store(store: ThreadedMotoServer, tmp_path: Path) -> None:
    """Files wait in the spool folder while the store has no such bucket, also over a restart."""
    import boto3

    host, port = store.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    s3 = boto3.client("s3", endpoint_url=endpoint)
    uri = f"s3://bucket/some/log?endpoint_override={endpoint}&region=us-east-1"
    served = [ids(tmp_path, prediction_log=ALL)]
    log = {"path": uri, "spool": "spool", "file_s": 0.1}
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        score(gateway, [1, 2])
        eventually(
            lambda: "cannot be uploaded" in
            observation(gateway)["report"].get("prediction_log", {}).get("failure", ""),
            what="a failed upload",
        )  # fmt: skip
        assert count(gateway, "logged") == 0
        report = observation(gateway)["report"]["prediction_log"]
        assert report["spooled_bytes"] > 0
    assert len(list(tmp_path.glob("spool/slot-0/ready/**/*.parquet"))) == 1
    s3.create_bucket(Bucket="bucket")
    with running(tmp_path, served, workers=dict(ONE), prediction_log=log) as gateway:
        score(gateway, [3])

        def keys() -> list[str]:
            return [each["Key"] for each in s3.list_objects(Bucket="bucket").get("Contents", [])]

        eventually(lambda: len(keys()) == 2, what="two objects")
        eventually(lambda: count(gateway, "files") == 2, what="the report")
    pattern = r"some/log/model=ids/version=1/date=[\d-]{10}/hour=\d\d/[0-9a-f-]+\.parquet"
    assert all(re.fullmatch(pattern, key) for key in keys())
    assert not list(tmp_path.glob("spool/slot-0/ready/**/*.parquet"))
    for number, key in enumerate(keys()):
        (tmp_path / f"{number}.parquet").write_bytes(
            s3.get_object(Bucket="bucket", Key=key)["Body"].read()
        )
    assert sorted(pl.read_parquet(tmp_path / "*.parquet")["x"].to_list()) == [1, 2, 3]


SLOTS = {"slot-0", "slot-1"}
"""Folders in which two gateway processes write."""


@pytest.mark.slow
def test_model_of_a_repository_and_two_processes(tmp_path: Path) -> None:
    """`model.toml` has the share; both processes write files of their own."""
    models.row_ids(tmp_path / "models" / "ids" / "1")
    (tmp_path / "models" / "ids" / "model.toml").write_text("[prediction_log]\nshare = 1.0\n")
    with running(
        tmp_path,
        [],
        workers=dict(ONE),
        server={"processes": 2},
        repository={"path": "models"},
        prediction_log={"path": "log", "file_s": 0.2},
    ) as gateway:
        values: list[int] = []

        def both_write() -> bool:
            values.append(len(values))
            score(gateway, values[-1:])
            return {path.name for path in tmp_path.glob("log/.writing/slot-*")} == SLOTS

        eventually(both_write, what="a file of each process")
        for value in range(len(values), len(values) + 20):
            values.append(value)
            score(gateway, [value])
    assert sorted(logged(tmp_path)["x"].to_list()) == values
    assert {path.name for path in tmp_path.glob("log/.writing/slot-*")} == SLOTS
