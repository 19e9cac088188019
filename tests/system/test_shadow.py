"""Shadow versions: real models whose results differ by known amounts, beside a served version."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from onnx import TensorProto
from support.models import fragile, picky, slow
from support.processes import BIN, Gateway, eventually, running
from support.repositories import Folder, scaled

from iskander.client import Client

ALL_TIME = {"time_percent": 100.0}
LEAST = -(2**63)
WORKERS = {"count": 1}


def versions(name: str, served: Path, candidate: Path, share: float = 1.0) -> list[dict[str, Any]]:
    """A model with a shadow version."""
    return [
        {"name": name, "version": "1", "path": str(served)},
        {"name": name, "version": "2", "path": str(candidate), "shadow_share": share},
    ]


def compare(admin: str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "iskander"), "models", "compare", name, "--admin", admin, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def figures(gateway: Gateway, name: str = "m") -> dict[str, Any]:
    """The pair of a model, with its outputs."""
    url = f"http://{gateway.stats()['admin_address']}/status.json"
    with urllib.request.urlopen(url, timeout=10) as response:
        status = json.load(response)
    (shadow,) = (each for each in status["shadows"] if each["name"] == name)
    outputs = [each for each in status["shadow_outputs"] if each["name"] == name]
    return {**shadow, "outputs": {each["output"]: each for each in outputs}}


def compared(gateway: Gateway, rows: int, name: str = "m") -> dict[str, Any]:
    """The figures, once so many rows are compared or dropped."""

    def are_done() -> dict[str, Any] | None:
        found = figures(gateway, name)
        is_done = found["rows"] + sum(found["dropped"].values()) >= rows
        return found if is_done else None

    result: dict[str, Any] = eventually(are_done, what=f"{rows} rows of the shadow version")
    return result


def score(client: Client, name: str, values: list[float], **options: Any) -> list[float]:
    kind = pa.float32() if isinstance(values[0], float) else pa.int64()
    batch = pa.record_batch({"x": pa.array(values, kind)})
    found: list[float] = client.score(name, batch, **options)["y"].to_pylist()
    return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("shadow")
    models = [
        *versions(
            "m",
            scaled(folder / "m1", 2, TensorProto.FLOAT),
            scaled(folder / "m2", 3, TensorProto.FLOAT),
        ),
        *versions("labels", scaled(folder / "l1", 2), scaled(folder / "l2", 3)),
        *versions("other", scaled(folder / "o1", 2), scaled(folder / "o2", 3, TensorProto.INT32)),
        *versions("picky", scaled(folder / "p1", 2), picky(folder / "p2", 100)),
        {"name": "plain", "version": "1", "path": str(scaled(folder / "plain", 5))},
    ]
    with running(folder, models, workers=WORKERS, shadow=ALL_TIME) as gateway:
        yield gateway


def test_differences_of_floats_are_measured_and_never_returned(gateway: Gateway) -> None:
    """The shadow version returns 3 x in place of 2 x: relative to the larger one, a third."""
    with gateway.client() as client:
        for count in range(1, 11):
            assert score(client, "m", [0.0, 1.0, 2.0, 4.0]) == [0, 2, 4, 8]
            found = compared(gateway, 4 * count)
        assert score(client, "m", [1.0], version="2") == [3], "only a call that names it"
    assert (found["rows"], found["disagreeing"], found["dropped"]) == (40, 30, {})
    output = found["outputs"]["y"]
    assert output["kind"] == "float" and output["bias"] == pytest.approx(1.75)
    assert output["absolute"]["highest"] == 4
    assert output["absolute"]["p50"] == pytest.approx(1, rel=0.1)
    assert output["relative"]["p99"] == pytest.approx(1 / 3, rel=0.01)
    lane = gateway.stats()["lanes"]["m/2"]
    assert (lane["requests"], lane["failed"], lane["refused"]) == (1, {}, {})
    gateway.wait_idle()


def test_labels_that_differ_are_counted_in_pairs(gateway: Gateway) -> None:
    with gateway.client() as client:
        for count in range(1, 6):
            assert score(client, "labels", [0, 1, 2]) == [0, 2, 4]
            found = compared(gateway, 3 * count, "labels")
    output = found["outputs"]["y"]
    assert (output["kind"], output["disagreeing"]) == ("label", 10)
    assert output["pairs"] == {"2 > 3": 5, "4 > 6": 5}
    text = compare(gateway.stats()["admin_address"], "labels").stdout
    assert "labels: served version 1, shadow version 2, share 1\ncomparing\n" in text
    assert "15 rows compared, 10 differ (66.7 %)" in text


def test_large_requests_are_compared_in_batches(gateway: Gateway) -> None:
    before = figures(gateway, "m")["rows"]
    rows = 20_000
    with gateway.client() as client:
        assert score(client, "m", [1.0] * rows) == [2.0] * rows
    found = compared(gateway, before + rows, "m")
    assert found["rows"] == before + rows or "expired" in found["dropped"]
    gateway.wait_idle()


def test_other_types_are_refused(gateway: Gateway) -> None:
    with gateway.client() as client:
        assert score(client, "other", [1]) == [2]
    found = compared(gateway, 1, "other")
    assert found["state"] == "not comparable"
    assert found["reason"] == "the inputs differ: x int64, and x int32 of the candidate"
    assert "shadow version other/2 is not compared with other/1: the inputs" in gateway.text()


def test_failing_shadow_version_costs_no_request(gateway: Gateway) -> None:
    """It fails for values of 100 or more; the requests do not."""
    with gateway.client() as client:
        for count, value in enumerate((1, 100, 1, 1), 1):
            assert score(client, "picky", [value]) == [2 * value]
            compared(gateway, count, "picky")
    found = compared(gateway, 4, "picky")
    assert found["dropped"]["failed"] == 1 and found["state"] == "suspended"
    assert "a shadow batch failed" in found["reason"]
    lanes = gateway.stats()["lanes"]
    assert not lanes["picky/2"]["failed"] and not lanes["picky/1"]["failed"]


def test_models_without_a_shadow_version(gateway: Gateway) -> None:
    done = compare(gateway.stats()["admin_address"], "plain")
    assert done.returncode == 1 and "model `plain` has no shadow version" in done.stderr
    done = compare("127.0.0.1:1", "plain")
    assert done.returncode == 69 and "no status at http://127.0.0.1:1/status.json" in done.stderr


def test_routes_and_pages_have_the_shadow_versions(gateway: Gateway) -> None:
    with gateway.client() as client:
        routes = {(each["name"], each["version"]): each["routes"] for each in client.models()}
    assert (routes["m", "1"], routes["m", "2"]) == ([], ["shadow of 1"])


def test_share_changes_by_a_reload(tmp_path: Path) -> None:
    """No version is loaded again, and a version that is no shadow any more is the highest."""
    models = versions("m", scaled(tmp_path / "a", 2), scaled(tmp_path / "b", 3), 0.0)
    with running(tmp_path, models, workers=WORKERS, shadow=ALL_TIME) as gateway:
        with gateway.client() as client:
            assert score(client, "m", [1]) == [2]
            assert figures(gateway)["state"] == "paused"
            text = gateway.config.read_text()
            gateway.config.write_text(text.replace("shadow_share = 0.0", "shadow_share = 1.0"))
            gateway.signal(signal.SIGHUP)
            eventually(lambda: figures(gateway)["state"] == "comparing", what="the new share")
            assert score(client, "m", [1]) == [2]
            assert compared(gateway, 1)["rows"] == 1
            gateway.config.write_text(text.replace("shadow_share = 0.0", ""))
            gateway.signal(signal.SIGHUP)
            eventually(lambda: score(client, "m", [1]) == [3], what="the highest version")
        assert compare(gateway.stats()["admin_address"], "m").returncode == 1
        assert gateway.text().count("loaded m/2") == 1


def test_shadow_versions_of_the_repository(tmp_path: Path) -> None:
    """Version 2 is higher, and gets no calls; without `shadows` it does."""
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 2)
    folder.put("m", 2, 3)
    folder.write_settings("m", 'versions = "latest:2"\naliases = {next = 2}\nshadows = {next = 1}')
    repository = {"path": str(folder.root), "settle_ms": 10}
    with running(tmp_path, [], workers=WORKERS, shadow=ALL_TIME, repository=repository) as gateway:
        with gateway.client() as client:
            assert score(client, "m", [1, 2]) == [2, 4]
            assert compared(gateway, 2)["disagreeing"] == 2
            folder.write_settings("m", 'versions = "latest:2"\nshadows = {2 = 0}')
            eventually(lambda: figures(gateway)["state"] == "paused", what="the changed share")
            assert figures(gateway)["rows"] == 2, "the statistics stay"
            folder.write_settings("m", 'versions = "latest:2"')
            eventually(lambda: score(client, "m", [1]) == [3], what="the highest version")
        assert gateway.text().count("loaded m/2") == 1


def test_shadow_version_that_ends_workers_costs_no_request(tmp_path: Path) -> None:
    """The least integer ends its process; the served version computes it."""
    models = versions("m", scaled(tmp_path / "a", 1), fragile(tmp_path / "b"))
    with running(tmp_path, models, workers=WORKERS, shadow=ALL_TIME) as gateway:
        with gateway.client() as client:

            def has_ended_a_worker() -> int | None:
                for value in (5, LEAST, 6, 7):
                    assert score(client, "m", [value]) == [value]
                lost: int | None = figures(gateway)["dropped"].get("worker_lost")
                return lost

            eventually(has_ended_a_worker, what="the end of the worker")
            found = figures(gateway)
            assert found["state"] == "suspended"
            assert "ended during a shadow batch" in found["reason"]
            gateway.wait_full()
            assert score(client, "m", [8]) == [8]
        lanes = gateway.stats()["lanes"]
        assert [lanes[key]["worker_deaths"] for key in ("m/2", "m/1")] == [1, 0]
        assert not lanes["m/1"]["failed"]


def test_shadow_batch_is_cancelled_for_a_request(tmp_path: Path) -> None:
    """A batch of the shadow version would take minutes: the served version does not wait for it."""
    models = versions("m", scaled(tmp_path / "a", 1), slow(tmp_path / "b", 100))
    with running(tmp_path, models, workers=WORKERS, shadow=ALL_TIME) as gateway:
        with gateway.client() as client:
            for value in range(10**7, 10**7 + 4):
                assert score(client, "m", [value]) == [value]
        found = compared(gateway, 3)
        assert found["dropped"]["cancelled"] and not found["rows"]
        assert not gateway.stats()["lanes"]["m/1"]["worker_deaths"]
        # The last batch still runs; the drain at the end cancels it.


@pytest.mark.slow
def test_full_arena_is_not_held_by_shadow_requests(tmp_path: Path) -> None:
    """Batches of 4 MiB in an arena of 24 MiB; the shadow version has a large share of it."""
    models = versions("m", scaled(tmp_path / "a", 2), scaled(tmp_path / "b", 3))
    shadow = {**ALL_TIME, "bytes": 256 << 20}
    limits = {"arena_wait_ms": 20_000}
    with running(tmp_path, models, workers=WORKERS, shadow=shadow, limits=limits) as gateway:
        batch = pa.record_batch({"x": pa.array(range(500_000), pa.int64())})
        with gateway.client() as client:
            results = list(client.stream("m", [batch] * 12))
        assert all(each["y"][7].as_py() == 14 for each in results) and len(results) == 12
        gateway.wait_idle()
        assert figures(gateway)["rows"]


@pytest.mark.slow
def test_figures_of_several_processes_are_added(tmp_path: Path) -> None:
    from support.prometheus import free_port

    admin = f"127.0.0.1:{free_port()}"
    models = versions("m", scaled(tmp_path / "a", 2), scaled(tmp_path / "b", 3))
    options = {"workers": WORKERS, "shadow": ALL_TIME, "admin": {"address": admin}}
    with running(tmp_path, models, server={"processes": 2}, **options) as gateway:
        for _ in range(20):
            with gateway.client() as client:
                assert score(client, "m", [1, 2]) == [2, 4]

        def are_compared() -> bool:
            """Each process has half of the time, so that a busy machine drops some rows."""
            found = json.loads(compare(admin, "m", "--json").stdout)
            (shadow,), (output,) = found["shadows"], found["shadow_outputs"]
            rows = shadow["rows"]
            is_complete = rows + sum(shadow["dropped"].values()) == 40
            return is_complete and rows and sum(output["pairs"].values()) == rows

        eventually(are_compared, what="the rows of both processes")


def test_configuration_without_a_served_version_is_invalid(tmp_path: Path) -> None:
    path = tmp_path / "iskander.toml"
    model = f'[[models]]\nname = "m"\npath = "{scaled(tmp_path / "a", 2)}"\nshadow_share = 0.5\n'
    path.write_text(model)
    command = [str(BIN / "iskander"), "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "models[0].shadow_share: `m` has no other version" in done.stderr


def test_check_finds_versions_that_cannot_be_compared(tmp_path: Path) -> None:
    """In the configuration, and in a repository."""
    path = tmp_path / "iskander.toml"
    served, candidate = scaled(tmp_path / "a", 2), scaled(tmp_path / "b", 3, TensorProto.INT32)
    folder = Folder(tmp_path / "models")
    folder.put("r", 1, 2)
    folder.put("r", 2, candidate)
    folder.write_settings("r", 'versions = "all"\nshadows = {2 = 1}')
    scaled(candidate, 3, TensorProto.INT32)
    path.write_text(
        f'''
        [repository]
        path = "{folder.root}"
        [[models]]
        name = "m"
        path = "{served}"
        version = 1
        [[models]]
        name = "m"
        path = "{candidate}"
        version = 2
        shadow_share = 0.5
        '''
    )
    command = [str(BIN / "iskander"), "check", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {each["model"]: each["error"] for each in json.loads(done.stdout)["models"]}
    problem = "the inputs differ: x int64, and x int32 of the candidate"
    assert done.returncode == 1
    assert found == {
        "m/1": "",
        "m/2": f"not comparable with m/1: {problem}",
        "r/1": "",
        "r/2": f"not comparable with r/1: {problem}",
    }
