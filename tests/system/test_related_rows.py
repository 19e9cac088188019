"""Models whose rows depend on each other: each answer is that of its request alone."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from support import row_graphs
from support.processes import BIN, Gateway, running

from iskander.client import Client
from iskander.errors import ContractError, IskanderError, LimitExceeded

ROWS_MAX = 8
CLIENTS, REQUESTS = 4, 60
Infer = Callable[[str, np.ndarray], np.ndarray]
LIST = pa.list_(pa.float32(), row_graphs.WIDTH)


def column(x: np.ndarray) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), type=LIST)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """`fixed` has a fixed first axis; `declared` is independent but not combined."""
    folder = tmp_path_factory.mktemp("related")
    lane = {"pad_to": [4, ROWS_MAX], "linger_us": 2000, "preferred_batch_rows": [4]}
    paths = {
        "sums": row_graphs.cumulative_sum(folder / "sums"),
        "fixed": row_graphs.cumulative_sum(folder / "fixed", rows=3),
        "declared": row_graphs.linear(folder / "declared"),
    }
    (folder / "declared" / "manifest.toml").write_text(
        'format = 1\ncombine = false\ninputs = [{tensor = "x", column = "x"}]\n'
        'outputs = [{tensor = "y", column = "y", type = "fixed_size_list<float32>[3]"}]\n'
    )
    served = [
        {"name": name, "path": str(path), "max_batch_rows": ROWS_MAX, "lane": lane}
        for name, path in paths.items()
    ]
    with running(
        folder, served, workers={"groups": ["0"], "count": 1}, http={"address": "127.0.0.1:0"}
    ) as ready:
        yield ready
        ready.wait_idle()


def by_flight(gateway: Gateway) -> Infer:
    """Batches of one stream for each call."""
    client = gateway.client()

    def infer(model: str, x: np.ndarray) -> np.ndarray:
        (result,) = client.stream(model, [pa.record_batch({"x": column(x)})])
        return np.stack(result.column("y").to_numpy(zero_copy_only=False))

    return infer


def by_flight_window(gateway: Gateway) -> Infer:
    """The batch between two others of the same stream."""
    client = gateway.client()

    def infer(model: str, x: np.ndarray) -> np.ndarray:
        batch, other = (pa.record_batch({"x": column(each)}) for each in (x, 100 + x[::-1]))
        _, result, _ = client.stream(model, [other, batch, other])
        return np.stack(result.column("y").to_numpy(zero_copy_only=False))

    return infer


def by_triton(kind: Any, address: str) -> Infer:
    client = kind.InferenceServerClient(address)

    def infer(model: str, x: np.ndarray) -> np.ndarray:
        tensor = kind.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        result: np.ndarray = client.infer(model, [tensor]).as_numpy("y")
        return result

    return infer


def by_grpc(gateway: Gateway) -> Infer:
    """Calls of Triton's gRPC client."""
    return by_triton(triton_grpc, gateway.address)


def by_http(gateway: Gateway) -> Infer:
    """Calls of Triton's HTTP client."""
    return by_triton(triton_http, gateway.stats()["http_address"])


@pytest.mark.parametrize("connect", [by_flight, by_flight_window, by_grpc, by_http])
@pytest.mark.parametrize("model", ["sums", "fixed"])
def test_concurrent_callers_get_the_results_of_their_requests_alone(
    gateway: Gateway, connect: Callable[[Gateway], Infer], model: str
) -> None:
    barrier = threading.Barrier(CLIENTS)

    def call(seed: int) -> int:
        rng, infer, wrong = np.random.default_rng(seed), connect(gateway), 0
        barrier.wait(30)
        for _ in range(REQUESTS):
            rows = 3 if model == "fixed" else int(rng.integers(1, ROWS_MAX + 1))
            x = rng.standard_normal((rows, row_graphs.WIDTH)).astype(np.float32)
            wrong += not np.allclose(infer(model, x), np.cumsum(x, axis=0), atol=1e-4)
        return wrong

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert list(pool.map(call, range(CLIENTS))) == [0] * CLIENTS
    lane = gateway.stats()["lanes"][f"{model}/1"]
    assert lane["batches"] == lane["completed"]


def test_requests_of_a_model_that_declares_it_are_not_combined(gateway: Gateway) -> None:
    infer = by_flight_window(gateway)
    for rows in range(1, ROWS_MAX + 1):
        infer("declared", np.ones((rows, row_graphs.WIDTH), np.float32))
    lane = gateway.stats()["lanes"]["declared/1"]
    assert lane["batches"] == lane["completed"] == 3 * ROWS_MAX
    assert lane["rows"] == 3 * sum(range(1, ROWS_MAX + 1))


def test_table_is_one_request(gateway: Gateway) -> None:
    """In one batch of several chunks; batches of `stream` are requests as they are."""
    parts = [np.random.default_rng(1).standard_normal((2, row_graphs.WIDTH)) for _ in range(4)]
    batches = [pa.record_batch({"x": column(each.astype(np.float32))}) for each in parts]
    with Client(gateway.address) as client:
        found = client.score("sums", pa.Table.from_batches(batches))
        assert client.model("sums").description.limits["rows"] == ROWS_MAX
        with pytest.raises(LimitExceeded, match="a table in one batch: at least 10 rows"):
            client.score("sums", pa.Table.from_batches([*batches, batches[0]]))
        streamed = list(client.stream("sums", batches))
    values = np.stack(found["y"].to_numpy())
    np.testing.assert_allclose(values, np.cumsum(np.concatenate(parts), axis=0), atol=1e-4)
    for part, result in zip(parts, streamed, strict=True):
        values = np.stack(result.column("y").to_numpy(zero_copy_only=False))
        np.testing.assert_allclose(values, np.cumsum(part, axis=0), atol=1e-4)


def test_parts_of_a_table_are_rejected(gateway: Gateway) -> None:
    """A client may have read the contract of another version."""
    batch = pa.record_batch({"x": column(np.ones((2, row_graphs.WIDTH), np.float32))})
    with gateway.client() as client:
        with pytest.raises(ContractError, match="all rows of its table"):
            list(client.stream("sums", [batch], terms={"cut": True}))
        description = client.model("sums").description
    assert (description.row_relation, description.is_whole) == ("dependent", True)


@pytest.mark.parametrize(
    ("model", "rows", "kind", "parts"),
    [
        ("sums", 9, LimitExceeded, ["9 rows, limit 8", "max_batch_rows", "dependent", "combine"]),
        ("declared", 20, LimitExceeded, ["20 rows, limit 8", "combine = false"]),
        ("fixed", 1, ContractError, ["exactly 3 rows", "got 1"]),
        ("fixed", 6, ContractError, ["exactly 3 rows", "got 6"]),
        ("fixed", 0, ContractError, ["exactly 3 rows", "got 0"]),
    ],
)
def test_request_that_cannot_be_one_run(
    gateway: Gateway, model: str, rows: int, kind: type[IskanderError], parts: list[str]
) -> None:
    x = np.zeros((rows, row_graphs.WIDTH), np.float32)
    with pytest.raises(kind) as caught:
        by_flight(gateway)(model, x)
    assert all(part in caught.value.message for part in parts), caught.value.message
    for connect in (by_grpc, by_http):
        with pytest.raises(Exception, match=parts[0]):  # Triton's own type for each.
            connect(gateway)(model, x)


def scored(gateway: Gateway, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "iskander"), "score", "--server", gateway.address, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_job_scores_all_files_as_one_request(gateway: Gateway, tmp_path: Path) -> None:
    parts = [np.random.default_rng(n).standard_normal((2, row_graphs.WIDTH)) for n in range(4)]
    (tmp_path / "in").mkdir()
    for index, part in enumerate(parts):
        table = pa.table({"x": column(part.astype(np.float32)), "n": [index, index]})
        pq.write_table(table, tmp_path / "in" / f"{index}.parquet")

    done = scored(gateway, "sums", tmp_path / "in", "-o", tmp_path / "out", "--keep", "n")

    assert done.returncode == 0, done.stderr
    found = pq.read_table(tmp_path / "out")
    assert found["n"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    values = np.stack(found["y"].to_numpy())
    np.testing.assert_allclose(values, np.cumsum(np.concatenate(parts), axis=0), atol=1e-4)


def test_job_that_is_no_request_is_rejected_by_name(gateway: Gateway, tmp_path: Path) -> None:
    x = np.ones((ROWS_MAX + 1, row_graphs.WIDTH), np.float32)
    pq.write_table(pa.table({"x": column(x)}), tmp_path / "in.parquet")
    done = scored(gateway, "sums", tmp_path / "in.parquet", "-o", tmp_path / "out")
    assert done.returncode == 1
    for part in ("9 rows", "limit 8", "max_batch_rows", "dependent", "combine = true"):
        assert part in done.stderr
    done = scored(
        gateway, "sums", tmp_path / "in.parquet", "-o", tmp_path / "out", "--on-error", "null"
    )
    assert done.returncode == 2 and "use `fail`" in done.stderr


def run(*words: str | Path) -> str:
    command = [str(BIN / "iskander"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_relation_is_visible(gateway: Gateway) -> None:
    """In the contract, `models`, `stats`, `check`, the page and the log."""
    why = "requests are not combined: its rows are dependent: output `y` of row"
    for action in ("models", "stats"):
        assert f"sums/1: {why}" in run(action, "--address", gateway.address)
    (listed,) = [
        each
        for each in json.loads(run("models", "--address", gateway.address, "--json"))
        if each["name"] == "declared"
    ]
    rows = listed["rows"]
    assert (rows["verdict"], rows["combine"], rows["is_whole"]) == ("independent", False, True)
    checked = run("check", gateway.config)
    assert "rows dependent, requests are not combined; output `y` of row" in checked
    assert "rows independent, requests are not combined: `combine = false`" in checked
    by_name = {
        each["model"]: each for each in json.loads(run("check", gateway.config, "--json"))["models"]
    }
    assert by_name["fixed/1"]["rows"]["verdict"] == "dependent"
    admin = gateway.stats()["admin_address"]
    with urllib.request.urlopen(f"http://{admin}/status.json", timeout=30) as response:
        models = json.load(response)["models"]
    (shown,) = [each["row_relation"] for each in models if each["name"] == "sums"]
    assert shown.startswith("dependent, requests are not combined; output `y`")
    log = gateway.text()
    assert (
        "W iskander.supervisor: requests for model sums/1 are not combined, cut or padded: " in log
    )
    assert "I iskander.supervisor: requests for model declared/1 are not combined, by" in log
    settings = "`lane.preferred_batch_rows`, `lane.linger_us`, `lane.pad_to`"
    assert (
        f"settings of model sums/1 without effect, because its rows are not combined: {settings}"
        in log
    )
